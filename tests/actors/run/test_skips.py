"""A step without a finite gradient is named and counted, and too many of them end the run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.outcome import StopRun
from actors.records.events import StepSkipped
from actors.run.skips import WINDOW, Skips, skipped_before


def step(number: int, applied: bool, *bad: str) -> Any:
    report = SimpleNamespace(applied=applied, loss=float("nan"), grad_norm=float("inf"), bad_samples=bad)
    return SimpleNamespace(running=SimpleNamespace(step=number), reports=(report,))


def quiet(limit: int, known: tuple[int, ...] = ()) -> Skips:
    return Skips(limit, lambda event: None, known)


def test_skipped_steps_are_told_up_to_the_limit_and_then_end_the_run() -> None:
    told: list[Any] = []
    skips = Skips(2, told.append)
    for number in range(5):
        skips.check(step(number, applied=number not in (1, 3)), committed=number - 1)
    assert [(type(e), e.step) for e in told] == [(StepSkipped, 1), (StepSkipped, 3)]
    with pytest.raises(StopRun) as stopped:
        skips.check(step(9, False, "shard-1/clip-7", "shard-0/clip-2"), committed=8)
    outcome = stopped.value.outcome
    assert (outcome.code, outcome.last_step) == (1, 8)
    assert "max_skipped_steps 2" in outcome.reason and "shard-0/clip-2, shard-1/clip-7" in outcome.reason


def test_a_step_that_is_computed_again_counts_once_and_not_at_all_when_it_goes_well() -> None:
    skips = quiet(2)
    for _ in range(5):
        skips.check(step(4, False), committed=3)
    skips.check(step(5, False), committed=4)
    skips.check(step(4, True), committed=3)
    skips.check(step(5, True), committed=4)
    for number in (6, 7):
        skips.check(step(number, False), committed=number - 1)
    with pytest.raises(StopRun):
        skips.check(step(8, False), committed=7)


def test_a_skip_now_and_then_never_ends_a_long_run() -> None:
    skips = quiet(2)
    for number in range(0, 100 * WINDOW, WINDOW // 2):
        skips.check(step(number, False), committed=number - 1)


def test_the_next_controller_of_a_run_goes_on_counting(tmp_path: Path) -> None:
    assert skipped_before(tmp_path) == []
    events = [{"event": "start", "step": 0}, {"event": "skipped", "step": 3}, {"event": "skipped", "step": 5},
              {"event": "fail", "why": 'a word like "skipped"', "step": 6}]  # fmt: skip
    lines = "".join(json.dumps(e) + "\n" for e in events) + '{"event": "skipped", "st'
    (tmp_path / "events.jsonl").write_text(lines)
    assert skipped_before(tmp_path) == [3, 5]
    with pytest.raises(StopRun):
        quiet(2, tuple(skipped_before(tmp_path))).check(step(7, False), committed=6)
