"""Moments of a worker's own work, and seconds between them: by the host's clock, or by events on a device's stream.

A device's work is only queued when a call returns, and the host goes on. So a mark says when the device comes there,
and is read when it has: later, without a wait in between.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.worker.run_clock import own_clock
from ops.waiting import has_passed


class Stopwatch(Protocol):
    """Marks moments; when one of them was, and how far two are apart, may be asked when it has come."""

    def mark(self) -> object:
        """The moment when all work that was queued so far has ended."""
        ...

    def has_come(self, mark: object) -> bool:
        """Whether the moment has come. Any thread may ask. Raises RuntimeError for a failure of the device."""
        ...

    def wait(self, mark: object) -> None:
        """Returns when the moment has come. Raises RuntimeError for a failure of the device."""
        ...

    def settle(self) -> None:
        """Wait until all work that was queued so far has ended."""
        ...

    def seconds(self, first: object, second: object) -> float: ...
    def unix(self, mark: object) -> float:
        """The moment in unix seconds."""
        ...


class HostWatch:
    """A watch for the CPU, whose work has ended when a call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def has_come(self, mark: object) -> bool:
        return True

    def wait(self, mark: object) -> None: ...

    def settle(self) -> None: ...

    def seconds(self, first: object, second: object) -> float:
        assert isinstance(first, float) and isinstance(second, float)
        return second - first

    def unix(self, mark: object) -> float:
        assert isinstance(mark, float)
        return own_clock.of_perf_counter(mark)


@dataclass(frozen=True, slots=True)
class _Moment:
    """An event that had come already at a known time."""

    event: torch.cuda.Event
    unix: float


@dataclass(frozen=True, slots=True)
class StreamMark:
    """A place in a stream, and a moment before it from which its time is counted."""

    event: torch.cuda.Event
    since: _Moment


class StreamWatch:
    """A watch for CUDA: a collective holds up the stream, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._settled: _Moment | None = None

    def mark(self) -> StreamMark:
        if self._settled is None:
            self.settle()
        assert self._settled is not None
        return StreamMark(self._recorded(), self._settled)

    def has_come(self, mark: object) -> bool:
        assert isinstance(mark, StreamMark)
        return has_passed(mark.event)

    def wait(self, mark: object) -> None:
        assert isinstance(mark, StreamMark)
        mark.event.synchronize()

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        event = self._recorded()
        event.synchronize()  # of an idle stream: at once
        self._settled = _Moment(event, own_clock.now())

    def seconds(self, first: object, second: object) -> float:
        assert isinstance(first, StreamMark) and isinstance(second, StreamMark)
        return float(first.event.elapsed_time(second.event)) / 1e3

    def unix(self, mark: object) -> float:
        assert isinstance(mark, StreamMark)
        return mark.since.unix + float(mark.since.event.elapsed_time(mark.event)) / 1e3

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The one that sees the work of this device."""
    return StreamWatch(device) if device.type == "cuda" else HostWatch()
