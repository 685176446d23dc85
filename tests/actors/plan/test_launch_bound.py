"""A GPU on which small cascades cost what their launches do: the demo on an NVIDIA H200, measured alone
(profiles/demo-h200.json, by `heddle profile`) and in a run of 300 steps (profiles/demo-h200-run.json)."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.plan.costs.fit import LEAST_POINTS, fit_form, model_from
from actors.plan.costs.flops import PRIORS
from actors.plan.costs.left_out import left_out
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import Module
from actors.planning.batching import fitted_limits
from app.settings.config import RunConfig
from data.buckets import BucketTable
from ops.geometry import Geometry
from ops.models.wan.config import WanConfig

HERE = Path(__file__).parent / "profiles"
DEMO = RunConfig.load(Path(__file__).parents[3] / "configs" / "runs" / "demo.yaml")
CLIPS = ((1, 64), (9, 64), (17, 128), (33, 128), (33, 256))  # frames, side
ALONE, RUN = HERE / "demo-h200.json", HERE / "demo-h200-run.json"


def errors_at_unseen(module: Module, file: Path) -> list[float]:
    """Relative errors of a profile's prices of points that were taken out of it, a fifth at a time."""
    whole = read_profile(file)
    points = [key for key in whole.measured if key[0] == module]
    found = []
    for fold in range(5):
        rest = read_profile(file)
        for key in points[fold::5]:
            del rest.measured[key]
        for key in points[fold::5]:
            priced = rest.price(module, Samples.of_key(key, whole.text_tokens.get(key, 0)), key[5])
            assert priced is not None
            found.append(abs(priced / whole.measured[key] - 1))
    return found


@pytest.mark.parametrize(("module", "median", "worst"), [("dit", 0.11, 0.4), ("text", 0.12, 0.5), ("vae", 0.16, 0.5)])
def test_shapes_that_were_not_measured_are_priced_near_the_truth(module: Module, median: float, worst: float) -> None:
    """The scaled FLOP model, which stood in for any fit of a low R^2, is 89, 66 and 38 % off (median)."""
    errors = errors_at_unseen(module, ALONE)
    assert statistics.median(errors) <= median and max(errors) <= worst


def test_the_note_on_a_nearly_constant_fit_does_not_call_it_poor() -> None:
    profile = read_profile(ALONE)
    found = profile.model_of("dit")
    assert found is not None and found.r2 < 0.2 and found.unseen is not None
    assert found.unseen.median < 0.11 < found.worst < 0.5
    (note,) = profile.notes
    assert "nearly constant" in note and "poor" not in note and "missing points use the fit" in note
    assert "error at points left out 9%" in found.quality


def test_a_bag_saves_no_launches() -> None:
    """By the FLOP model two workers were twice as quick, and the demo's plans were full of bags."""
    profile = read_profile(ALONE)
    alone, both = (profile.seconds("dit", Samples.of(4, (17, 32, 48), 56), degree) for degree in (1, 2))
    assert both > 0.9 * alone


def test_a_few_points_that_are_too_quick_do_not_draw_the_constant_down() -> None:
    """In the run three of 12 points, parts of packed cascades, took 7 to 11 ms and all others 19 to 29."""
    profile = read_profile(RUN)
    found = profile.model_of("dit")
    assert found is not None
    middle = statistics.median(seconds for key, seconds in profile.measured.items() if key[0] == "dit")
    assert found.predict(profile.load(("dit", 4, 17, 32, 48, 1), 56)) == pytest.approx(middle, rel=0.1)
    loads, seconds = profile.points("dit")
    plain = fit_form("arachne", loads, seconds, "")
    assert plain.predict(loads[0]) < 0.7 * middle, "what the floor is for"


@pytest.mark.parametrize("file", [ALONE, RUN])
def test_noise_chooses_no_exponent(file: Path) -> None:
    """p was 2.4, the end of what is tried, by prices of which launches were 97 %: the longest clips then had half of
    the batch."""
    limits = replace(DEMO.data.batch, auto=True, compute=0.0)
    buckets = BucketTable.build(DEMO.data.buckets, Geometry(vae_stride=(4, 4, 4))).buckets
    found, fit = fitted_limits(read_profile(file), buckets, limits)
    assert found.exponent == fit.exponent == limits.exponent
    assert found.compute >= 272**limits.exponent


@pytest.mark.parametrize("slope", [0.0, 1e-12])
def test_without_a_target_launches_are_worth_their_batch(slope: float) -> None:
    """All buckets are of one length, where one clip of the longest is a batch of 1, nearly all of it launches. Where
    seconds do not grow, or only noise says how, batches grow to the largest that was measured, and no further."""
    limits = replace(DEMO.data.batch, auto=True, compute=0.0)
    (bucket,) = BucketTable.build(
        replace(DEMO.data.buckets, table=("17x32x48",)), Geometry(vae_stride=(4, 4, 4))
    ).buckets
    profile = Profile.from_flops(DEMO.model.dit, geometry=Geometry(vae_stride=(4, 4, 4)))
    for batch in (1, 2, 4, 8, 16):
        noise = 1 + 0.1 * (-1) ** batch.bit_length()
        profile.measure(("dit", batch, 17, 32, 48, 1), noise * (0.02 + slope * batch), 56)
    sizes = []
    for measured in (16, 4, 1):
        profile.measured = {key: seconds for key, seconds in profile.measured.items() if key[1] <= measured}
        profile.points_changed("dit")
        found, _ = fitted_limits(profile, [bucket], limits)
        length = profile.tokens(17, 32, 48) + limits.text_tokens
        sizes.append(round(found.compute / length**found.exponent))
    assert sizes == [16, 4, 1]


