from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest

from actors.config import PlannerConfig
from actors.plan.costs.fit import fit, fit_form, knapformer_constants
from actors.plan.costs.flops import PRIORS
from actors.plan.costs.forms import FORMS, Load
from actors.plan.costs.known import KnownCosts
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import profile_json, read_profile, write_profile
from actors.plan.costs.spanning import BagSpread, SpanningPoint
from actors.plan.costs.topology import CrossNode, Topology
from actors.plan.types import Cluster, Item, PlanError
from actors.planning.make_plan import make_plan
from actors.planning.options import profile_of
from ops.geometry import Geometry
from ops.models.base.tiling import Tiling
from ops.models.config import ModelConfig
from ops.models.wan.config import WanConfig
from ops.typed import as_plain
from tests.actors.plan.options import counted

ENTRY = {"module": "dit", "batch": 1, "frames": 17, "height": 64, "width": 64, "degree": 1, "seconds": 2.0}


def load(batch: int, tokens: int, degree: int) -> Load:
    return Load(batch=batch, frames=17, height=64, width=64, text_tokens=0, tokens=tokens, degree=degree)


def grid() -> list[Load]:
    return [load(b, s, k) for b in (1, 2, 4) for s in (1000, 5000, 20000, 60000) for k in (1, 2, 4, 8)]


def test_measured_points_are_used_as_they_stand(h100: Profile) -> None:
    assert h100.seconds("dit", Samples.of(1, (129, 1280, 720)), 8) == pytest.approx(22.1055, abs=1e-4)
    assert h100.legal_degrees("dit", Samples.of(1, (129, 1280, 720))) == (4, 6, 8, 12, 24)
    assert h100.legal_degrees("dit", Samples.of(1, (17, 1280, 720))) == ()


def test_arachne_form_recovers_its_coefficients() -> None:
    truth = (0.5, 2e-4, 1e-8, 3e-5)
    seconds = [sum(c * x for c, x in zip(truth, FORMS["arachne"].features(point, 2.0))) for point in grid()]
    found = fit_form("arachne", grid(), seconds, "synthetic")
    assert found.coefficients == pytest.approx(truth, rel=1e-6)
    assert found.r2 == pytest.approx(1.0) and not found.poor


def test_pixel_form_counts_pixels_and_clips_of_each_member() -> None:
    shapes = [(17, 64, 96), (1, 128, 64), (33, 64, 64)]
    points = [
        Load(batch=b, frames=f, height=h, width=w, text_tokens=0, tokens=9, degree=k)
        for b in (1, 4)
        for f, h, w in shapes
        for k in (1, 2)
    ]
    seconds = [0.2 + (3e-6 * p.frames * p.height * p.width + 0.01) * p.batch / p.degree for p in points]
    assert fit_form("pixels", points, seconds, "synthetic").coefficients == pytest.approx((0.2, 3e-6, 0.01), rel=1e-6)


def test_a_member_multiplies_its_part_of_video_and_text() -> None:
    assert replace(load(1, 1000, 4), text_tokens=500).rows == 375


def test_adaptiveload_grid_finds_the_exponent() -> None:
    seconds = [0.3 + 1e-7 * p.batch * p.length**1.75 / p.degree for p in grid()]
    found = fit_form("adaptiveload", grid(), seconds, "synthetic")
    assert found.exponent == pytest.approx(1.75)
    assert found.coefficients == pytest.approx((0.3, 1e-7), rel=1e-6)


def test_knapformer_fit_gives_k_and_gamma() -> None:
    width, k, gamma = 3072, 2e-15, 0.42
    points = [load(1, n, 1) for n in (448, 4000, 16000, 65536)]
    seconds = [k * (24 * p.length * width**2 + gamma * 4 * p.length**2 * width) for p in points]
    found = fit_form("knapformer", points, seconds, "synthetic")
    assert knapformer_constants(found, width) == pytest.approx((k, gamma), rel=1e-6)


