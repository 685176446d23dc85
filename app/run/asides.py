"""What a run's workers make beside its steps, from its checkpoints: samples, and the loss of held-out clips."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Protocol

from actors.aside_turns import AsideWork, TurnReport
from actors.plan.types import Module
from actors.records.events import RunEvent
from ops.counted import counted

log = logging.getLogger(__name__)


class CheckpointAsides(Protocol):
    """A source of asides that wants some when a checkpoint is whole (`app.sampling.live`, `app.validation.live`)."""

    @property
    def expected(self) -> bool: ...

    @property
    def encoders(self) -> Collection[Module]: ...

    def wanted(self) -> Sequence[AsideWork]: ...

    def ended(self, report: TurnReport) -> RunEvent | None:
        """None also for an aside of another source."""
        ...

    def dropped(self) -> Collection[str]: ...

    def on_checkpoint(self, step: int, before: int | None = None) -> RunEvent | None:
        """The event to report, if any. `before` is the step of the checkpoint before it, -1 if it is the first, None if
        that is not known."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class RunAsides:
    """Several sources as one: the controller's `AsideSource`, and told of checkpoints by the recorder."""

    def __init__(self, sources: Sequence[CheckpointAsides], share: float, before: int | None = None) -> None:
        """`share` of the run's time is what all of them together may take. `before` is the step of the newest
        checkpoint so far, -1 without one, None if it is not known."""
        self._sources, self.share, self._before = tuple(sources), share, before

    @property
    def expected(self) -> bool:
        return any(source.expected for source in self._sources)

    @property
    def encoders(self) -> Collection[Module]:
        return {module for source in self._sources for module in source.encoders}

    def wanted(self) -> list[AsideWork]:
        return [work for source in self._sources for work in source.wanted()]

    def ended(self, report: TurnReport) -> RunEvent | None:
        return next((event for source in self._sources if (event := source.ended(report)) is not None), None)

    def dropped(self) -> Collection[str]:
        return {name for source in self._sources for name in source.dropped()}

    def on_checkpoint(self, step: int) -> list[RunEvent]:
        events: list[RunEvent] = []
        before, self._before = self._before, step
        for source in self._sources:
            try:
                event = source.on_checkpoint(step, before)
            except Exception:  # whatever it is, the run goes on
                log.exception("nothing is made beside the run from the checkpoint after %s", counted(step + 1, "step"))
                continue
            if event is not None:
                events.append(event)
        return events

    def close(self) -> None:
        with ExitStack() as stack:
            for source in reversed(self._sources):
                stack.callback(source.close)