@pytest.mark.parametrize(("launch_s", "clips"), [(0.0, 1), (0.09, 1), (0.11, 2), (0.35, 4), (0.7, 8), (90.0, 16)])
def test_batches_grow_by_doublings_until_they_take_what_their_launches_do(launch_s: float, clips: int) -> None:
    """A clip of 0.1 s, measured in batches of up to 16."""
    limits = replace(DEMO.data.batch, auto=True, compute=0.0)
    geometry = Geometry(vae_stride=(4, 4, 4))
    (bucket,) = BucketTable.build(replace(DEMO.data.buckets, table=("17x32x48",)), geometry).buckets
    profile = Profile.from_flops(DEMO.model.dit, geometry=geometry)
    for batch in (1, 2, 4, 8, 16):
        profile.measure(("dit", batch, 17, 32, 48, 1), launch_s + 0.1 * batch, 56)
    found, _ = fitted_limits(profile, [bucket], limits)
    length = profile.tokens(17, 32, 48) + limits.text_tokens
    assert found.compute / length**found.exponent == pytest.approx(clips, rel=1e-3)


def test_a_target_counts_on_points_of_every_batch() -> None:
    limits = replace(DEMO.data.batch, auto=True, compute=0.0, target_s=0.02)
    buckets = BucketTable.build(DEMO.data.buckets, Geometry(vae_stride=(4, 4, 4))).buckets
    found, _ = fitted_limits(read_profile(ALONE), buckets, limits)
    assert found.compute / 272**found.exponent > 32, "32 clips of the longest bucket took 18 ms"


def test_points_that_tell_their_exponent_keep_it() -> None:
    profile = read_profile(ALONE)
    for key in profile.measured:
        if key[0] == "dit":
            noise = 1 + 0.3 * (-1) ** len(str(key))
            length = profile.tokens(*key[2:5]) + 56
            profile.measured[key] = noise * (1e-5 + 1e-9 * key[1] * length**2.2)
    limits = replace(DEMO.data.batch, auto=True, compute=0.0)
    buckets = BucketTable.build(DEMO.data.buckets, Geometry(vae_stride=(4, 4, 4))).buckets
    assert fitted_limits(profile, buckets, limits)[0].exponent == pytest.approx(2.2, abs=0.16)


def test_left_out_points_are_priced_by_the_others_alone() -> None:
    profile = Profile()
    loads = [profile.load_of("text", Samples.of(batch, (0, 0, 0), 10), 1) for batch in (1, 2, 3, 4)]
    seen: list[int] = []

    def mean_of(some: object, seconds: object) -> object:
        assert isinstance(seconds, list)
        seen.append(len(seconds))
        return lambda load: statistics.mean(seconds)

    found = left_out(mean_of, loads, [1.0, 1.0, 1.0, 2.0])  # type: ignore[arg-type]
    assert seen == [3, 3, 3, 3]
    assert found.worst == pytest.approx(0.5) and found.median == pytest.approx(1 / 3)


def test_a_good_fit_is_chosen_without_leaving_points_out() -> None:
    profile = Profile()
    loads = [profile.load_of("text", Samples.of(batch, (0, 0, 0), 10), 1) for batch in range(1, LEAST_POINTS + 1)]
    found, notes = model_from("text", PRIORS["text"], loads, [0.1 + 0.2 * load.batch for load in loads], "cpu", False)
    assert found.form == "captions" and found.unseen is None and not notes


def test_a_form_that_replaces_a_poor_fit_has_its_own_name_alone() -> None:
    profile = Profile.from_flops(DEMO.model.dit, tflops=1.0, exchange_gbps=1.0)
    sizes = [(batch, frames, side) for batch in (1, 2, 4) for frames, side in CLIPS]
    loads = [profile.load(("dit", batch, frames, side, side, 1), 16) for batch, frames, side in sizes]
    noise = np.exp(np.random.default_rng(14).normal(0, 0.25, len(loads)))
    seconds = [
        float(factor) * (0.002 + 2.04e-9 * one.batch * one.length**2 + 1e-5 * one.batch * one.length)
        for one, factor in zip(loads, noise, strict=True)
    ]
    chosen, notes = model_from("dit", profile.models["dit"], loads, seconds, "x", False)
    assert notes and chosen.source == f"{chosen.form} form fitted to 15 points of x"


def test_the_same_points_give_the_same_prices_in_whatever_order_they_came() -> None:
    """A resume reads them in another order than that in which the run before it had seen them."""
    source, dit = random.Random(4), WanConfig(num_layers=40, num_heads=40, head_dim=128, gradient_checkpointing=True)
    points = [
        (Samples.of(1, (frames, 480, 832), 100), degree, source.uniform(0.4, 2.5))
        for frames in (1, 17, 33, 49, 65, 81, 121)
        for degree in (4, 8, 16)
    ]
    true = Profile.from_flops(dit, tflops=400.0, launch_s=1e-4, exchange_gbps=300.0)

    def priced(order: Sequence[tuple[Samples, int, float]]) -> float:
        profile = Profile.from_flops(dit, tflops=400.0, launch_s=1e-4, exchange_gbps=300.0)
        for part, degree, noise in order:
            profile.observe("dit", part, degree, 0.3 + noise * true.seconds("dit", part, degree))
        return round(profile.seconds("dit", Samples.of(2, (73, 480, 832), 100), 8), 9)

    assert len({priced(source.sample(points, len(points))) for _ in range(8)}) == 1
