"""Pinned host memory of large uploads to one device: blocks of one size, and how many of them there may be. Pure.

PyTorch's allocator of pinned memory rounds a size up to a power of two and keeps what it has taken until the process
ends (ATen/core/CachingHostAllocator.h: `PowerOf2Ceil`, `maybe_cache_block`). The pixels of a clip of 129x720x1280, 340
MiB, took 512, and one more such block for each clip that was queued. So large uploads go through blocks of their own.
"""

from __future__ import annotations

from ops.units import GIB

BLOCK = 32 << 20  # bytes of a block, a power of two; 0.6 ms at 55 GB/s, which is long beside a launch
SMALL = 4 << 20  # bytes up to which an upload is none of them
_LEAST = 4  # blocks: rows and index tensors of some cascades
_AHEAD = 2  # of the largest uploads: one that the device reads or comes to next, and a whole one after it


def most_blocks(largest: int) -> int:
    """Blocks that there may be for uploads of at most `largest` bytes. A larger one goes through them in turns, as the
    device reads it.

    >>> most_blocks(0), most_blocks(129 * 720 * 1280 * 3)
    (4, 22)
    """
    return max(_LEAST, _AHEAD * -(-largest // BLOCK))


def uploads_gib(largest: int) -> float:
    """GiB of host memory that a worker's large uploads may hold. `largest` as `most_blocks`."""
    return most_blocks(largest) * BLOCK / GIB