def test_a_fit_of_many_points_is_that_of_the_features_of_each() -> None:
    """Features of all points at once and errors by a triangle of few rows, beside one by one and all rows."""
    source = random.Random(0)
    loads = [load(source.randint(1, 9), source.randint(1, 90_000), source.choice([1, 2, 4])) for _ in range(200)]
    for form, exponent in (("adaptiveload", 1.85), ("arachne", 2.0)):
        columns = np.array([FORMS[form].features(one, exponent) for one in loads])
        weights = np.array([3.0, *(1.0 / column.mean() for column in columns.T[1:])])
        seconds = columns @ weights * np.array([source.uniform(0.9, 1.1) for _ in loads])
        found = fit_form(form, loads, seconds.tolist(), "", exponents=(exponent,))
        plain = np.linalg.lstsq(columns / seconds[:, None], np.ones(len(loads)), rcond=None)[0]
        assert (plain >= 0).all() and found.coefficients == pytest.approx(plain.tolist(), rel=1e-9)


def test_coefficients_are_never_negative() -> None:
    seconds = [10.0 / (1 + p.batch) for p in grid()]  # falls with the load: no physical model fits
    found = fit("dit", grid(), seconds, "nonsense")
    assert min(found.coefficients) >= 0 and found.poor


def test_a_poor_fit_is_reported_and_replaced_by_the_flop_model_where_that_is_better() -> None:
    """Seconds that grow as FLOPs do, with noise of a factor of 3: what is fitted to them follows the noise."""
    noise = {1: 3.0, 5: 0.4, 9: 1.0, 13: 2.5, 17: 0.3, 21: 1.0}
    by_flops = {f: PRIORS["dit"].predict(Profile().load(("dit", 1, f, 64, 64, 1), 0)) for f in noise}
    entries = [{**ENTRY, "frames": f, "seconds": by_flops[f] * times} for f, times in noise.items()]
    profile = read_profile({"latency": entries, "extrapolate": True, "degrees": {"dit": [1]}})
    found = profile.model_of("dit")
    assert found is not None and found.source.startswith("FLOP model")
    assert any("poor" in note for note in profile.notes)
    profile.measure(("dit", 1, 25, 64, 64, 1), 2.0 * by_flops[21])
    profile.model_of("dit")
    (note,) = profile.notes
    assert "fit to 7 points" in note, "of the fit that counts alone"


TILING = Tiling(height=256, width=256, height_stride=192, width_stride=192)


def test_the_tile_model_counts_tiles_of_the_busiest_worker() -> None:
    profile = Profile(tiling=TILING)
    one, two, three = (
        FORMS["tiles"].features(profile.load_of("vae", Samples.of(1, (16, 256, 640)), k), 2.0)[1] for k in (1, 2, 3)
    )
    upper, lower = 16 * 256 * (256 + 256 + 256 + 64), 16 * 64 * (256 + 256 + 256 + 64)  # four columns of two rows
    assert one == upper + lower
    assert two == 16 * (256 + 64) * (256 + 256), "dealt in turn, the first has columns 0 and 2"
    assert three == 16 * (256 * 256 + 256 * 64 + 64 * 256), "tiles 0, 3 and 6"


def test_a_vae_without_tiles_is_dealt_by_clips() -> None:
    loads = [Profile().load_of("vae", Samples.of(5, (17, 480, 832)), k) for k in (1, 2, 4, 8)]
    assert [load.dealt.count for load in loads if load.dealt] == [5, 3, 2, 1]
    assert [FORMS["tiles"].features(load, 2.0)[1] / (17 * 480 * 832) for load in loads] == [5, 3, 2, 1]


def test_observed_cascades_correct_their_point_and_their_neighbours() -> None:
    profile = Profile.from_flops(WanConfig())
    ran = Samples.of(2, (17, 64, 96), 20)
    before, modes = profile.seconds("dit", Samples.of(4, (17, 64, 96), 20), 1), profile.modes("dit", ran)
    factor = 3.0
    for _ in range(3):
        profile.observe("dit", ran, 1, factor * 0.05)
    assert profile.seconds("dit", ran, 1) == pytest.approx(0.15)
    assert profile.modes("dit", ran)[0] == (1, profile.seconds("dit", ran, 1)) != modes[0]
    assert profile.seconds("dit", Samples.of(4, (17, 64, 96), 20), 1) != before
    with pytest.raises(ValueError):
        profile.observe("dit", Samples.of(2, (17, 64, 96)), 1, math.nan)


