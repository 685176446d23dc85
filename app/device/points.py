"""What `heddle profile` measures, and how it is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
