"""What the host side of every Triton kernel needs: aligned rows, the device's size, launch options.

Nothing here reads a value from the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ops.kernels.base.tuning import Launch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowShares:
    """How rows are dealt out to persistent programs."""

    least: int = 32  # a program with fewer rows does not pay for its slot in the second stage
    interpreted: int = 3  # stands in for the multiprocessors of a GPU when the interpreter runs on CPU tensors


_shares = RowShares()


@contextmanager
def dealt(shares: RowShares) -> Iterator[None]:
    """Deal out rows in another way: in tests a few rows already cross programs and runs."""
    global _shares
    before, _shares = _shares, shares
    try:
        yield
    finally:
        _shares = before


def num_programs(num_rows: int, most: int) -> int:
    """Persistent programs: `most` fill the device, each takes the least number of rows or more and none is without a
    row."""
    rows_per_program = -(-num_rows // max(min(most, -(-num_rows // _shares.least)), 1))
    return -(-num_rows // rows_per_program)


def num_sms(device: torch.device) -> int:
    return _multiprocessors(device) if device.type == "cuda" else _shares.interpreted


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def rows(x: Tensor) -> Tensor:
    """x itself where its rows are 16-byte aligned and dense, else one contiguous copy."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    log_copy(f"strides {x.stride()} or a start that is not on 16 bytes; rows must be dense and aligned")
    return x.contiguous()


def table(table: Tensor | None) -> Tensor | None:
    """[S, D] or [D] with dense, aligned rows."""
    if table is None:
        return None
    return rows(table if table.ndim == 2 else table.view(1, -1))


def stride8(x: Tensor | None) -> int:
    """Distance of rows [N, D] in units of 8 elements; 0 without a tensor."""
    return 0 if x is None else x.stride(0) // 8


def or_else(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Kernels take a pointer for every argument; flags say which ones they read."""
    return stand_in if tensor is None else tensor


def options(config: Launch) -> dict[str, int]:
    return {"num_warps": config.warps, "enable_fp_fusion": True}


def name(x: Tensor) -> str:
    """The dtype as launch tables name it."""
    return str(x.dtype).removeprefix("torch.")


@cache
def log_copy(reason: str) -> None:
    """Called where the host side copies an operand first: right, but slower than it could be."""
    log.warning("fused ops copy an operand before the Triton kernel reads it: %s", reason)
