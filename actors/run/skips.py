"""Steps whose gradient is not finite: they change nothing, are counted and named, and too many of them end the run.

Clips are not the only reason: a GPU may compute wrongly, and then losses are not finite on its worker, of other clips
every time, though other workers had clips of the same shapes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from actors.messages import NOT_FINITE
from actors.outcome import Exit, Outcome, StopRun, Tell
from actors.records.events import StepSkipped, events_so_far
from actors.step import CollectedStep, RunningStep
from data.types import clip_of

log = logging.getLogger(__name__)

WINDOW = 1000  # steps: a bad clip now and then in a million steps is no reason to stop, ten at once are
_CHANCE = 0.01  # that clips alone hit the same worker every time


@dataclass(frozen=True, slots=True)
class _Skip:
    """Where losses of a skipped step were not finite."""

    workers: frozenset[str]
    share: float  # of the step's clips like these, what was on these workers
    clips: frozenset[str]


_UNKNOWN = _Skip(frozenset(), 1.0, frozenset())


class Skips:
    """Counts the skipped steps among the last thousand; one that is computed again counts once, by its last outcome.

    `tell` gets what belongs into events.jsonl, `known` are steps that earlier controllers of the run have skipped.
    """

    def __init__(self, limit: int, tell: Tell, known: Iterable[int] = ()) -> None:
        self._limit, self._tell = limit, tell
        self._steps: dict[int, _Skip] = dict.fromkeys(known, _UNKNOWN)

    def check(self, done: CollectedStep, committed: int) -> str:
        """Returns the worker that seems to compute wrongly, "" if there is none. Raises StopRun, with `committed` as
        the run's last step, when the limit is passed."""
        first, step = done.reports[0], done.running.step
        if first.applied:
            self._steps.pop(step, None)
            return ""
        self._steps = {s: skip for s, skip in self._steps.items() if step - WINDOW < s <= step} | {step: _skip_of(done)}
        count, samples = len(self._steps), tuple(sorted({s for r in done.reports for s in r.bad_samples}))
        workers = tuple(sorted(self._steps[step].workers))
        self._tell(StepSkipped(step=step, loss=first.loss, grad_norm=first.grad_norm, samples=samples, workers=workers))
        log.warning(
            "step %d is skipped: loss %s, gradient norm %s (%d of at most %d in %d steps)",
            step,
            first.loss,
            first.grad_norm,
            count,
            self._limit,
            WINDOW,
        )
        suspect = self._suspect()
        if count > self._limit:
            remedy = "Check these clips, or lower the learning rate."
            if suspect:
                known = sum(bool(skip.workers) for skip in self._steps.values())
                remedy = f"In {known} of them losses were not finite on {suspect} alone: its device may be faulty."
            reason = (
                f"{count} of the last {WINDOW} steps had a non-finite gradient, more than train.max_skipped_steps "
                f"{self._limit}; last samples: {', '.join(samples) or 'none named'}. {remedy}"
            )
            raise StopRun(Outcome(code=Exit.FAILURE, last_step=committed, reason=reason))
        return suspect

    def forget_where(self) -> None:
        """Call when a worker has left: remember only that steps were skipped, not on which workers. Later skips may
        come from another worker, even on the same GPU."""
        self._steps = dict.fromkeys(self._steps, _UNKNOWN)

    def _suspect(self) -> str:
        """The only worker on which losses were not finite in every skipped step in which they were anywhere, if clips
        make that unlikely: others like them were elsewhere. A step with a clip of an earlier one says nothing more."""
        skips = [skip for skip in self._steps.values() if skip.workers]
        common = frozenset.intersection(*(skip.workers for skip in skips)) if skips else frozenset()
        if len(common) != 1:
            return ""
        seen, shares = set[str](), list[float]()
        for skip in skips:
            shares += [skip.share] if skip.clips.isdisjoint(seen) else []
            seen |= skip.clips
        chance = math.prod(sorted(shares)[1:])  # the first time it is some worker
        return next(iter(common)) if chance < _CHANCE else ""


def _skip_of(done: CollectedStep) -> _Skip:
    bad = {rank: {s for s in r.bad_samples if s.startswith(NOT_FINITE)} for rank, r in enumerate(done.reports)}
    ranks = {rank for rank, samples in bad.items() if samples}
    keys = {sample.removeprefix(NOT_FINITE) for samples in bad.values() for sample in samples}
    return _Skip(
        workers=frozenset(done.reports[rank].worker for rank in ranks),
        share=_share(done.running, ranks, keys),
        clips=frozenset(map(clip_of, keys)),
    )


def _share(running: RunningStep, ranks: Set[int], keys: Set[str]) -> float:
    """Which part of the clips like these, by shape and expert, was on these workers: plans may give all long clips to
    the same one."""
    items = running.data.items.items.values()
    kinds = {one.plan.id: (one.bucket, one.plan.expert) for one in items}
    wanted = {kinds[one.plan.id] for one in items if any(sample.key in keys for sample in one.samples)}
    dits = (cascade for cascade in running.assignment.cascades if cascade.module == "dit")
    alike = [(dit, part.count) for dit in dits for part in dit.parts if kinds[part.item] in wanted]
    theirs = sum(count for dit, count in alike if not ranks.isdisjoint(dit.workers))
    return theirs / sum(count for _, count in alike) if alike else 1.0


def skipped_before(run_dir: Path) -> list[int]:
    """Steps that the run has skipped so far, from its events.jsonl; none without one."""
    return [event.step for event in events_so_far(run_dir, StepSkipped)]
