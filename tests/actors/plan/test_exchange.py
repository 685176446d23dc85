"""Measured all-to-alls price what degrees cost, where points of bags do not say it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.plan.costs.exchange import CallLatency, ExchangePoint, exchange_speed
from actors.plan.costs.flops import PRIORS, exchange_calls, exchange_seconds, flop_coefficients
from actors.plan.costs.forms import FORMS
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import profile_json, read_profile, write_profile
from ops.models.latte.config import LatteConfig
from ops.models.wan.config import WanConfig

DIT = WanConfig(num_layers=4, num_heads=4, head_dim=32, ffn_dim=512)
CLIPS = ((1, 256), (1, 512), (5, 256), (9, 256), (17, 256), (17, 512), (33, 256))
CLIP = Samples.of(1, (17, 512, 512))
ALPHA, COMM = 2e-4, 6e-5


def exchange(num_bytes: int, seconds: float, workers: int = 2) -> ExchangePoint:
    return ExchangePoint(workers=workers, num_bytes=num_bytes, seconds=seconds)


def of_one_worker(clips: tuple[tuple[int, int], ...] = CLIPS, exchange_s: float = 0.0) -> Profile:
    """Points of one worker, of a machine without attention and with slow all-to-alls."""
    profile = Profile(degrees={"dit": (1, 2, 4)}, exchange_s=exchange_s)
    for frames, side in clips:
        profile.measure(("dit", 1, frames, side, side, 1), 0.05 + ALPHA * profile.tokens(frames, side, side))
    return profile


def true_s(profile: Profile, frames: int, side: int, degree: int) -> float:
    tokens = profile.tokens(frames, side, side)
    return 0.05 + ALPHA * tokens / degree + COMM * tokens * (degree - 1) / degree**2


def test_latency_and_bandwidth_are_the_line_through_two_sizes() -> None:
    def taken(num_bytes: int, workers: int) -> float:
        return 0.002 + num_bytes * (workers - 1) / workers / 3e9

    found = [exchange(size, taken(size, k), k) for size in (2**20, 2**25) for k in (2, 4)]
    assert exchange_speed(found) == pytest.approx((0.002, 3e9))
    assert exchange_speed(found[:1]) is None
    busy = [exchange(2**20, 0.5), exchange(2**25, 0.1)]
    assert exchange_speed(busy) == (0.0, pytest.approx(2**24 / 0.1)), "no negative time of a byte"


def test_the_latency_of_a_call_is_the_line_over_doublings_of_the_bag() -> None:
    def calls(latencies: dict[int, float]) -> CallLatency:
        return CallLatency.of(
            exchange(size, at + size * (k - 1) / k / 3e9, k) for k, at in latencies.items() for size in (2**20, 2**25)
        )

    found = calls({2: 0.001, 4: 0.003, 8: 0.005})
    assert [found.seconds(k) for k in (1, 2, 4, 16)] == pytest.approx([0.0, 0.001, 0.003, 0.007])
    assert calls({4: 0.003}).seconds(2) == pytest.approx(0.003), "of one bag nobody knows how it grows"
    falling = calls({2: 0.003, 4: 0.001})
    assert falling.seconds(2) == falling.seconds(64) == pytest.approx(0.002)
    steep = calls({4: 0.0, 8: 0.01})
    assert steep.seconds(2) >= 0 and CallLatency.of(()).seconds(8) == 0


@pytest.mark.parametrize("known", [False, True])
def test_measured_latencies_price_short_loads_of_large_bags(known: bool) -> None:
    """The machine is one that spends 400 calls of 0.1 ms and doubling of it on every cascade."""
    profile = of_one_worker()
    if known:
        profile.exchanges = tuple(
            exchange(size, 1e-4 * math.log2(k) + size * (k - 1) / k / 3e9, k) for k in (2, 4) for size in (2**20, 2**25)
        )
    for frames, side in CLIPS:
        for degree in (2, 4):
            seconds = true_s(profile, frames, side, degree) + 0.04 * math.log2(degree)
            profile.measure(("dit", 1, frames, side, side, degree), seconds)
    fit = profile.model_of("dit")
    assert fit is not None and fit.form.startswith("arachne")
    true = true_s(profile, 1, 512, 8) + 0.04 * 3
    error = abs(profile.seconds("dit", Samples.of(1, (1, 512, 512)), 8) / true - 1)
    assert error < 1e-6 if known else error > 0.1


def test_degrees_that_were_not_measured_are_priced_by_the_measured_all_to_all() -> None:
    known, unknown = of_one_worker(exchange_s=COMM), of_one_worker()
    for degree in (2, 4):
        true = true_s(known, 17, 512, degree)
        assert known.seconds("dit", CLIP, degree) == pytest.approx(true, rel=0.01)
        assert unknown.seconds("dit", CLIP, degree) < 0.93 * true, "perfect scaling without it"
    assert known.seconds("dit", CLIP, 1) == unknown.seconds("dit", CLIP, 1)


def test_measured_bags_count_instead_of_it() -> None:
    bags = of_one_worker(exchange_s=100 * COMM)
    for frames, side in CLIPS:
        bags.measure(("dit", 1, frames, side, side, 2), true_s(bags, frames, side, 2))
    assert bags.seconds("dit", CLIP, 4) == pytest.approx(true_s(bags, 17, 512, 4), rel=0.02)


def test_noise_of_bags_is_weighed_against_what_all_to_alls_took_on_their_own() -> None:
    """Nine bags with 8 % of noise say little of what a degree sends that none of them had."""
    off: dict[float, list[float]] = {0.0: [], COMM: []}
    for seed in range(24):
        rng = np.random.default_rng(seed)
        noise = {(frames, side): math.exp(rng.normal(0, 0.08)) for frames, side in CLIPS}
        for exchange_s, errors in off.items():
            bags = of_one_worker(exchange_s=exchange_s)
            for (frames, side), factor in noise.items():
                bags.measure(("dit", 1, frames, side, side, 2), factor * true_s(bags, frames, side, 2))
            true = true_s(bags, 17, 512, 8)
            errors.append(abs(bags.seconds("dit", CLIP, 8) / true - 1))
    assert np.mean(off[COMM]) < 0.8 * np.mean(off[0.0]) and max(off[COMM]) < 0.8 * max(off[0.0])


def test_a_cascade_calls_twice_around_every_attention() -> None:
    """Backward as often as forward, and with checkpointing forward twice: as `ops.packed.sequence_parallel` is seen to
    do in tests/ops/test_sequence_parallel.py."""
    assert exchange_calls(DIT) == 2 * 2 * 4 and exchange_calls(replace(DIT, gradient_checkpointing=True)) == 2 * 3 * 4
    assert exchange_calls(LatteConfig()) == 0, "exchanged in slices, by other laws"


def test_few_points_scale_the_work_of_the_prior_and_not_its_exchange() -> None:
    profile = of_one_worker(CLIPS[:2], exchange_s=COMM)
    fit = profile.model_of("dit")
    assert fit is not None and "FLOP model" in fit.source
    assert dict(zip(FORMS[fit.form].names, fit.coefficients))["comm"] == COMM
    scaled = of_one_worker(CLIPS[:2]).model_of("dit")
    assert scaled is not None and scaled.coefficients[:3] == pytest.approx(fit.coefficients[:3])
    assert scaled.coefficients[3] / scaled.coefficients[1] == pytest.approx(
        PRIORS["dit"].coefficients[3] / PRIORS["dit"].coefficients[1]
    ), "another device's network, scaled"


def test_the_coefficient_is_that_of_the_flop_model_at_this_bandwidth() -> None:
    nothing = {"vae_flops_per_pixel": 0.0, "text_flops_per_token": 0.0, "launch_s": 0.0}
    whole = flop_coefficients(DIT, 7.0, exchange_gbps=3.0, **nothing)["dit"]
    assert exchange_seconds(DIT, 3e9) == whole.coefficients[-1] > 0


def test_a_profile_keeps_them_and_one_without_is_priced_as_ever(tmp_path: Path) -> None:
    first = of_one_worker(exchange_s=COMM)
    first.exchanges = (exchange(2**20, 0.1), exchange(2**25, 0.2))
    write_profile(first, tmp_path / "p.json")
    again = read_profile(tmp_path / "p.json")
    assert again.exchanges == first.exchanges and again.exchange_s == COMM
    shape = "dit", CLIP, 4
    assert again.seconds(*shape) == first.seconds(*shape)
    old = {key: value for key, value in profile_json(first).items() if key not in ("exchanges", "exchange_s")}
    assert read_profile(old).seconds(*shape) == of_one_worker().seconds(*shape)
