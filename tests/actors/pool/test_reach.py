"""Which nodes reach each other: who stays out, when two are tried together again, what is forgotten."""

from __future__ import annotations

import pytest

from actors.messages import NodeDoor, NodesApart, WorkerInfo
from actors.pool.membership_types import Limits, Member
from actors.pool.reach import NodeReach

LIMITS = Limits(min=1, max=8, apart_s=60.0, apart_longest_s=600.0, apart_waiting_s=30.0)


def members(**nodes: int) -> list[Member]:
    """As many workers on each node, numbered in order."""
    where = [node for node, count in nodes.items() for _ in range(count)]
    infos = [WorkerInfo(worker=f"w{n}", node=node, host="h", pid=n, device="cpu") for n, node in enumerate(where)]
    return [Member(worker=n, info=info, phase="ready", since=0.0) for n, info in enumerate(infos)]


def apart(one: str, *others: str) -> NodesApart:
    return NodesApart(node=one, host=one, others=tuple(NodeDoor(node=name, host=name, address=None) for name in others))


def nodes_of(reach: NodeReach, found: list[Member]) -> set[str]:
    return {member.node for member in reach.among(found)[0]}


@pytest.mark.parametrize(
    ("home", "staying"),
    [("elsewhere", {"a", "c"}), ("b", {"b"})],
)
def test_the_node_that_most_do_not_reach_stays_out_unless_it_is_the_controllers(home: str, staying: set[str]) -> None:
    reach, found = NodeReach(LIMITS, home), members(a=2, b=2, c=2)
    assert nodes_of(reach, found) == {"a", "b", "c"} and reach.among(found)[1] == ""
    reach.broken([apart("b", "a", "c")], now=0.0)
    assert nodes_of(reach, found) == staying
    assert "b does not reach a, c" in reach.among(found)[1]


def test_two_nodes_are_tried_together_later_each_time() -> None:
    reach, found, now = NodeReach(LIMITS, "a"), members(a=1, b=1), 0.0
    for wait_s in (60.0, 120.0, 240.0, 480.0, 600.0, 600.0):
        reach.broken([apart("a", "b")], now)
        assert not reach.try_again(now + wait_s - 1, soon=False) and nodes_of(reach, found) == {"a"}
        now += wait_s
        assert reach.try_again(now, soon=False) and nodes_of(reach, found) == {"a", "b"}
        assert not reach.try_again(now, soon=False), "once"
        assert reach.beyond({"a"}, also_tried=True) == ("b",) and reach.beyond({"a"}, also_tried=False) == ()


def test_a_run_that_waits_tries_soon() -> None:
    reach = NodeReach(LIMITS, "a")
    reach.broken([apart("a", "b")], now=0.0)
    assert not reach.try_again(29.0, soon=True) and reach.try_again(30.0, soon=True)


def test_nodes_that_have_trained_together_are_not_apart() -> None:
    reach = NodeReach(LIMITS, "a")
    reach.broken([apart("a", "b", "c")], now=0.0)
    reach.trained({"a", "b"})
    assert reach.beyond({"a"}, also_tried=True) == ("c",)


def test_a_node_without_a_worker_that_could_try_is_forgotten() -> None:
    reach = NodeReach(LIMITS, "a")
    reach.broken([apart("a", "b", "c")], now=0.0)
    assert not reach.forget_lost(29.0, here={"a", "b"})
    assert reach.forget_lost(30.0, here={"a", "b"}) and reach.beyond({"a"}, also_tried=True) == ("b",)
