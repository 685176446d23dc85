"""`heddle profile` on a cluster of several nodes: bags over them, and handoffs between workers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.plan.costs.handoff import HandoffPoint
from actors.plan.costs.profile_json import read_profile
from app.device import over_nodes
from app.device.bag import degrees_here
from app.device.bench import Bench
from app.device.over_nodes import HANDOFFS, BagOverNodes, LentRay, MeasuredCluster, shares, timed_handoffs
from app.device.points import PointTimes, ProfiledShape
from app.device.profile import run_profile
from app.device.wanted import by_information, figures_of, points_of
from app.settings.config import RunConfig
from data.types import Bucket
from ops.typed import ConfigError

DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"
TINY = ["data.buckets.table=[1x32x32, 5x32x48]", "data.batch.max_batch=3", "model.dit.num_layers=1"]


def test_a_bag_spans_the_fewest_nodes_in_equal_shares() -> None:
    seats = {"a": 8, "b": 8, "c": 4}
    assert shares(seats, 8) == ("a",) * 4 + ("b",) * 4
    assert shares(seats, 16) == ("a",) * 8 + ("b",) * 8
    assert shares({"a": 2, "b": 2, "c": 2}, 5) == ("a", "a", "b", "b", "c")
    assert shares(seats, 20) is None, "equal shares do not fit the smallest"
    assert shares({"a": 8}, 2) is None and shares(seats, 1) is None


@contextmanager
def nothing() -> Iterator[None]:
    yield


def cluster(seats: dict[str, int]) -> MeasuredCluster:
    bags = {degree: over for degree in (2, 4) if (over := shares(seats, degree)) is not None}
    return MeasuredCluster(ray=LentRay(nothing, has_nodes=True), seats=seats, bags=bags)


def test_handoffs_are_timed_where_there_are_two_workers() -> None:
    assert cluster({"a": 2, "b": 1}).handoffs(4, "cpu") == (1, 2)
    assert cluster({"a": 1, "b": 1}).handoffs(4, "cpu") == (2,)
    assert cluster({}).handoffs(4, "cpu") == (1,), "a Ray of this machine"
    assert cluster({"a": 2, "b": 1}).handoffs(1, "cpu") == ()
    assert cluster({"a": 2, "b": 1}).ends(2) == ("a", "b") and cluster({"a": 1, "b": 2}).ends(1) == ("b", "b")


def test_a_degree_that_only_several_nodes_hold_may_be_asked_for() -> None:
    config = RunConfig.load(DEMO)
    with pytest.raises(ConfigError, match="--degrees 4 needs as many GPUs, and this machine has 0"):
        degrees_here(config, (1, 2, 4), [4], "cuda")
    assert degrees_here(config, (1, 2, 4), [4], "cuda", over={4: 2}) == ()


def test_one_bag_over_nodes_after_the_other() -> None:
    shape = ProfiledShape(batch=1, bucket=Bucket(1, 32, 32), text_tokens=8)
    points = points_of([shape, replace(shape, bucket=Bucket(5, 32, 32))], (2,), {2: 2, 4: 2})
    figures = figures_of(RunConfig.load(DEMO), (2,), {2: 2, 4: 2}, (1, 2))
    ordered = by_information(points, figures)
    assert len(ordered) == len(points) + len(figures)
    assert [one.degree for one in ordered if one.nodes > 1] == sorted(  # type: ignore[union-attr]
        one.degree for one in (*points, *figures) if one.nodes > 1
    )


def test_two_sizes_are_measured_over_nodes_also_of_a_single_bucket() -> None:
    shapes = [ProfiledShape(batch=batch, bucket=Bucket(5, 32, 32), text_tokens=8) for batch in (1, 2, 4)]
    over = [one for one in points_of(shapes, (2,), {2: 2}) if one.nodes > 1]
    assert sorted(one.shape.batch for one in over if one.module == "dit") == [1, 4]
    assert [(one.module, one.shape.batch) for one in over if one.module != "dit"] == [("text", 4), ("vae", 4)]
    assert [one.module for one in points_of(shapes[:1], (2,), {2: 2}) if one.nodes > 1] == ["vae", "dit"]


class Apart:
    """A bag in which everything takes 0.6 of one worker's seconds, and half as much again over nodes."""

    degree, alive, most = 2, 0, 0

    def __init__(self, config: RunConfig, where: object, device: str) -> None:
        self.slow = 1.5 if isinstance(where, tuple) else 1.0
        Apart.alive += isinstance(where, tuple)
        Apart.most = max(Apart.most, Apart.alive)

    def measure(self, module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        return PointTimes(seconds=(self.slow * 0.06 * shape.batch * shape.bucket.frames,))

    def exchange(self, num_bytes: int) -> float:
        return self.slow * (0.001 + num_bytes / 2 / 1e9)

    def update(self, repeats: int) -> PointTimes:
        return PointTimes(seconds=(self.slow * 0.3,))

    def close(self) -> None:
        Apart.alive -= self.slow > 1


def test_what_is_measured_across_nodes_is_kept_told_and_not_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(self: Bench, module: str, shape: ProfiledShape, repeats: int, rates: object = None) -> PointTimes:
        return PointTimes(seconds=(0.1 * shape.batch * shape.bucket.frames,))

    def handoffs(places: tuple[str, str], device: str, repeats: int) -> list[HandoffPoint]:
        timed.append(places)
        nodes = len(set(places))
        return [
            HandoffPoint(num_bytes=size, seconds=0.01 * nodes + nodes * size / 2**30, nodes=nodes)
            for size in (2**16, 2**22, 2**26)
            for _ in range(repeats)
        ]

    timed: list[tuple[str, str]] = []
    Apart.alive = Apart.most = 0
    monkeypatch.setattr(Bench, "measure", alone)
    monkeypatch.setattr(Bench, "update", lambda self, repeats: PointTimes(seconds=(0.25,)))
    monkeypatch.setattr("app.device.measuring.Bag", Apart)
    monkeypatch.setattr("app.device.measuring.BagOverNodes", Apart)
    monkeypatch.setattr("app.device.measuring.timed_handoffs", handoffs)
    monkeypatch.setattr(MeasuredCluster, "of", classmethod(lambda cls, *of: cluster({"a": 2, "b": 2})))
    out, ray = tmp_path / "p.json", LentRay(nothing, has_nodes=True)
    run_profile(DEMO, TINY, out, repeats=3, device="cpu", degrees=[1, 2], ray=ray)
    profile = read_profile(out)
    assert profile.cross_node.factor(1.0) == pytest.approx(1.5)
    assert {(point.module, point.frames, point.degree, point.nodes) for point in profile.over_nodes} == {
        *(("dit", frames, degree, 2) for frames in (1, 5) for degree in (2, 4)),
        *(("vae", 5, degree, 2) for degree in (2, 4)),
        ("text", 1, 2, 2),
    }
    assert (Apart.most, Apart.alive) == (1, 0), "the next one waits for its workers"
    assert profile.update_seconds(2) == 0.3 and profile.update_seconds(2, nodes=2) == pytest.approx(0.45)
    assert profile.handoff.latency_s == pytest.approx(0.02, rel=0.05) and timed == [("a", "a"), ("a", "b")]
    told = capsys.readouterr().out
    for line in (
        "nodes     bags over nodes: degrees 2, 4",
        "sp2 over 2 nodes",
        "end of a step on 2 workers over 2 nodes",
        "all-to-all of 2 over 2 nodes",
        "to another worker on two nodes",
        "a2a   across nodes 0.83 GB/s",
        "takes 1.5 times as long",
        "us more for a row that a member sends",
        "handoff  on one node: 1 GiB/s after 10.00 ms",
        "handoff  on two nodes: 0.5 GiB/s after 20.00 ms",
    ):
        assert line in told, line
    run_profile(DEMO, TINY, out, repeats=3, device="cpu", degrees=[1, 2], ray=ray)
    again = read_profile(out)
    assert len(timed) == 2 and "34 are known from" in capsys.readouterr().out
    assert (again.over_nodes, again.cross_node, again.handoff) == (
        profile.over_nodes,
        profile.cross_node,
        profile.handoff,
    )
    run_profile(DEMO, TINY, tmp_path / "alone.json", repeats=3, device="cpu", degrees=[1])
    assert "all on one: what bags and handoffs cost across nodes is not measured" in capsys.readouterr().out


class InThreads:
    """Stands for Ray: an actor is a thread here, a reference its future."""

    def __init__(self, plain: type, node: str, cpus: float, device: str, *arguments: object) -> None:
        self._actor = plain(*arguments)
        self._pool = ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *of: self._pool.submit(self._call, name, *of))

    def _call(self, name: str, *of: Any) -> object:
        return getattr(self._actor, name)(*(one.result() if isinstance(one, Future) else one for one in of))


