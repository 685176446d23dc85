"""What `heddle bench communicators` counts, and at which degrees it plans."""

from __future__ import annotations

import pytest

from actors.planning.memory import PEER_GIB
from app.bench.communicators import PlannedBags, figures, profile_of_run


def test_bags_connections_and_seconds_are_counted_with_and_without_a_limit() -> None:
    steps = [
        PlannedBags(seconds=2.0, bags=[(0, 1), (0, 2), (1, 2)]),
        PlannedBags(seconds=4.0, bags=[(0, 1), (3,)]),
    ]
    free, bound = figures(steps, 0), figures(steps, 1)
    assert (free.distinct, free.bags, free.gib, free.made, free.seconds) == (3, 2, 2 * PEER_GIB, 1.5, 3.0)
    assert (bound.distinct, bound.bags, bound.gib, bound.made) == (3, 1, PEER_GIB, 2.0), "(0, 1) is made again"


@pytest.mark.parametrize(
    ("config", "degrees"),
    [("wan2.1-1.3b", {1, 2, 3, 4, 6, 8, 12}), ("wan2.1-14b", {1, 2, 4, 5, 8, 10, 16, 20, 32, 40})],
)
def test_plans_have_the_degrees_of_a_run(config: str, degrees: set[int]) -> None:
    """Powers of two that do not divide the heads among them."""
    assert set(profile_of_run(config).degrees["dit"]) == degrees
