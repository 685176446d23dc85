"""What a measurement is, where it runs, and which earlier figures it may use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from app.bench.timing import Timing
from ops.units import GIB

T = TypeVar("T")

Figure = float | int | str | bool | None
NamedFigures = Mapping[str, Figure]
Earlier = Mapping[str, NamedFigures]  # name of a measurement that succeeded -> its figures

REHEARSAL_SECONDS = 1.0  # seconds that a measurement is expected to take in a rehearsal


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where measurements run: the GPU, or the CPU in a rehearsal of the same code with small shapes."""

    device: torch.device
    rehearse: bool
    folder: Path | None = None  # of the results; None: only figures are wanted

    def pick(self, real: T, small: T) -> T:
        """The size of the real run, or of the rehearsal."""
        return small if self.rehearse else real

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], repeats: int, warm_up: int = 1) -> Timing:
        """Seconds of one call, host and device together, after `warm_up` calls that do not count."""
        samples = []
        for index in range(warm_up + repeats):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            if index >= warm_up:
                samples.append(time.perf_counter() - start)
        return Timing.of(samples)

    def host_seconds(self, call: Callable[[], object]) -> float:
        """Seconds until the call returns, begun on an idle device, which may go on after that."""
        self.synchronize()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def has_gib(self, needed: float) -> bool:
        """Whether so much memory of the device is free; always so in a rehearsal."""
        return self.rehearse or torch.cuda.mem_get_info(self.device)[0] > needed * GIB

    def peak_gib(self, call: Callable[[], object]) -> float | None:
        """The allocator's peak during the call in GiB, including what was held before; None without a GPU."""
        if self.device.type != "cuda":
            call()
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) / GIB


class Measurement(Protocol):
    """One line of the result: a frozen dataclass in the file of its subject."""

    @property
    def name(self) -> str:
        """Unique; the subject comes first and ends at a dot."""
        ...

    @property
    def estimate_s(self) -> float:
        """Seconds on an H200, compiling included; a measurement starts only if they are left."""
        ...

    def why_not(self, place: Place) -> str | None:
        """Why this place cannot run it, in one sentence; it is then left out by name."""
        ...

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        """The figures. What it raises becomes the error of the line."""
        ...


class RunsAnywhere:
    """A measurement that no place has to leave out."""

    __slots__ = ()

    def why_not(self, place: Place) -> str | None:
        return None


def expected_seconds(measurement: Measurement, place: Place, times_slower: float) -> float:
    """The seconds that are compared with the time left, on a device that is `times_slower` than an H200."""
    return place.pick(measurement.estimate_s * times_slower, REHEARSAL_SECONDS)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """L2 of the difference over L2 of what was expected, in fp64."""
    difference = (actual.detach().double() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm().clamp_min(1e-30))
