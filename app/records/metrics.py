"""Numbers of a run: metrics.jsonl for programs, trackers for curves, and workers.jsonl for figures of single workers.

    with Metrics(folder) as metrics:
        metrics.step(record)                      # a StepMetrics; every step once, in order

A step that comes a second time (the run resumed before it, or recovered from a loss) replaces its line and every later
one, and carries `"recomputed": true`: no file holds a step twice. Lines are in the order of their steps, so only the
end of a file is ever read or cut, however many steps a run has.

metrics.jsonl has the whole history, 0.9 kB a step in the demo, however many workers there are. Figures of 1,024 workers
take 83 kB: of these there are the newest steps, in two files, as of the timeline.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeGuard

from actors.records.events import CheckpointWritten, HeldOutMeasured, RunEvent, SamplesMade, TrackerQuiet
from actors.records.lines import line_of
from actors.records.metrics_line import StepMetrics
from app.records.alerts import ALERTS
from app.records.most_steps import note_steps
from app.records.ray_gauges import CHECKPOINT
from app.records.rundir import METRICS, OLDER_WORKERS, WORKERS
from app.records.tails import backwards, number_in
from app.records.tracker import SampleFiles
from app.records.trackers import Trackers
from ops.line_file import LineFile, cut_torn_line
from ops.units import MIB

log = logging.getLogger(__name__)

# metrics.jsonl name -> tag in trackers; numbers without an entry go to run/<name>
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "d": "train/d",
    "epoch": "train/epoch",
    "step_s": "perf/step_time_s",
    "data_wait_s": "perf/data_wait_s",
    "tokens_per_s": "perf/tokens_per_s",
    "videos_per_s": "perf/videos_per_s",
    "idle_ratio": "balance/idle_ratio",
    "wir": "balance/wir",
    "cv_step": "balance/cv_step",
    "cv_compute": "balance/cv_compute",
    "cv_tflops": "balance/cv_tflops",
    "wait_sync_s": "balance/wait_sync_s",
    "exposed_s": "perf/exposed_s",
    "fbl_s": "perf/fbl_s",
    "mfu": "perf/mfu",
    "hfu": "perf/hfu",
    "tflops": "perf/tflops_per_gpu",
    "tokens_per_s_with_text": "perf/tokens_per_s_with_text",
    "corr_tokens": "balance/corr_step_time_tokens",
    "corr_load": "balance/corr_step_time_load",
    "load_exponent": "balance/load_exponent",
    "predicted_s": "plan/predicted_s",
    "planning_s": "plan/planning_s",
    "peak_memory_gib": "memory/max_active_gib",
    "room_gib": "memory/room_gib",
    "rss_gib": "memory/rss_gib",
    "workers": "elastic/workers",
    "generation": "elastic/generation",
}


_MOST_CURVES = 64  # of workers in a chart. 1,024 workers have 5,120, a quarter of a CPU second of TensorBoard per step
PER_WORKER = "_by_worker"  # how the names of mappings from workers end; the others are of buckets


_WORKERS_BYTES = 128 * MIB  # of a file of their figures


class StepFile:
    """A JSON-lines file with one object per step, in their order. With more than `most_bytes` it becomes the `older`
    one, in the place of the one before. Nothing changes before the first `write` or `cut`: a start that is refused
    leaves the files as they are."""

    def __init__(self, path: Path, older: Path | None = None, most_bytes: int = 0) -> None:
        self._path, self._older, self._most_bytes = path, older, most_bytes
        found = (_last_step(file) for file in self._files)
        self.last = next((step for step in found if step >= 0), -1)  # -1 without one
        self._lines = LineFile(path)

    @property
    def _files(self) -> tuple[Path, ...]:
        """Those that there may be, the newest lines first."""
        return (self._path,) if self._older is None else (self._path, self._older)

    def write(self, step: int, line: Mapping[str, object]) -> None:
        """The line of this step, in place of any that is there and of all later ones. Raises OSError, and then has no
        line of this step."""
        self.cut(step)
        self._lines.add([json.dumps(line)])
        self.last = step
        if self._older is not None and self._lines.tell() > self._most_bytes:
            self.close()
            os.replace(self._path, self._older)

    def sync(self) -> None:
        """Raises OSError."""
        self._lines.sync()

    def cut(self, step: int) -> None:
        """Drop the line of this step and all later ones."""
        if step <= self.last:
            self._lines.close()
            cut_torn_line(self._path)
            for file in self._files:
                if file.is_file():
                    os.truncate(file, _offset_of(file, step))
            self.last = step - 1

    def close(self) -> None:
        self._lines.close()


def newest_line(run_dir: Path) -> tuple[int, int] | None:
    """(step, generation) of the newest line of a run's metrics; None without one."""
    for _, record in backwards(run_dir / METRICS):
        if "step" in record:
            return int(number_in(record, "step", -1)), int(number_in(record, "generation", -1))
    return None


