"""What is measured across nodes apart from any run prices bags and handoffs there."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.plan.costs.exchange import ExchangePoint, exchange_speed
from actors.plan.costs.handoff import HandoffPoint, estimate_of
from actors.plan.costs.profile import Handoff, Profile
from actors.plan.costs.profile_json import read_profile, write_profile
from actors.plan.costs.spanning import SpanningPoint
from actors.plan.costs.topology import Topology
from actors.plan.types import Cluster

GIB = 2**30


def spanning(degree: int, seconds: float, frames: int = 17) -> SpanningPoint:
    return SpanningPoint(batch=1, frames=frames, height=64, width=64, degree=degree, nodes=2, seconds=seconds)


def profiled() -> Profile:
    """Half the seconds at twice the degree, on one node."""
    profile = Profile(degrees={"dit": (1, 2, 4)})
    for frames in (9, 17, 33):
        for degree in (1, 2):
            profile.measure(("dit", 1, frames, 64, 64, degree), 0.1 * frames / degree)
    return profile


def planned(profile: Profile, degree: int, workers: tuple[int, ...]) -> float:
    return profile.seconds("dit", 1, 17, 64, 64, degree) * Topology(Cluster(nodes=(2, 2)), profile.cross_node).factor(
        workers
    )


def test_a_bag_over_nodes_costs_what_it_takes_beside_the_same_cascade_on_one() -> None:
    profile = profiled()
    profile.count_over_nodes([spanning(2, 1.3 * 0.85), spanning(2, 1.3 * 0.45, frames=9), spanning(4, 0.7)])
    assert profile.cross_node.factor(1.0) == pytest.approx(1.3)
    assert planned(profile, 2, (0, 1)) == pytest.approx(0.85)
    assert planned(profile, 2, (0, 2)) == pytest.approx(1.3 * 0.85)
    assert planned(profile, 4, (0, 1, 2, 3)) == pytest.approx(0.7), "measured over nodes only: as it stands"


def test_without_the_same_cascade_on_one_node_the_model_stands_for_it() -> None:
    profile = profiled()
    modelled = profile.seconds("dit", 1, 17, 64, 64, 4)
    profile.count_over_nodes([spanning(4, 1.5 * modelled)])
    assert profile.cross_node.factor(1.0) == pytest.approx(1.5, rel=0.05)
    assert planned(profile, 4, (0, 1, 2, 3)) == pytest.approx(1.5 * modelled)
    quick = profiled()
    quick.count_over_nodes([spanning(2, 0.5)])
    assert quick.cross_node.factor(1.0) == 1.0, "no bag is quicker for being spread"


def test_a_one_node_point_that_comes_later_counts() -> None:
    profile = profiled()
    profile.count_over_nodes([spanning(4, 1.0)])
    profile.measure(("dit", 1, 17, 64, 64, 4), 0.5)
    assert profile.cross_node.factor(1.0) == pytest.approx(2.0)


def test_all_to_alls_inside_and_across_nodes_are_apart() -> None:
    def point(num_bytes: int, speed: float, nodes: int) -> ExchangePoint:
        return ExchangePoint(workers=2, num_bytes=num_bytes, seconds=0.001 + num_bytes / 2 / speed, nodes=nodes)

    found = [point(size, speed, nodes) for nodes, speed in ((1, 4e9), (2, 1e9)) for size in (2**20, 2**25)]
    assert exchange_speed(found) == pytest.approx((0.001, 4e9))
    assert exchange_speed(found, across=True) == pytest.approx((0.001, 1e9))
    assert exchange_speed(found[:2], across=True) is None


def handoffs(nodes: int, latency_s: float, gib_per_s: float) -> list[HandoffPoint]:
    return [
        HandoffPoint(num_bytes=size, seconds=latency_s + size / GIB / gib_per_s, nodes=nodes)
        for size in (2**16, 2**22, 2**26)
        for _ in range(3)
    ]


def test_plans_take_handoffs_across_nodes_where_both_are_known() -> None:
    profile = Profile(degrees={"dit": (1,)})
    profile.count_handoffs(handoffs(1, 0.01, 4.0))
    assert profile.handoff.gib_per_s == pytest.approx(4.0, rel=0.01)
    profile.count_handoffs(handoffs(2, 0.02, 0.5))
    assert profile.handoff.latency_s == pytest.approx(0.02, rel=0.02)
    assert profile.handoff.gib_per_s == pytest.approx(0.5, rel=0.01)
    inside = estimate_of([point for point in profile.handoffs if point.nodes == 1]).cost(0.0)
    assert inside == pytest.approx((0.01, 4.0), rel=0.02)


def test_measured_handoffs_cost_nothing_beside_long_cascades() -> None:
    profile = Profile(degrees={"dit": (1,)})
    profile.count_handoffs(handoffs(1, 0.01, 4.0))
    profile.measure(("dit", 1, 17, 64, 64, 1), 30.0)
    assert profile.handoff == Handoff()


def test_a_file_keeps_what_was_measured_across_nodes(tmp_path: Path) -> None:
    first = profiled()
    first.count_over_nodes([spanning(2, 1.3 * 0.85), spanning(4, 0.7)])
    first.count_handoffs(handoffs(2, 0.02, 0.5))
    write_profile(first, tmp_path / "p.json")
    again = read_profile(tmp_path / "p.json")
    assert (again.over_nodes, again.handoffs) == (first.over_nodes, first.handoffs)
    assert (again.cross_node, again.handoff) == (first.cross_node, first.handoff)
    assert planned(again, 4, (0, 1, 2, 3)) == pytest.approx(0.7)


def test_impossible_points_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes"):
        SpanningPoint(batch=1, frames=1, height=8, width=8, degree=2, nodes=1, seconds=1.0)
    with pytest.raises(ValueError, match="seconds"):
        HandoffPoint(num_bytes=1, seconds=0.0)
