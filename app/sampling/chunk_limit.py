"""How long workers may take for their clips before they count as hanging. Pure: the caller says what the time is."""

from __future__ import annotations

_FIRST_S = 12 * 3600.0  # nothing is known yet: the largest clips take hours of one device
_FACTOR = 5.0  # over the slowest clip so far: devices share their node, and clips of one job are alike
_BESIDE_S = 900.0  # for what a process does for the first time, whatever a clip takes


class ChunkLimit:
    """Follows what the clips of one job have taken."""

    def __init__(self) -> None:
        self._slowest_s = 0.0  # of one clip

    def seconds(self, clips: int) -> float:
        """That workers may take for this number of clips."""
        return _BESIDE_S + _FACTOR * clips * self._slowest_s if self._slowest_s else _FIRST_S

    def took(self, clips: int, seconds: float) -> None:
        """This number of clips was made in this time."""
        self._slowest_s = max(self._slowest_s, seconds / clips)
