"""What a run has learned of memory outlasts it: peaks, where memory ran out, and how often; and only what holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.config import TrainConfig, TrainMemoryConfig
from actors.plan.costs.needs import BAG, SOLO, TRIES, Footprint, NeedLine, Needs
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile, write_profile
from actors.plan.types import Cluster, Item
from actors.planning.learned import save_learned, setting_of, take_up
from actors.planning.make_plan import make_plan
from actors.planning.options import tell_updates
from ops.models.config import ModelConfig
from ops.models.wan.config import WanConfig
from tests.actors.plan.options import counted

MODEL = ModelConfig(dit=WanConfig(num_heads=4))
TRAIN = TrainConfig()
SETTING = setting_of(MODEL, "H100", TRAIN)
CLIP = (33, 96, 96)
LARGE = Samples(count=3, frames=33, height=96, width=96, text_tokens=8)


def forecast(text_rows: float = 1.5) -> Needs:
    """What is predicted before anything has run: less than there is room for."""
    needs = Needs(text_rows={SOLO: text_rows, BAG: text_rows}, num_heads=4)
    for kind in (SOLO, BAG):
        needs.predicted["dit", kind] = NeedLine(fixed_gib=0.1, gib_per_unit=1e-4)
    return needs


def starting(train: TrainConfig = TRAIN, memory_gib: float = 0.0, predicted: Needs | None = None) -> Profile:
    """The profile of a run that has just begun, on a GPU."""
    profile = Profile.from_flops(MODEL.dit)
    profile.expect_needs(predicted or forecast())
    tell_updates(profile, train, MODEL, "H100", memory_gib)
    return profile


def resumed(folder: Path, profile: Profile | None = None) -> Profile:
    found = profile or starting()
    assert take_up(found, SETTING, folder) == ""
    return found


def largest_dit(profile: Profile) -> int:
    """Clips of the largest DiT cascade that is planned of a batch of three on one worker."""
    item = Item(id="x", batch=3, frames=33, height=96, width=96, text_tokens=8)
    cluster = Cluster(nodes=(1,), room_gib=(60.0,))
    plan = make_plan([[item]], profile, cluster, counted(budget_s=0.0))
    return max(cascade.batch for cascade in plan.steps[0].cascades if cascade.module == "dit")


def ran_out(profile: Profile, times: int = 1) -> Footprint:
    found = profile.footprint("dit", [LARGE], 1)
    for _ in range(times):
        profile.exceed(found, 0.7)
    return found


def test_a_resumed_run_does_not_plan_what_ran_out_of_memory(tmp_path: Path) -> None:
    before = starting()
    assert largest_dit(before) == 3, "the forecast sees no danger"
    ran_out(before)
    save_learned(before, SETTING, tmp_path)
    again = resumed(tmp_path)
    assert largest_dit(again) < 3 and again.needs.limits == before.needs.limits
    assert again.needs.missing == before.needs.missing and list(again.needs.tries.values()) == [1]


def test_peaks_outlast_the_run_and_stand_above_its_forecast(tmp_path: Path) -> None:
    before = starting()
    before.observe("dit", Samples.of(1, CLIP, 8), 1, 0.5)
    for count in (1, 2):
        one = before.footprint("dit", [replace(LARGE, count=count)], 1)
        before.observe_need(one, 0.2 + 1e-3 * one.units)
    save_learned(before, SETTING, tmp_path)
    again, three = resumed(tmp_path), before.footprint("dit", [LARGE], 1)
    assert again.needs.gib(three) == pytest.approx(0.2 + 1e-3 * three.units, rel=0.02)
    assert again.needs.gib(three) == before.needs.gib(three) != starting().needs.gib(three)


@pytest.mark.parametrize(
    "other",
    [
        starting(replace(TRAIN, memory=TrainMemoryConfig(state="host"))),
        starting(replace(TRAIN, optimizer=replace(TRAIN.optimizer, ema_decay=0.0))),
        starting(memory_gib=40.0),
    ],
    ids=["state in host memory", "no average", "half of the device"],
)
def test_limits_beside_other_states_are_forgotten_and_peaks_are_not(tmp_path: Path, other: Profile) -> None:
    before = starting()
    ran_out(before)
    small = before.footprint("dit", [replace(LARGE, count=1)], 1)
    before.observe_need(small, 0.4)
    save_learned(before, SETTING, tmp_path)
    again = resumed(tmp_path, other)
    assert again.needs.limits == again.needs.tries == {} and largest_dit(again) == 3
    assert again.needs.gib(small) == 0.4


def test_a_shape_that_failed_as_often_as_it_may_is_tried_once_by_a_resumed_run(tmp_path: Path) -> None:
    """The memory may have been another process's, which is gone."""
    before = starting()
    found = ran_out(before, times=TRIES)
    assert not before.needs.may_try(found, 60.0)
    save_learned(before, SETTING, tmp_path)
    again = resumed(tmp_path)
    assert again.needs.may_try(found, 60.0)
    again.exceed(found, 0.7)
    assert not again.needs.may_try(found, 60.0)


def test_peaks_in_rows_that_count_otherwise_now_are_left_out(tmp_path: Path) -> None:
    before = starting()
    before.observe_need(before.footprint("dit", [LARGE], 1), 5.0)
    captions = Footprint(module="text", kind=SOLO, units=40.0)
    before.observe_need(captions, 0.3)
    save_learned(before, SETTING, tmp_path)
    alike = resumed(tmp_path, starting(predicted=forecast(1.51)))
    other = resumed(tmp_path, starting(predicted=forecast(0.1)))
    line = ("dit", SOLO)
    assert alike.needs.measured[line] == before.needs.measured[line] and line not in other.needs.measured
    assert other.needs.gib(captions) == 0.3


def test_a_forecast_that_comes_later_leaves_what_a_file_has_measured(tmp_path: Path) -> None:
    """The limits of batches are found by it, whoever has measured it."""
    measured = starting()
    measured.measure(("dit", 1, *CLIP, 1), 0.5)
    for units in (100.0, 1000.0):
        measured.observe_need(Footprint(module="dit", kind=SOLO, units=units), 2e-3 * units)
    write_profile(measured, tmp_path / "p.json")
    found = read_profile(tmp_path / "p.json")
    assert found.needs.most_rows(10.0) == pytest.approx(5000)
    found.expect_needs(forecast())
    assert found.needs.most_rows(10.0) == pytest.approx(5000) != forecast().most_rows(10.0)
    found.expect_needs(forecast(0.1))
    assert found.needs.most_rows(10.0) == pytest.approx(forecast(0.1).most_rows(10.0))
