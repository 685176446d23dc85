"""What stands for a CUDA graph on the CPU: the operators of some work, and the memory that each read and wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Work = Callable[[], None]


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    """Writes down the operators inside its `with`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[torch._ops.OpOverload, tuple[object, ...], dict[str, object], list[Tensor]]] = []
        self._own: set[int] = set()  # addresses of memory that was taken inside the `with`

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert "_local_scalar_dense" not in func._schema.name, "a value is read, which no graph does again"
        out = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        self._own |= {one.untyped_storage().data_ptr() for one in _tensors(out)} - given
        if not func.is_view:
            self._calls.append((func, args, dict(kwargs or {}), _tensors(out)))
        return out

    def play(self) -> None:
        """All of them again, on the same memory, and nothing of what the host does between them. Afterwards nothing is
        left of what lies in memory of its own, which other tapes may use."""
        with torch.no_grad():
            for func, args, kwargs, results in self._calls:
                for result, now in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                    if result.data_ptr() != now.data_ptr():
                        result.copy_(now)
            for _, _, _, results in self._calls:
                for result in results:
                    if result.is_floating_point() and result.untyped_storage().data_ptr() in self._own:
                        result.fill_(math.nan)


class TapeCapture:
    """`Capture` on the CPU."""

    def __init__(self) -> None:
        self.captured = self.played = self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def __call__(self, work: Work) -> Work:
        self.captured += 1
        tape = Tape()
        work()
        with tape:
            work()

        def play() -> None:
            self.played += 1
            tape.play()

        return play


def _tensors(out: object) -> list[Tensor]:
    return [one for one in tree_leaves(out) if isinstance(one, Tensor)]
