"""What a run learns of a cascade: one duration of work, whatever waited, packed or not, on one node or over several."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence

import pytest

from actors.config import PlannerConfig
from actors.messages import Piece, Span
from actors.plan.costs.needs import NEWEST_PEAKS
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.spanning import BagSpread, SpreadCascade, cross_of_spread
from actors.plan.costs.topology import CrossNode, Topology, cross_of
from actors.plan.types import Cluster, places_in
from actors.planning.actor import Planner
from actors.planning.observations import Observation, learn, observations
from data.config import BatchConfig
from data.types import Bucket
from ops.models.wan.config import WanConfig

IMAGE, CLIP = (1, 64, 96), (17, 64, 96)
TEXTS = {"a": 10, "b": 30}
TWO_NODES = Topology(Cluster(nodes=(2, 2)), CrossNode())


def span(rank: int, work_s: float, *, bag: tuple[int, ...] = (0, 1), wait_s: float = 0.0, **changes: object) -> Span:
    pieces = (Piece(item="a", bucket=CLIP, batch=2),)
    given: dict[str, object] = {
        "name": "dit", "module": "dit", "cascade": "c", "step": 0, "start": 0.0, "end": wait_s + work_s, "batch": 2,
        "degree": len(bag), "pieces": pieces, "bag": bag, "work_s": work_s, "wait_s": wait_s,
    }  # fmt: skip
    return Span(**{**given, **changes})  # type: ignore[arg-type]


def only(*spans: Span, topology: Topology = TWO_NODES) -> Observation:
    (found,), refused = observations(spans, TEXTS, topology)
    assert not refused
    return found


def test_a_bag_whose_last_worker_comes_late_is_one_observation_of_its_work() -> None:
    found = only(span(0, 20.0, wait_s=10.0), span(1, 20.0))
    assert (found.seconds, found.degree, found.parts, found.spanned) == (20.0, 2, (Samples.of(2, CLIP, 10),), None)


def test_waiting_that_is_learnt_as_work_is_gone() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    planner = Planner(profile, PlannerConfig())
    for _ in range(20):
        planner.observe([span(0, 20.0, wait_s=10.0), span(1, 20.0)], TEXTS, Cluster(nodes=(2,)))
    assert profile.seconds("dit", Samples.of(2, CLIP), 2) == pytest.approx(20.0)


def test_batches_are_not_sized_by_a_planner_that_has_measured_nothing() -> None:
    """One that was started again between two checkpoints: by FLOPs alone sizes would go back to those before all
    measurements."""
    profile = Profile.from_flops(WanConfig(num_heads=4))
    planner, bucket = Planner(profile, PlannerConfig()), Bucket(*CLIP)
    limits = BatchConfig(target_s=40.0, memory_tokens=1e9)
    with pytest.raises(ValueError, match="no cascade of the DiT has been measured"):
        planner.best_sizes([bucket], limits, math.inf)
    planner.observe([span(0, 20.0), span(1, 20.0)], TEXTS, Cluster(nodes=(2,)))
    assert planner.best_sizes([bucket], limits, math.inf)[bucket] >= 1


def test_first_runs_and_half_bags_are_left_out() -> None:
    assert observations([span(0, 9.0), span(1, 50.0, first_here=True)], TEXTS, TWO_NODES) == ([], [])
    assert observations([span(0, 9.0, exceeded_gib=1.0), span(1, 9.0)], TEXTS, TWO_NODES) == ([], [])
    assert observations([span(0, 9.0)], TEXTS, TWO_NODES) == ([], [])


def test_a_step_has_one_peak_of_a_size_however_many_cascades_it_has_of_that() -> None:
    """The newest peaks are those of steps: of many cascades a rare kind that needs more is not forgotten within one."""
    profile, cluster = Profile.from_flops(WanConfig(num_heads=4)), Cluster(nodes=(1,))
    planner, room = Planner(profile, PlannerConfig()), 3.0
    alone = [span(0, 9.0, bag=(0,), cascade=f"c{n}", need_gib=2.0 if n == 0 else 1.0) for n in range(NEWEST_PEAKS + 1)]
    planner.observe(alone, TEXTS, cluster)
    size = profile.footprint("dit", [Samples.of(2, CLIP, 10)], 1)
    assert profile.needs.gib(size) == 2.0 and profile.needs.fits(size, room)
    planner.observe([span(0, 9.0, bag=(0,), cascade="d", need_gib=1.5, exceeded_gib=3.0), *alone], TEXTS, cluster)
    assert not profile.needs.fits(size, room), "what fitted once and not another time is a limit"


@pytest.mark.parametrize("work_s", [math.nan, -1.0, 0.0, math.inf, 99.0])
def test_timings_that_cannot_be_are_refused_with_one_sentence(work_s: float, caplog: pytest.LogCaptureFixture) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    with caplog.at_level(logging.WARNING):
        Planner(profile, PlannerConfig()).observe([span(0, work_s, end=10.0, bag=(0,))], TEXTS, Cluster(nodes=(1,)))
    assert not profile.live
    (record,) = caplog.records
    assert record.message.startswith(f"dit reports {work_s:g} s of work within 10 s")


def test_seconds_are_those_of_a_worker_of_normal_speed() -> None:
    slow = Topology(Cluster(nodes=(2,), speed=(1.0, 0.5)), CrossNode())
    assert only(span(0, 20.0), span(1, 20.0), topology=slow).seconds == 10.0
    assert only(span(1, 20.0, bag=(1,)), topology=slow).seconds == 10.0


def test_a_bag_over_nodes_teaches_what_spanning_costs() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    planner, cluster = Planner(profile, PlannerConfig()), Cluster(nodes=(2, 2))
    for _ in range(5):
        planner.observe([span(0, 10.0), span(1, 10.0)], TEXTS, cluster)
        planner.observe([span(0, 14.0, bag=(0, 2)), span(2, 14.0, bag=(0, 2))], TEXTS, cluster)
    assert profile.seconds("dit", Samples.of(2, CLIP), 2) == pytest.approx(10.0), "a point is that of one node"
    assert profile.cross_node.factor(1.0) == pytest.approx(1.4)


def test_bags_of_two_sizes_over_nodes_teach_what_a_row_takes() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    assert profile.cross_node == CrossNode()
    for batch in (1, 4):
        rows = batch * (profile.tokens(*CLIP) + 30) / 4  # half of a member's rows stay with it
        part = Samples.of(batch, CLIP, 30)
        for _ in range(3):
            profile.observe("dit", part, 2, 10.0 * batch)
            profile.observe("dit", part, 2, 10.0 * batch + 0.05 * rows, spanned=BagSpread(2, 1.0))
    profile.learn_cross_node()
    assert profile.cross_node.row_s == pytest.approx(0.05, rel=0.01) and profile.cross_node.peer_s == 0
    more = 0.05 * 2 * (profile.tokens(*CLIP) + 30) / 4
    found = profile.penalty("dit", Samples.of(2, CLIP, 30), 2)
    assert found == pytest.approx(more, rel=0.01), "a size that did not run"


def test_what_spanning_costs_is_learned_once_from_all_bags_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, alone = BagSpread(2, 1.0), Profile.from_flops(WanConfig(num_heads=4))
    for batch in range(1, 41):
        alone.observe("dit", Samples.of(batch, CLIP, 30), 2, 10.0 * batch)
    one_by_one, together = copy.deepcopy(alone), copy.deepcopy(alone)
    found = [
        Observation(
            module="dit",
            parts=(Samples.of(batch, CLIP, 30),),
            degree=2,
            seconds=12.0 * batch + batch % 3,
            spanned=spread,
        )
        for batch in range(1, 41)
    ]
    for one in found:
        one_by_one.observe("dit", one.parts[0], 2, one.seconds, spanned=spread)
        one_by_one.learn_cross_node()
    calls: list[int] = []

    def counted(pairs: Sequence[SpreadCascade], known: CrossNode) -> CrossNode:
        calls.append(len(pairs))
        return cross_of_spread(pairs, known)

    monkeypatch.setattr("actors.plan.costs.profile.cross_of_spread", counted)
    assert learn(together, found) == []
    assert calls == [40] and together.cross_node == one_by_one.cross_node != CrossNode()


def test_bags_of_one_size_over_nodes_scale_what_was_known_of_rows() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    profile.cross_node = CrossNode(row_s=0.01, peer_s=0.1)
    before = profile.penalty("dit", Samples.of(2, CLIP, 30), 2)
    for _ in range(3):
        profile.observe("dit", Samples.of(2, CLIP, 30), 2, 10.0)
        profile.observe("dit", Samples.of(2, CLIP, 30), 2, 10.0 + 3 * before, spanned=BagSpread(2, 1.0))
    profile.learn_cross_node()
    assert profile.penalty("dit", Samples.of(2, CLIP, 30), 2) == pytest.approx(3 * before)
    assert profile.cross_node.row_s == pytest.approx(0.03) and profile.cross_node.peer_s == pytest.approx(0.3)


def test_a_bag_that_seems_quicker_for_being_spread_teaches_nothing_of_rows() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    profile.cross_node = CrossNode(row_s=0.01, peer_s=0.1)
    profile.observe("dit", Samples.of(2, CLIP, 30), 2, 10.0)
    profile.observe("dit", Samples.of(2, CLIP, 30), 2, 9.9, spanned=BagSpread(2, 1.0))
    profile.learn_cross_node()
    assert (profile.cross_node.row_s, profile.cross_node.peer_s) == (0.01, 0.1)


def test_a_packed_cascade_over_nodes_teaches_its_parts_there() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    profile.cross_node = CrossNode(row_s=0.01)
    for shape, seconds in ((IMAGE, 1.0), (CLIP, 8.0)):
        for _ in range(9):
            profile.observe("dit", Samples.of(1, shape, 30), 2, seconds)
    parts = Samples.of(1, IMAGE, 30), Samples.of(1, CLIP, 30)
    whole = profile.together("dit", parts, 2) + profile.penalty_together("dit", parts, 2)
    profile.observe_packed("dit", parts, 2, whole, spanned=BagSpread(2, 1.0))
    for part, alone in zip(parts, (1.0, 8.0), strict=True):
        learnt = profile.spanning[part.key("dit", 2), BagSpread(2, 1.0)].seconds
        assert learnt == pytest.approx(alone + profile.penalty("dit", part, 2))


def test_bags_over_two_nodes_and_over_three_are_not_the_same() -> None:
    """Both have one degree, with rails alike: the median of both would be that of neither."""
    profile = Profile.from_flops(WanConfig(num_heads=6))
    planner, cluster = Planner(profile, PlannerConfig()), Cluster(nodes=(6, 6, 6))
    two, three = (0, 1, 2, 6, 7, 8), (0, 1, 6, 7, 12, 13)
    for seconds, bag in ((10.0, tuple(range(6))), (12.0, two), (18.0, three)):
        for _ in range(5):
            planner.observe([span(worker, seconds, bag=bag) for worker in bag], TEXTS, cluster)
    key = ("dit", 2, *CLIP, 6)
    learnt = {spanned: point.seconds for (of, spanned), point in profile.spanning.items() if of == key}
    assert learnt == {BagSpread(2, 1.0): 12.0, BagSpread(3, 1.0): 18.0}
    profile.forget(key, BagSpread(3, 1.0))
    assert [spanned for _, spanned in profile.spanning] == [BagSpread(2, 1.0)]


def test_what_a_bag_takes_in_islands_it_did_not_need_is_no_part_of_its_price() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4), exchange_gbps=200.0)
    cluster = Cluster(nodes=(4,), places=places_in((4,), islands="AABB"), island_gbps=0.001)
    detour = profile.detour("dit", Samples.of(2, CLIP, 10), 2, cluster.island_gbps)
    assert detour > 1.0
    planner = Planner(profile, PlannerConfig())
    for bag, seconds in (((0, 1), 10.0), ((1, 2), 10.0 + detour)):
        for _ in range(5):
            planner.observe([span(worker, seconds, bag=bag) for worker in bag], TEXTS, cluster)
    point = profile.live["dit", 2, *CLIP, 2]
    assert point.count == 10 and point.newest == pytest.approx([10.0] * 9, rel=1e-3)


def test_bags_on_common_and_on_other_rails_teach_how_the_penalty_falls() -> None:
    truth = CrossNode(penalty=0.5, decay=1.2)
    found = cross_of([(o, truth.factor(o), 3) for o in (0.0, 0.5, 1.0)], CrossNode())
    assert [found.factor(o) for o in (0.0, 0.5, 1.0)] == pytest.approx([truth.factor(o) for o in (0.0, 0.5, 1.0)])


def test_a_packed_cascade_counts_as_the_sum_of_its_parts() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    truth = {IMAGE: 1.0, CLIP: 8.0}
    for _ in range(40):
        for images, clips in ((3, 1), (1, 2), (2, 2)):
            parts = Samples.of(images, IMAGE, 10), Samples.of(clips, CLIP, 30)
            seconds = images * truth[IMAGE] + clips * truth[CLIP]
            assert not learn(profile, [Observation(module="dit", parts=parts, degree=1, seconds=seconds)])
    for images, clips in ((3, 1), (1, 2), (2, 2)):
        parts = Samples.of(images, IMAGE), Samples.of(clips, CLIP)
        priced = sum(profile.seconds("dit", part, 1) for part in parts)
        assert priced == pytest.approx(images * truth[IMAGE] + clips * truth[CLIP], rel=0.02)


def test_a_part_that_is_known_leaves_the_difference_to_the_one_that_is_not() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    for _ in range(20):
        profile.observe("dit", Samples.of(1, IMAGE), 1, 1.0)
    for _ in range(20):
        profile.observe_packed("dit", [Samples.of(1, shape) for shape in (IMAGE, CLIP)], 1, 9.0)
    assert profile.seconds("dit", Samples.of(1, IMAGE), 1) == pytest.approx(1.0, rel=0.15)
    assert profile.seconds("dit", Samples.of(1, CLIP), 1) == pytest.approx(8.0, rel=0.05)


def test_a_jump_is_believed_only_when_it_stays() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    for _ in range(5):
        profile.observe("dit", Samples.of(1, CLIP), 1, 1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"took 500 s and 1 s before; .* It is left out"):
            profile.observe("dit", Samples.of(1, CLIP), 1, 500.0)
    assert profile.seconds("dit", Samples.of(1, CLIP), 1) == 1.0
    profile.observe("dit", Samples.of(1, CLIP), 1, 500.0)
    assert profile.seconds("dit", Samples.of(1, CLIP), 1) == 500.0


def test_points_of_a_file_that_did_not_run_follow_those_that_did() -> None:
    profile = Profile(degrees={"dit": (1, 2)})
    profile.measured = {("dit", 1, 17, 64, 96, 1): 2.0, ("dit", 1, 33, 64, 96, 1): 5.0}
    for _ in range(30):
        profile.observe("dit", Samples.of(1, (17, 64, 96)), 1, 6.0)
    assert profile.seconds("dit", Samples.of(1, (17, 64, 96)), 1) == pytest.approx(6.0, rel=1e-3)
    assert profile.seconds("dit", Samples.of(1, (33, 64, 96)), 1) == pytest.approx(15.0, rel=1e-3)


def test_what_a_slow_worker_measured_before_it_was_known_is_forgotten() -> None:
    """A bag with a worker of half the speed took 20 s, of which a normal one needs 10."""
    profile = Profile.from_flops(WanConfig(num_heads=4))
    planner, key = Planner(profile, PlannerConfig()), ("dit", 2, *CLIP, 2)
    alone = [span(0, 7.0, bag=(0,), pieces=(Piece(item="b", bucket=IMAGE, batch=2),), cascade="d")]
    planner.observe([span(0, 20.0), span(1, 20.0), *alone], TEXTS, Cluster(nodes=(2,)))
    assert profile.live[key].seconds == 20.0
    known = Cluster(nodes=(2,), speed=(1.0, 0.5))
    planner.observe(alone, TEXTS, known)
    assert key not in profile.live, "it was learned at a speed that was wrong"
    assert profile.live["dit", 2, *IMAGE, 1].count == 2, "this one ran on a worker that is as quick as before"
    planner.observe([span(0, 20.0), span(1, 20.0)], TEXTS, known)
    assert profile.live[key].seconds == 10.0
    planner.observe([span(0, 20.0), span(1, 20.0)], TEXTS, known)
    assert profile.live[key].count == 2, "nothing is doubted twice"


def test_another_generation_doubts_nothing() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    planner, key = Planner(profile, PlannerConfig()), ("dit", 2, *CLIP, 2)
    planner.observe([span(0, 20.0), span(1, 20.0)], TEXTS, Cluster(nodes=(2,)))
    planner.observe([], TEXTS, Cluster(nodes=(3,), speed=(1.0, 0.5, 1.0)))
    assert profile.live[key].seconds == 20.0


def test_a_doubt_of_a_generation_s_own_measurements_leaves_the_many_of_the_one_before() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=4))
    planner, key = Planner(profile, PlannerConfig()), ("dit", 2, *CLIP, 2)
    for _ in range(5):
        planner.observe([span(0, 10.0), span(1, 10.0)], TEXTS, Cluster(nodes=(2,)), 4)
    for _ in range(2):
        planner.observe([span(0, 20.0), span(1, 20.0)], TEXTS, Cluster(nodes=(2,)), 5)
    planner.observe([], TEXTS, Cluster(nodes=(2,), speed=(1.0, 0.5)), 5)
    assert profile.live[key].seconds == 10.0 and profile.live[key].count == 7


def test_a_replaced_worker_casts_no_doubt_on_what_others_of_its_number_have_measured() -> None:
    """As many workers as before, and worker 1 is another one, which is slow."""
    profile = Profile.from_flops(WanConfig(num_heads=4))
    planner, key = Planner(profile, PlannerConfig()), ("dit", 2, *CLIP, 2)
    planner.observe([span(0, 20.0), span(1, 20.0)], TEXTS, Cluster(nodes=(2,)), 4)
    planner.observe([], TEXTS, Cluster(nodes=(2,), speed=(1.0, 0.5)), 5)
    assert profile.live[key].seconds == 20.0
