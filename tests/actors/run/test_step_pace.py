"""What a step takes beside its cascades and its end: measured, learned, kept, and part of what plans predict."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.config import PlannerConfig
from actors.messages import Span
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile, write_profile
from actors.plan.costs.remainder import RemainderPoint, remainder_of
from actors.plan.costs.update import UpdateCosts, UpdatePoint
from actors.plan.types import Cluster, Item
from actors.planning.actor import Planner
from actors.planning.learned import save_learned, setting_of, take_up
from actors.run.step_pace import StepPace, stretch_of
from ops.models.config import ModelConfig
from ops.models.wan.config import WanConfig

MODEL = ModelConfig(dit=WanConfig(num_layers=1, num_heads=4, head_dim=16, ffn_dim=64, freq_dim=32))
ITEM = Item(id="a", batch=2, frames=5, height=64, width=96, text_tokens=8)


def cascade(work_s: float, planned_s: float = 2.0, first: bool = False) -> Span:
    return Span(
        name="dit",
        module="dit",
        cascade="a/dit/0",
        step=0,
        start=10.0,
        end=10.0 + work_s,
        planned_end_s=planned_s,
        work_s=work_s,
        first_here=first,
    )


def finish(seconds: float) -> Span:
    return Span(name="finish", module="finish", cascade="", step=0, start=20.0, end=20.0 + seconds)


def step(ended_at: float, *spans: Span, makespan_s: float = 2.0, generation: int = 1) -> Any:
    """A collected step, as far as its pace asks."""
    plan = SimpleNamespace(makespan_s=makespan_s, update_s=0.0)
    running = SimpleNamespace(generation=generation, assignment=SimpleNamespace(step=plan))
    return SimpleNamespace(running=running, reports=[SimpleNamespace(spans=spans)], collected_at=ended_at)


def test_it_is_what_neither_cascades_nor_end_nor_data_explain() -> None:
    pace = StepPace()
    assert pace.remainder(step(100.0, cascade(2.0), finish(0.5))) is None, "a generation connects first"
    assert pace.remainder(step(103.0, cascade(2.0), finish(0.5))) == pytest.approx(0.5)
    pace.waited_for_data(4.0)
    assert pace.remainder(step(110.0, cascade(2.0), finish(0.5))) == pytest.approx(0.5)
    assert pace.remainder(step(112.0, cascade(2.0), finish(0.5))) == 0.0, "never less than nothing"


def test_what_medians_leave_out_of_a_sum_is_remainder() -> None:
    """The median of skewed seconds is known, and a step is a sum: here one of 2.6 s where 2 s were planned."""
    pace = StepPace()
    pace.remainder(step(100.0, cascade(2.0), finish(0.5)))
    assert pace.remainder(step(103.3, cascade(2.6), finish(0.5))) == pytest.approx(0.8)
    assert pace.remainder(step(105.8, cascade(1.6), finish(0.5))) == 0.0


def test_cascades_that_took_far_longer_than_planned_are_no_remainder() -> None:
    pace = StepPace()
    pace.remainder(step(100.0, cascade(2.0), finish(0.5)))
    assert stretch_of([cascade(3.0), cascade(5.0), finish(0.5)]) == 2.0
    assert stretch_of([cascade(3.0), cascade(5.0), cascade(7.0, planned_s=0.0)]) == 2.0, "one that nobody planned"
    assert pace.remainder(step(104.9, cascade(4.0), finish(0.5))) == pytest.approx(0.4)


def test_first_runs_and_impossible_timings_teach_nothing() -> None:
    pace = StepPace()
    pace.remainder(step(100.0, cascade(2.0), finish(0.5)))
    assert pace.remainder(step(150.0, cascade(2.0, first=True), finish(0.5))) is None
    assert pace.remainder(step(153.0, cascade(math.nan), finish(0.5))) is None, "no cascade that can be true"
    assert pace.remainder(step(156.0, cascade(2.0))) is None, "nobody says what the end took"
    assert pace.remainder(step(159.0, cascade(2.0), finish(0.5), generation=2)) is None
    assert pace.remainder(step(162.0, cascade(2.0), finish(0.5), generation=2)) == pytest.approx(0.5)


def profile() -> Profile:
    made = Profile.from_flops(MODEL.dit)
    made.measure(("dit", 2, 5, 64, 96, 1), 3.0)
    made.update = UpdateCosts(points=(UpdatePoint(workers=2, seconds=0.7),))
    return made


def test_a_plan_predicts_the_step_with_it() -> None:
    planner = Planner(profile(), PlannerConfig(budget_s=0.0))
    before = planner.plan(0, [[ITEM]], Cluster(nodes=(2,)), (), 0.0).step
    for seconds in (0.2, 0.3, 9.0, 0.3, 0.4):
        planner.observe([], {}, Cluster(nodes=(2,)), 0, seconds)
    after = planner.plan(1, [[ITEM]], Cluster(nodes=(2,)), (), 0.0).step
    assert before.seconds == pytest.approx(before.makespan_s + 0.7)
    assert after.remainder_s == 0.3, "the median: one busy moment does not move it"
    assert after.seconds == pytest.approx(before.seconds + 0.3) and after.makespan_s == before.makespan_s


def test_what_a_run_has_learned_of_it_is_kept_and_goes_on(tmp_path: Path) -> None:
    first, again = profile(), profile()
    for seconds in (0.2, 0.3, 0.4):
        first.observe_remainder(2, 1, seconds)
    first.observe("dit", Samples.of(2, (5, 64, 96)), 1, 3.0)
    save_learned(first, setting_of(MODEL, "cpu"), tmp_path)
    assert take_up(again, setting_of(MODEL, "cpu"), tmp_path) == ""
    assert again.remainders == first.remainders == (RemainderPoint(workers=2, seconds=0.3, count=3),)
    again.observe_remainder(2, 1, 5.0)
    assert again.remainder_seconds(2) == 0.3 and again.remainders[0].count == 4
    write_profile(first, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json").remainder_seconds(2) == 0.3


def test_another_number_of_workers_has_that_of_the_nearest() -> None:
    known = [RemainderPoint(workers=2, seconds=0.2), RemainderPoint(workers=16, nodes=2, seconds=0.9)]
    assert [remainder_of(known, workers, 1) for workers in (1, 2, 4, 8, 64)] == [0.2, 0.2, 0.2, 0.9, 0.9]
    assert remainder_of([], 4, 1) == 0.0


def test_contradictory_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="took nan s beside its cascades"):
        Profile().observe_remainder(2, 1, math.nan)
    with pytest.raises(ValueError, match="seconds is -1"):
        RemainderPoint(workers=1, seconds=-1.0)
