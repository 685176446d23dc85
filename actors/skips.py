"""Steps whose gradient is not finite: they change nothing, are counted and named, and too many of them end the run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from actors.outcome import Outcome, StopRun
from actors.steps import CollectedStep

log = logging.getLogger(__name__)


class Skips:
    """Counts skipped steps of one controller. `tell` gets what belongs into events.jsonl."""

    def __init__(self, limit: int, tell: Callable[..., None]) -> None:
        self._limit, self._tell, self._count = limit, tell, 0

    def check(self, done: CollectedStep, committed: int) -> None:
        """Raises StopRun, with `committed` as the run's last step, when the limit is passed."""
        first = done.reports[0]
        if first.applied:
            return
        self._count += 1
        step, samples = done.running.step, sorted({s for r in done.reports for s in r.bad_samples})
        self._tell("skipped", step=step, loss=first.loss, grad_norm=first.grad_norm, samples=samples)
        log.warning("step %d is skipped: loss %s, gradient norm %s (%d of at most %d)",
                    step, first.loss, first.grad_norm, self._count, self._limit)
        if self._count > self._limit:
            reason = (
                f"{self._count} steps had a non-finite gradient, more than train.max_skipped_steps {self._limit}; last "
                f"samples: {', '.join(samples) or 'none named'}. Lower the learning rate or check these clips."
            )
            raise StopRun(Outcome(code=1, last_step=committed, reason=reason))