def waited(references: list[Future[object]], timeout: float) -> tuple[list[Future[object]], list[Future[object]]]:
    done, waiting = wait(references, timeout, return_when="FIRST_COMPLETED")
    return list(done), list(waiting)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_nodes, "_actor_on", InThreads)
    monkeypatch.setattr(over_nodes, "get", lambda reference: reference.result())
    monkeypatch.setattr(over_nodes, "wait", waited)
    monkeypatch.setattr(over_nodes, "kill", lambda actor: None)
    monkeypatch.setattr(over_nodes, "node_address", lambda: "127.0.0.1")


def test_members_on_two_nodes_run_what_they_are_told_together(threads: None) -> None:
    config = RunConfig.load(DEMO, TINY)
    shape = ProfiledShape(batch=2, bucket=Bucket(5, 32, 48), text_tokens=8)
    with BagOverNodes(config, ("a", "b"), "cpu") as bag:
        assert (bag.degree, bag.nodes) == (2, 2)
        assert all(actor._actor._group.nodes == (0, 1) for actor in bag._actors)
        times = bag.measure("dit", shape, repeats=1)
        assert len(times.seconds) == 1 and times.median > 0 and times.gathered_bytes > 0
        assert bag.exchange(2**16, 2) > 0
        with pytest.raises(ConfigError, match=r"member [01] of a bag of 2 failed: .*nonsense"):
            bag.measure("nonsense", shape, repeats=1)  # type: ignore[arg-type]


