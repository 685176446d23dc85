"""Plans beside what was measured: errors of cascades and ratios of steps, and the same of real runs on this machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.records.span_record import SpanRecord
from app.bench.lab import Lab
from app.bench.predicted import STEP_RATIO, cascade_errors, of_tiny, step_ratios


def span(step: int, cascade: str, planned_s: float, work_s: float | None, module: str = "dit") -> SpanRecord:
    return SpanRecord(
        step=step,
        worker="w",
        node="n",
        name="",
        module=module,
        cascade=cascade,
        item="",
        bucket=None,
        pieces=(),
        batch=1,
        degree=1,
        start=0.0,
        end=9.0,
        planned_start_s=1.0,
        planned_end_s=1.0 + planned_s,
        step_start=0.0,
        generation=1,
        phases={},
        handoff_bytes=0,
        handoff_s=0.0,
        work_s=work_s,
    )


def test_the_last_member_of_a_bag_counts_once_and_ends_of_steps_do_not() -> None:
    spans = [
        span(7, "a", 2.0, 1.0),
        span(7, "a", 2.0, 2.5),
        span(7, "b", 3.0, 2.0),
        span(8, "a", 1.0, 1.0, "vae"),
        span(6, "a", 9.0, 1.0),
        span(7, "", 0.0, 4.0, "finish"),
        span(8, "c", 1.0, None),
    ]
    errors = cascade_errors(spans, {7, 8})
    assert {module: sorted(of) for module, of in errors.items()} == {
        "dit": [pytest.approx(0.2), pytest.approx(0.5)],
        "vae": [0.0],
    }


def test_waiting_for_data_is_no_part_of_a_step() -> None:
    lines: list[Any] = [SimpleNamespace(predicted_s=2.0, step_s=5.0, data_wait_s=3.0)]
    assert step_ratios(lines) == [1.0]


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_plan_says_what_a_step_on_this_machine_takes(workers: int, tmp_path: Path) -> None:
    """What must be reached on a quiet machine; here others may compute, and it may be twice as far off."""
    with Lab(tmp_path) as lab:
        found = of_tiny(lab, workers, 60)
    low, high = STEP_RATIO
    assert found.steps == 30 and found.cascades > 100 and found.remainder_s > 0
    assert 1 - 2 * (1 - low) <= found.step_ratio <= 1 + 2 * (high - 1)
