"""Workers that cannot follow the planner's settings: what is reported, and how long a run waits for others."""

from __future__ import annotations

from actors.outcome import Tell
from actors.plan.types import PlanError
from actors.records.events import PlanAdapted, WorkersAwaited


class Misfits:
    """`wait_s`: how long a run waits for workers that can run its next step."""

    def __init__(self, wait_s: float, tell: Tell) -> None:
        self._wait_s, self._tell = wait_s, tell
        self._since: float | None = None  # seconds of the caller's clock
        self._settings: tuple[str, ...] = ()

    def planned(self, settings: tuple[str, ...]) -> None:
        """The next step has a plan. `settings` are those that the plan could not follow, each with its replacement."""
        self._since = None
        if settings != self._settings:
            self._settings = settings
            self._tell(PlanAdapted(settings=settings))

    def refused(self, error: PlanError, now: float) -> None:
        """The next step has no plan at `now`. Raises the error when the run has waited for `wait_s`."""
        if self._since is None:
            self._since = now
            self._tell(WorkersAwaited(detail=f"waiting for workers that can run the next step: {error}"))
        if now - self._since > self._wait_s:
            raise error
