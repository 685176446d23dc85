"""Collects all that the page says of a run, going through its records one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.records.rundir import RunDir
from app.records.timeline import WindowTimes, final_times, windows
from app.report.totals import EventTotals, SpanTotals, StepTotals
from ops.typed import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """All that the page says of a run's records."""

    steps: StepTotals
    events: EventTotals
    spans: SpanTotals
    shown: Sequence[tuple[str, int]]  # (label, step) of the windows that are drawn


def read_facts(run: RunDir) -> RunFacts:
    """Go through the records of a run, one at a time. Raises ConfigError where there is no step."""
    steps = StepTotals(run.metrics().count())
    for line in run.metrics():
        steps.add(line)
    if steps.first is None:
        raise ConfigError(
            f"run {run.path} has no finished step yet: its metrics.jsonl is missing or empty. "
            f"There is a report after the first step."
        )
    slow = steps.slow()
    events = EventTotals(slow)
    for event in run.events():
        events.add(event)
    final = final_times(run.spans())
    shown = _telling(final)
    spans = SpanTotals(final, wanted=[*(line.step for line in slow), *(step for _, step in shown)])
    for window in windows(run.spans()):
        spans.add(window)
    return RunFacts(steps=steps, events=events, spans=spans, shown=shown)


def _telling(final: Mapping[int, WindowTimes]) -> list[tuple[str, int]]:
    """The median step, the slowest and the last one. The first steps are warm-up and left out if there are others."""
    if not final:
        return []
    settled = list(final)[min(3, len(final) // 4) :]
    by_time = sorted(settled, key=lambda step: final[step].seconds)
    picks = [("a typical one", by_time[len(by_time) // 2]), ("the slowest", by_time[-1]), ("the last", settled[-1])]
    first_label = {step: label for label, step in reversed(picks)}
    return [(label, step) for label, step in picks if first_label[step] == label]
