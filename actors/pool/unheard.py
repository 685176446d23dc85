"""Starts whose process is up and has sent no heartbeat: it hangs before it could, as where its programs lie on storage
that does not answer.

Such a worker has its GPU, and looks like one that waits for it: nothing is heard of either. Ray knows which has a
process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.messages import FailedStart, HostGpu

_ASK_S = 20.0  # Ray answers in a millisecond, and a thousand workers may wait


@dataclass(slots=True)
class _Start:
    """A worker of which nothing was heard yet (seconds, by a clock that leaves out the time without a look)."""

    asked: float
    since: float  # it had no process before, as far as anybody has asked


class UnheardStarts:
    """The unheard starts of one run. `hosting` says where a worker's process is; None: it has none."""

    def __init__(self, hosting: Callable[[str], HostGpu | None]) -> None:
        self._hosting = hosting
        self._starts: dict[str, _Start] = {}

    def look(self, unheard: Sequence[str], patience_s: float, now: float) -> list[FailedStart]:
        """The workers, of those `unheard` of yet, that have had a process for longer than `patience_s`."""
        self._starts = {name: self._starts.get(name) or _Start(asked=now, since=now) for name in unheard}
        found = [self._hanging(name, start, patience_s, now) for name, start in self._starts.items()]
        return [failed for failed in found if failed is not None]

    def _hanging(self, name: str, start: _Start, patience_s: float, now: float) -> FailedStart | None:
        if now - start.asked < _ASK_S:
            return None
        start.asked, where = now, self._hosting(name)
        if where is None:
            start.since = now
        if where is None or now - start.since <= patience_s:
            return None
        why = f"its process has not begun to load modules in {now - start.since:.0f} s"
        return FailedStart(worker=name, why=f"{where}: {why}", where=where)
