"""Steps whose gradient is not finite: they change nothing, are counted and named, and too many of them end the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from actors.outcome import Exit, Outcome, StopRun, Tell
from actors.records.events import StepSkipped, events_so_far
from actors.step import CollectedStep

log = logging.getLogger(__name__)

WINDOW = 1000  # steps: a bad clip now and then in a million steps is no reason to stop, ten at once are


class Skips:
    """Counts the skipped steps among the last thousand; one that is computed again counts once, by its last outcome.

    `tell` gets what belongs into events.jsonl, `known` are steps that earlier controllers of the run have skipped.
    """

    def __init__(self, limit: int, tell: Tell, known: Iterable[int] = ()) -> None:
        self._limit, self._tell, self._steps = limit, tell, set(known)

    def check(self, done: CollectedStep, committed: int) -> None:
        """Raises StopRun, with `committed` as the run's last step, when the limit is passed."""
        first, step = done.reports[0], done.running.step
        if first.applied:
            self._steps.discard(step)
            return
        self._steps = {s for s in (*self._steps, step) if step - WINDOW < s <= step}
        count, samples = len(self._steps), tuple(sorted({s for r in done.reports for s in r.bad_samples}))
        self._tell(StepSkipped(step=step, loss=first.loss, grad_norm=first.grad_norm, samples=samples))
        log.warning(
            "step %d is skipped: loss %s, gradient norm %s (%d of at most %d in %d steps)",
            step,
            first.loss,
            first.grad_norm,
            count,
            self._limit,
            WINDOW,
        )
        if count > self._limit:
            reason = (
                f"{count} of the last {WINDOW} steps had a non-finite gradient, more than train.max_skipped_steps "
                f"{self._limit}; last samples: {', '.join(samples) or 'none named'}. Lower the learning rate or check "
                f"these clips."
            )
            raise StopRun(Outcome(code=Exit.FAILURE, last_step=committed, reason=reason))


def skipped_before(run_dir: Path) -> list[int]:
    """Steps that the run has skipped so far, from its events.jsonl; none without one."""
    return [event.step for event in events_so_far(run_dir, StepSkipped)]
