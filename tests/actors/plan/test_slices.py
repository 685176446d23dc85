"""Bags of spatial-temporal transformers in plans: any size, exposed communication, one choice of slices for all."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from actors.config import PlannerConfig, WorkersConfig
from actors.plan.costs.exchange import ExchangePoint
from actors.plan.costs.flops import exchange_seconds
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import write_profile
from actors.plan.costs.spanning import BagSpread
from actors.plan.types import Cluster, Item
from actors.planning.actor import Planner
from actors.planning.options import flop_profile, profile_of
from app.settings.rules import check_degrees
from ops.geometry import Geometry
from ops.models.config import ModelConfig, VAEConfig
from ops.models.latte.config import LatteConfig
from ops.models.wan.config import WanConfig
from ops.spatial_temporal.choice import SlicingRule
from ops.spatial_temporal.schedule import Axis, Grid, length_of
from ops.typed import ConfigError

GEOMETRY = Geometry(vae_stride=(4, 4, 4), patch=(1, 2, 2))
DIT = LatteConfig(num_layers=4, num_heads=4, head_dim=32, ffn_dim=512)
DSP = replace(DIT, temporal_slices=1, spatial_slices=1, temporal_lead=0, spatial_lead=0)
AXES: tuple[Axis, ...] = ("temporal", "spatial")
CLIP = Samples.of(1, (29, 64, 64), 20)  # 8 x 64 tokens
ITEM = Item(id="a", batch=1, frames=29, height=64, width=64, text_tokens=20)


def latte(dit: LatteConfig = DIT, gbps: float = 0.5) -> Profile:
    return Profile.from_flops(dit, geometry=GEOMETRY, tflops=0.2, exchange_gbps=gbps, launch_s=1e-6)


def test_a_bag_costs_what_its_schedule_leaves_exposed() -> None:
    """DSP exposes every exchange, forward and backward; `auto` hides most of it, and is priced so."""
    seconds = {dit: latte(dit).seconds("dit", CLIP, 2) for dit in (DSP, DIT)}
    free = latte(DSP, gbps=1e9).seconds("dit", CLIP, 2)
    rows, exchanges = 8 * 64 / 2 / 2, 2 * 2 * 4  # rows that a member sends; blocks of two kinds, two directions
    assert seconds[DSP] - free == pytest.approx(exchanges * rows * 4 * DIT.dim / 0.5e9, rel=1e-3)
    assert free < seconds[DIT] < free + 0.4 * (seconds[DSP] - free)


def test_a_bag_by_ulysses_exposes_all_that_its_spatial_blocks_exchange() -> None:
    """Four activations in each of three passes, and it is planned at sizes that deal out the heads."""
    by_heads = replace(DIT, bag_mode="ulysses")
    paid, free = (latte(by_heads, gbps=gbps).seconds("dit", CLIP, 2) for gbps in (0.5, 1e9))
    rows, exchanges = 8 * 64 / 2 / 2, 4 * 2 * 4
    assert paid - free == pytest.approx(exchanges * rows * 4 * DIT.dim / 0.5e9, rel=1e-3)
    assert latte(by_heads).legal_degrees("dit", CLIP) == (1, 2, 4)
    planner = PlannerConfig(degrees=(3,), sequence="ulysses")
    with pytest.raises(ConfigError, match=r"planner\.degrees has 3, which does not divide the 4 attention heads"):
        check_degrees(ModelConfig(dit=by_heads), planner, WorkersConfig())


def test_a_price_is_that_of_the_member_with_most_rows() -> None:
    """Eight frames on three workers: three of them, and 22 of 64 positions; a picture's spatial blocks stay whole."""
    profile = latte(gbps=1e9)
    alone, three = (profile.seconds("dit", CLIP, degree) for degree in (1, 3))
    assert 22 / 64 < three / alone < 3 / 8 + 0.02
    alone, two = (profile.seconds("dit", Samples.of(1, (1, 64, 64)), degree) for degree in (1, 2))
    assert two > 0.7 * alone


def test_a_bag_has_any_size_up_to_the_frames_or_positions() -> None:
    profile = latte()
    assert profile.legal_degrees("dit", CLIP) == tuple(range(1, 65))
    assert profile.legal_degrees("dit", Samples.of(1, (29, 16, 16))) == tuple(range(1, 9))  # 8 frames of 4 positions
    assert profile.legal_degrees("dit", Samples.of(1, (1, 16, 16))) == (1, 2, 3, 4)
    wan = Profile.from_flops(WanConfig(num_heads=4), geometry=GEOMETRY)
    assert wan.legal_degrees("dit", CLIP) == (1, 2, 4)


