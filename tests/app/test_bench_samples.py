"""What `heddle bench samples` counts: clips that are made after the last step are part of what they cost."""

from __future__ import annotations

import math

import pytest
import typer

from actors.records.events import CheckpointWritten, RunFinished, SamplesFailed
from actors.records.metrics_line import StepMetrics, metrics_of
from app.bench.samples import SampledRun, steps_that_hold, table

EVERY = 3
BEGAN = 100.5  # the checkpoint is whole: in the step that ends at 101
FINISHED = [CheckpointWritten(time=BEGAN, step=2, folder="x"), RunFinished(time=104.2, step=6, ledger={})]


def line(step: int, at: float, step_s: float) -> StepMetrics:
    return metrics_of({"step": step, "time": at, "step_s": step_s})


STEPS = [line(2, 100.0, 9.0), line(3, 101.0, 1.0), line(4, 102.0, 1.0), line(5, 104.0, 2.0)]


def found(*clips_at: float) -> SampledRun:
    return SampledRun.of(FINISHED, STEPS, clips_at, EVERY)


def test_seconds_end_with_the_last_step_where_all_clips_are_there() -> None:
    one = found(101.5, 103.0)
    assert (one.total_s, one.ready_s, one.late) == (3.5, 2.5, 0)
    assert (one.step_s, one.longest_s) == (1.0, 2.0)  # of the steps after the checkpoint


def test_seconds_end_with_the_last_clip_where_it_comes_after_the_last_step() -> None:
    one = found(101.5, 103.0, 109.0)
    assert (one.total_s, one.ready_s, one.late, one.clips) == (8.5, 8.5, 1, 3)


def test_a_run_without_clips_ends_with_its_last_step() -> None:
    one = found()
    assert (one.total_s, one.late, one.clips) == (3.5, 0, 0) and math.isnan(one.ready_s)


def test_clips_that_failed_are_no_figure() -> None:
    events = [*FINISHED, SamplesFailed(step=2, why="no memory")]
    with pytest.raises(RuntimeError, match="samples of a run failed: no memory"):
        SampledRun.of(events, STEPS, (), EVERY)


def test_the_run_becomes_longer_until_it_holds_its_clips() -> None:
    asked: list[int] = []

    def measured(every: int) -> SampledRun:
        asked.append(every)
        return found(101.5) if every >= 12 else found(101.5, 109.0)

    assert steps_that_hold(measured, 3) == 12
    assert asked == [3, 6, 12]


def test_clips_that_no_run_holds_end_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as error:
        steps_that_hold(lambda every: found(109.0), 3)
    assert error.value.exit_code == 1
    assert "not even 24 steps hold 4 clips; raise --share" in capsys.readouterr().out


def test_the_table_says_how_many_clips_were_late() -> None:
    lines = table({"none": [found()], "beside": [found(101.5, 102.0), found(101.5, 109.0)]}).splitlines()
    assert lines[1].endswith("0, 0") and lines[2].endswith("3, 1")
    assert "+71.4%" in lines[2]  # of 3.5 s: half of 3.5 + 8.5
