"""How long workers may take for their clips before they count as hanging. Pure: the caller says what the time is."""

from __future__ import annotations

_FIRST_S = 12 * 3600.0  # nothing is known yet: the largest clips take hours of one device
_FACTOR = 5.0  # over the slowest clip so far: devices share their node, and clips of one size are alike
_BESIDE_S = 900.0  # for what a process does for the first time, whatever a clip takes


class ChunkLimit:
    """Follows what the clips of one job have taken. `work` is that of each clip, in any unit: a clip of twice as much
    may take four times as long, as attention does, and one of less as long as one of more."""

    def __init__(self) -> None:
        self._slowest_s: dict[float, float] = {}  # of one clip, by its work

    def seconds(self, clips: int, work: float = 1.0) -> float:
        """Seconds that workers may take for this number of clips."""
        known = [took_s * max(1.0, work / of) ** 2 for of, took_s in self._slowest_s.items()]
        return _BESIDE_S + _FACTOR * clips * max(known) if known else _FIRST_S

    def took(self, clips: int, seconds: float, work: float = 1.0) -> None:
        """This number of clips was made in this time."""
        self._slowest_s[work] = max(self._slowest_s.get(work, 0.0), seconds / clips)
