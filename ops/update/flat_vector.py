"""The flat vector of a module's trained parameters: which they are, where each lies, and the state it begins with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ops.shards import ShardState, Slot


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the flat vector. Raises ValueError when there are none or their dtypes differ."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no trainable parameter; set requires_grad on what should be trained.")
    check_alike({p.dtype for _, p in named})
    return named


def check_alike(kinds: Collection[object]) -> None:
    """Raises ValueError for more than one dtype, or device."""
    if len(kinds) > 1:
        raise ValueError(
            f"trainable parameters are of {sorted(map(str, kinds))}; cast the module to one dtype on one device first."
        )


def slots(named: Sequence[tuple[str, Tensor]]) -> tuple[Slot, ...]:
    """Name, shape and range of each parameter in the flat vector; checkpoints store it."""
    found, at = [], 0
    for name, parameter in named:
        found.append(Slot(name=name, shape=tuple(parameter.shape), lo=at, hi=at + parameter.numel()))
        at += parameter.numel()
    return tuple(found)


def part_ranges(layout: Sequence[Slot], parts: Sequence[str]) -> list[tuple[int, int]]:
    """[lo, hi) of the flat vector for each beginning of names. Raises ValueError unless they divide it in order."""
    found = [[slot for slot in layout if slot.name.startswith(part)] for part in parts]
    if [slot for slots_of in found for slot in slots_of] != list(layout) or not all(found):
        raise ValueError(f"parts {list(parts)} do not divide the trained parameters in their order.")
    return [(slots_of[0].lo, slots_of[-1].hi) for slots_of in found]


def initial_shard(
    named: Sequence[tuple[str, Tensor]], lo: int, hi: int, value: Callable[[str], Tensor] | None = None
) -> ShardState:
    """State of [lo, hi) of the flat vector before the first update: these trainable parameters and zero moments.

    The state is fp32 (or fp64). Parameters in bf16 have been rounded: `value` gives, by name, those that were read, and
    is asked only for what the range touches.
    """
    layout = slots(named)
    dtype = torch.float64 if named[0][1].dtype == torch.float64 else torch.float32
    pieces = [
        (parameter if value is None else value(name))
        .detach()
        .reshape(-1)[max(lo, slot.lo) - slot.lo : min(hi, slot.hi) - slot.lo]
        .to("cpu", dtype)
        for (name, parameter), slot in zip(named, layout, strict=True)
        if max(lo, slot.lo) < min(hi, slot.hi)
    ]
    master = (torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)).numpy()
    moments = {name: np.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
    return ShardState(updates=0, lo=lo, hi=hi, total=layout[-1].hi, arrays={"master": master, **moments})
