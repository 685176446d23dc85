"""Runs measurements one after the other within a budget. Whatever one of them does, the next one runs."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from app.bench.gpu.attention_table import write_table
from app.bench.gpu.ceilings import times_slower
from app.bench.gpu.lines import Facts, ResultLine, append_line, begin_mark, end_mark, good_figures, read_lines
from app.bench.gpu.measurement import Measurement, Place, expected_seconds
from app.bench.gpu.report import cell, report
from app.bench.gpu.timeline import PREFIX

REPORT = "report.md"
_ERROR_LENGTH = 600
_TIMES_EXPECTED, _AND_S = 4.0, 60.0  # after which a measurement has no end


class TooLittleTime(ValueError):
    """The budget is too small for the shortest of the missing measurements."""


class OtherDevice(ValueError):
    """The folder holds results of another device, or a rehearsal where a real run is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Seconds since a moment of time.time(), which outlives a restart of the process."""

    began: float
    seconds: float

    def left(self) -> float:
        return self.began + self.seconds - time.time()


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one call did."""

    lines: tuple[ResultLine, ...]  # of this call
    skipped: tuple[str, ...]  # for lack of time
    dead: bool  # the device no longer answers; a new process may go on


def run_all(
    measurements: Sequence[Measurement],
    place: Place,
    folder: Path,
    facts: Facts,
    budget: Budget,
    say: Callable[[str], None] = print,
    retry: bool = False,
    end: Callable[[], None] | None = None,
) -> Round:
    """Everything that `folder` does not hold yet by these versions (with `retry`: or holds as failed before the budget
    began), in the order given. What was left out is asked again: a package may have come, or memory. `end` ends this
    process where a measurement hangs.

    Raises TooLittleTime when nothing is there and nothing fits, OtherDevice when the folder is of another device.
    """
    place = replace(place, folder=folder)
    before = read_lines(folder)
    _check_same_device(before, facts, folder)
    if lost := end_mark(folder):
        append_line(folder, _died(*lost, facts))
        before = read_lines(folder)
    left_out = {line.name: line.left_out for line in before if line.left_out}
    ours = [line for line in before if line.facts.versions == facts.versions]
    since = budget.began if retry else 0.0
    done = {line.name for line in ours if line.good or (line.error and _time(line) >= since)}
    missing = [one for one in measurements if one.name not in done]
    new: list[ResultLine] = []
    skipped: list[str] = []
    dead = False
    for one in missing:
        line = _left_out(one, place, facts)
        if line is not None and line.left_out and line.left_out == left_out.get(one.name):
            continue  # as it stands there
        expected_s = expected_seconds(one, place, times_slower(good_figures([*before, *new])))
        if line is None and expected_s > budget.left():
            skipped.append(one.name)
            continue
        if line is None:
            with _watched(one, _TIMES_EXPECTED * expected_s + _AND_S, folder, facts, end):
                line = _measured(one, place, folder, facts)
        append_line(folder, line)
        new.append(line)
        say(_said(line, budget))
        _write(folder, skipped)
        if line.error is not None and not _answers(place):
            dead = True
            break
    if skipped and not any(line.good or line.error for line in [*before, *new]):
        raise TooLittleTime(_too_little([one for one in missing if one.name in skipped], place, budget))
    _write(folder, skipped)
    return Round(lines=tuple(new), skipped=tuple(skipped), dead=dead)


def _write(folder: Path, skipped: Sequence[str]) -> None:
    """What is made of all lines so far."""
    lines = read_lines(folder)
    (folder / REPORT).write_text(report(lines, skipped), encoding="utf-8")
    write_table(lines, folder)


def _measured(one: Measurement, place: Place, folder: Path, facts: Facts) -> ResultLine:
    at, start = _now(), time.monotonic()
    earlier = good_figures(read_lines(folder))
    torch.manual_seed(0)
    begin_mark(folder, one.name)
    try:
        figures, error = one.run(place, earlier), None
        place.synchronize()
    except Exception as raised:  # of a kernel, a compiler, the allocator: the next measurement is not affected
        figures, error = {}, _told(raised)
    finally:  # also if a person stops it, but not if the process dies
        end_mark(folder)
    _forget(place)
    return ResultLine(
        name=one.name, facts=facts, at=at, seconds=round(time.monotonic() - start, 2), figures=figures, error=error
    )


