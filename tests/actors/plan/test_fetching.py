"""Blocks fetched from host memory: no pass is planned to be shorter than their copies, and a pack has them once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.config import PlannerConfig, TrainConfig, TrainMemoryConfig
from actors.plan.costs.fetching import ON_DEVICE, FetchedWeights
from actors.plan.costs.point import LivePoint, Samples
from actors.plan.costs.profile import Profile
from actors.plan.schedule.bounds import rolling_bound
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.types import Cluster, Item, PlanError
from actors.planning.actor import Planner
from actors.planning.batching import TargetBatch
from actors.planning.forecasts import sizes_of
from actors.planning.learned import refuse_other, setting_of
from actors.planning.make_plan import make_plan
from actors.planning.options import copies_if_fetched, flop_profile, profile_of, tell_fetched
from data.config import BatchConfig
from data.types import Bucket
from ops.geometry import Geometry
from ops.models.config import ModelConfig, TextConfig
from ops.models.wan.config import WanConfig

DIT = WanConfig(num_heads=12, head_dim=128, ffn_dim=8960, num_layers=30, gradient_checkpointing=True, lora_rank=16)
MODEL = ModelConfig(dit=DIT)
GEOMETRY = Geometry(patch=DIT.patch)
IMAGE, CLIP = (1, 256, 256), (81, 480, 832)
NODE, REPLICATED = (
    TrainConfig(parameter_dtype="bfloat16", memory=TrainMemoryConfig(parameters=p)) for p in ("node", "replicated")
)
GPU = "NVIDIA GeForce RTX 4090"


def profile(way_s: float = 1.0, in_points: bool = True, train: TrainConfig = REPLICATED) -> Profile:
    found = profile_of(PlannerConfig(), MODEL, GEOMETRY, GPU, train)
    if way_s:
        found.fetched = FetchedWeights(num_bytes=100, bytes_per_s=100 / way_s, in_points=in_points)
    return found


def seconds(found: Profile, clips: int, shape: tuple[int, int, int] = IMAGE, degree: int = 1) -> float:
    return found.seconds("dit", Samples.of(clips, shape, 512), degree)


@pytest.mark.parametrize(
    ("computed_s", "expected_s"),
    [(0.0, 2.0), (1.0, 2.0), (2.0, 1.0 + 1.5), (4.0, 4.0), (8.0, 8.0)],  # forward is a quarter of what is computed
)
def test_each_half_of_a_pass_takes_what_it_computes_or_what_it_copies(computed_s: float, expected_s: float) -> None:
    assert FetchedWeights(num_bytes=10, bytes_per_s=10.0).beside(computed_s) == expected_s
    assert ON_DEVICE.beside(computed_s) == computed_s


def test_a_pass_is_no_shorter_than_its_copies_and_a_long_one_hides_them() -> None:
    bare, found = profile(0.0), profile(1.0)
    assert seconds(bare, 1) < 0.5 and seconds(found, 1) == seconds(found, 2) == 2.0
    assert seconds(found, 1, degree=2) == 2.0, "each member of a bag copies all of them"
    assert seconds(bare, 1, CLIP) > 4.0 and seconds(found, 1, CLIP) == seconds(bare, 1, CLIP)
    assert found.seconds("vae", Samples.of(1, IMAGE), 1) == bare.seconds("vae", Samples.of(1, IMAGE), 1)


parts = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([IMAGE, CLIP, (17, 256, 256), (33, 480, 832)])),
    min_size=2,
    max_size=4,
    unique_by=lambda part: part[1],
).map(lambda found: [Samples.of(count, shape, 512) for count, shape in found])


@given(parts=parts, way_s=st.sampled_from([0.05, 0.5, 5.0, 50.0]))
def test_a_pack_copies_once(parts: list[Samples], way_s: float) -> None:
    found, bare = profile(way_s), profile(0.0)
    together = found.together("dit", parts, 1)
    assert together == pytest.approx(found.fetched.beside(bare.together("dit", parts, 1)))
    alone = [found.seconds("dit", part, 1) for part in parts]
    assert max(alone) <= together * (1 + 1e-9) and together <= sum(alone) * (1 + 1e-9)


def test_small_clips_of_a_step_share_passes_where_weights_are_copied() -> None:
    items = [Item(id=f"i{n}", batch=1, frames=1, height=256 + 64 * n, width=256, text_tokens=512) for n in range(8)]
    options, cluster = PlanOptions(budget_s=0.02), Cluster(nodes=(1,))

    def dits(found: Profile) -> tuple[int, float]:
        plan = make_plan([items], found, cluster, options)
        assert plan.steps[0].makespan_s >= plan.steps[0].lower_bound_s * (1 - 1e-9)
        assert rolling_bound(Problem([items], found, cluster, options)) == pytest.approx(plan.steps[0].lower_bound_s)
        return sum(c.module == "dit" for c in plan.steps[0].cascades), plan.steps[0].makespan_s

    passes, makespan_s = dits(profile(2.0))
    assert passes == 1 and makespan_s < 5.0, "eight passes would copy for 32 s"


def test_a_batch_for_some_seconds_is_filled_up_to_what_its_copies_take_anyway() -> None:
    bucket, limits = Bucket(*IMAGE), BatchConfig(target_s=2.0, memory_tokens=1e6, text_tokens=512)
    sizes = [TargetBatch(profile=profile(way_s), geometry=GEOMETRY)(bucket, limits) for way_s in (0.0, 1.0)]
    assert sizes[0] > sizes[1] >= 1
    assert seconds(profile(1.0), sizes[1]) == 2.0 < seconds(profile(1.0), sizes[1] + 1)


def test_passes_that_waited_for_copies_do_not_make_others_dear() -> None:
    found, truth = profile(1.0), profile(1.0)
    for clips in range(1, 9):
        found.observe("dit", Samples.of(clips, (1, 128, 128), 512), 1, 2.0)
    assert seconds(found, 1, CLIP) == pytest.approx(seconds(truth, 1, CLIP))
    parts = Samples.of(1, (1, 128, 128), 512), Samples.of(2, (1, 128, 160), 512)
    assert found.together("dit", parts, 1) == pytest.approx(2.0)


def test_points_measured_with_weights_on_the_device_get_the_copies() -> None:
    """`heddle profile` measures trained blocks there, and frozen ones where the run has them."""
    key = ("dit", 1, *IMAGE, 1)
    trained, frozen = profile(1.0, in_points=False), profile(1.0)
    for one in (trained, frozen):
        one.measure(key, 0.4, 512)
    assert seconds(trained, 1) == 2.0 and seconds(frozen, 1) == 0.4
    trained.live[key] = LivePoint.of(1.7, 3, 512)
    trained.points_changed("dit")
    assert seconds(trained, 1) == 1.7, "a run's own measurement has them"


@pytest.mark.parametrize(
    ("device", "gpus", "gbps"),
    [
        (GPU, 1, 27.2),
        ("NVIDIA H100 80GB HBM3", 1, 54.4),
        ("NVIDIA H100 80GB HBM3", 8, 25.0),
        ("GeForce RTX 9999", 1, 27.2),
    ],
)
def test_what_a_pass_copies_and_how_fast(device: str, gpus: int, gbps: float) -> None:
    found = Profile.from_flops(DIT, device=device)
    sizes = sizes_of(MODEL, NODE, cuda=True)
    tell_fetched(found, MODEL, sizes, gpus)
    assert found.fetched.num_bytes == sizes.in_blocks > 2e9
    assert found.fetched.bytes_per_s == pytest.approx(gbps * 1e9)
    tell_fetched(found, MODEL, sizes_of(MODEL, REPLICATED, cuda=True), gpus)
    assert not found.fetched.num_bytes


def test_a_runs_profile_knows_by_its_settings_that_blocks_are_fetched() -> None:
    assert profile(0.0, train=NODE).fetched.num_bytes == sizes_of(MODEL, NODE, cuda=True).in_blocks
    assert not profile(0.0).fetched.num_bytes
    assert not profile_of(PlannerConfig(), MODEL, GEOMETRY, "cpu", NODE).fetched.num_bytes, (
        "a CPU computes with them there"
    )
    whole = replace(MODEL, dit=replace(DIT, lora_rank=0))
    assert not profile_of(PlannerConfig(), whole, GEOMETRY, GPU, NODE).fetched.in_points


def test_where_auto_may_fetch_blocks_a_run_knows_beforehand_what_passes_would_copy() -> None:
    auto = TrainConfig(parameter_dtype="bfloat16")
    found = copies_if_fetched(profile(0.0), MODEL, auto, 2)
    assert found == profile_of(PlannerConfig(), MODEL, GEOMETRY, GPU, NODE, gpus=2).fetched and found.num_bytes
    assert copies_if_fetched(profile(0.0), MODEL, auto, 0) is None, "on CPUs"
    plain = replace(MODEL, dit=replace(DIT, gradient_checkpointing=False))
    assert copies_if_fetched(profile(0.0), plain, auto, 2) is None, "no pass computes its forward again"
    for decided in (NODE, REPLICATED):
        assert copies_if_fetched(profile(0.0), MODEL, decided, 2) is None


def test_plans_of_a_generation_count_what_its_workers_have_decided() -> None:
    """From its first plan on, before anything was measured."""
    items = [Item(id=f"i{n}", batch=1, frames=1, height=256 + 64 * n, width=256, text_tokens=512) for n in range(8)]
    planner, copies = Planner(profile(0.0), PlannerConfig(budget_s=0.02)), profile(2.0).fetched

    def passes() -> int:
        answer = planner.plan(0, [items], Cluster(nodes=(1,)), [], 0.02)
        return sum(cascade.module == "dit" for cascade in answer.cascades)

    before = passes()
    planner.count_fetched(copies)
    assert passes() == 1 < before
    planner.count_fetched(ON_DEVICE)
    assert passes() == before


def test_costs_measured_with_blocks_elsewhere_are_refused() -> None:
    measured = Profile.from_flops(DIT, device=GPU)
    measured.setting = setting_of(MODEL, GPU, NODE)
    refuse_other(measured, setting_of(MODEL, GPU, NODE), "p.json")
    with pytest.raises(PlanError, match="frozen blocks 'in host memory'; this run has 'on the device'"):
        refuse_other(measured, setting_of(MODEL, GPU, REPLICATED), "p.json")
    refuse_other(
        measured, setting_of(MODEL, GPU, TrainConfig(parameter_dtype="bfloat16")), "auto decides on the device"
    )


def test_a_text_encoder_in_host_memory_is_copied_for_each_of_its_cascades(tmp_path: Path) -> None:
    (tmp_path / "text_encoder").mkdir()
    numbers = {"model_type": "umt5", "d_model": 4096, "num_layers": 24}
    (tmp_path / "text_encoder" / "config.json").write_text(json.dumps(numbers))
    text = TextConfig(path=str(tmp_path), d_model=4096)
    here, there = (
        flop_profile(replace(MODEL, text=replace(text, place=place)), GEOMETRY, GPU).models["text"].coefficients
        for place in ("device", "host")
    )
    assert there[0] - here[0] == pytest.approx(24 * 12 * 4096**2 * 2 / 27.2e9)
    assert here[1] == there[1] == pytest.approx(24 * 24 * 4096**2 / (0.4 * 165.2e12)), "24 layers, as its folder says"
