"""The end of a step: what was measured of it, what plans, runs and waits make of that."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from actors.config import PlannerConfig, TrainConfig, WorkersConfig
from actors.letters import NodeAnswer
from actors.messages import Span, StepReport
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import profile_json, read_profile, write_profile
from actors.plan.costs.update import UpdateCosts, UpdatePoint
from actors.plan.types import Cluster, Item
from actors.planning.actor import Planner, updates
from actors.planning.learned import save_learned, setting_of, take_up
from actors.planning.options import tell_updates, update_kind
from actors.run.waits import StepWaits
from ops.config import OptimizerConfig
from ops.models.config import ModelConfig
from ops.models.load import num_trained
from ops.models.wan.config import WanConfig

MODEL = ModelConfig(dit=WanConfig(num_layers=1, num_heads=4, head_dim=16, ffn_dim=64, freq_dim=32))
KIND, WEIGHTS = update_kind(TrainConfig(), num_trained(MODEL.dit), "cpu"), num_trained(MODEL.dit)
ITEM = Item(id="a", batch=2, frames=5, height=64, width=96, text_tokens=8)


def costs(*points: tuple[int, float], nodes: int = 1) -> UpdateCosts:
    found = tuple(UpdatePoint(workers=workers, seconds=seconds, nodes=nodes) for workers, seconds in points)
    return UpdateCosts(kind=KIND, weights=WEIGHTS, points=found)


def profile(update: UpdateCosts) -> Profile:
    made = Profile.from_flops(MODEL.dit)
    made.measure(("dit", 2, 5, 64, 96, 1), 3.0)
    made.update = update
    return made


def finish(worker_s: float, workers: int = 2, step: int = 0) -> Span:
    return Span(
        name="finish", module="finish", cascade="", step=step, start=10.0, end=10.0 + worker_s, degree=workers
    )  # fmt: skip


KINDS: tuple[Literal["adamw", "muon", "prodigy"], ...] = ("adamw", "muon", "prodigy")


def test_no_optimizer_takes_what_the_end_of_a_step_took_with_another() -> None:
    kinds = {
        name: update_kind(TrainConfig(optimizer=OptimizerConfig(kind=name, learning_rate=1.0)), WEIGHTS, "cpu")
        for name in KINDS
    }
    assert len(set(kinds.values())) == 3
    for name, kind in kinds.items():
        assert bool(costs((1, 0.1)).of_run(kind, WEIGHTS).points) == (name == "adamw")


def test_measured_numbers_of_workers_stand_and_a_law_is_between_them() -> None:
    def law(n: int) -> float:
        return 0.8 / n + 0.3 * (n - 1) / n + 0.05

    found = costs(*((n, law(n)) for n in (1, 2, 4)))
    assert [found.seconds(n) for n in (1, 2, 4)] == pytest.approx([law(1), law(2), law(4)])
    assert found.seconds(3) == pytest.approx(law(3)) and found.seconds(64) == pytest.approx(law(64))
    assert costs((2, 9.0), *((n, law(n)) for n in (1, 4))).seconds(2) == 9.0, "a measured point is never smoothed"


def test_one_point_alone_is_divided_only_where_it_is_of_one_worker() -> None:
    assert costs((1, 0.8)).seconds(4) == pytest.approx(0.2)
    assert costs((4, 0.8)).seconds(8) == pytest.approx(0.8)
    assert UpdateCosts().seconds(4) is None


def test_what_was_measured_inside_a_node_does_not_stand_for_nodes_where_these_were_measured() -> None:
    both = UpdateCosts(points=(*costs((1, 0.8), (8, 0.1)).points, *costs((16, 2.0), nodes=2).points))
    assert both.seconds(32, nodes=4) == pytest.approx(2.0) and both.seconds(8) == pytest.approx(0.1)


def test_the_same_seconds_are_in_the_plan_of_a_preview_and_of_a_run() -> None:
    planner = Planner(profile(costs((2, 0.7))), PlannerConfig(budget_s=0.0))
    assigned = planner.plan(0, [[ITEM]], Cluster(nodes=(2,)), (), 0.0)
    assert assigned.step.update_s == pytest.approx(0.7)
    plain = Planner(profile(UpdateCosts()), PlannerConfig(budget_s=0.0)).plan(0, [[ITEM]], Cluster(nodes=(2,)), (), 0.0)
    assert plain.step.update_s == 0.0 and plain.step.makespan_s == assigned.step.makespan_s


def test_a_run_learns_the_end_of_its_steps_from_the_worker_that_came_last() -> None:
    planner = Planner(profile(costs((2, 0.7))), PlannerConfig(budget_s=0.0))
    for step, seconds in enumerate((0.4, 0.5, 9.0, 0.45, 0.5)):
        planner.observe([finish(5.0, step=step), finish(seconds, step=step)], {}, Cluster(nodes=(2,)))
    assert planner.learned().update_seconds(2) == pytest.approx(0.5), "not the wait, nor one busy moment"
    assert updates([finish(math.nan), finish(math.nan)]) == updates([finish(1.0)]) == [], "nor what cannot be"


def test_what_relays_have_answered_is_learned_as_what_workers_have() -> None:
    planner = Planner(profile(costs((2, 0.7))), PlannerConfig(budget_s=0.0))
    for step in range(4):
        answers = [NodeAnswer(ends={rank: (report_of(finish(s, step=step)), None)}) for rank, s in ((1, 5.0), (0, 0.5))]
        planner.observe([], {}, Cluster(nodes=(2,)), 0, None, *answers)
    assert planner.learned().update_seconds(2) == pytest.approx(0.5)


def report_of(span: Span) -> StepReport:
    return StepReport(worker="w", step=span.step, loss=0.0, weight=1.0, grad_norm=0.0, lr=0.0, applied=True,
                      spans=(span,), peak_memory_gib=0.0, rss_gib=0.0)  # fmt: skip


def test_what_was_learned_is_kept_and_taken_up_by_the_same_kind_of_run(tmp_path: Path) -> None:
    first, again, other = profile(costs()), profile(costs()), profile(replace(costs(), kind="another"))
    first.observe("dit", Samples.of(2, (5, 64, 96)), 1, 3.0)
    for seconds in (0.4, 0.5, 0.6):
        first.observe_update(2, 1, seconds)
    save_learned(first, setting_of(MODEL, "cpu"), tmp_path)
    assert take_up(again, setting_of(MODEL, "cpu"), tmp_path) == "" and again.update == first.update
    assert again.update.points[0].count == 3
    assert take_up(other, setting_of(MODEL, "cpu"), tmp_path) == "" and other.update_seconds(2) == 0.0


def test_a_profile_holds_it_and_one_without_is_read_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(profile(costs((1, 0.8), (2, 0.5))), path)
    assert read_profile(path).update == costs((1, 0.8), (2, 0.5))
    old = {key: value for key, value in profile_json(read_profile(path)).items() if key != "update"}
    assert read_profile(old).update_seconds(2) == 0.0


@pytest.mark.parametrize(
    "other",
    [
        replace(TrainConfig(), optimizer=OptimizerConfig(ema_decay=0.0)),
        replace(TrainConfig(), parameter_dtype="bfloat16"),
        replace(TrainConfig(), memory=replace(TrainConfig().memory, gradients="node")),
    ],
)
def test_a_run_that_ends_its_steps_in_another_way_takes_no_figure(other: TrainConfig) -> None:
    found = profile(costs((2, 0.7)))
    tell_updates(found, TrainConfig(), MODEL, "cpu")
    assert found.update_seconds(2) == 0.7
    tell_updates(found, other, MODEL, "cpu")
    assert found.update_seconds(2) == 0.0


def test_workers_wait_for_what_the_profile_says_until_a_step_has_ended() -> None:
    waits = StepWaits(config=WorkersConfig(), measured=True)
    waits.of(0, [], [])
    assert waits.of(1, [], [], 60.0).limit_s == 300.0 > waits.of(1, [], []).limit_s


def test_contradictory_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="end of a step took nan"):
        Profile().observe_update(2, 1, math.nan)
    with pytest.raises(ValueError, match="seconds is -1"):
        UpdatePoint(workers=1, seconds=-1.0)
