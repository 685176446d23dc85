"""The baseline of one degree per item: pieces of a batch with different legal degrees are planned, not a KeyError."""

from __future__ import annotations

import pytest

from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.check import check
from actors.plan.types import Cluster, Item
from actors.planning.make_plan import make_plan
from tests.actors.plan.options import counted


@pytest.mark.parametrize("strategy", ["flexsp", "flexsp_greedy"])
def test_pieces_without_a_common_degree_take_their_own(strategy: str) -> None:
    latency = [
        {"module": "dit", "batch": batch, "frames": 17, "height": 64, "width": 64, "degree": degree, "seconds": 1.0}
        for batch, degree in ((2, 2), (1, 1))
    ]
    profile = read_profile(
        {
            "model": "m",
            "device": "d",
            "degrees": {"dit": [1, 2]},
            "latency": latency,
            "extrapolate": False,
        }
    )
    steps = [[Item(id="a", batch=3, frames=17, height=64, width=64, cached=("text", "vae"))]]
    plan = make_plan(steps, profile, Cluster(nodes=(4,)), counted(strategy=strategy))
    check(plan, steps, profile, Cluster(nodes=(4,)))
    assert sorted((c.batch, c.degree) for c in plan.steps[0].cascades) == [(1, 1), (2, 2)]
