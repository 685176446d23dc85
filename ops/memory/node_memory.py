"""Memory of a node that several processes map, and locks on ranges of it. No torch.

    memory = NodeMemory.create("gradients", num_bytes)     # one process; others get it by ops.memory.lending
    array = torch.frombuffer(memory.buffer, dtype=torch.float32)
    lock = RangeLock(memory)
    lock.acquire(lo, hi, check)
    array[lo // 4 : hi // 4].add_(...)
    lock.release(lo, hi)

The memory is a file without a name (memfd): it lives until the last process that maps it has ended or let go, whichever
way that process ends, and the size of /dev/shm does not limit it. The kernel drops a process's locks when it dies.
Linux only.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable

from ops.memory.node_room import node_room
from ops.units import MIB

PAGE_BYTES = mmap.PAGESIZE
_TAKEN_AT_ONCE = 64 << 20  # bytes, after which the node's room is looked at: less than it keeps in reserve
_FLOCK = struct.Struct("hhqqi0q")  # struct flock: type, whence, start, length, pid (0 for these locks)
_PAUSES_S = (2e-5, 2e-3)  # between two tries for a lock: the first and the longest


class NodeMemory:
    """Bytes that every process with a mapping of the same memory reads and writes; zero at first."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map the memory of a descriptor, which belongs to this object from now on."""
        self.descriptor, self.num_bytes = descriptor, num_bytes
        try:
            self.buffer = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            self.close()  # once: its number may be another file's when this object goes
            raise

    @staticmethod
    def create(name: str, num_bytes: int) -> NodeMemory:
        """New memory, with all its pages. `name` is what /proc/PID/maps shows. Raises MemoryError without room for it.

        Pages are taken at once, and room is looked for before: the kernel promises any number of them, and ends
        processes when it cannot keep the promise.
        """
        if num_bytes > (room := node_room()):
            raise _no_room(name, num_bytes, f", it can spare {room / MIB:,.0f} MiB")
        memory = NodeMemory.reserve(name, num_bytes)
        try:
            memory._allocate(name, 0, num_bytes)
        except MemoryError:
            memory.close()
            raise
        return memory

    @staticmethod
    def reserve(name: str, num_bytes: int) -> NodeMemory:
        """New memory that has addresses and no pages: `take` gets them, range by range. Takes no room."""
        descriptor = os.memfd_create(f"heddle-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return NodeMemory(descriptor, num_bytes)

    def take(self, name: str, lo: int, hi: int) -> None:
        """Have pages for the bytes [lo, hi); those that are there keep what they hold. Raises MemoryError when the node
        runs out of room on the way, which leaves it what it keeps in reserve."""
        for at in range(lo, hi, _TAKEN_AT_ONCE):
            before = self.taken_bytes
            self._allocate(name, at, min(hi, at + _TAKEN_AT_ONCE))
            if self.taken_bytes > before and node_room() <= 0:
                raise _no_room(name, hi - lo, ", of which a part was taken")

    def give(self, lo: int, hi: int) -> None:
        """Let go of the whole pages inside [lo, hi), in every process that maps them: they read as zero from now on."""
        first, last = -(-lo // PAGE_BYTES) * PAGE_BYTES, hi // PAGE_BYTES * PAGE_BYTES
        if first < last:
            self.buffer.madvise(mmap.MADV_REMOVE, first, last - first)

    @property
    def taken_bytes(self) -> int:
        """Bytes of all pages that its file has taken."""
        return os.fstat(self.descriptor).st_blocks * 512

    def _allocate(self, name: str, lo: int, hi: int) -> None:
        try:
            os.posix_fallocate(self.descriptor, lo, hi - lo)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise _no_room(name, hi - lo, "") from None

    def close(self) -> None:
        """Let go of the descriptor. The mapping goes with the last tensor or view of `buffer`."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


class RangeLock:
    """Locks on byte ranges of a NodeMemory, exclusive between RangeLocks of any processes and threads.

    Each has a description of the file of its own (open file description locks, fcntl(2)): one that came with a passed
    descriptor would share its locks with the sender. A process that dies, also by SIGKILL, holds none any more; one
    that is stopped keeps them. Not thread-safe.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._descriptor = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def try_acquire(self, lo: int, hi: int) -> bool:
        """Lock the bytes [lo, hi), lo < hi, unless another holds a part of them. Never waits."""
        try:
            self._set(fcntl.F_WRLCK, lo, hi)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as the file system likes
            return False
        return True

    def acquire(self, lo: int, hi: int, check: Callable[[], None]) -> None:
        """Lock [lo, hi) as soon as no other process has a part of it. `check` is called while it waits, and may
        raise."""
        pause = _PAUSES_S[0]
        while not self.try_acquire(lo, hi):
            check()
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])

    def release(self, lo: int, hi: int) -> None:
        """Unlock [lo, hi)."""
        self._set(fcntl.F_UNLCK, lo, hi)

    def close(self) -> None:
        """Unlock everything and let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _set(self, kind: int, lo: int, hi: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, lo, hi - lo, 0))


def _no_room(name: str, num_bytes: int, spare: str) -> MemoryError:
    return MemoryError(f"this node has no room for {num_bytes / MIB:,.0f} MiB of shared memory ({name}){spare}.")
