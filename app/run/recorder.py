"""Writes a run's folder: metrics.jsonl, TensorBoard, timeline.jsonl, events.jsonl and plans/, while it trains."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from actors.records.events import HeldOutMeasured, RunEvent, RunFinished, SamplesMade, SettingsChanged
from actors.records.metrics_line import StepMetrics
from actors.records.plan_record import PlanRecord
from actors.records.span_record import SpanRecord, lines_of
from actors.step import StepAssignment
from app.records.rundir import OLDER_TIMELINE, TIMELINE
from app.records.tails import cut_torn_line
from app.run.asides import RunAsides
from app.run.train_reports import TrainReports
from app.settings.config import RunConfig
from app.settings.run_folder import save_config
from ops.typed import as_plain

log = logging.getLogger(__name__)

_TIMELINE_BYTES = 128 * 2**20
_PLANS = 1000


class Recorder:
    """The controller's listener. Plans and timeline are bounded, metrics.jsonl and events.jsonl are whole."""

    def __init__(
        self,
        run_dir: Path,
        asides: RunAsides | None = None,
        guard: Callable[[], None] = lambda: None,
        config: RunConfig | None = None,
        changes: Sequence[str] = (),
        *,
        plans: int = _PLANS,
        timeline_bytes: int = _TIMELINE_BYTES,
    ) -> None:
        """Inside Ray Train `asides` are given: then checkpoints are reported to Ray Train, and asides are made from
        them. `guard` raises once this process must no longer write here. `config` names the trackers, which get it; it
        is saved with the first step, and `changes` say what differs from the start before.

        The newest `plans` stay, and of the others one in this number. A timeline of more than `timeline_bytes` becomes
        OLDER_TIMELINE, in the place of the one before."""
        from app.records.metrics import Metrics

        self._run_dir, self._asides, self._guard = run_dir, asides, guard
        self._plans, self._timeline_bytes = plans, timeline_bytes
        self._reports = TrainReports()
        self._unsaved, self._changes = config, tuple(changes)
        if config is None:
            self._metrics = Metrics(run_dir)
        else:
            self._metrics = Metrics(run_dir, track=config.track, config=as_plain(config))
        self._timeline = _appending(run_dir / TIMELINE)
        self._events = _appending(run_dir / "events.jsonl")
        (run_dir / "plans").mkdir(exist_ok=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        for part in (self._asides, self._metrics, self._timeline, self._events, self._reports):
            if part is None:
                continue
            try:
                part.close()
            except OSError as error:  # a full disk: what it did not take is not committed either
                log.warning("a file of %s could not be closed: %s", self._run_dir, error)

    def on_step(self, metrics: StepMetrics, timeline: Sequence[SpanRecord], plan: StepAssignment) -> None:
        self._guard()
        self._save_settings()
        self._write_plan(metrics.step, plan)
        self._timeline.writelines(f"{json.dumps(line)}\n" for line in lines_of(timeline))
        self._timeline.flush()
        if self._timeline.tell() > self._timeline_bytes:
            self._timeline.close()
            os.replace(self._run_dir / TIMELINE, self._run_dir / OLDER_TIMELINE)
            self._timeline = _appending(self._run_dir / TIMELINE)
        self._metrics.step(metrics)  # at last: with this line the step counts, and keepers hear of it next

    def newest_line(self) -> tuple[int, int] | None:
        return self._metrics.newest_line()

    def _write_plan(self, step: int, plan: StepAssignment) -> None:
        """Keep the newest plans and a few of the older ones, since a run may take millions of steps."""
        folder = self._run_dir / "plans"
        record = PlanRecord.of(plan.step, plan.cascades, plan.planning_s)
        (folder / f"step-{step}.json").write_text(json.dumps(record.line()), encoding="utf-8")
        if (old := step - self._plans) % self._plans:
            (folder / f"step-{old}.json").unlink(missing_ok=True)

    def _save_settings(self) -> None:
        """The settings of this start become the run's: a start that was refused before it got here has changed
        nothing."""
        config, self._unsaved = self._unsaved, None
        if config is not None and save_config(config, self._run_dir) and self._changes:
            self._write_event(SettingsChanged(time=time.time(), settings=self._changes))

    def on_event(self, event: RunEvent) -> None:
        self._guard()
        if isinstance(event, RunFinished):
            self._save_settings()  # a resume that had nothing left to do
        self._write_event(event)
        self._metrics.event(event)
        if isinstance(event, HeldOutMeasured):
            self._metrics.held_out(event)
        elif isinstance(event, SamplesMade):
            self._metrics.samples(event)

    def _write_event(self, event: RunEvent) -> None:
        self._events.write(json.dumps(event.line(), default=str) + "\n")
        self._events.flush()

    def on_checkpoint(self, folder: Path, step: int) -> None:
        if self._asides is None:
            return
        self._reports.put(step)
        for event in self._asides.on_checkpoint(step):
            self.on_event(replace(event, time=time.time()))


def _appending(path: Path) -> IO[str]:
    """Open a JSON-lines file after its last whole line: a killed writer may have left half of one."""
    cut_torn_line(path)
    return path.open("a", encoding="utf-8")
