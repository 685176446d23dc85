"""Encode results on their way from the device to host memory while the worker goes on with its next cascade. No Ray.

A published result leaves a CUDA worker in three parts that overlap with the cascades after it: a copy to pinned memory
on a side stream, which the task thread only queues (`start`); the wait for that copy and the write into the object
store, both in the actor's "io" thread (`take`, called by Worker.published). The task thread never waits for a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actors.worker.handoff import EncodeResult

Key = tuple[int, str]  # generation, cascade


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyInFlight:
    """A copy in flight: `host` may be read once `wait` has returned."""

    host: Tensor
    wait: Callable[[], None]


class PinnedCopy:
    """Copies to pinned host memory on a stream of its own, after what the current stream has queued so far."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, rows: Tensor) -> CopyInFlight:
        if not rows.is_cuda:
            return CopyInFlight(host=rows, wait=lambda: None)
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits for it sleeps, without the GIL
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            host.copy_(rows, non_blocking=True)
            done.record(self._stream)
        rows.record_stream(self._stream)  # its memory is not given out again before the copy has read it
        return CopyInFlight(host=host, wait=done.synchronize)


class HostCopies:
    """Results that consumers elsewhere wait for, by generation and cascade. Each is taken once. Thread-safe."""

    def __init__(self, copy: Callable[[Tensor], CopyInFlight]) -> None:
        self._copy = copy
        self._changed = threading.Condition()
        self._started: dict[Key, list[tuple[EncodeResult, CopyInFlight]]] = {}

    def start(self, key: Key, results: list[EncodeResult]) -> None:
        """Queue the copies of a cascade's results; returns at once."""
        copies = [self._copy(result.rows) for result in results]
        started = [(replace(result, rows=copying.host), copying) for result, copying in zip(results, copies)]
        with self._changed:
            self._started[key] = started
            self._changed.notify_all()

    def take(self, key: Key, timeout_s: float) -> list[EncodeResult] | None:
        """The results in host memory, when their copies have ended. None if the cascade has not run by then."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._started, timeout_s):
                return None
            started = self._started.pop(key)
        for _, copying in started:
            copying.wait()
        return [result for result, _ in started]

    def clear(self) -> None:
        """The generation has ended: nobody will ask for what is left."""
        with self._changed:
            self._started.clear()

    def __len__(self) -> int:
        with self._changed:
            return len(self._started)
