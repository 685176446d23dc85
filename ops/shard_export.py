"""Copies of a worker's optimizer state in host memory, made while training goes on where there is a GPU.

A snapshot of a 14B model on eight GPUs is 21 GB of each: a second of every step if the worker waited for it. The copy
begins at the end of a step, and only the next update, which would change what is read, waits until it has ended. The
GPU's buffers are pinned and used again: a run holds two sets, of the snapshot that is being handed out and of the one
that is being made.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ops.cuda_memory import CudaHostCopy
from ops.shards import ShardState

_COPY_ALONE = 1 << 20  # elements; threads are not worth it for fewer
_THREADS = 4  # one for each array of a shard
_REGISTERED_BYTES = 64 << 20  # and more; malloc gives so much memory pages of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardExport:
    """The state of a shard as it was when the export began: `shard` may be read once `wait` has returned.

    `wait` may be called from any thread and any number of times; it raises what the copy failed with.
    """

    shard: ShardState
    wait: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostArrays:
    """Copies in host memory of their own, which may be read once `wait` has returned."""

    arrays: dict[str, np.ndarray]
    wait: Callable[[], None] = lambda: None


CopyArrays = Callable[[Mapping[str, Tensor]], HostArrays]


def copy_at_once(arrays: Mapping[str, Tensor]) -> HostArrays:
    """From any device; in host memory every large array has a thread."""
    if next(iter(arrays.values())).numel() < _COPY_ALONE:
        return HostArrays(arrays={name: array.to("cpu", copy=True).numpy() for name, array in arrays.items()})
    with ThreadPoolExecutor(len(arrays), thread_name_prefix="snapshot") as threads:
        copies = threads.map(lambda array: array.to("cpu", copy=True).numpy(), arrays.values())
        return HostArrays(arrays=dict(zip(arrays, copies)))


class CopyInThreads:
    """State that lies in host memory beside a GPU: copied by threads of their own while the GPU computes."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot")

    def __call__(self, arrays: Mapping[str, Tensor]) -> HostArrays:
        copies = {name: torch.empty_like(array, device="cpu") for name, array in arrays.items()}
        running = [self._threads.submit(copies[name].copy_, array) for name, array in arrays.items()]

        def wait() -> None:
            for one in running:
                one.result()

        return HostArrays(arrays={name: copy.numpy() for name, copy in copies.items()}, wait=wait)


class Pins(Protocol):
    """A device that can be told to read and write host memory itself."""

    def pin(self, memory: Tensor) -> None: ...
    def unpin(self, memory: Tensor) -> None: ...


class PinnedMemory:
    """Pinned arrays that are given out again when nobody holds them any more. One thread takes, any may let go.

    PyTorch rounds what it pins up to powers of two, and keeps that: up to twice what is asked for, of memory that a
    node counts on. So large arrays are ordinary memory of just their size, which the device is told of.
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._free: deque[Tensor] = deque()

    def like(self, array: Tensor) -> np.ndarray:
        """In host memory, of the same shape and dtype, not filled."""
        if array.nbytes < _REGISTERED_BYTES:
            return torch.empty_like(array, device="cpu", pin_memory=True).numpy()
        buffer = self._used_before(array)
        if buffer is None:
            buffer = torch.empty_like(array, device="cpu")
            self._pins.pin(buffer)
        given: np.ndarray = buffer.numpy()
        weakref.finalize(given, self._free.append, buffer).atexit = False
        return given

    def _used_before(self, array: Tensor) -> Tensor | None:
        """Lets go of buffers of other sizes: those of a generation that has ended."""
        for _ in range(len(self._free)):
            buffer = self._free.popleft()
            if (buffer.shape, buffer.dtype) == (array.shape, array.dtype):
                return buffer
            self._pins.unpin(buffer)
        return None


class CopyOnStream:
    """State on a GPU: copied to pinned memory on a stream of its own, after what the current one has queued so far."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._memory = PinnedMemory(CudaHostCopy(device))

    def __call__(self, arrays: Mapping[str, Tensor]) -> HostArrays:
        pinned = {name: self._memory.like(array) for name, array in arrays.items()}
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps, without the GIL
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, array in arrays.items():
                torch.from_numpy(pinned[name]).copy_(array, non_blocking=True)
                array.record_stream(self._stream)  # not given out again before the copy has read it
            done.record(self._stream)
        return HostArrays(arrays=pinned, wait=done.synchronize)


def copies_of(device: torch.device, state_device: torch.device) -> CopyArrays:
    """How state on `state_device` of a worker that computes on `device` is copied."""
    if device.type == "cpu":
        return copy_at_once
    return CopyOnStream(state_device) if state_device.type == "cuda" else CopyInThreads()
