"""What `heddle profile` measures, and how it is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from actors.plan.types import Module
from data.types import Bucket

if TYPE_CHECKING:
    import torch

    from ops.comm import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledShape:
    """One cascade to time."""

    batch: int
    bucket: Bucket
    text_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePoint:
    """A cascade to measure."""

    module: Module
    shape: ProfiledShape
    degree: int = 1

    @property
    def key(self) -> tuple[str, int, int, int, int, int]:
        """As profiles name it."""
        bucket = self.shape.bucket
        return self.module, self.shape.batch, bucket.frames, bucket.height, bucket.width, self.degree

    @property
    def pixels(self) -> int:
        bucket = self.shape.bucket
        return self.shape.batch * bucket.frames * bucket.area

    @property
    def name(self) -> str:
        """For a person."""
        bucket, bag = self.shape.bucket, f" sp{self.degree}" if self.degree > 1 else ""
        return f"{self.module:4}  {bucket.frames:4d}f {bucket.height}x{bucket.width}  b{self.shape.batch:<4d}{bag}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFigure:
    """What else a plan counts on, to be measured once per degree. update: the end of a step, with so many workers.
    exchange: the all-to-all of a bag."""

    kind: Literal["update", "exchange"]
    degree: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PointTimes:
    """Seconds of the timed runs of one cascade, and the peak GiB of a member where the device counts it."""

    seconds: tuple[float, ...]
    peak_gib: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Longest less shortest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def timed(work: Callable[[], object], device: torch.device, group: Group) -> float:
    """Seconds of one call, which all members of the group begin together."""
    import torch

    if group.size > 1:
        group.barrier(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
