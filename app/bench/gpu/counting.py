"""What one packed DiT call asks of a device, counted without one: ops, copies between host and device, waits.

The model is on PyTorch's meta device, which stands for the GPU: it has shapes but no memory, so real sizes cost
nothing. Every op on it would be at least one kernel, every tensor moved to it an upload, and every value read from it
makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.bench.gpu.measurement import Earlier, NamedFigures, Place
from app.bench.gpu.models import HUNYUAN_13B, WAN_1_3B, PackedCall, build
from ops.attention import varlen
from ops.attention.varlen import backend_of
from ops.comm import Group
from ops.flow import flow_loss
from ops.models.base.config import DiTConfig
from ops.packing import Sequence as PackedSequence

STAND_IN = torch.device("meta")
PACK = [PackedSequence((5, 12, 16), 77), PackedSequence((1, 20, 20), 33), PackedSequence((21, 30, 52), 512)]
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal")
FREE = ("aten.detach", "aten.lift_fresh", "prim.device")  # no kernel and no view of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchCount:
    """One packed call, forward and backward, of a model at its real size."""

    family: str
    config: DiTConfig
    estimate_s: float = 10.0

    @property
    def name(self) -> str:
        return f"counts.{self.family}"

    def why_not(self, place: Place) -> str | None:
        return None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        first, second = counted_call(self.config)
        per_layer = (second.kernels - first.kernels) / sum(self.config.block_counts)
        figures: dict[str, float] = {f"without blocks: {name}": value for name, value in first.figures().items()}
        figures |= second.figures()
        return figures | {"kernels per block": round(per_layer, 1)}


def measurements() -> list[DispatchCount]:
    return [DispatchCount(family="wan", config=WAN_1_3B), DispatchCount(family="hunyuan", config=HUNYUAN_13B)]


class DispatchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    """Counts inside its `with`. A value that is read from the stand-in is taken to be 0."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dispatched = self.kernels = self.uploads = self.downloads = self.waits = 0
        self.uploaded_bytes = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.dispatched += 1
        given = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, given)) if isinstance(t, Tensor)]
        there = any(t.device == STAND_IN for t in tensors)
        name = func._schema.name.replace("::", ".")
        if there and name in READS:
            self.waits += 1
            return 0 if name == "aten._local_scalar_dense" else func(*args, **given)
        if name in ("aten._to_copy", "aten.copy_") and (moved := self._moved(name, args, given)) is not None:
            return moved
        out = func(*args, **given)
        there = there or any(isinstance(t, Tensor) and t.device == STAND_IN for t in tree_leaves(out))
        if there and not func.is_view and not name.startswith(FREE):
            self.kernels += 1
        return out

    def _moved(self, name: str, args: tuple[object, ...], given: Mapping[str, object]) -> Tensor | None:
        """The result of a download (uploads are only counted); None where the op can run unchanged."""
        source, first, device = args[1 if name == "aten.copy_" else 0], args[0], given.get("device")
        assert isinstance(source, Tensor) and isinstance(first, Tensor)
        target = torch.device(device) if isinstance(device, str | torch.device) else first.device
        if source.device != STAND_IN and target == STAND_IN:
            self.uploads += 1
            self.uploaded_bytes += source.numel() * source.element_size()
        if source.device == STAND_IN and target != STAND_IN:
            self.downloads += 1
            self.waits += not given.get("non_blocking", False)
            dtype = given.get("dtype")
            return torch.zeros(source.shape, dtype=dtype if isinstance(dtype, torch.dtype) else source.dtype)
        return None

    def figures(self) -> dict[str, float]:
        return {
            "ops dispatched": self.dispatched,
            "kernels": self.kernels,
            "host to device": self.uploads,
            "host to device bytes": self.uploaded_bytes,
            "device to host": self.downloads,
            "synchronisations": self.waits,
        }


def counted_call(config: DiTConfig) -> tuple[DispatchCounter, DispatchCounter]:
    """Forward and backward of one pack: of the model without its blocks, and of the whole model."""
    return _count(config, blocks=False), _count(config, blocks=True)


def _count(config: DiTConfig, blocks: bool) -> DispatchCounter:
    with as_on_a_gpu():
        dit = build(config, STAND_IN, torch.bfloat16)
        if not blocks:
            for name, child in list(dit.named_children()):
                if isinstance(child, torch.nn.ModuleList):
                    setattr(dit, name, torch.nn.ModuleList())
        counter = DispatchCounter()
        with counter:
            call = PackedCall.of(config, PACK, STAND_IN, torch.bfloat16)
            out = dit(call.tokens, call.timesteps, call.text, call.layout, Group.solo())
            flow_loss(out.float(), call.target, call.layout, call.weights).backward()
    return counter


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Attention as on a GPU (variable-length flash); autocast does not know the stand-in, and weights are bf16."""
    flash = backend_of("flash")
    autocast = torch.autocast

    def quiet(
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> AbstractContextManager[object]:
        if device_type == STAND_IN.type:
            return nullcontext()
        return autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    with (
        patch.object(varlen, "choose", lambda q, lengths: flash),
        patch.object(torch, "autocast", quiet),
        patch.object(torch, "is_autocast_enabled", lambda device_type=None: False),
    ):
        yield
