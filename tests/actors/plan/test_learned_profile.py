"""What a run has learned of its costs is kept in its folder, and refused by name where it does not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.config import PlannerConfig, TrainConfig
from actors.plan.costs.point import MOST_POINTS, Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import LEARNED, profile_json, read_profile, write_profile
from actors.plan.costs.setting import ProfiledSetting
from actors.plan.costs.spanning import BagSpread
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cluster, Item, PlanError
from actors.planning.learned import save_learned, setting_of, take_up
from actors.planning.make_plan import make_plan
from actors.planning.observations import Observation, Witnesses
from actors.planning.options import assumption, profile_of
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.base.flops import TrainedPart
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.wan.config import WanConfig

MODEL = ModelConfig(dit=WanConfig(num_heads=4))
TRAIN = TrainConfig()
SETTING = setting_of(MODEL, "cpu", TRAIN)
CLIP = (17, 64, 96)
ITEM = Item(id="a", batch=1, frames=17, height=64, width=96, text_tokens=5)
POINT = {"module": "dit", "batch": 1, "frames": 17, "height": 64, "width": 96, "seconds": 1.0}


def of_dit(**settings: object) -> ProfiledSetting:
    return setting_of(replace(MODEL, dit=replace(MODEL.dit, **settings)), "cpu", TRAIN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "float32, autocast none"),
        ({"tf32": "on"}, "float32, autocast none, with TF32"),
        ({"autocast": "bfloat16"}, "float32, autocast bfloat16"),
        ({"autocast": "bfloat16", "tf32": "off"}, "float32, autocast bfloat16, without TF32"),
    ],
)
def test_costs_in_another_precision_are_of_another_setting(settings: dict[str, str], said: str) -> None:
    train = TrainConfig(**settings)  # type: ignore[arg-type]
    assert setting_of(MODEL, "H100", train).precision == said
    assert "TF32" not in setting_of(MODEL, "cpu", train).precision


@pytest.mark.parametrize("graphs", [True, "auto"])
def test_costs_by_graphs_are_of_another_setting(graphs: bool | str) -> None:
    by_graphs = replace(MODEL, dit=replace(MODEL.dit, cuda_graphs=graphs))  # type: ignore[arg-type]
    assert setting_of(by_graphs, "H100").checkpointing == setting_of(MODEL, "H100").checkpointing + ", CUDA graphs"
    assert setting_of(by_graphs, "cpu") == setting_of(MODEL, "cpu")


def learned() -> Profile:
    profile = Profile.from_flops(MODEL.dit)
    for batch in (1, 2, 3):
        for degree in (1, 2, 4):
            for _ in range(5):
                profile.observe("dit", Samples.of(batch, CLIP, 12), degree, 0.3 + 2.0 * batch / degree)
    profile.observe("text", Samples.of(2, CLIP, 12), 1, 0.05)
    profile.observe("dit", Samples.of(2, CLIP, 12), 4, 2.6, spanned=BagSpread(2, 1.0))
    profile.observe("dit", Samples.of(3, CLIP, 12), 4, 3.6, spanned=BagSpread(2, 1.0))
    profile.learn_cross_node()
    return profile


def test_a_resume_goes_on_with_what_was_learned(tmp_path: Path) -> None:
    first, again = learned(), Profile.from_flops(MODEL.dit)
    save_learned(first, SETTING, tmp_path)
    assert take_up(again, SETTING, tmp_path) == ""
    for batch in (1, 3, 7):  # the last has not run: what the fit says of it is the same, too
        for degree in (1, 2, 4):
            shape = "dit", Samples.of(batch, CLIP, 12), degree
            assert again.price(*shape) == pytest.approx(first.price(*shape))
    assert again.cross_node == first.cross_node and again.cross_node.by_rows
    assert again.live == first.live
    again.observe("dit", Samples.of(1, CLIP, 12), 1, 2.3)
    assert again.live["dit", 1, *CLIP, 1].count == 6


def test_nothing_learned_writes_nothing_and_takes_up_nothing(tmp_path: Path) -> None:
    save_learned(Profile.from_flops(MODEL.dit), SETTING, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert take_up(Profile.from_flops(MODEL.dit), SETTING, tmp_path) == ""


@pytest.mark.parametrize(
    "other, sentence",
    [
        (of_dit(num_layers=3), "is of model 'wan 4x128'; this run has 'wan 3x128'"),
        (replace(SETTING, device="H100"), "is of device 'cpu'; this run has 'H100'"),
        (of_dit(attention="flex"), "is of attention backend 'sdpa'; this run has 'flex'"),
        (of_dit(gradient_checkpointing=True), "is of gradient checkpointing 'off'; this run has 'on'"),
        (of_dit(lora_rank=8), "is of training of 'all weights'; this run has 'LoRA factors of rank 8'"),
        (of_dit(lora_rank=8, frozen_dtype="float8"), "this run has 'LoRA factors of rank 8 beside float8'"),
        (of_dit(train_only=("blocks.1",)), "is of training of 'all weights'; this run has 'blocks.1'"),
        (
            setting_of(MODEL, "cpu", replace(TRAIN, autocast="bfloat16")),
            "is of precision 'float32, autocast none'; this run has 'float32, autocast bfloat16'",
        ),
        (
            setting_of(replace(MODEL, vae=VAEConfig(channels=24)), "cpu", TRAIN),
            "is of VAE 'haar 4x8x8, 48 channels'; this run has 'haar 4x8x8, 24 channels'",
        ),
        (
            setting_of(replace(MODEL, text=TextConfig(num_layers=3, pad_to=512)), "cpu", TRAIN),
            "this run has 't5 3x64 float32 on the device, padded to 512'",
        ),
    ],
)
def test_costs_of_something_else_are_refused_by_name(tmp_path: Path, other: ProfiledSetting, sentence: str) -> None:
    save_learned(learned(), SETTING, tmp_path)
    fresh = Profile.from_flops(MODEL.dit)
    why = take_up(fresh, other, tmp_path)
    assert sentence in why and "planner.profile" not in why, "nobody has given one"
    assert not fresh.live


def test_tiles_and_class_of_a_vae_are_part_of_what_costs_hold_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    whole = VAEConfig(kind="diffusers", path=str(tmp_path))
    tiled = replace(whole, tiling=True)
    said = [setting_of(replace(MODEL, vae=vae), "cpu").vae for vae in (whole, tiled)]
    assert said == [
        "AutoencoderKLWan float32, no tiles",
        "AutoencoderKLWan float32, tiles of 256x256 every 192x192",
    ]


def test_a_backend_by_another_name_is_the_same_and_what_nobody_knows_is_not_compared(tmp_path: Path) -> None:
    save_learned(learned(), SETTING, tmp_path)
    assert take_up(Profile.from_flops(MODEL.dit), of_dit(attention="sdpa"), tmp_path) == ""
    old = ProfiledSetting(model=SETTING.model, device="cpu", attention="auto")
    save_learned(learned(), old, tmp_path)
    assert take_up(Profile.from_flops(MODEL.dit), SETTING, tmp_path) == "", "a file from before the others were kept"
    assert "is of attention 'auto'" in take_up(Profile.from_flops(MODEL.dit), of_dit(attention="flex"), tmp_path)


def test_a_resume_goes_on_with_bags_over_nodes_and_handoffs_as_they_were_measured(tmp_path: Path) -> None:
    first, again = learned(), Profile.from_flops(MODEL.dit)
    for number in range(8):
        first.observe_handoff((1 + number % 2) << 24, 0.4 + 0.3 * (number % 2))
    first.observe("dit", Samples.of(1, CLIP, 12), 2, 3.0, spanned=BagSpread(2, 0.5))
    first.learn_cross_node()
    save_learned(first, SETTING, tmp_path)
    take_up(again, SETTING, tmp_path)
    assert {key: (one.seconds, one.count) for key, one in again.spanning.items()} == {
        key: (one.seconds, one.count) for key, one in first.spanning.items()
    }
    assert again.handoff == first.handoff and again.seen_handoffs == first.seen_handoffs
    for profile in (first, again):
        profile.observe("dit", Samples.of(2, CLIP, 12), 4, 2.9, spanned=BagSpread(2, 1.0))
        profile.learn_cross_node()
        profile.observe_handoff(1 << 25, 0.9)
    assert again.handoff == first.handoff
    assert again.cross_node.row_s == pytest.approx(first.cross_node.row_s)


def test_of_thousands_of_points_those_that_ran_last_are_kept_and_priced_as_before(tmp_path: Path) -> None:
    profile, again = (Profile.from_flops(MODEL.dit) for _ in range(2))
    witnesses, often = Witnesses(), Samples.of(1, (1, 8, 8), 12)
    for number in range(5000):
        for part, seconds in ((Samples.of(1, (17, 8, 8 + number), 12), 1.0 + number), (often, 0.5)):
            profile.observe("dit", part, 1, seconds)
            one = Observation(module="dit", parts=(part,), degree=1, seconds=seconds, bag=(0,))
            witnesses.saw([one])
    assert len(profile.live) == MOST_POINTS and len(witnesses._bags) == 2 * MOST_POINTS
    lately = [Samples.of(1, (17, 8, 8 + number), 12) for number in range(4900, 5000)]
    assert [profile.price("dit", part, 1) for part in lately] == [1.0 + number for number in range(4900, 5000)]
    assert profile.live[often.key("dit", 1)].count == 5000, "it was there first, and goes on running"
    save_learned(profile, SETTING, tmp_path)
    assert take_up(again, SETTING, tmp_path) == "" and list(again.live) == list(profile.live)
    for one in (profile, again):  # the same goes, also after a resume
        one.observe("dit", Samples.of(9, CLIP, 12), 1, 3.0)
    assert list(again.live) == list(profile.live) and len(again.live) == MOST_POINTS


def test_one_point_is_repaired_with_one_sentence() -> None:
    profile = Profile.from_flops(MODEL.dit)
    profile.measure(("dit", 1, *CLIP, 1), 2.0)
    profile.seconds("dit", Samples.of(2, CLIP, 12), 1)
    assert profile.notes == ["dit: 1 measured point fit no model, which takes 6; the FLOP model is scaled to it."]


def test_a_damaged_file_is_told_and_not_taken_up(tmp_path: Path) -> None:
    (tmp_path / LEARNED).write_text('{"latency": [')
    assert "is not valid JSON" in take_up(Profile.from_flops(MODEL.dit), SETTING, tmp_path)


def test_planner_profile_refuses_another_model_or_device(tmp_path: Path) -> None:
    save_learned(learned(), SETTING, tmp_path)
    config, geometry = PlannerConfig(profile=str(tmp_path / LEARNED)), Geometry()
    assert profile_of(config, MODEL, geometry, "cpu").price("dit", Samples.of(1, CLIP), 1) == pytest.approx(2.3)
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
    assert read_profile(tmp_path).seconds("dit", Samples.of(1, CLIP), 1) == pytest.approx(2.3)


def test_a_point_counts_for_captions_of_another_length_as_its_model_says() -> None:
    """A run's captions are of any length; the point of a shape is the median of theirs."""
    profile = Profile.from_flops(MODEL.dit, launch_s=1e-3)
    for text in (10, 20, 40, 20, 10, 40, 20):
        for batch in range(1, 8):
            profile.observe("text", Samples.of(batch, CLIP, text), 1, 0.01 + 1e-3 * batch * text)
    assert profile.price("text", Samples.of(2, CLIP, 20), 1) == pytest.approx(0.05)
    assert profile.price("text", Samples.of(2, CLIP, 80), 1) == pytest.approx(0.01 + 2e-3 * 80, rel=0.1)
    assert profile.price("text", Samples.of(2, CLIP), 1) == pytest.approx(0.05), "where nobody says"
    measured = Profile.from_flops(MODEL.dit)
    for batch in range(1, 8):
        measured.measure(("text", batch, *CLIP, 1), 0.01 + 1e-3 * batch * 20, 20)
    assert measured.price("text", Samples.of(2, CLIP, 80), 1) == pytest.approx(0.01 + 2e-3 * 80, rel=0.05)
    assert measured.price("text", Samples.of(2, CLIP, 20), 1) == pytest.approx(0.05)


