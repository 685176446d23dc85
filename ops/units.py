"""Work dealt over a bag in units of any shape: unit u is made by rank u % size, and given to the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ops.comm import Group

_MAX_DIMS = 6


def share_units(
    found: dict[int, Tensor], units: int, group: Group, device: torch.device, only: int | None = None
) -> dict[int, Tensor]:
    """All units [any shape] by their number, of which `found` are those made here. With `only`, that rank alone ends
    with all of them, the others with their own. Collective. Shapes travel first, then fp32 data."""
    dims = torch.zeros(units, _MAX_DIMS, dtype=torch.int64, device=device)
    for u, unit in found.items():
        dims[u, : unit.dim()] = torch.tensor(unit.shape, device=device) + 1  # 0: no such dimension
    group.all_reduce(dims)
    shapes = [tuple(n - 1 for n in row if n) for row in dims.tolist()]
    sizes = [math.prod(shape) for shape in shapes]
    owned = [range(r, units, group.size) for r in range(group.size)]
    takers = [r for r in range(group.size) if r != group.rank and only in (None, r)]
    takes = only in (None, group.rank)
    output_splits = [sum(sizes[u] for u in owned[r]) if takes and r != group.rank else 0 for r in range(group.size)]
    flat = [found[u].to(device, torch.float32).reshape(-1) for u in owned[group.rank]]
    mine = torch.cat(flat) if flat else torch.empty(0, device=device)
    input_splits = [mine.numel() if r in takers else 0 for r in range(group.size)]
    received = torch.empty(sum(output_splits), device=device)
    group.all_to_all(received, mine.repeat(len(takers)), output_splits, input_splits)
    result, offset = dict(found), 0
    for u in (u for r in range(group.size) if takes and r != group.rank for u in owned[r]):
        result[u] = received[offset : offset + sizes[u]].reshape(shapes[u])
        offset += sizes[u]
    return result
