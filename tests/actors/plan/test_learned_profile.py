"""What a run has learned of its costs is kept in its folder, and refused by name where it does not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.config import PlannerConfig
from actors.plan.costs.profile import Profile, ProfiledSetting
from actors.plan.costs.profile_json import LEARNED, read_profile, write_profile
from actors.plan.costs.spanning import Spanned
from actors.plan.types import PlanError
from actors.planning.learned import save_learned, setting_of, take_up
from actors.planning.options import profile_of
from ops.geometry import Geometry
from ops.models.config import ModelConfig, VAEConfig
from ops.models.wan.config import WanConfig

MODEL = ModelConfig(dit=WanConfig(num_heads=4))
SETTING = setting_of(MODEL, "cpu")
CLIP = (17, 64, 96)


def learned() -> Profile:
    profile = Profile.from_flops(MODEL.dit)
    for batch in (1, 2, 3):
        for degree in (1, 2, 4):
            for _ in range(5):
                profile.observe("dit", batch, *CLIP, degree, 0.3 + 2.0 * batch / degree, 12)
    profile.observe("text", 2, *CLIP, 1, 0.05, 12)
    profile.observe("dit", 2, *CLIP, 4, 2.6, 12, spanned=Spanned(2, 1.0))
    profile.observe("dit", 3, *CLIP, 4, 3.6, 12, spanned=Spanned(2, 1.0))
    return profile


def test_a_resume_goes_on_with_what_was_learned(tmp_path: Path) -> None:
    first, again = learned(), Profile.from_flops(MODEL.dit)
    save_learned(first, SETTING, tmp_path)
    assert take_up(again, SETTING, tmp_path) == ""
    for batch in (1, 3, 7):  # the last has not run: what the fit says of it is the same, too
        for degree in (1, 2, 4):
            shape = ("dit", batch, *CLIP, degree, 12)
            assert again.price(*shape) == pytest.approx(first.price(*shape))
    assert again.cross_node == first.cross_node and again.cross_node.by_rows
    assert again.live == first.live
    again.observe("dit", 1, *CLIP, 1, 2.3, 12)
    assert again.live["dit", 1, *CLIP, 1].count == 6


def test_nothing_learned_writes_nothing_and_takes_up_nothing(tmp_path: Path) -> None:
    save_learned(Profile.from_flops(MODEL.dit), SETTING, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert take_up(Profile.from_flops(MODEL.dit), SETTING, tmp_path) == ""


@pytest.mark.parametrize(
    "other, sentence",
    [
        (setting_of(replace(MODEL, dit=WanConfig(num_heads=4, num_layers=3)), "cpu"), "is of model 'wan "),
        (
            setting_of(replace(MODEL, vae=VAEConfig(kind="diffusers", path="-", dtype="bfloat16")), "cpu"),
            "VAE in bfloat16",
        ),
        (replace(SETTING, device="H100"), "is of device 'cpu'; this run has 'H100'"),
        (replace(SETTING, attention="flash3"), "is of attention 'auto'; this run has 'flash3'"),
    ],
)
def test_costs_of_something_else_are_refused_by_name(tmp_path: Path, other: ProfiledSetting, sentence: str) -> None:
    save_learned(learned(), SETTING, tmp_path)
    fresh = Profile.from_flops(MODEL.dit)
    assert sentence in take_up(fresh, other, tmp_path)
    assert not fresh.live


def test_a_damaged_file_is_told_and_not_taken_up(tmp_path: Path) -> None:
    (tmp_path / LEARNED).write_text('{"latency": [')
    assert "is not valid JSON" in take_up(Profile.from_flops(MODEL.dit), SETTING, tmp_path)


def test_planner_profile_refuses_another_model_or_device(tmp_path: Path) -> None:
    save_learned(learned(), SETTING, tmp_path)
    config, geometry = PlannerConfig(profile=str(tmp_path / LEARNED)), Geometry()
    assert profile_of(config, MODEL, geometry, "cpu").price("dit", 1, *CLIP, 1) == pytest.approx(2.3)
    with pytest.raises(PlanError, match="is of device 'cpu'; this run has 'H100'"):
        profile_of(config, MODEL, geometry, "H100")
    with pytest.raises(PlanError, match="is of model 'wan"):
        profile_of(config, replace(MODEL, dit=WanConfig(num_heads=2)), geometry)


def test_a_gpu_has_a_short_and_a_long_name(tmp_path: Path) -> None:
    save_learned(learned(), replace(SETTING, device="NVIDIA H100 80GB HBM3"), tmp_path)
    assert take_up(Profile.from_flops(MODEL.dit), replace(SETTING, device="H100"), tmp_path) == ""


def test_a_file_that_does_not_say_what_it_is_of_is_taken_at_its_word(tmp_path: Path) -> None:
    write_profile(learned(), tmp_path / "p.json")
    assert profile_of(PlannerConfig(profile=str(tmp_path / "p.json")), MODEL, Geometry(), "H100").setting is None


def test_a_run_s_folder_is_read_as_its_profile(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(PlanError, match="has learned nothing yet"):
        read_profile(tmp_path)
    save_learned(learned(), SETTING, tmp_path)
    assert read_profile(tmp_path).seconds("dit", 1, *CLIP, 1) == pytest.approx(2.3)
