"""Freed memory is given back where it is much."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ops.heap import freed_bytes, give_back

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not freed_bytes(), reason="the allocator says nothing")
MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_holes_between_blocks_that_are_in_use_go_back_to_the_system() -> None:
    """Every other block of a heap of them stays: no block of the double size fits into what is free."""
    blocks = [bytearray(b"\1") * (100 << 10) for _ in range(1000)]  # below what is mapped by itself
    kept = blocks[::2]
    del blocks
    free, before = freed_bytes(), resident()
    assert free > 40 * MIB
    give_back(most=free + 1)
    assert resident() > before - MIB, "as much may stay"
    give_back(most=10 * MIB)
    assert resident() < before - 30 * MIB
    assert all(block == b"\1" * (100 << 10) for block in kept)
