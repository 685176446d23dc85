"""Workers that make each clip together are one bag or two halves, by what either costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.config import PlannerConfig, TrainConfig
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import write_profile
from app.sampling.clip_worker import profile_for
from app.sampling.clips import ClipSettings
from app.sampling.ways import cheapest_way, check_together, forward_s, legal_sizes
from app.settings.config import RunConfig
from app.settings.sections import RunSection
from ops.config import ForcingSchedule
from ops.flow.sampling import SamplerConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig, TextConfig
from ops.models.flux.config import FluxConfig
from ops.models.latte.config import LatteConfig
from ops.models.wan.config import WanConfig
from ops.typed import ConfigError

GUIDED, ALONE = SamplerConfig(), SamplerConfig(guidance_scale=1.0)
WAN, LATTE = WanConfig(num_layers=4, num_heads=12), LatteConfig(num_layers=4, num_heads=2, head_dim=64, ffn_dim=512)
GRID = (3, 2, 3)
RUN = RunSection(name="tiny")
GEOMETRY = Geometry(vae_stride=(4, 8, 8), patch=(1, 2, 2))
SETTINGS = ClipSettings(frames=17, height=128, width=128, fps=8.0, seed=0, sampler=GUIDED)  # 5 x 8 x 8 tokens


def profile(dit: WanConfig | LatteConfig, gbps: float) -> Profile:
    return Profile.from_flops(dit, geometry=GEOMETRY, tflops=1.0, exchange_gbps=gbps, launch_s=1e-6)


def chosen(workers: int, dit: WanConfig | LatteConfig, gbps: float, sampler: SamplerConfig = GUIDED) -> tuple[int, int]:
    model = ModelConfig(dit=dit, text=TextConfig(max_length=16))
    way = cheapest_way(workers, model, replace(SETTINGS, sampler=sampler), GEOMETRY, profile(dit, gbps))
    return way.bags, way.size


@pytest.mark.parametrize("dit", [WAN, LATTE], ids=["wan", "latte"])
def test_an_even_number_is_two_halves_and_an_odd_one_what_costs_less(dit: WanConfig | LatteConfig) -> None:
    """Two halves exchange less. Of three workers one is lost to them, which pays where exchanges are dear."""
    fast, slow = 1000.0, 1e-3
    assert [chosen(workers, dit, slow) for workers in (2, 4)] == [(2, 1), (2, 2)]
    assert chosen(4, dit, 1.0) == (2, 2)
    assert (chosen(3, dit, fast), chosen(3, dit, slow)) == ((1, 3), (2, 1))
    assert chosen(3, dit, slow, ALONE) == (1, 3), "nothing runs in halves"


def test_a_step_of_halves_is_one_forward_and_of_a_bag_two() -> None:
    model, known = ModelConfig(dit=LATTE, text=TextConfig(max_length=16)), profile(LATTE, 1.0)
    grid = GEOMETRY.token_grid(SETTINGS.frames, SETTINGS.height, SETTINGS.width)
    one = cheapest_way(4, model, SETTINGS, GEOMETRY, known, "never")
    two = cheapest_way(4, model, SETTINGS, GEOMETRY, known, "always")
    assert (one.bags, one.size, two.bags, two.size) == (1, 4, 2, 2) and one.rates == known.slice_rates()
    assert one.step_s == 2 * forward_s(model, SETTINGS, grid, known, 4)
    assert two.step_s == forward_s(model, SETTINGS, grid, known, 2)
    alone = cheapest_way(1, model, SETTINGS, GEOMETRY, known)
    assert alone.step_s == pytest.approx(4 * two.step_s, rel=0.4), "a device computes what four share"


def test_what_was_measured_decides() -> None:
    """A bag of three that takes as long as one worker: halves are taken, though FLOPs speak for the bag."""
    model, known = ModelConfig(dit=WAN, text=TextConfig(max_length=16)), profile(WAN, 1000.0)
    assert cheapest_way(3, model, SETTINGS, GEOMETRY, known).bags == 1
    seconds = known.seconds("dit", Samples.of(1, (17, 128, 128), 16), 1)
    for degree in (1, 3):
        known.measure(("dit", 1, 17, 128, 128, degree), seconds)
    assert cheapest_way(3, model, SETTINGS, GEOMETRY, known).bags == 2


@pytest.mark.parametrize("dit", [WAN, LATTE], ids=["wan", "latte"])
@pytest.mark.parametrize("again", [False, True])
def test_a_forward_takes_as_long_whatever_was_trained(dit: WanConfig | LatteConfig, again: bool) -> None:
    grid, last = GEOMETRY.token_grid(SETTINGS.frames, SETTINGS.height, SETTINGS.width), "*blocks.3"
    took = set()
    for changed in ({}, {"lora_rank": 4}, {"train_only": (last,)}, {"train_only": ("proj_out",)}):
        model = ModelConfig(dit=replace(dit, gradient_checkpointing=again, **changed), text=TextConfig(max_length=16))
        known = profile_for(RunConfig(run=RUN, model=model), GEOMETRY, torch.device("cpu"))
        took |= {forward_s(model, SETTINGS, grid, known, degree) for degree in (1, 2)}
    assert len(took) == 2, "of each degree one"


def test_a_forward_is_a_share_of_the_pass_that_was_measured(tmp_path: Path) -> None:
    """A file of a LoRA run has passes of two forwards of products, one of all weights three."""
    grid = GEOMETRY.token_grid(SETTINGS.frames, SETTINGS.height, SETTINGS.width)
    for changed, forwards in (({}, 3), ({"lora_rank": 4}, 2), ({"train_only": ("proj_out",)}, 1)):
        model = ModelConfig(dit=replace(WAN, **changed), text=TextConfig(max_length=16))
        measured = Profile(degrees={"dit": (1,)})
        measured.measure(("dit", 1, 17, 128, 128, 1), 6.0)
        write_profile(measured, tmp_path / "p.json")
        config = RunConfig(run=RUN, model=model, planner=PlannerConfig(profile=str(tmp_path / "p.json")))
        known = profile_for(config, GEOMETRY, torch.device("cpu"))
        assert forward_s(model, SETTINGS, grid, known, 1) == pytest.approx(6.0 / forwards)


def test_clips_are_priced_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.sampling.clip_worker.device_name", lambda device: "NVIDIA H100")
    trains = (TrainConfig(autocast="bfloat16"), TrainConfig())
    bf16, fp32 = (
        profile_for(RunConfig(run=RUN, model=ModelConfig(dit=WAN), train=train), GEOMETRY, torch.device("cuda"))
        for train in trains
    )
    assert (bf16.element_bytes, fp32.element_bytes) == (2, 4)
    ratio = fp32.models["dit"].coefficients[1] / bf16.models["dit"].coefficients[1]
    assert ratio == pytest.approx(989.4 / 66.9)


def test_guidance_that_the_weights_take_has_no_halves() -> None:
    assert legal_sizes(4, WAN, GUIDED, GRID) == [(1, 4), (2, 2)]
    assert legal_sizes(5, WAN, GUIDED, GRID) == [(1, 5), (2, 2)]
    assert (
        legal_sizes(4, WAN, ALONE, GRID) == legal_sizes(4, FluxConfig(guidance_embeds=True), GUIDED, GRID) == [(1, 4)]
    )
    assert legal_sizes(4, WAN, ALONE, GRID, "always") == [(1, 4)]
    assert legal_sizes(1, WAN, GUIDED, GRID) == [(1, 1)]


def test_a_clip_is_dealt_to_no_more_workers_than_it_has_frames_or_positions() -> None:
    """Three frames of six positions: bags of six; no heads are dealt out, but by Ulysses."""
    for workers, sampler in ((5, ALONE), (6, ALONE), (7, GUIDED), (13, GUIDED)):
        check_together(workers, LATTE, sampler, GRID)
    assert legal_sizes(7, LATTE, GUIDED, GRID) == [(2, 3)]
    check_together(20, replace(LATTE, bag_mode="ulysses"), ALONE, GRID)
    with pytest.raises(ConfigError, match="3 frames of 6 positions, which are dealt to at most 6 workers here"):
        check_together(7, LATTE, ALONE, GRID)
    with pytest.raises(ConfigError, match="at most 12 workers here"):
        check_together(14, LATTE, GUIDED, GRID)


def test_frames_that_attend_by_blocks_need_bags_that_divide_the_heads() -> None:
    """12 heads: eight workers are two halves of four."""
    guided, alone = (replace(one, forcing=ForcingSchedule(causal_block_size=5)) for one in (GUIDED, ALONE))
    assert legal_sizes(8, WAN, guided, GRID) == [(2, 4)] and chosen(8, WAN, 1000.0, guided) == (2, 4)
    assert legal_sizes(4, WAN, guided, GRID) == [(1, 4), (2, 2)]
    assert legal_sizes(8, WAN, replace(GUIDED, forcing=ForcingSchedule()), GRID) == [(1, 8), (2, 4)]
    with pytest.raises(ConfigError, match=r"--workers 10 --together: .* divide the 12 attention heads. Use 9 workers"):
        check_together(10, WAN, guided, GRID)
    with pytest.raises(ConfigError, match="Use 6 workers"):
        check_together(8, WAN, alone, GRID)
