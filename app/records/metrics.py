"""Numbers of a run: metrics.jsonl for programs, trackers for curves, one line for the person watching.

    with Metrics(folder, total_steps=config.train.steps) as metrics:
        metrics.step(record)                               # a StepMetrics; every step once, in order

A step that comes a second time (the run resumed before it, or recovered from a loss) replaces its line and every later
one, and carries `"recomputed": true`: the file never holds a step twice. Lines are in the order of their steps, so only
the end of the file is ever read or cut, however many steps a run has.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeGuard

from actors.records.lines import line_of
from actors.records.metrics_line import StepMetrics
from app.records.tails import backwards, cut_torn_line
from app.records.trackers import Trackers

# metrics.jsonl name -> tag in trackers; numbers without an entry go to run/<name>
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "step_s": "perf/step_time_s",
    "data_wait_s": "perf/data_wait_s",
    "tokens_per_s": "perf/tokens_per_s",
    "videos_per_s": "perf/videos_per_s",
    "idle_ratio": "balance/idle_ratio",
    "wir": "balance/wir",
    "cv_step": "balance/cv_step",
    "cv_compute": "balance/cv_compute",
    "predicted_s": "plan/predicted_s",
    "planning_s": "plan/planning_s",
    "workers": "elastic/workers",
    "generation": "elastic/generation",
}


class Metrics:
    """The one writer of a run's metrics. `total_steps` None: no progress line (somebody else follows the file)."""

    def __init__(
        self,
        run_dir: str | Path,
        total_steps: int | None = None,
        track: Sequence[str] = ("tensorboard",),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`track` names trackers (`app.records.trackers`), which are told the run's `config`."""
        self.path = Path(run_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(self.path)
        self._last = _last_step(self.path)
        self._replaced_up_to = -1
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        self._progress = ProgressLine(total_steps) if total_steps is not None else None
        self._trackers = Trackers(track, Path(run_dir), config)

    def step(self, record: StepMetrics) -> StepMetrics:
        """Write one step. Returns it as written: marked when it replaces what was written of it before."""
        if record.step <= self._last:
            self._drop_from(record.step)
        if record.step <= self._replaced_up_to:
            record = replace(record, recomputed=True)
        self._last = record.step
        self._file.write(json.dumps(record.line()) + "\n")
        self._file.flush()
        self._trackers.log(record.step, record.time, scalars(record))
        if self._progress is not None:
            self._progress.show(record)
        return record

    def _drop_from(self, step: int) -> None:
        """Cut the file before `step`; trackers are told to forget it and what follows, too."""
        self._replaced_up_to = max(self._replaced_up_to, self._last)
        self._file.truncate(_offset_of(self.path, step))
        self._trackers.forget(step)

    def close(self) -> None:
        self._file.close()
        self._trackers.close()
        if self._progress is not None:
            self._progress.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _last_step(path: Path) -> int:
    """Step of the newest line; -1 without one."""
    return next((record["step"] for _, record in backwards(path) if "step" in record), -1)


def _offset_of(path: Path, step: int) -> int:
    """Where the line of this step begins, or that of the first later one, or the end."""
    offset = path.stat().st_size
    for at, record in backwards(path):
        if record.get("step", step) < step:
            break
        offset = at
    return offset


def scalars(record: StepMetrics) -> list[tuple[str, float]]:
    """Tags and values of one step, with the ratios users look for."""
    tagged = []
    for name, value in line_of(record).items():
        if name in ("step", "time"):
            continue
        if isinstance(value, Mapping):
            group = f"train/{name}" if name.startswith("loss") else f"run/{name}"
            tagged += [(f"{group}/{key}", float(child)) for key, child in value.items() if _is_number(child)]
        elif _is_number(value):
            tagged.append((TAGS.get(name, f"run/{name}"), float(value)))
    return tagged + _ratios(record)


def _ratios(record: StepMetrics) -> list[tuple[str, float]]:
    ratios = []
    if record.step_s > 0:
        ratios.append(("perf/data_wait_pct", 100 * record.data_wait_s / record.step_s))
        ratios.append(("balance/pred_vs_actual_err", record.predicted_s / record.step_s - 1))
    if record.workers:
        ratios.append(("perf/tokens_per_s_per_gpu", record.tokens_per_s / record.workers))
    return ratios


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ProgressLine:
    """One Rich line on a terminal; elsewhere a plain line per step, at most one per `interval_s`."""

    def __init__(self, total_steps: int, stream: IO[str] | None = None, interval_s: float = 1.0) -> None:
        self.total_steps = total_steps
        self._stream = stream or sys.stdout
        self._interval_s = interval_s
        self._started = time.monotonic()
        self._first_step: int | None = None
        self._printed = -math.inf
        self._bar: Any = None
        if self._stream.isatty():
            self._bar, self._task = _rich_bar(total_steps, self._stream)

    def show(self, line: StepMetrics) -> None:
        """Show a step that has been written."""
        if self._bar is not None:
            self._bar.update(self._task, completed=line.step + 1, figures=figures(line))
            return
        now = time.monotonic()
        if self._first_step is None:
            self._first_step, self._started = line.step, now
        last = line.step + 1 >= self.total_steps
        if now - self._printed < self._interval_s and not last:
            return
        self._printed = now
        print(
            f"step {line.step + 1}/{self.total_steps}  {figures(line)}{self._left(line.step, now)}",
            file=self._stream,
            flush=True,
        )

    def _left(self, step: int, now: float) -> str:
        assert self._first_step is not None
        done = step - self._first_step
        if done < 1 or step + 1 >= self.total_steps:
            return ""
        return f"  {clock((now - self._started) / done * (self.total_steps - step - 1))} left"

    def say(self, text: str) -> None:
        """Print a line without disturbing the progress."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _rich_bar(total_steps: int, stream: IO[str]) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=Console(file=stream),
    )
    bar.start()
    return bar, bar.add_task("train", total=total_steps, figures="starting workers")


def figures(line: StepMetrics) -> str:
    """What a person wants to see of one step."""
    parts = [f"loss {line.loss:.4f}" if math.isfinite(line.loss) else "loss not finite"]
    if math.isfinite(line.step_s):
        parts.append(f"{line.step_s:.2f} s/step")
    if math.isfinite(line.tokens_per_s):
        parts.append(f"{line.tokens_per_s:,.0f} tokens/s")
    if math.isfinite(line.idle_ratio):
        parts.append(f"idle {100 * line.idle_ratio:.0f}%")
    if line.workers:
        parts.append(f"{line.workers} worker{'' if line.workers == 1 else 's'}")
    if line.recomputed:
        parts.append("recomputed")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
