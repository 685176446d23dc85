"""A step without a finite gradient is named and counted, and too many of them end the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.outcome import StopRun
from actors.skips import Skips


def step(number: int, applied: bool, *bad: str) -> Any:
    report = SimpleNamespace(applied=applied, loss=float("nan"), grad_norm=float("inf"), bad_samples=bad)
    return SimpleNamespace(running=SimpleNamespace(step=number), reports=(report,))


def test_skipped_steps_are_told_up_to_the_limit_and_then_end_the_run() -> None:
    told: list[dict[str, Any]] = []
    skips = Skips(2, lambda event, **detail: told.append({"event": event, **detail}))
    for number in range(5):
        skips.check(step(number, applied=number not in (1, 3)), committed=number - 1)
    assert [(e["event"], e["step"]) for e in told] == [("skipped", 1), ("skipped", 3)]
    with pytest.raises(StopRun) as stopped:
        skips.check(step(9, False, "shard-1/clip-7", "shard-0/clip-2"), committed=8)
    outcome = stopped.value.outcome
    assert (outcome.code, outcome.last_step) == (1, 8)
    assert "max_skipped_steps 2" in outcome.reason and "shard-0/clip-2, shard-1/clip-7" in outcome.reason
