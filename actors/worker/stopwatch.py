"""Seconds between two moments of a worker's own work: by the host's clock, or by events on a device's stream."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Marks moments; how far two of them are apart may be asked when the work between them has ended."""

    def mark(self) -> object: ...

    def settle(self) -> None:
        """Wait until all work that was queued so far has ended."""
        ...

    def seconds(self, first: object, second: object) -> float: ...


class HostWatch:
    """A watch for the CPU, whose work has ended when a call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None: ...

    def seconds(self, first: object, second: object) -> float:
        assert isinstance(first, float) and isinstance(second, float)
        return second - first


class StreamWatch:
    """A watch for CUDA, whose work is only queued when a call returns: a collective holds up the stream, not the host.
    To be asked once it has settled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def seconds(self, first: object, second: object) -> float:
        assert isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event)
        return float(first.elapsed_time(second)) / 1e3


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The one that sees the work of this device."""
    return StreamWatch(device) if device.type == "cuda" else HostWatch()
