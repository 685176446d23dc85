"""Writes a run's folder while it trains: metrics.jsonl, TensorBoard, timeline.jsonl, events.jsonl, env.json, plans/."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from actors.outcome import Exit, NotRecorded, Outcome, Superseded
from actors.records.events import (
    EnvironmentSeen,
    HeldOutMeasured,
    RunEvent,
    RunFailed,
    RunFinished,
    SamplesMade,
    SettingsChanged,
)
from actors.records.metrics_line import StepMetrics
from actors.records.plan_record import PlanRecord
from actors.records.span_record import SpanRecord, lines_of
from actors.step import StepAssignment
from app.export.live import FINISH_S, LiveLora
from app.records.metrics import Metrics, newest_line
from app.records.rundir import ENVIRONMENT, OLDER_TIMELINE, TIMELINE
from app.run.asides import RunAsides
from app.run.outcomes import FAILED
from app.run.train_reports import TrainReports
from app.settings.config import RunConfig
from app.settings.run_folder import save_config
from ops.line_file import LineFile
from ops.passing import UNREACHABLE
from ops.typed import as_plain
from ops.whole_file import write_whole

log = logging.getLogger(__name__)

_TIMELINE_BYTES = 128 * 2**20
_PLANS = 1000
_STOPPED_S = 5.0  # for LoRA files, where the run was asked to end: Slurm and Kubernetes kill it after 30 s in all
_EVENTS = 10_000  # that wait to be written; of more the newest
# What may pass: a disk is full, or has become read-only; a file server does not answer, or refuses this user, as NFS
# does where a Kerberos ticket has run out. EPERM stays out: somebody has made a file immutable, and means it.
_PASSING = UNREACHABLE | {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


class Recorder:
    """The controller's listener. Plans and timeline are bounded, metrics.jsonl and events.jsonl are whole: where the
    disk takes nothing for a while, a step raises NotRecorded and is tried again, and events wait in memory."""

    def __init__(
        self,
        run_dir: Path,
        asides: RunAsides | None = None,
        guard: Callable[[], None] = lambda: None,
        config: RunConfig | None = None,
        changes: Sequence[str] = (),
        *,
        lora: LiveLora | None = None,
        plans: int = _PLANS,
        timeline_bytes: int = _TIMELINE_BYTES,
    ) -> None:
        """Inside Ray Train `asides` and `lora` are given: then checkpoints are reported to Ray Train, and asides and
        LoRA files are made from them. `guard` raises once this process must no longer write here. `config` names the
        trackers, which get it; it is saved with the first step, and `changes` say what differs from the start before.

        The newest `plans` stay, and of the others one in this number. A timeline of more than `timeline_bytes` becomes
        OLDER_TIMELINE, in the place of the one before."""
        self._run_dir, self._asides, self._lora, self._guard = run_dir, asides, lora, guard
        self._plans, self._timeline_bytes = plans, timeline_bytes
        self._reports = TrainReports()
        self._unsaved, self._changes = config, tuple(changes)
        if config is None:
            self._metrics = Metrics(run_dir)
        else:
            self._metrics = Metrics(run_dir, track=config.track, config=as_plain(config))
        self._timeline, self._events = LineFile(run_dir / TIMELINE), LineFile(run_dir / "events.jsonl")
        self._unwritten: deque[str] = deque(maxlen=_EVENTS)  # events
        self._timed: StepMetrics | None = None  # the newest step that is in the timeline
        self._finished = False  # all steps are done
        self._failed = False  # there is a RunFailed
        self._code = int(Exit.OK)  # of the run, as far as known

    def __enter__(self) -> Recorder:
        for event in self._metrics.quiet():
            self.on_event(replace(event, time=time.time()))
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if not any(exception):
                self._end_lora()
        finally:
            self._metrics.end(self._code or (Exit.FAILURE if any(exception) else Exit.OK))
            self._close()

    def ended(self, outcome: Outcome) -> None:
        """This is how the run has ended. A failure goes to all records, unless it is there already."""
        self._code = outcome.code
        if outcome.code not in FAILED or self._failed:
            return
        try:
            self.on_event(RunFailed(time=time.time(), why=outcome.reason, code=outcome.code))
        except Exception:  # it may have failed by the same error
            log.exception("the end is not in %s", self._events.path.name)

    def _end_lora(self) -> None:
        try:
            self._hear_of_lora(FINISH_S if self._finished else _STOPPED_S)
        except Superseded:
            pass
        except Exception:  # its event cannot be written: how the run ended is known, and stays
            log.exception("what has become of the last LoRA files is not in %s", self._events.path.name)

    def _close(self) -> None:
        with suppress(OSError):
            self._write_events()
        if self._unwritten:
            log.warning("%d events were not written, the last one: %s", len(self._unwritten), self._unwritten[-1])
        for part in (self._lora, self._asides, self._metrics, self._timeline, self._events, self._reports):
            if part is None:
                continue
            try:
                part.close()
            except OSError as error:  # a full disk: what it did not take is not committed either
                log.warning("a file of %s could not be closed: %s", self._run_dir, error)

    def on_step(self, metrics: StepMetrics, timeline: Sequence[SpanRecord], plan: StepAssignment) -> None:
        self._guard()
        self._hear_of_lora()
        with _told(self._run_dir):
            self._write_events()
            self._save_settings()
            self._write_plan(metrics.step, plan)
            self._write_timeline(metrics, timeline)
            self._metrics.step(metrics)  # at last: with this line the step counts, and keepers hear of it next

    def newest_line(self) -> tuple[int, int] | None:
        return newest_line(self._run_dir)

    def _write_timeline(self, metrics: StepMetrics, timeline: Sequence[SpanRecord]) -> None:
        if metrics is not self._timed:
            self._timeline.add(json.dumps(line) for line in lines_of(timeline))
            self._timed = metrics
        if self._timeline.tell() > self._timeline_bytes:
            self._timeline.close()
            os.replace(self._run_dir / TIMELINE, self._run_dir / OLDER_TIMELINE)

    def _write_plan(self, step: int, plan: StepAssignment) -> None:
        """Keep the newest plans and a few of the older ones, since a run may take millions of steps."""
        folder = self._run_dir / "plans"
        folder.mkdir(exist_ok=True)
        record = PlanRecord.of(plan.step, plan.cascades, plan.planning_s)
        (folder / f"step-{step}.json").write_text(json.dumps(record.line()), encoding="utf-8")
        if (old := step - self._plans) % self._plans:
            (folder / f"step-{old}.json").unlink(missing_ok=True)

    def _save_settings(self) -> None:
        """The settings of this start become the run's: a start that was refused before it got here has changed
        nothing."""
        if self._unsaved is not None and save_config(self._unsaved, self._run_dir) and self._changes:
            self._write_event(SettingsChanged(time=time.time(), settings=self._changes))
        self._unsaved = None

    def on_event(self, event: RunEvent) -> None:
        self._guard()
        self._failed = self._failed or isinstance(event, RunFailed)
        if isinstance(event, RunFinished):
            self._finished = True
            with suppress(NotRecorded), _told(self._run_dir):
                self._save_settings()  # a resume that had nothing left to do
        self._write_event(event)
        self._metrics.event(event)
        if isinstance(event, EnvironmentSeen):
            self._write_environment(event)
        elif isinstance(event, HeldOutMeasured):
            self._metrics.held_out(event)
        elif isinstance(event, SamplesMade):
            self._metrics.samples(event)

    def _write_environment(self, event: EnvironmentSeen) -> None:
        """The newest one, for people and programs that look for it; events.jsonl has all of them."""
        line = {name: value for name, value in event.line().items() if name not in ("event", "generation")}
        try:
            write_whole(self._run_dir / ENVIRONMENT, json.dumps(line, indent=1) + "\n")
        except OSError as error:
            log.warning("%s was not written: %s", ENVIRONMENT, error)

    def _write_event(self, event: RunEvent) -> None:
        """Or keep it for later: no event is a reason to end a run, and the next step cannot be recorded either."""
        self._unwritten.append(json.dumps(event.line(), default=str))
        try:
            self._write_events()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            log.warning("an event waits to be written: %s", error)

    def _write_events(self) -> None:
        if self._unwritten:
            self._events.add(self._unwritten)
            self._unwritten.clear()

    def before_checkpoint(self) -> None:
        """After a power cut that took the lines of its steps, the checkpoint would be used only where there is no older
        one, and leave a gap in metrics.jsonl."""
        try:
            self._metrics.sync()
        except OSError as error:  # the checkpoint serves all the same, unless the power fails
            log.warning("metrics.jsonl of %s may lose its newest lines in a power cut: %s", self._run_dir, error)

    def on_checkpoint(self, folder: Path, step: int) -> None:
        if self._lora is not None:
            self._lora.on_checkpoint(step)
            self._hear_of_lora()
        if self._asides is None:
            return
        self._reports.put(step)
        for event in self._asides.on_checkpoint(step):
            self.on_event(replace(event, time=time.time()))

    def _hear_of_lora(self, finish_s: float | None = None) -> None:
        """Tell what has become of LoRA files; with `finish_s` wait for the last ones, as the run has ended."""
        if self._lora is None:
            return
        try:
            if finish_s is None:
                events = self._lora.heard()
            else:
                events = self._lora.finish(finish_s, resumes=not self._finished)
        except Exception:  # whatever it is, the run goes on
            log.exception("it is not known what has become of LoRA files")
            return
        for event in events:
            self.on_event(replace(event, time=time.time()))


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Raises NotRecorded in place of an OSError that may pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _PASSING:
            raise
        raise NotRecorded(f"{error.strerror or error}: {error.filename or folder}") from error
