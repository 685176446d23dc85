"""Batch size of a bucket from a profile: as many clips as train in `data.batch.target_s` seconds and fit into memory.

AdaptiveLoad's dual constraint (sec. 3.2) with the profile in place of a + b B S^p: measured points count as they stand.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.plan.costs.profile import Profile
from data.config import BatchConfig
from data.types import Bucket
from ops.geometry import Geometry

_MOST = 4096  # clips of the smallest image bucket; more would not train better


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetBatch:
    """`data.buckets.BatchSize`: a pure function of the profile, so run and preview agree."""

    profile: Profile
    geometry: Geometry

    def __call__(self, bucket: Bucket, limits: BatchConfig) -> int:
        tokens = limits.text_tokens + self.geometry.tokens(bucket.frames, bucket.height, bucket.width)
        most = min(int(limits.memory_tokens // tokens), limits.max_batch or _MOST)
        low, high = 1, max(1, most)
        while low < high:  # seconds grow with the batch
            middle = (low + high + 1) // 2
            if self._seconds(middle, bucket, limits.text_tokens) <= limits.target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _seconds(self, batch: int, bucket: Bucket, text_tokens: int) -> float:
        """On the fewest workers that hold it; infinite where the profile knows no legal degree."""
        modes = self.profile.modes("dit", batch, bucket.frames, bucket.height, bucket.width, text_tokens)
        return modes[0][1] if modes else float("inf")