def test_short_captions_of_a_run_are_no_drift_of_points_that_were_measured_with_long_ones() -> None:
    profile = Profile.from_flops(MODEL.dit)

    def took(batch: int, text: int) -> float:
        return 0.01 + 1e-3 * batch * text

    for batch in range(1, 8):
        profile.measure(("text", batch, *CLIP, 1), took(batch, 80), 80)
    for _ in range(5):
        for batch in (2, 4, 6):
            profile.observe("text", Samples.of(batch, CLIP, 20), 1, took(batch, 20))
    for text in (20, 80):
        priced = profile.price("text", Samples.of(3, CLIP, text), 1)
        assert priced == pytest.approx(took(3, text), rel=0.1), "the file's point, once"


def test_a_run_schedules_modules_of_which_its_profile_has_no_point(tmp_path: Path) -> None:
    """That of a run whose encodes came from a cache."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"latency": [POINT | {"degree": 1}]}))
    profile = profile_of(PlannerConfig(profile=str(path)), MODEL, Geometry(), "cpu")
    plan = make_plan([[ITEM]], profile, Cluster(nodes=(1,)), PlanOptions(budget_s=0.0))
    assert {c.module for c in plan.steps[0].cascades} == {"text", "vae", "dit"}
    assert f"{path} has no point of text and vae: the FLOP model is taken." in profile.notes


def test_of_an_unknown_gpu_it_is_said_whose_flops_are_taken_for_modules_without_a_point(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"device": "Some GPU", "latency": [POINT | {"degree": 1}]}))
    profile = profile_of(PlannerConfig(profile=str(path)), MODEL, Geometry(), "Some GPU")
    assert assumption("Some GPU") in profile.notes
    known = profile_of(PlannerConfig(profile=str(path)), MODEL, Geometry(), "Some GPU", measured={"Some GPU": 300.0})
    assert assumption("Some GPU") not in known.notes and any("Some GPU 300 TFLOP/s" in note for note in known.notes)


def test_a_profile_of_a_cpu_without_points_of_encoders_is_priced_as_a_cpu(tmp_path: Path) -> None:
    """Where no device is said, as in a plan, the processor's name was taken for a GPU that is in no table."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"device": "CPU x86_64", "latency": [POINT | {"degree": 1}]}))
    planned, run = (profile_of(PlannerConfig(profile=str(path)), MODEL, Geometry(), name) for name in ("", "cpu"))
    assert planned.notes == run.notes and not any("H100" in note for note in planned.notes)
    for module in ("text", "vae", "dit"):
        clip = Samples.of(1, CLIP)
        assert planned.price(module, clip, 1) == run.price(module, clip, 1), module