def test_settings_allow_any_degree_where_no_heads_are_dealt_out() -> None:
    planner, workers = PlannerConfig(degrees=(1, 3, 5), sequence="ulysses"), WorkersConfig()
    check_degrees(ModelConfig(dit=DIT), planner, workers)
    with pytest.raises(ConfigError, match=r"planner\.degrees has 3, which does not divide the 4 attention heads"):
        check_degrees(ModelConfig(dit=WanConfig(num_heads=4)), planner, workers)


def test_a_plan_brings_the_rates_that_it_was_priced_by() -> None:
    profile = latte()
    cluster, config = Cluster(nodes=(3,)), PlannerConfig(budget_s=0.0, degrees=(3,))
    found = Planner(profile, config).plan(0, [[ITEM]], cluster, (), 0.0)
    assert found.rates == profile.slice_rates() is not None
    assert {cascade.degree for cascade in found.cascades if cascade.module == "dit"} == {3}
    wan = Profile.from_flops(WanConfig(num_heads=3), geometry=GEOMETRY)
    assert Planner(wan, config).plan(0, [[ITEM]], cluster, (), 0.0).rates is None


def test_workers_choose_what_was_priced() -> None:
    profile = latte()
    rates = profile.slice_rates()
    load = profile.load_of("dit", Samples.of(2, (29, 64, 64), 20), 3)
    chosen = SlicingRule(slicing=DIT.slicing, rates=rates, training=True).stack(8, 64, 2, 20, 3)
    assert load.slices == (chosen.temporal_slices + chosen.spatial_slices) / 2 > 1
    assert load.exposed < 0.5


@pytest.mark.parametrize("dit", [DIT, replace(DIT, temporal_slices=4, spatial_slices=4)])
@pytest.mark.parametrize(("frames", "degree"), [(1, 2), (29, 3), (29, 8)])
def test_slices_are_priced_that_a_member_has_rows_in(dit: LatteConfig, frames: int, degree: int) -> None:
    """Three of four slices of a picture's single frame are empty, and eight workers have one frame of eight each."""
    profile = latte(dit)
    load = profile.load_of("dit", Samples.of(1, (frames, 64, 64), 20), degree)
    rows = load.token_frames, load.tokens // load.token_frames
    how = SlicingRule(slicing=dit.slicing, rates=profile.slice_rates(), training=True)
    schedule = how.stack(*rows, 1, 20, degree)
    grid = Grid(frames=rows[0], positions=rows[1], schedule=schedule, degree=degree, rank=0)
    run = [
        sum(length_of(grid.chunk(axis, index, rank)) > 0 for axis in AXES for index in range(schedule.slices(axis)))
        for rank in range(degree)
    ]
    assert load.slices == max(run) / 2


def test_measurements_change_the_rates() -> None:
    """A device of half the speed: twice the seconds of rows. A measured link: its latency and its bytes a second."""
    profile, slow = latte(), latte()
    for frames in (1, 29, 57):
        slow.measure(("dit", 1, frames, 64, 64, 1), 2 * profile.seconds("dit", Samples.of(1, (frames, 64, 64)), 1))
    before, after = profile.slice_rates(), slow.slice_rates()
    assert after.row_s == pytest.approx(2 * before.row_s, rel=0.1)
    assert after.moved_s == before.moved_s
    points = [ExchangePoint(workers=2, num_bytes=n, seconds=3e-3 + n / 2 / 1e8) for n in (1 << 10, 1 << 24)]
    slow.exchanges = tuple(points)
    slow.count_exchange(exchange_seconds(DIT, 1e8))
    found = slow.slice_rates()
    assert found.part_s == pytest.approx(3e-3, rel=0.1)
    assert found.moved_s == pytest.approx(4 * DIT.dim / 1e8, rel=0.1)


