"""Blocks whose weights are fetched from host memory, in prices: no pass is shorter than their copies. Pure.

A pass copies all blocks to every worker of its bag for its forward, and again for its backward, where it computes the
forward again (`ops.update.parameter_places`): one block beside the one that runs, and none ahead of that. So each half
takes what it computes or what it copies, whichever is longer, and samples that share a pass share its copies.
"""

from __future__ import annotations

from dataclasses import dataclass

_FORWARD = 0.25  # of what a pass computes: forward, forward again and a backward of two


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedWeights:
    """What one pass copies to a GPU, once for its forward and once for its backward."""

    num_bytes: int = 0
    bytes_per_s: float = 1.0
    in_points: bool = True  # points of a profile's file were measured beside them

    @property
    def way_s(self) -> float:
        """Seconds of the copies of one way."""
        return self.num_bytes / self.bytes_per_s

    def beside(self, computed_s: float) -> float:
        """Seconds of a pass that computes so long."""
        if not self.num_bytes:
            return computed_s
        forward = _FORWARD * computed_s
        return max(forward, self.way_s) + max(computed_s - forward, self.way_s)

    def hide(self, seconds: float) -> bool:
        """Whether a pass that took so long may have waited for copies, and does not say what it computed."""
        return _FORWARD * seconds < self.way_s


ON_DEVICE = FetchedWeights()
