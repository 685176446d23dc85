"""Batch size of a bucket from a profile: as many clips as train in `data.batch.target_s` seconds and fit into memory.

AdaptiveLoad's dual constraint (sec. 3.2) with the profile in place of a + b B S^p: measured points count as they stand.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.plan.profile import Profile
from data.config import BatchConfig
from ops.geometry import Geometry

_MOST = 4096  # clips of the smallest image bucket; more would not train better


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetBatch:
    """Called by the dataset with a bucket's frames, height and width. The same profile gives the same sizes."""

    profile: Profile
    config: BatchConfig
    geometry: Geometry

    def __call__(self, frames: int, height: int, width: int) -> int:
        tokens = self.config.text_tokens + self.geometry.tokens(frames, height, width)
        most = min(int(self.config.memory_tokens // tokens), self.config.max_batch or _MOST)
        low, high = 1, max(1, most)
        while low < high:  # seconds grow with the batch
            middle = (low + high + 1) // 2
            if self._seconds(middle, frames, height, width) <= self.config.target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _seconds(self, batch: int, frames: int, height: int, width: int) -> float:
        """On the fewest workers that hold it; infinite where the profile knows no legal degree."""
        modes = self.profile.modes("dit", batch, frames, height, width, self.config.text_tokens)
        return modes[0][1] if modes else float("inf")
