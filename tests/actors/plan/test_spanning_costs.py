"""What is measured across nodes apart from any run prices bags and handoffs there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.plan.costs.exchange import ExchangePoint, exchange_speed
from actors.plan.costs.handoff import Handoff, HandoffPoint, estimate_of
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import profile_json, read_profile, write_profile
from actors.plan.costs.spanning import SpanningPoint
from actors.plan.costs.topology import CrossNode, Topology
from actors.plan.schedule.evaluator import cascade_seconds
from actors.plan.types import Cascade, Cluster, Item, Part

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


def planned(profile: Profile, degree: int, workers: tuple[int, ...], frames: int = 17, cluster: str = "2x2") -> float:
    """As the evaluator prices a cascade on these workers."""
    item = Item(id="a", batch=1, frames=frames, height=64, width=64)
    cascade = Cascade(
        id="a",
        module="dit",
        step=0,
        parts=(Part(item="a", first=0, count=1),),
        degree=degree,
        workers=workers,
        start_s=0.0,
        end_s=0.0,
    )
    topology = Topology(Cluster.parse(cluster), profile.cross_node)
    return cascade_seconds(cascade, {(0, "a"): item}, profile, topology)


def test_of_cascades_of_one_size_spanning_nodes_takes_a_share() -> None:
    profile = profiled()
    profile.count_over_nodes([spanning(2, 1.3 * 0.85), spanning(2, 1.3 * 0.85), spanning(4, 0.7)])
    assert profile.cross_node.factor(1.0) == pytest.approx(1.3) and not profile.cross_node.by_rows
    assert planned(profile, 2, (0, 1)) == pytest.approx(0.85)
    assert planned(profile, 2, (0, 2)) == pytest.approx(1.3 * 0.85)
    assert planned(profile, 4, (0, 1, 2, 3)) == pytest.approx(0.7), "measured over nodes only: as it stands"


def sending(row_s: float, peer_s: float = 0.0) -> Profile:
    """Two sizes of two degrees, measured on one node and over two; on one node half the seconds at twice the degree."""
    profile = profiled()
    for frames in (9, 17, 33):
        profile.measure(("dit", 1, frames, 64, 64, 4), 0.1 * frames / 4)
    profile.count_over_nodes(
        [
            spanning(degree, 0.1 * frames / degree + more_of(frames, degree, row_s, peer_s), frames)
            for frames in (9, 33)
            for degree in (2, 4)
        ]
    )
    return profile


def more_of(frames: int, degree: int, row_s: float, peer_s: float) -> float:
    """Sixteen tokens to a latent frame, of which every member sends all but its own share."""
    return row_s * 16 * ((frames - 1) // 4 + 1) * (degree - 1) / degree**2 + peer_s * (degree - 1)


@pytest.mark.parametrize("row_s, peer_s", [(0.003, 0.0), (0.003, 0.02), (0.0, 0.02)])
def test_two_sizes_tell_what_a_row_and_what_a_peer_takes(row_s: float, peer_s: float) -> None:
    profile = sending(row_s, peer_s)
    assert (profile.cross_node.row_s, profile.cross_node.peer_s) == pytest.approx((row_s, peer_s), abs=1e-12)
    for degree, workers in ((2, (0, 2)), (4, (0, 1, 2, 3))):
        more = more_of(17, degree, row_s, peer_s)
        assert planned(profile, degree, workers) == pytest.approx(0.1 * 17 / degree + more), "a size not measured"
    assert planned(profile, 2, (0, 1)) == pytest.approx(0.85), "inside a node nothing is added"


def test_a_cascade_measured_over_nodes_only_is_priced_as_it_stands() -> None:
    profile = sending(0.003)
    profile.count_over_nodes([spanning(8, 0.4)])
    assert planned(profile, 8, tuple(range(8)), cluster="2x4") == pytest.approx(0.4)


def test_where_spanning_seems_to_take_all_of_a_cascade_a_tenth_of_it_is_left() -> None:
    profile = profiled()
    profile.cross_node, profile.over_nodes = CrossNode(row_s=0.003, peer_s=0.02), (spanning(8, 0.01),)
    assert profile.seconds("dit", Samples.of(1, (17, 64, 64)), 8) == pytest.approx(0.001)


sizes = st.integers(0, 60).map(lambda n: 1 + 4 * n)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 0.01),
    st.floats(0, 0.1),
    st.floats(0, 1),
    st.sampled_from([2, 4, 6, 8]),
    st.lists(sizes, min_size=2, max_size=2).map(sorted),
    st.integers(1, 3),
)
def test_more_rows_never_take_less_over_nodes_and_no_bag_is_quicker_for_being_spread(
    row_s: float, peer_s: float, penalty: float, degree: int, frames: list[int], batch: int
) -> None:
    profile = profiled()
    profile.cross_node = CrossNode(penalty=penalty, row_s=row_s, peer_s=peer_s)
    few, many = (profile.penalty("dit", Samples.of(batch, (f, 64, 64)), degree) for f in frames)
    assert 0 <= few <= many * (1 + 1e-9)
    assert few <= profile.penalty("dit", Samples.of(batch + 1, (frames[0], 64, 64)), degree) * (1 + 1e-9)
    for size in frames:
        workers = tuple(range(degree))
        inside, over = (planned(profile, degree, workers, size, nodes) for nodes in ("1x8", "8x1"))
        assert inside <= over


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.5, 3.0), min_size=4, max_size=4), st.sampled_from([2, 4, 8]), sizes)
def test_whatever_is_measured_no_bag_is_quicker_for_being_spread(ratios: list[float], degree: int, frames: int) -> None:
    profile = profiled()
    for clip in (9, 17, 33):
        profile.measure(("dit", 1, clip, 64, 64, 4), 0.1 * clip / 4)
    places = [(clip, k) for clip in (9, 33) for k in (2, 4)]
    profile.count_over_nodes(
        [spanning(k, ratio * 0.1 * clip / k, clip) for ratio, (clip, k) in zip(ratios, places, strict=True)]
    )
    assert profile.cross_node.row_s >= 0 and profile.cross_node.peer_s >= 0
    assert profile.penalty("dit", Samples.of(1, (frames, 64, 64)), degree) >= 0


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 2), st.floats(0, 3), st.sampled_from([2, 4]), sizes, st.sampled_from(["", "AABB"]))
def test_a_file_without_seconds_for_rows_keeps_its_prices(
    penalty: float, decay: float, degree: int, frames: int, rails: str
) -> None:
    """As they were before: 1 + penalty * exp(-decay * overlap) times those on one node, of the files of that time."""
    plain = profile_json(profiled())
    plain["cross_node"] = {"penalty": penalty, "decay": decay, "rails_per_node": rails}
    plain["over_nodes"] = [
        {"batch": 1, "frames": f, "height": 64, "width": 64, "degree": 2, "nodes": 2, "seconds": 5.0} for f in (9, 33)
    ]
    profile = read_profile(plain)
    topology = Topology(Cluster.parse("2x4"), profile.cross_node)
    for workers in ((0, 4), (0, 6), (0, 2, 4, 6), (0, 1, 4, 5)):
        alone = profile.seconds("dit", Samples.of(1, (frames, 64, 64)), len(workers))
        factor = 1 + penalty * math.exp(-decay * topology.overlap(workers))
        assert planned(profile, len(workers), workers, frames, "2x4") == pytest.approx(alone * factor)


def test_without_the_same_cascade_on_one_node_the_model_stands_for_it() -> None:
    profile = profiled()
    modelled = profile.seconds("dit", Samples.of(1, (17, 64, 64)), 4)
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
    assert planned(profile, 4, (0, 1, 2, 3)) == pytest.approx(1.0)


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
    assert inside is not None
    assert (inside.latency_s, inside.gib_per_s) == pytest.approx((0.01, 4.0), rel=0.02)


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
