"""Bags that send attention heads in two halves, in prices: half of the way is exposed, where ranks send so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from actors.config import PlannerConfig
from actors.plan.costs.halved import HalvedHeads
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import write_profile
from actors.planning.options import profile_of
from app.bench.sequence import HALVES, priced
from ops.comm.collectives import Group
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.latte.config import LatteConfig
from ops.models.wan.config import WanConfig
from ops.packed.exchange_halves import worth_halving
from ops.packed.packing import Layout, Sequence

GPU = "NVIDIA H100 80GB HBM3"
DIT = WanConfig(num_layers=2, num_heads=12, head_dim=16, ffn_dim=64)
LONG, SHORT = Samples.of(1, (81, 480, 832)), Samples.of(1, (1, 256, 256))
Setting = Literal["auto", "whole", "halves"]


def profile(exchange: Setting = "auto", device: str = GPU, gbps: float = 1.0, dit: DiTConfig = DIT) -> Profile:
    return Profile.from_flops(replace(dit, exchange=exchange), device=device, exchange_gbps=gbps)


def exposed_s(exchange: Setting, device: str, clip: Samples, degree: int) -> float:
    paid, free = (profile(exchange, device, gbps).seconds("dit", clip, degree) for gbps in (1.0, 1e9))
    return paid - free


@pytest.mark.parametrize(
    ("exchange", "device", "clip", "degree", "share"),
    [
        ("auto", GPU, LONG, 2, 0.5),
        ("auto", GPU, LONG, 4, 0.75 / 3 + 0.25 * 2 / 3),  # one head of three there, two back
        ("auto", GPU, LONG, 12, 1.0),  # one head each
        ("auto", GPU, LONG, 8, 1.0),  # heads that are shared travel whole
        ("auto", GPU, SHORT, 2, 1.0),  # too little to hide anything
        ("auto", "cpu", LONG, 2, 1.0),
        ("whole", GPU, LONG, 2, 1.0),
        ("halves", "cpu", SHORT, 2, 0.5),
        ("halves", GPU, LONG, 12, 1.0),  # what travels whole is not halved by a setting
        ("halves", GPU, LONG, 5, 1.0),  # two heads of each rank, and shared ones
    ],
)
def test_a_bag_pays_for_what_is_exposed(
    exchange: Setting, device: str, clip: Samples, degree: int, share: float
) -> None:
    assert exposed_s(exchange, device, clip, degree) == pytest.approx(
        share * exposed_s("whole", device, clip, degree), rel=1e-3
    )


class _OnDevice(Group):
    on_device = True  # type: ignore[assignment]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("text", [0, 300])
@pytest.mark.parametrize("degree", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("dit", [DIT, HunyuanConfig(num_heads=12, head_dim=16)], ids=["wan", "hunyuan"])
def test_prices_and_ranks_go_by_one_rule(dit: DiTConfig, degree: int, text: int, batch: int) -> None:
    """For packs of one bucket, whose batch is what a price is asked for."""
    prices, group = profile(dit=dit), _OnDevice(None, tuple(range(degree)), 0, 1.0)
    told = set()
    for frames, width in ((1, 480), (1, 1024), (5, 832), (9, 480), (17, 832), (81, 832)):
        load = prices.load_of("dit", Samples.of(batch, (frames, 480, width), text), degree)
        layout = Layout([Sequence((1, 1, load.tokens), text)] * batch, degree, 0)
        exchange = layout.joint_exchange if dit.flops.within else layout.video_exchange
        halves = worth_halving(exchange, dit.num_heads // degree, group)
        assert (load.exposed < 1.0) == halves, (frames, width)
        told.add(halves)
    assert told == {True, False} or degree == 12


def test_a_measured_profile_is_priced_by_the_config(tmp_path: Path) -> None:
    measured = profile()
    measured.measure(LONG.key("dit", 1), 1.0)
    write_profile(measured, tmp_path / "profile.json")
    told: dict[Setting, float] = {"auto": 0.5, "whole": 1.0}
    for exchange, exposed in told.items():
        model = ModelConfig(dit=replace(DIT, exchange=exchange))
        planner = PlannerConfig(profile=str(tmp_path / "profile.json"))
        found = profile_of(planner, model, Geometry(patch=DIT.patch), GPU)
        assert found.load_of("dit", LONG, 2).exposed == exposed


def test_blocks_that_attend_in_turn_hide_nothing_by_halves() -> None:
    for mode in ("sliced", "ulysses"):
        assert HalvedHeads.of(LatteConfig(bag_mode=mode, exchange="halves"), GPU) is None


def test_the_bench_of_ways_takes_off_what_is_hidden_once() -> None:
    prices = profile(gbps=300.0)
    fit, load = prices.model_of("dit"), prices.load_of("dit", LONG, 2)
    assert fit is not None and load.exposed == 0.5
    ways = {one.way: one.seconds for one in priced(fit, load, DIT.num_heads)}
    whole = {one.way: one.seconds for one in priced(fit, replace(load, exposed=1.0), DIT.num_heads)}
    assert ways == whole and ways[HALVES] < ways["Ulysses"]
    assert ways[HALVES] == pytest.approx(prices.seconds("dit", LONG, 2), rel=1e-6)
