"""What a committed step writes: its line of metrics and its bars of the timeline. Pure but for what it remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from actors.run.step_metrics import StepFacts, step_metrics, timeline_records
from actors.step import CollectedStep
from ops.geometry import Geometry


@dataclass(kw_only=True)
class StepAccount:
    """Turns collected steps into records, in the order in which they are committed."""

    geometry: Geometry
    node_of: Callable[[str], str]  # of a worker, as people read it
    last_ended_at: float = 0.0  # unix seconds: when the step before the next one ended, or the generation began
    data_wait_s: float = 0.0  # since the last committed step

    def records(self, done: CollectedStep) -> tuple[StepMetrics, list[SpanRecord]]:
        """The line of metrics.jsonl and the lines of timeline.jsonl. To be called once per committed step."""
        started, self.last_ended_at = self.last_ended_at, done.collected_at
        facts = self._facts(done, started)
        self.data_wait_s = 0.0
        begin = min((s.start for r in done.reports for s in r.spans if s.module != "finish"), default=started)
        timeline = [
            record for r in done.reports for record in timeline_records(facts, r, self.node_of(r.worker), begin)
        ]
        return step_metrics(facts, done.reports, self.geometry), timeline

    def _facts(self, done: CollectedStep, started: float) -> StepFacts:
        running, samples = done.running, done.running.data.samples
        return StepFacts(
            step=running.step,
            generation=running.generation,
            plan=running.assignment.step,
            planning_s=running.planning_s,
            step_s=done.collected_at - started,
            data_wait_s=self.data_wait_s,
            finished_at=done.collected_at,
            num_samples=sum(len(s) for s in samples.samples.values()),
            dispatch_s=running.dispatch_s,
            num_calls=running.num_calls,
            num_tokens=sum(len(s) * self.geometry.tokens(*samples.buckets[i]) for i, s in samples.samples.items()),
        )