def test_handoffs_of_three_sizes_are_timed_both_ways(threads: None) -> None:
    found = timed_handoffs(("a", "b"), "cpu", repeats=3)
    assert {(point.num_bytes, point.nodes) for point in found} == {(size, 2) for size in HANDOFFS}
    assert len(found) == 9 and all(point.seconds > 0 for point in found)
    assert {point.nodes for point in timed_handoffs(("a", "a"), "cpu", repeats=1)} == {1}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_nodes_are_measured_with_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from functools import partial

    from app.bench.lab import patiently
    from app.run.borrowed_ray import borrowed_ray

    def started() -> object:
        from ray.cluster_utils import Cluster

        return Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})

    nodes = patiently(started)
    try:
        for _ in range(2):
            patiently(lambda: nodes.add_node(num_cpus=2, object_store_memory=300 * 2**20))  # type: ignore[attr-defined]
        out = tmp_path / "p.json"
        address: str = nodes.address  # type: ignore[attr-defined]
        wanted = [*TINY, "workers.cpus_per_worker=1.0"]
        with LentRay(partial(borrowed_ray, address, 2), has_nodes=True) as ray:
            run_profile(DEMO, wanted, out, repeats=1, device="cpu", degrees=[1, 2], ray=ray)
    finally:
        nodes.shutdown()  # type: ignore[attr-defined]
    profile, told = read_profile(out), capsys.readouterr().out
    assert {(point.degree, point.nodes) for point in profile.over_nodes} == {(2, 2)}
    assert {(one.workers, one.nodes) for one in profile.exchanges} == {(2, 1), (2, 2)}
    assert {point.nodes for point in profile.handoffs} == {1, 2}
    assert profile.update_seconds(2, nodes=2) > 0 and "handoff  in plans" in told
