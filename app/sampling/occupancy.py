"""How busy the workers of a job were while prompts waited. Pure: the caller says what the time is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class _Attendance:
    """One worker, from the moment it could begin."""

    since: float
    until: float | None = None  # it died; what it did then does not count
    works: list[tuple[float, float]] = field(default_factory=list)  # begin and end


class Occupancy:
    """The share of its time that each worker computes before the tail, which begins when the last prompt is given out:
    from then on a worker must wait, however prompts are shared."""

    def __init__(self) -> None:
        self._workers: dict[object, _Attendance] = {}
        self._tail_at: float | None = None
        self._ended_at = 0.0

    def ready(self, worker: object, now: float) -> None:
        """The worker has loaded the model."""
        self._workers[worker] = _Attendance(since=now)

    def answered(self, worker: object, seconds: float, now: float) -> None:
        """The worker has made clips, and computed for `seconds`."""
        self._workers[worker].works.append((now - seconds, now))
        self._ended_at = now

    def died(self, worker: object) -> None:
        one = self._workers[worker]
        one.until = one.works[-1][1] if one.works else one.since

    def given_out(self, waiting: bool, now: float) -> None:
        """A prompt was given out, or came back; whether others wait."""
        if waiting:
            self._tail_at = None
        elif self._tail_at is None:
            self._tail_at = now

    def shares(self) -> list[float]:
        """The busy share of every worker that was there before the tail, in the order in which they came."""
        end = self._ended_at if self._tail_at is None else self._tail_at
        found = []
        for one in self._workers.values():
            until = end if one.until is None else min(end, one.until)
            if until > one.since:
                busy = sum(max(0.0, min(stop, until) - max(start, one.since)) for start, stop in one.works)
                found.append(busy / (until - one.since))
        return found

    def summary(self) -> str | None:
        """One line; None where no worker had more than one turn."""
        shares = self.shares()
        if not shares or self._tail_at is None:
            return None
        began = min(one.since for one in self._workers.values())
        told = ", ".join(f"{share:.0%}" for share in shares)
        return (
            f"workers computed {told} of the {self._tail_at - began:.1f} s until the last prompt was given out; "
            f"{self._ended_at - self._tail_at:.1f} s later all clips were there"
        )
