"""Progress for the person watching, of a run or another command: what moves on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import IO, cast

from actors.records.metrics_line import StepMetrics
from app.settings.terminal import leave_unsaid, say
from ops.counted import counted

_BAR_FITS = 130  # columns of a terminal that has room for the bar beside all figures
_LINE_S = 30.0  # between two lines where no bar moves
_SPEED_S = 3600.0  # the time left follows from the steps of so long: those of large models take minutes


class ProgressLine:
    """One Rich line on a terminal; elsewhere a plain line per step, at most one per `interval_s`."""

    def __init__(self, total_steps: int, stream: IO[str] | None = None, interval_s: float = 1.0) -> None:
        self.total_steps = total_steps
        self._stream = stream or sys.stdout
        self._interval_s = interval_s
        self._started = time.monotonic()
        self._first_step: int | None = None
        self._printed = -math.inf
        self._bar = _RichBar(total_steps, self._stream) if _moves(self._stream) else None

    def show(self, line: StepMetrics) -> None:
        """Show a step that has been written."""
        if self._bar is not None:
            self._bar.show(line)
            return
        now = time.monotonic()
        if self._first_step is None:
            self._first_step, self._started = line.step, now
        last = line.step + 1 >= self.total_steps
        if now - self._printed < self._interval_s and not last:
            return
        self._printed = now
        say(f"step {line.step + 1}/{self.total_steps}  {figures(line)}{self._left(line.step, now)}", self._stream)

    def _left(self, step: int, now: float) -> str:
        assert self._first_step is not None
        done = step - self._first_step
        if done < 1 or step + 1 >= self.total_steps:
            return ""
        return f"  {clock((now - self._started) / done * (self.total_steps - step - 1))} left"

    def say(self, text: str) -> None:
        """Print a line without disturbing the progress."""
        if self._bar is not None:
            self._bar.say(text)
        else:
            say(text, self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _moves(stream: IO[str]) -> bool:
    """Whether a line of the stream can be written over: not in a file, nor in a terminal of Emacs (TERM=dumb)."""
    from rich.console import Console

    return stream.isatty() and Console(file=stream).is_interactive


class _Unfailing:
    """A stream for Rich, whose own thread writes to it, too: it fails no more than `say` where the terminal is gone."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            leave_unsaid(self._stream, error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            leave_unsaid(self._stream, error)


class _RichBar:
    """The line on a terminal. Where it is narrow the bar is left out, then the last figures are cut off."""

    def __init__(self, total_steps: int, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.table import Column

        console = Console(file=cast(IO[str], _Unfailing(stream)))
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            *([BarColumn(bar_width=20)] if console.width >= _BAR_FITS else []),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=console,
            speed_estimate_period=_SPEED_S,
            expand=True,  # what is left belongs to the figures
            redirect_stderr=sys.stderr.isatty(),  # `2> err.log` has its warnings
        )
        self._bar.start()
        self._task = self._bar.add_task("train", total=total_steps, figures="starting workers")

    def show(self, line: StepMetrics) -> None:
        self._bar.update(self._task, completed=line.step + 1, figures=figures(line))

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


class ProgressBar:
    """A Rich bar where stderr is a terminal: FORCE_COLOR has Rich take a file for one. Elsewhere `tell` gets a line now
    and then, if there is one. What is printed meanwhile stays on stdout, above the bar where that is a terminal as
    well. Gives a function (done, total).
    """

    def __init__(self, what: str, quiet: bool = False, tell: Callable[[str], None] | None = None) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress

        moves = _moves(sys.stderr) and not quiet
        self._what, self._tell = what, None if moves else tell
        self._began = self._told = time.monotonic()
        self._bar = Progress(
            *Progress.get_default_columns(),
            MofNCompleteColumn(),
            console=Console(file=cast(IO[str], _Unfailing(sys.stderr))),
            transient=True,
            speed_estimate_period=_SPEED_S,
            redirect_stdout=sys.stdout.isatty(),
            disable=not moves,
        )
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        return self._show

    def _show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        now = time.monotonic()
        if self._tell is not None and now - self._told >= _LINE_S:
            self._told = now
            left = timedelta(seconds=round((now - self._began) / max(done, 1) * (total - done)))
            self._tell(f"{self._what}: {done}/{total}, {left} left")

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def figures(line: StepMetrics) -> str:
    """What a person wants to see of one step, the most telling first: a narrow terminal cuts the rest off."""
    parts = [f"loss {line.loss:.4f}" if math.isfinite(line.loss) else "loss not finite"]
    if line.epoch is not None:
        parts.append(f"epoch {line.epoch:.2f}")
    if math.isfinite(line.grad_norm):
        norm = f"{line.grad_norm:#.3g}".removesuffix(".")  # with its zeros, so that columns stay where they are
        parts.append(f"grad norm {norm}")
    if line.d is not None:
        parts.append(f"d {line.d:.3g}")
    if math.isfinite(line.step_s):
        parts.append(f"{line.step_s:.2f} s/step")
    if math.isfinite(line.tokens_per_s):
        parts.append(f"{line.tokens_per_s:,.0f} tokens/s")
    if math.isfinite(line.idle_ratio):
        parts.append(f"idle {100 * line.idle_ratio:.0f}%")
    if line.workers:
        parts.append(counted(line.workers, "worker"))
    if line.recomputed:
        parts.append("recomputed")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
