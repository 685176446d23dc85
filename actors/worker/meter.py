"""How much memory cascades take, and how much a worker has for them: of a CUDA device, of counted tensors, or unknown.

A cascade is bracketed by `start` and `stop`. Between two cascades `room_gib` says what the next one may take.
"""

from __future__ import annotations

import gc
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from actors.plan.types import USABLE
from ops.packed.graphed_blocks import held_by_graphs
from ops.storages import StorageCount, storage_bytes
from ops.units import GIB

_LARGE = 0.5  # of its room: a cascade that takes less was not kept from taking more by fragments
_TEXTS = ("out of memory", "CUDNN_STATUS_ALLOC_FAILED", "Failed to CUDA calloc", "CUBLAS_STATUS_ALLOC_FAILED")
_TRACED = (FakeTensor, FunctionalTensor)


class Meter(Protocol):
    """What a worker knows of its memory."""

    def start(self) -> float | None:
        """A cascade begins: GiB that it may take; None without a limit."""
        ...

    def stop(self) -> float | None:
        """The cascade has ended. Returns the GiB that it took beside what was there before; None where memory is not
        counted."""
        ...

    def room_gib(self) -> float | None:
        """GiB that a cascade may take, measured now; None without a limit. For the ends of steps: it takes time. What
        an encode has taken that outlasts its step is not taken from the cascades after it."""
        ...

    def settled(self) -> None:
        """The states have another size now, which stays until the next call. No cascade runs."""
        ...


class NoMeter:
    """Host memory has no limit that belongs to one worker."""

    def start(self) -> float | None:
        return None

    def stop(self) -> float | None:
        return None

    def room_gib(self) -> float | None:
        return None

    def settled(self) -> None: ...


class DeviceMeter:
    """A CUDA device, by the counters of PyTorch's allocator, which count at launch and need no synchronisation. What
    others have of the device is asked where nothing else is to be done, and holds for the cascades until then."""

    def __init__(self, device: torch.device, limit_gib: float = 0.0) -> None:
        """`limit_gib` of the device may be used; 0: all of it."""
        self._device, self._limit = device, limit_gib
        self._base = self._retries = 0
        self._usable: float | None = None  # bytes for this process
        self._room_gib = 0.0
        self._in_cascade = False
        if limit_gib:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total), device)

    def start(self) -> float | None:
        if self._usable is None:
            self._usable = self._measured()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._base, _, self._retries = self._counters()
        self._room_gib = (self._usable - self._base) / GIB
        self._in_cascade = True
        return self._room_gib

    def stop(self) -> float | None:
        self._in_cascade = False
        _, peak, retries = self._counters()
        taken_gib = (peak - self._base) / GIB
        # The allocator had to give cached blocks back first. Of a large cascade that is as much as fits, whatever the
        # tensors add up to; before a small one the blocks were another's, and all of the room would be no need of it.
        retried = retries != self._retries and taken_gib > _LARGE * self._room_gib
        return max(taken_gib, self._room_gib) if retried else taken_gib

    def room_gib(self) -> float | None:
        self._usable = self._measured()
        return (self._usable - (self._base if self._in_cascade else self._counters()[0])) / GIB

    def settled(self) -> None:
        collect()
        self._usable = None

    def _measured(self) -> float:
        free, total = torch.cuda.mem_get_info(self._device)
        usable = min(total, self._limit * GIB) if self._limit else total
        other = total - free - torch.cuda.memory_reserved(self._device)  # contexts, communicators, other processes
        return USABLE * (usable - other) - held_by_graphs(self._device)

    def _counters(self) -> tuple[int, int, int]:
        """Bytes in tensors, the most of them since the last start, and how often the allocator had to try again. One
        call: `memory_stats` would sort a hundred figures for each of them."""
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not found:  # nothing was ever allocated
            return 0, 0, 0
        tensors = found["allocated_bytes"]["all"]
        return int(tensors["current"]), int(tensors["peak"]), int(found["num_alloc_retries"])


class TensorMeter:
    """A CPU worker with a limit of its own: the tensors that its operators make are counted, and may not exceed it."""

    def __init__(self, limit_gib: float) -> None:
        self._limit = limit_gib
        self._room: float | None = None
        self._count: StorageCount | None = None

    def start(self) -> float | None:
        room = self.room_gib()
        assert room is not None
        self._count = StorageCount(limit_bytes=int(max(room, 0.0) * GIB))
        self._count.__enter__()  # type: ignore[no-untyped-call]
        return room

    def stop(self) -> float | None:
        count, self._count = self._count, None
        if count is None:
            return None
        count.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return count.peak_bytes / GIB

    def room_gib(self) -> float | None:
        """Counted when the modules or the state have come, and not in a cascade, whose own tensors would count with
        them: walking all tensors takes a tenth of a second."""
        if self._room is None:
            self._room = self._limit - host_bytes() / GIB
        return self._room

    def settled(self) -> None:
        collect()
        self._room = None
        self.room_gib()


def host_bytes() -> int:
    """Bytes of all tensors of this process in host memory, those in garbage included.

    A compiler's tensors have no memory, and their sizes may be symbols: they are left out.
    """
    tensors = (o for o in gc.get_objects() if issubclass(type(o), Tensor) and not issubclass(type(o), _TRACED))
    return storage_bytes(tensor for tensor in tensors if tensor.device.type == "cpu")


def meter_of(device: torch.device, limit_gib: float) -> Meter:
    """The meter of a worker; `limit_gib` is `workers.memory_gib`, 0 without one."""
    if device.type == "cuda":
        return DeviceMeter(device, limit_gib)
    return TensorMeter(limit_gib) if limit_gib else NoMeter()


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out, by PyTorch's allocator or by a library beside it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    )


def release(error: BaseException | None) -> None:
    """Let go of the tensors in the frames of an error that has been caught, and of the blocks that they leave."""
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error = error.__context__
    collect()


def collect() -> None:
    """Free what cannot be reached any more: a graph whose backward was cut short refers to itself, and its tensors
    would stay until Python happens to look."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def keep(device: torch.device) -> None:
    """Exempt the objects that exist now from garbage collection: while a GPU waits for its host, Python would walk some
    300,000 of them in 0.16 s. Not on a CPU, where `host_bytes` has to find them."""
    if device.type == "cuda":
        gc.collect()
        gc.freeze()


@contextmanager
def freed() -> Iterator[None]:
    """A context for a cascade: if it fails, its tensors are freed although somebody may keep its error."""
    try:
        yield
        return
    except Exception as error:
        failed = error
    try:
        release(failed)
        raise failed
    finally:
        del failed  # it refers to this frame


def peak_rss_gib() -> float:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
