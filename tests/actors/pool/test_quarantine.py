"""Nodes rest on which workers end before their first step."""

from __future__ import annotations

import pytest

from actors.messages import HostGpu
from actors.pool.quarantine import Quarantine

BAD, GOOD = HostGpu(node="n", host="h", gpu="2"), HostGpu(node="n", host="h", gpu="3")


def test_once_may_be_chance_and_each_rest_is_twice_as_long_up_to_the_longest() -> None:
    quarantine, now, rests = Quarantine(60.0, 200.0), 0.0, list[float | None]()
    for _ in range(5):
        rests.append(quarantine.ended(BAD, now))
        now += rests[-1] or 0.0
    assert rests == [None, 60.0, 120.0, 200.0, 200.0] and quarantine.count(BAD) == 5


def test_a_node_rests_until_the_time_is_up() -> None:
    quarantine = Quarantine(60.0, 200.0)
    quarantine.ended(BAD, 0.0)
    assert quarantine.resting(0.0) == set()
    quarantine.ended(BAD, 10.0)
    assert quarantine.resting(69.0) == {"n"} and quarantine.resting(70.0) == set()


def test_workers_that_had_been_started_before_a_rest_do_not_make_it_longer() -> None:
    quarantine = Quarantine(60.0, 200.0)
    found = [quarantine.ended(HostGpu(), 0.1 * n) for n in range(8)]
    assert found == [None, 60.0, *[None] * 6] and quarantine.resting(1.0) == {""}
    assert quarantine.ended(HostGpu(), 61.0) == 60.0, "no longer than that where nobody knows the node"


@pytest.mark.parametrize(("worked", "rests"), [(BAD, None), (GOOD, 60.0)])
def test_only_a_step_on_the_same_gpu_clears_it(worked: HostGpu, rests: float | None) -> None:
    quarantine = Quarantine(60.0, 200.0)
    quarantine.ended(BAD, 0.0)
    quarantine.worked(worked)
    assert quarantine.ended(BAD, 1.0) == rests


def test_what_is_known_of_a_node_alone_is_cleared_by_a_step_on_any_of_its_gpus() -> None:
    quarantine = Quarantine(60.0, 200.0)
    quarantine.ended(HostGpu(node="n", host="h"), 0.0)
    quarantine.worked(GOOD)
    assert quarantine.ended(HostGpu(node="n", host="h"), 1.0) is None
