"""Plans beside what was measured: errors of cascades and ratios of steps, and the same of real runs on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from actors.records.span_record import PieceRecord, SpanRecord
from app.bench.lab import TINY, Lab
from app.bench.predicted import STEP_RATIO, again_errors, of_tiny, off_alone, off_median, ran_cascades, step_ratios
from app.settings.config import RunConfig


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
    found = ran_cascades(spans, {7, 8})
    assert [(one.module, pytest.approx(one.off)) for one in found] == [("dit", 0.2), ("dit", 0.5), ("vae", 0.0)]


def test_the_same_cascade_is_compared_with_its_other_runs_alone() -> None:
    """Clips of another batch, and what ran three times, are no other runs of it."""
    spans = [span(step, "a", 1.0, work_s) for step, work_s in enumerate((1.0, 1.0, 1.0, 2.0))]
    spans += [replace(span(4, "b", 1.0, 9.0), pieces=(PieceRecord(item="", bucket=(1, 8, 8), batch=2),))]
    spans += [span(step, "c", 1.0, 5.0, "vae") for step in range(3)]
    assert again_errors(ran_cascades(spans, set(range(5)))) == {"dit": [0.0, 0.0, 0.0, 0.5]}
    assert off_median([1.0, 1.0, 2.0]) == [0.5, 0.5, 0.5]


def test_every_module_runs_again_alone() -> None:
    off = off_alone(RunConfig.from_yaml(yaml.safe_dump({"run": {"name": "alone"}, "model": dict(TINY["model"])})))
    assert set(off) == {"text", "vae", "dit"} and all(0 < share < 1 for share in off.values())


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
