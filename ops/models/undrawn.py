"""Modules on the meta device without first values. There is nothing to draw, which PyTorch finds out anew for each
tensor: half of the time that skeletons of all presets took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

# functions of `init` hide the tensor's own methods from a mode
_DRAWS = frozenset({Tensor.uniform_, Tensor.normal_, init.uniform_, init.normal_, init.kaiming_uniform_})


class Undrawn(TorchFunctionMode):
    """A context in which draws into tensors of the meta device are left out."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        if func in _DRAWS:
            tensor = args[0] if args else named["tensor"]
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **named)
