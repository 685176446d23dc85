"""`heddle bench sequence`: prices of the ways in which a bag can share attention."""

from __future__ import annotations

import pytest

from actors.plan.costs.forms import FORMS
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from app.bench.sequence import HALVES, HIDDEN, RING, SHARED, USP, geometry_of, priced, run, ways_of
from app.bench.workload import CONFIGS
from app.settings.config import RunConfig
from ops.geometry import Geometry
from ops.models.wan.config import WanConfig
from ops.typed import ConfigError


def test_volumes_are_those_of_twelve_heads_on_eight_ranks() -> None:
    """Rows of a head that a rank with n rows sends forward: Ulysses 4 n 12 (7 / 8) = 42 n."""
    found = ways_of(12, 8)
    assert found[SHARED] == pytest.approx((2 * 12 + 2 * 16) * (7 / 8) / 42)
    assert found[USP] == pytest.approx((4 * 12 * (3 / 4) + 2 * 12) / 42)
    assert found[RING] == found[HIDDEN] == pytest.approx((2 * 2 * 12 * 7 + 4 * 12 * 7) / 3 / 42)
    assert ways_of(12, 6).keys() == {"Ulysses", HALVES, RING, HIDDEN} and ways_of(12, 1) == {"Ulysses": 1.0}
    assert ways_of(12, 12).keys() == {"Ulysses", RING, HIDDEN}, "one head for each rank"


@pytest.mark.parametrize("degree", [4, 6, 8])
def test_what_runs_is_priced_as_the_planner_does(degree: int) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=12), tflops=400.0, exchange_gbps=300.0)
    load = profile.load_of("dit", Samples.of(1, (81, 480, 832), 512), degree)
    ways = {one.way: one for one in priced(profile.models["dit"], load, 12)}
    runs = ways[SHARED if degree == 8 else "Ulysses"]
    assert runs.seconds == pytest.approx(profile.seconds("dit", Samples.of(1, (81, 480, 832), 512), degree))
    assert runs.seconds < ways[RING].seconds and ways[HIDDEN].seconds < ways[RING].seconds
    if HALVES in ways:
        link = profile.models["dit"].coefficients[-1] * FORMS["arachne"].features(load, 1.0)[-1]
        assert ways[HALVES].seconds == pytest.approx(runs.seconds - link / 2)


@pytest.mark.parametrize(
    ("preset", "stride", "patch"),
    [
        ("wan2.1-1.3b", (4, 8, 8), (1, 2, 2)),
        ("ltx-2b", (8, 32, 32), (1, 1, 1)),
        ("mochi-1", (6, 8, 8), (1, 2, 2)),
        ("tiny", (4, 8, 8), (1, 2, 2)),
    ],
)
def test_tokens_are_those_of_the_preset(preset: str, stride: tuple[int, int, int], patch: tuple[int, int, int]) -> None:
    model = RunConfig.load(CONFIGS / "models" / f"{preset}.yaml", ["run.name=bench"]).model
    assert geometry_of(preset, model) == Geometry(vae_stride=stride, patch=patch)


@pytest.mark.parametrize(
    ("preset", "clip", "says"),
    [
        ("latte-1", "16x512x512", "--preset latte-1 deals out no attention heads"),
        ("wan2.2-ti2v-5b", "81x480x832", "takes latents of 48 channels"),
        ("wan2.1-1.3b", "81x480", "--clip 81x480 is not FRAMESxHEIGHTxWIDTH"),
        ("wan2.1-1.3b", "80x480x832", "--clip 80x480x832 of wan2.1-1.3b: 80 frames"),
    ],
)
def test_what_cannot_be_priced_is_refused(preset: str, clip: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(preset=preset, clip=clip, device="NVIDIA H100", text=512, most=4)


def test_a_clip_is_priced_at_every_degree(capsys: pytest.CaptureFixture[str]) -> None:
    run(preset="wan2.1-1.3b", clip="81x480x832", device="NVIDIA H100", text=512, most=8)
    degrees = [line.split()[1] for line in capsys.readouterr().out.splitlines()[3:]]
    assert sorted(set(degrees), key=int) == ["1", "2", "3", "4", "6", "8"]