def test_rates_are_those_of_one_device_and_of_bags_where_none_ran_alone() -> None:
    assumed, bags, both = latte(), latte(), latte()
    for frames in (29, 57, 85):
        clip = Samples.of(1, (frames, 64, 64))
        bags.measure(clip.key("dit", 2), 2 * assumed.seconds("dit", clip, 2))
        both.measure(clip.key("dit", 2), 0.5 * assumed.seconds("dit", clip, 2))
        both.measure(clip.key("dit", 1), 2 * assumed.seconds("dit", clip, 1))
    expected = assumed.slice_rates()
    assert bags.slice_rates().row_s > 1.5 * expected.row_s
    assert both.slice_rates().row_s == pytest.approx(2 * expected.row_s, rel=0.1)


def test_a_run_that_learns_from_bags_goes_on_planning() -> None:
    profile = latte()
    for seconds in (0.5, 0.52, 0.49):
        profile.observe("dit", CLIP, 2, seconds)
    assert profile.seconds("dit", CLIP, 2) == 0.5
    first = profile.slice_rates()
    for degree in (1, 3):
        for batch in (1, 2, 3):
            profile.observe("dit", Samples.of(batch, (29, 64, 64), 20), degree, batch * 0.9 / degree)
    assert profile.slice_rates() != first  # what one device took is known now
    model = profile.model_of("dit")
    assert model is not None and model.form == "spatial_temporal"
    assert profile.seconds("dit", Samples.of(4, (29, 64, 64), 20), 3) == pytest.approx(4 * 0.3, rel=0.3)


def test_a_run_that_learns_from_bags_over_nodes_alone_goes_on_planning() -> None:
    """What they take is priced by rates, which are not those of bags over nodes: neither needs the other."""
    profile = latte()
    before = profile.slice_rates()
    for batch in (1, 2, 3):
        for _ in range(3):
            profile.observe("dit", Samples.of(batch, (29, 64, 64), 20), 2, 0.5 * batch, spanned=BagSpread.of(2, 1.0))
            profile.learn_cross_node()
    assert profile.slice_rates() == before
    found = Planner(profile, PlannerConfig(budget_s=0.0, degrees=(2,))).plan(
        0, [[ITEM]], Cluster(nodes=(1, 1)), (), 0.0
    )
    assert found.rates == before


def test_a_profile_file_prices_bags_of_any_size(tmp_path: Path) -> None:
    """Its points are of one device; the form and the link are those of the model."""
    model = ModelConfig(dit=DIT, vae=VAEConfig(kind="haar", temporal=4, spatial=4, channels=16))
    measured, assumed = flop_profile(model, GEOMETRY), flop_profile(model, GEOMETRY)
    for batch in (1, 2, 4):
        for frames in (1, 29):
            part = Samples.of(batch, (frames, 64, 64))
            measured.measure(part.key("dit", 1), 3 * assumed.seconds("dit", part, 1))
    write_profile(measured, tmp_path / "p.json")
    profile = profile_of(PlannerConfig(profile=str(tmp_path / "p.json")), model, GEOMETRY)
    assert profile.sliced is not None
    assert profile.model_of("dit").form == "spatial_temporal"  # type: ignore[union-attr]
    alone, three = (profile.seconds("dit", CLIP, degree) for degree in (1, 3))
    assert alone / 3 < three < 0.6 * alone


@pytest.mark.parametrize("degrees", [(1,), (1, 2)])
def test_a_measured_profile_stands_captions_of_another_length(degrees: tuple[int, ...], tmp_path: Path) -> None:
    """Rates of slices are by the file's points, which are corrected by what ran, by the model of those points."""
    file, source = Profile(degrees={"dit": degrees}, geometry=GEOMETRY), latte()
    for degree, batch, frames in product(degrees, (1, 2), (17, 29, 57)):
        part = Samples.of(batch, (frames, 64, 64), 64)
        file.measure(part.key("dit", degree), source.seconds("dit", part, degree), 64)
    write_profile(file, tmp_path / "p.json")
    profile = profile_of(PlannerConfig(profile=str(tmp_path / "p.json")), ModelConfig(dit=DIT), GEOMETRY)
    ran, other = Samples.of(1, (17, 64, 64), 90), Samples.of(2, (45, 64, 64), 64)
    before = profile.seconds("dit", other, 1)
    profile.observe("dit", ran, 1, 2 * source.seconds("dit", ran, 1))
    assert 1.2 * before < profile.seconds("dit", other, 1) < 2.5 * before
    write_profile(profile, tmp_path / "learned.json")