def test_a_written_profile_reads_back_equal(tmp_path: Path, h100: Profile) -> None:
    write_profile(h100, tmp_path / "p.json")
    again = read_profile(tmp_path / "p.json")
    assert (again.measured, again.degrees, again.cross_node) == (h100.measured, h100.degrees, h100.cross_node)


def tiled_vae(points: int) -> dict:
    """A profile whose VAE is linear in its tiles but for a third more time of long ones, as no form can say."""
    shapes = product((1, 2, 3), (16, 32, 48), (256, 448, 640, 832))
    entries = []
    for batch, frames, height in islice(shapes, points):
        pixels = TILING.dealt(batch, (frames, height, 256), 1).pixels
        seconds = (0.05 + 4e-7 * pixels) * (1.35 if frames > 20 else 1.0)
        entries.append(
            {
                "module": "vae",
                "batch": batch,
                "frames": frames,
                "height": height,
                "width": 256,
                "degree": 1,
                "seconds": seconds,
            }
        )
    return {"latency": entries, "degrees": {"vae": [1]}, "extrapolate": True, "tiling": as_plain(TILING)}


def test_a_profile_that_does_not_ask_for_the_residual_needs_no_xgboost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    found = read_profile(tiled_vae(36)).model_of("vae")
    assert found is not None and found.residual is None


def test_a_profile_that_asks_for_the_residual_is_refused_without_xgboost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"residual is 'xgboost', and that package is not installed\. .*\[xgboost\]"):
        read_profile(tiled_vae(36) | {"residual": "xgboost"})


def test_the_residual_explains_what_the_tiles_do_not() -> None:
    plain, helped = (
        read_profile(tiled_vae(36) | {"residual": residual}).model_of("vae") for residual in ("none", "xgboost")
    )
    assert plain is not None and helped is not None
    assert "XGBoost" in helped.source and helped.worst < 0.5 * plain.worst


def test_too_few_points_for_the_residual_are_noted() -> None:
    profile = read_profile(tiled_vae(12) | {"residual": "xgboost"})
    found = profile.model_of("vae")
    assert found is not None and found.residual is None
    assert any("12 points are too few" in note for note in profile.notes)