class Metrics:
    """The one writer of a run's metrics."""

    def __init__(
        self,
        run_dir: str | Path,
        track: Sequence[str] = ("tensorboard",),
        config: Mapping[str, object] | None = None,
        *,
        workers_bytes: int = _WORKERS_BYTES,
    ) -> None:
        """`track` names trackers (`app.records.trackers`), which get the run's `config`. Figures of single workers that
        take more than `workers_bytes` become OLDER_WORKERS, in the place of the ones before."""
        folder = self._folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / METRICS).exists():
            (folder / METRICS).touch()
        self._steps = StepFile(folder / METRICS)
        self._workers = StepFile(folder / WORKERS, older=folder / OLDER_WORKERS, most_bytes=workers_bytes)
        self._replaced_up_to = -1
        self._trackers = Trackers(track, folder, config)

    def step(self, record: StepMetrics) -> StepMetrics:
        """Write one step. Returns the record as written: marked as recomputed if it replaces an earlier one. Raises
        OSError where it has no line then, and may be written again."""
        if record.step <= (last := self._steps.last):
            self._replaced_up_to = max(self._replaced_up_to, last)
            note_steps(self._folder, last + 1)  # before their lines go
            self._trackers.forget(record.step)
        if record.step > last + 1:
            log.warning(
                "%s has no lines of steps %d to %d, before which it goes on: they were lost with a machine, or cut off",
                self._folder / METRICS,
                last + 1,
                record.step - 1,
            )
        if record.step <= self._replaced_up_to:
            record = replace(record, recomputed=True)
        line = record.line()
        of_workers = {name: line.pop(name) for name in list(line) if name.endswith(PER_WORKER)}
        self._workers.cut(record.step)
        if of_workers:
            self._workers.write(record.step, {"step": record.step, "time": record.time} | of_workers)
        self._steps.write(record.step, line)  # at last: with this line the step counts
        self._trackers.log(record.step, record.time, scalars(record))
        return record

    def sync(self) -> None:
        """Lines of steps outlast a power cut. Raises OSError."""
        self._steps.sync()

    def quiet(self) -> list[RunEvent]:
        """An event for each tracker that nobody sees as things are."""
        return [TrackerQuiet(tracker=name, why=why) for name, why in self._trackers.quiet().items()]

    def held_out(self, measured: HeldOutMeasured) -> None:
        """A loss of held-out clips, for trackers: at the step of its checkpoint, which is over by now."""
        self._trackers.log(measured.step, measured.time, held_out_scalars(measured))

    def samples(self, made: SamplesMade) -> None:
        """Samples of a checkpoint, for trackers, in the same way."""
        try:
            files = SampleFiles.of(self._folder, made.samples)
        except (OSError, ValueError) as error:  # moved away by somebody meanwhile
            log.warning("trackers get no samples of step %d: %s", made.step, error)
            return
        self._trackers.show(made.step, made.time, files)

    def event(self, event: RunEvent) -> None:
        """Something happened; trackers that call somebody do so where somebody should look."""
        if isinstance(event, CheckpointWritten):
            self._trackers.log(event.step, event.time, [(CHECKPOINT, float(event.step))])
        if isinstance(event, ALERTS):
            self._trackers.alert(event)

    def end(self, code: int) -> None:
        """The run has ended with this exit code."""
        self._trackers.end(code)

    def close(self) -> None:
        self._workers.close()
        self._steps.close()
        self._trackers.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _last_step(path: Path) -> int:
    """Step of the newest line; -1 without one."""
    return next((int(number_in(record, "step", -1)) for _, record in backwards(path) if "step" in record), -1)


def _offset_of(path: Path, step: int) -> int:
    """Where the line of this step begins, or that of the first later one, or the end."""
    offset = path.stat().st_size
    for at, record in backwards(path):
        if number_in(record, "step", step) < step:
            break
        offset = at
    return offset


def spread_of(values: Iterable[float]) -> dict[str, float]:
    """Least, median and most, for figures of more workers than a chart can show."""
    ranked = sorted(value for value in values if not math.isnan(value))
    return {"least": ranked[0], "median": median(ranked), "most": ranked[-1]} if ranked else {}


def scalars(record: StepMetrics) -> list[tuple[str, float]]:
    """Tags and values of one step, with the ratios users look for."""
    tagged = []
    for name, value in line_of(record).items():
        if name in ("step", "time"):
            continue
        if isinstance(value, Mapping):
            found = {key: float(child) for key, child in value.items() if _is_number(child)}
            group = f"train/{name}"
            if name.endswith(PER_WORKER):
                group = f"workers/{name[: -len(PER_WORKER)]}"
                found = found if len(found) <= _MOST_CURVES else spread_of(found.values())
            tagged += [(f"{group}/{key}", number) for key, number in found.items()]
        elif _is_number(value):
            tagged.append((TAGS.get(name, f"run/{name}"), float(value)))
    return tagged + _ratios(record)


def held_out_scalars(measured: HeldOutMeasured) -> list[tuple[str, float]]:
    """Tags and values of a loss of held-out clips."""
    tagged = [("held_out/loss", measured.loss), ("held_out/clips", float(measured.clips))]
    tagged += [(f"held_out/loss_by_bucket/{name}", loss) for name, loss in measured.by_bucket.items()]
    return tagged + [(f"held_out/loss_by_noise/{name}", loss) for name, loss in measured.by_noise.items()]


def _ratios(record: StepMetrics) -> list[tuple[str, float]]:
    ratios = []
    if record.step_s > 0:
        ratios.append(("perf/data_wait_pct", 100 * record.data_wait_s / record.step_s))
        ratios.append(("balance/pred_vs_actual_err", record.predicted_s / record.step_s - 1))
    if record.workers:
        ratios.append(("perf/tokens_per_s_per_gpu", record.tokens_per_s / record.workers))
    return ratios


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