def test_a_profile_looks_once_at_what_of_the_transformer_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For patterns it builds the transformer without memory, which takes seconds: with 14B they were 10 to 28."""
    asked, path = list[DiTConfig](), tmp_path / "p.json"
    path.write_text(json.dumps({"latency": [POINT | {"degree": 1}]}))

    def part(dit: DiTConfig) -> TrainedPart:
        asked.append(dit)
        return dit.usual_part

    monkeypatch.setattr("actors.planning.options.trained_part", part)
    for config in (PlannerConfig(profile=str(path)), PlannerConfig()):
        profile_of(config, MODEL, Geometry(), "cpu")
        assert len(asked) == 1, config
        profile_of(config, MODEL, Geometry(), "cpu", part=asked.pop().usual_part)
        assert not asked


def test_of_a_profile_that_forbids_other_shapes_no_flop_model_is_told(tmp_path: Path) -> None:
    """The note said that it is taken, and the plan that there is no degree for text."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"latency": [POINT | {"degree": 1}], "extrapolate": False}))
    profile = profile_of(PlannerConfig(profile=str(path)), MODEL, Geometry(), "cpu")
    assert not any("FLOP" in note for note in profile.notes)
    with pytest.raises(PlanError, match=r'no legal degree for text.*set "extrapolate": true in the file'):
        make_plan([[ITEM]], profile, Cluster(nodes=(1,)), PlanOptions(budget_s=0.0))


def test_a_profile_of_bags_over_nodes_alone_has_the_dit() -> None:
    run = Profile.from_flops(WanConfig(num_heads=8), degrees=(2,))
    run.observe("dit", Samples.of(1, CLIP, 100), 2, 2.0, spanned=BagSpread.of(2, 1.0))
    again = read_profile(profile_json(run))
    assert again.has("dit") and not again.has("vae")
    plan = make_plan([[ITEM]], again, Cluster(nodes=(1, 1)), PlanOptions(budget_s=0.0))
    assert [(c.module, c.degree) for c in plan.steps[0].cascades] == [("dit", 2)]


@pytest.mark.parametrize("strategy", ["cascade", "knapsack", "static"])
def test_nothing_is_planned_by_a_profile_without_the_dit(strategy: str) -> None:
    profile = read_profile({"latency": [POINT | {"module": "vae", "degree": 1}]})
    with pytest.raises(PlanError, match="has no point of the DiT"):
        make_plan([[ITEM]], profile, Cluster(nodes=(2,)), PlanOptions(strategy=strategy))
