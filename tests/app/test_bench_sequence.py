"""`heddle bench sequence`: prices of the ways in which a bag can share attention."""

from __future__ import annotations

import pytest

from actors.plan.costs.profile import Profile
from app.bench.sequence import HIDDEN, RING, SHARED, USP, priced, ways_of
from ops.models.wan.config import WanConfig


def test_volumes_are_those_of_twelve_heads_on_eight_ranks() -> None:
    """Rows of a head that a rank with n rows sends forward: Ulysses 4 n 12 (7 / 8) = 42 n."""
    found = ways_of(12, 8)
    assert found[SHARED] == pytest.approx((2 * 12 + 2 * 16) * (7 / 8) / 42)
    assert found[USP] == pytest.approx((4 * 12 * (3 / 4) + 2 * 12) / 42)
    assert found[RING] == found[HIDDEN] == pytest.approx((2 * 2 * 12 * 7 + 2 * 4 * 12 * 7) / 4 / 42)
    assert ways_of(12, 6).keys() == {"Ulysses", RING, HIDDEN} and ways_of(12, 1) == {"Ulysses": 1.0}


@pytest.mark.parametrize("degree", [4, 6, 8])
def test_what_runs_is_priced_as_the_planner_does(degree: int) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=12), tflops=400.0, exchange_gbps=300.0)
    load = profile.load_of("dit", 1, 81, 480, 832, degree, 512)
    ways = {one.way: one for one in priced(profile.models["dit"], load, 12)}
    runs = ways[SHARED if degree == 8 else "Ulysses"]
    assert runs.seconds == pytest.approx(profile.seconds("dit", 1, 81, 480, 832, degree, 512))
    assert runs.seconds < ways[RING].seconds and ways[HIDDEN].seconds < ways[RING].seconds
