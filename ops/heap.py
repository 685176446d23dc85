"""Memory that this process has freed and its allocator keeps: given back where it is much.

glibc serves blocks of up to 32 MiB from its heap and reuses what is freed there, but for blocks that smaller ones have
been cut from: the gradients of a layer leave holes that the next ones do not fit. A CPU worker of 200 M weights held up
to 790 MiB of holes after a few steps, as much as one of its vectors. On other systems nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_MOST_BYTES = 64 << 20  # that may stay: taking pages anew costs a quarter of a microsecond for each


class _Heap(ctypes.Structure):
    """struct mallinfo2, in bytes (malloc.h)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def freed_bytes() -> int:
    """Free blocks of the heap; 0 where the allocator does not say."""
    library = _glibc()
    return int(library.mallinfo2().fordblks) if library is not None else 0


def give_back(most: int = _MOST_BYTES) -> None:
    """Free blocks go back to the system where they are more than `most` bytes. Takes milliseconds then, and next to
    nothing otherwise."""
    library = _glibc()
    if library is not None and freed_bytes() > most:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(library, "mallinfo2"):  # glibc before 2.33, or another library
        return None
    library.mallinfo2.restype = _Heap
    return library