@contextmanager
def _watched(
    one: Measurement, most_s: float, folder: Path, facts: Facts, end: Callable[[], None] | None
) -> Iterator[None]:
    """After `most_s` a thread writes the line of a failure and calls `end`: what waits for a device that hangs can be
    interrupted by nobody."""
    if end is None:
        yield
        return
    main, at, leave = threading.get_ident(), _now(), end

    def overrun() -> None:
        frame = sys._current_frames()[main]
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        error = f"no end after {most_s:.0f} s, in {where}; --retry measures it again."
        end_mark(folder)
        append_line(folder, ResultLine(name=one.name, facts=facts, at=at, seconds=most_s, error=error))
        leave()

    timer = threading.Timer(most_s, overrun)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _died(name: str, began: float, facts: Facts) -> ResultLine:
    """The line of a measurement during which the process died: it would die again, and what follows would never run."""
    error = "the process died or was stopped while this ran; --retry measures it again."
    return ResultLine(name=name, facts=facts, at=_text(began), seconds=0.0, error=error)


def _left_out(one: Measurement, place: Place, facts: Facts) -> ResultLine | None:
    """The line of a measurement that cannot run here; None for one that can."""
    try:
        reason, error = one.why_not(place), None
    except Exception as raised:  # a library that fails even at being asked
        reason, error = None, _told(raised)
    if reason is None and error is None:
        return None
    return ResultLine(name=one.name, facts=facts, at=_now(), seconds=0.0, left_out=reason, error=error)


def _forget(place: Place) -> None:
    """Free memory and compiled code, so that the next measurement begins without them."""
    gc.collect()
    torch._dynamo.reset()
    if place.device.type == "cuda" and _answers(place):
        torch.cuda.empty_cache()


def _answers(place: Place) -> bool:
    """False once a kernel has broken the process's CUDA context: every later call of it fails too."""
    try:
        place.synchronize()
    except Exception:
        return False
    return True


def _check_same_device(before: Sequence[ResultLine], facts: Facts, folder: Path) -> None:
    others = {line.facts.device for line in before} - {facts.device}
    if others:
        raise OtherDevice(
            f"{folder} holds results of {', '.join(sorted(others))}; this is {facts.device}. Give another --out."
        )
    if any(line.facts.rehearsal != facts.rehearsal for line in before):
        held = "a real run" if facts.rehearsal else "a rehearsal"
        raise OtherDevice(f"{folder} holds results of {held}. Give another --out.")


def _too_little(skipped: Sequence[Measurement], place: Place, budget: Budget) -> str:
    """Where nothing was measured, the device is not known to be slower."""
    shortest = min(skipped, key=lambda one: expected_seconds(one, place, 1.0))
    needed = expected_seconds(shortest, place, 1.0)
    return (
        f"--minutes {budget.seconds / 60:g} is too little for one result: {max(budget.left(), 0):.0f} s are left and "
        f"the shortest measurement, {shortest.name}, needs about {needed:.0f} s. Give --minutes "
        f"{(budget.seconds - budget.left() + needed) / 60 + 0.1:.1f} or more."
    )


def _told(raised: Exception) -> str:
    """Type, message and place of an error in one line."""
    frame = traceback.extract_tb(raised.__traceback__)[-1]
    text = " ".join(f"{type(raised).__name__}: {raised}".split())
    return f"{text[:_ERROR_LENGTH]} ({Path(frame.filename).name}:{frame.lineno})"


def _said(line: ResultLine, budget: Budget) -> str:
    if line.left_out:
        return f"{line.name}: left out. {line.left_out}"
    figures = ", ".join(f"{name} {cell(value)}" for name, value in line.figures.items() if not name.startswith(PREFIX))
    return f"{line.name} ({line.seconds:.1f} s, {budget.left():.0f} s left): {line.error or figures}"


def _now() -> str:
    return _text(time.time())


def _text(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")


def _time(line: ResultLine) -> float:
    return datetime.fromisoformat(line.at).timestamp()
