"""Work dealt over a bag in units of any shape: unit u is made by rank u % size, and given to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor

from ops.comm.collectives import Group

_HALVES = (torch.bfloat16, torch.float16)  # that units may travel in; their numbers in a message are 1 and 2


def share_units(
    found: dict[int, Tensor], units: int, group: Group, device: torch.device, only: int | None = None
) -> dict[int, Tensor]:
    """All units [any shape] by their number, of which `found` are those made here. With `only`, that rank alone ends
    with all of them, the others with their own. Collective. Shapes travel first, then numbers: in bf16 or fp16 where
    all units were made in it, else in fp32, and so they come."""
    shapes, dtype = _agree(found, units, group)
    sizes = [math.prod(shape) for shape in shapes]
    owned = [range(r, units, group.size) for r in range(group.size)]
    lengths = [sum(sizes[u] for u in numbers) for numbers in owned]
    mine = [found[u].reshape(-1) for u in owned[group.rank]]
    parts: Sequence[Tensor | None] = (
        _gathered(mine, lengths, group, device, dtype)
        if only is None
        else _taken(mine, lengths, only, group, device, dtype)
    )
    return {
        u: flat.view(shapes[u])
        for numbers, part in zip(owned, parts, strict=True)
        if part is not None
        for u, flat in zip(numbers, part.split([sizes[u] for u in numbers]), strict=True)
    }


def _agree(found: dict[int, Tensor], units: int, group: Group) -> tuple[list[tuple[int, ...]], torch.dtype]:
    """The shape of every unit, and the dtype that all travel in. Each host knows those of its own."""
    told = []
    for _, unit in sorted(found.items()):
        half = _HALVES.index(unit.dtype) + 1 if unit.dtype in _HALVES else 0
        told += [half, unit.dim(), *unit.shape]
    rows = [iter(row) for row in group.exchange_numbers(told)]
    shapes, halves = [], set()
    for u in range(units):
        row = rows[u % group.size]
        halves.add(next(row))
        shapes.append(tuple(islice(row, next(row))))
    (half,) = halves if len(halves) == 1 else (0,)
    return shapes, _HALVES[half - 1] if half else torch.float32


def _gathered(
    mine: list[Tensor], lengths: list[int], group: Group, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """What every rank has made, of such lengths, on all of them. NCCL gathers ranges of one length in place."""
    places = [max(lengths)] * group.size if group.on_device else lengths
    ends = list(accumulate(places))
    bounds = [(end - place, end) for end, place in zip(ends, places, strict=True)]
    flat = torch.empty(ends[-1], dtype=dtype, device=device)
    parts = [flat[lo : lo + length] for (lo, _), length in zip(bounds, lengths, strict=True)]
    _fill(parts[group.rank], mine)
    if ends[-1]:
        group.all_gather_ranges(flat, bounds)
    return parts


def _taken(
    mine: list[Tensor], lengths: list[int], taker: int, group: Group, device: torch.device, dtype: torch.dtype
) -> list[Tensor | None]:
    """The same on one rank; on the others what they have made."""
    own = _fill(torch.empty(lengths[group.rank], dtype=dtype, device=device), mine)
    takes = group.rank == taker
    come = [length if takes and r != taker else 0 for r, length in enumerate(lengths)]
    go = [0 if takes or r != taker else len(own) for r in range(group.size)]
    received = own.new_empty(sum(come))
    group.all_to_all(received, own[: sum(go)], come, go)
    others = received.split(come)
    return [own if r == group.rank else others[r] if takes else None for r in range(group.size)]


def _fill(flat: Tensor, pieces: list[Tensor]) -> Tensor:
    for place, piece in zip(flat.split([len(piece) for piece in pieces]), pieces, strict=True):
        place.copy_(piece)
    return flat