def test_seconds_of_a_bag_over_nodes_follow_common_rails() -> None:
    cross = CrossNode(decay=1.5, rails_per_node="AABB")
    topology = Topology(Cluster(nodes=(4, 4)), cross)
    assert topology.seconds((0, 1), 1.0, 0.2) == 1.0
    assert topology.seconds((0, 4), 1.0, 0.2) == pytest.approx(1 + 0.2 * math.exp(-1.5))
    assert topology.seconds((0, 6), 1.0, 0.2) == pytest.approx(1.2)
    assert topology.seconds((0, 2, 4), 1.0, 0.2) == pytest.approx(1 + 0.2 * math.exp(-0.75))
    slow = Topology(Cluster(nodes=(1, 1), speed=(1.0, 0.5)), CrossNode())
    assert slow.seconds((0, 1), 1.0, 0.2) == pytest.approx(2.4)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"latency": [{**ENTRY, "seconds": -1}]}, "positive"),
        ({"latency": [{**ENTRY, "seconds": float("nan")}]}, r"latency\.0\.seconds is nan; expected a number"),
        ({"latency": [{**ENTRY, "module": "audio"}]}, r"latency\.0\.module is 'audio'; expected one of text, vae, dit"),
        ({"latency": []}, "nothing can be priced"),
        ({"latency": [{**ENTRY, "degree": 0}]}, "degree is 0"),
        ({"latency": [ENTRY], "degrees": {"dit": [0]}, "num_heads": 12}, r"degrees.dit is \[0\]"),
        ({"latency": [ENTRY], "residual": "trees"}, "residual is 'trees'; expected one of none, xgboost"),
        ({"latency": [ENTRY], "degrees": []}, "degrees is .*; expected a mapping"),
        ({"latency": [ENTRY], "cross_node": {"decay": "x"}}, "decay"),
    ],
)
def test_bad_profiles_are_refused_with_one_sentence(change: dict, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        read_profile(change)


def test_malformed_json_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"latency": [')
    with pytest.raises(PlanError, match=r"p.json is not valid JSON: .* line 1"):
        read_profile(path)
    with pytest.raises(PlanError, match="does not exist; `heddle profile --out"):
        read_profile(tmp_path / "none.json")


def test_an_item_that_no_degree_holds_is_named_with_a_remedy(h100: Profile) -> None:
    big = Item(id="big", batch=1, frames=129, height=1280, width=720)
    with pytest.raises(PlanError, match=r"'big' \(129f .* on 2 workers: the smallest is 4\. Add 2 workers"):
        make_plan([[big]], h100, Cluster(nodes=(2,)), counted())
    many = Item(id="many", batch=3, frames=129, height=1280, width=720)
    with pytest.raises(PlanError, match="Use batch 1"):
        make_plan([[many]], h100, Cluster(nodes=(8,)), counted(split=False))
    with pytest.raises(PlanError, match="The profile lists"):
        make_plan([[Item(id="odd", batch=1, frames=130, height=1280, width=720)]], h100, Cluster(nodes=(8,)), counted())


def test_a_memory_limit_is_answered_with_the_degree_that_fits() -> None:
    """80 rows of the clip take 0.5 GiB each as far as two peaks say, of which a worker has 10 GiB."""
    peaks = [{"units": units, "gib": units / 2} for units in (8, 16)]
    kinds = [{"module": "dit", "kind": kind, "peaks": peaks} for kind in ("solo", "bag")]
    profile = read_profile(
        {"latency": [ENTRY], "degrees": {"dit": [1]}, "extrapolate": True, "num_heads": 8, "needs": {"kinds": kinds}}
    )
    with pytest.raises(PlanError, match="It fits at degree 4"):
        make_plan(
            [[Item(id="x", batch=1, frames=17, height=64, width=64)]],
            profile,
            Cluster(nodes=(8,), room_gib=(10.0,) * 8),
            counted(),
        )


def test_peaks_of_whole_devices_are_read_past_with_one_sentence() -> None:
    old = {"latency": [{**ENTRY, "peak_gib": 70.0}], "limits": {"gpu_memory_gib": 80}, "memory": None}
    (note,) = read_profile(old).notes
    assert "peaks of whole devices" in note
    assert read_profile({"latency": [ENTRY], "memory": None}).notes == []


def test_a_degree_that_shares_heads_costs_what_it_sends_more() -> None:
    """8 ranks of 12 heads hold 16 copies of heads: q and the output travel once, k and v 4 / 3 times."""
    clip = "dit", Samples.of(1, (81, 480, 832))
    free = Profile.from_flops(WanConfig(num_heads=12), exchange_gbps=1e9)
    paid = Profile.from_flops(WanConfig(num_heads=12), exchange_gbps=1.0)
    sent = {k: paid.seconds(*clip, k) - free.seconds(*clip, k) for k in (6, 8)}
    assert sent[8] / sent[6] == pytest.approx((7 / 64) / (5 / 36) * (1 + 4 / 12 / 2), rel=1e-6)
    paid.num_heads = 8
    paid.points_changed("dit")
    assert paid.seconds(*clip, 8) - free.seconds(*clip, 8) == pytest.approx(sent[8] / (1 + 1 / 6), rel=1e-6)


def wan_plan(gbps: float, setting: str) -> set[int]:
    """Degrees of one clip of a 12-head model on 8 workers."""
    model = ModelConfig(dit=WanConfig(num_layers=30, num_heads=12, head_dim=128, ffn_dim=8960))
    profile = profile_of(PlannerConfig(sequence=setting), model, Geometry())
    profile.models = Profile.from_flops(model.dit, tflops=400.0, exchange_gbps=gbps).models
    items = [Item(id="x", batch=1, frames=81, height=480, width=832, text_tokens=100)]
    plan = make_plan([items], profile, Cluster(nodes=(8,)), counted(budget_s=0.0))
    return {cascade.degree for cascade in plan.steps[0].cascades if cascade.module == "dit"}


def test_eight_workers_run_a_clip_of_twelve_heads_together_where_that_is_cheaper() -> None:
    assert wan_plan(300.0, "auto") == {8}
    assert wan_plan(300.0, "ulysses") == {6}


def test_settings_say_which_degrees_are_planned() -> None:
    model = ModelConfig(dit=WanConfig(num_heads=12))

    def degrees(**settings: object) -> tuple[int, ...]:
        return profile_of(PlannerConfig(**settings), model, Geometry()).degrees["dit"]

    assert degrees() == (1, 2, 3, 4, 6, 8, 12)
    assert degrees(sequence="ulysses") == (1, 2, 3, 4, 6, 12)
    assert degrees(degrees=(5, 16)) == (1, 2, 3, 4, 5, 6, 8, 12, 16)
    assert degrees(topology="g1n2+g10n1") == (1, 2, 3, 4, 6, 8, 10, 12)


def test_no_bag_has_no_workers() -> None:
    with pytest.raises(PlanError, match="degree 0 must be at least 1"):
        make_plan([[]], Profile.from_flops(WanConfig()), Cluster(nodes=(8,)), counted(degrees=(0,)))


def test_profiles_are_json(h100: Profile) -> None:
    profile = Profile.from_flops(WanConfig())
    profile.observe("dit", Samples.of(1, (17, 64, 64)), 1, 0.1)
    assert json.loads(json.dumps(profile_json(profile)))["latency"][0]["seconds"] == 0.1


def test_a_step_makes_loads_of_what_ran_in_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Profile.from_flops(WanConfig(num_heads=4))
    for count, frames in product(range(1, 21), range(1, 61, 4)):
        made.observe("dit", Samples.of(count, (frames, 64, 64), 20), 1, 0.1 * count * frames)
    other = Samples.of(2, (17, 64, 96), 20)
    made.seconds("dit", other, 2)
    loads: list[Samples] = []
    plain = KnownCosts._plain_load

    def noted(known: KnownCosts, part: Samples, degree: int) -> Load:
        loads.append(part)
        return plain(known, part, degree)

    monkeypatch.setattr(KnownCosts, "_plain_load", noted)
    made.observe("dit", Samples.of(3, (9, 96, 96), 20), 1, 2.0)
    made.seconds("dit", other, 2)
    assert len(loads) < 10 < len(made.live)
    made.num_heads = 6  # another model: no load of before holds
    made.points_changed("dit")
    made.seconds("dit", other, 2)
    assert len(loads) > len(made.live)


def test_a_price_by_bags_over_nodes_follows_what_ran_since() -> None:
    made, part = Profile.from_flops(WanConfig(num_heads=4)), Samples.of(1, (17, 64, 64), 20)
    made.observe("dit", part, 2, 4.0, spanned=BagSpread.of(2, 1.0))
    before = made.seconds("dit", part, 2)
    for _ in range(2):
        made.observe("dit", part, 2, 8.0, spanned=BagSpread.of(3, 1.0))
    assert made.seconds("dit", part, 2) == pytest.approx(2 * before)


def test_counts_are_known_that_were_measured_or_ran_on_one_node_or_over_several() -> None:
    made, shape = (
        read_profile({"latency": [{**ENTRY, "batch": 2}, {**ENTRY, "batch": 9, "module": "vae"}]}),
        (17, 64, 64),
    )
    made.observe("dit", Samples.of(3, shape), 1, 2.0)
    made.observe("dit", Samples.of(4, shape), 2, 2.0, spanned=BagSpread.of(2, 1.0))
    made.count_over_nodes([SpanningPoint(batch=5, frames=17, height=64, width=64, degree=2, nodes=2, seconds=1.0)])
    assert made.known_counts("dit", shape) == {2, 3, 4, 5}


def test_points_of_a_file_that_were_priced_before_follow_what_ran_since() -> None:
    made = read_profile({"latency": [ENTRY, {**ENTRY, "frames": 33, "seconds": 4.0}], "extrapolate": False})
    other = Samples.of(1, (33, 64, 64))
    assert made.seconds("dit", other, 1) == 4.0
    for _ in range(3):
        made.observe("dit", Samples.of(1, (17, 64, 64)), 1, 4.0)
    assert made.seconds("dit", other, 1) == pytest.approx(8.0)
