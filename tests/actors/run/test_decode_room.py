"""Clips that nobody can decode: a run says so once, and when CPUs are free again it knows."""

from __future__ import annotations

from dataclasses import replace

from actors.records.events import DecodingAwaited, RunEvent
from actors.refs import RayNode
from actors.run.decode_room import DecodeRoom
from data.config import EngineConfig

ENGINE = EngineConfig(decode_cpus=1.0)


class Waiting:
    """A run that waits; `left` is what a worker of half a core leaves of each of its nodes."""

    def __init__(self, engine: EngineConfig = ENGINE, **left: float) -> None:
        self.left, self.told, self.now, self.looks = left, list[RunEvent](), 0.0, 0
        self.room = DecodeRoom(engine, 0.5, self.told.append, self._look)

    def _look(self) -> list[RayNode]:
        self.looks += 1
        gone = _node("gone", 64.0, alive=False)
        return [gone, *(_node(name, cpus + 0.5) for name, cpus in self.left.items())]

    def wait(self, seconds: float, *avoid: str) -> bool:
        """Whether it lacks CPUs, after it has waited so long."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            self.room.awaited(avoid, tuple(self.left), self.now)
        return self.room.lacks


def _node(name: str, cpus: float, alive: bool = True) -> RayNode:
    return RayNode(
        NodeID=name,
        Alive=alive,
        Resources={"CPU": cpus} if cpus else {},
        NodeManagerAddress="",
        NodeManagerHostname="",
        NodeManagerPort=0,
    )


def test_free_cpus_out_of_reach_alone_are_told_once_with_what_helps() -> None:
    run = Waiting(a=0.5, b=6.0)
    assert not run.wait(29, "b") and run.told == [], "decoding may take its time"
    assert run.wait(300, "b")
    assert run.told == [DecodingAwaited(cpus=1.0, nodes_avoided=1, cpus_avoided=6.0)]
    told = run.told[0].describe()
    assert "no node within reach has 1 CPU beside its workers" in told
    assert "1 node out of reach has 6 of them" in told
    assert "data.engine.decode_cpus" in told and "heddle workers scale" in told
    assert run.looks < 70, "nodes are looked at every five seconds"


def test_it_is_over_when_a_cpu_is_free_or_the_clips_have_come() -> None:
    run = Waiting(a=0.0, b=6.0)
    assert run.wait(40, "b")
    run.left["a"] = 1.0
    assert not run.wait(6, "b")
    run.left["a"] = 0.0
    assert run.wait(6, "b") and len(run.told) == 1, "nothing new"
    run.room.came()
    assert not run.room.lacks and not run.wait(29, "b")
    assert run.wait(10) is False, "now b may decode"


def test_a_cluster_whose_workers_take_all_cpus_is_told_too() -> None:
    run = Waiting(a=0.0, b=0.5)
    assert run.wait(40) and "no node has 1 CPU beside its workers" in run.told[0].describe()
    assert "out of reach" not in run.told[0].describe()


def test_a_pool_of_processes_asks_ray_for_no_cpu() -> None:
    run = Waiting(replace(ENGINE, kind="pool"), a=0.0)
    assert not run.wait(100) and run.looks == 0


def test_clips_that_take_long_on_the_cpus_there_are_say_nothing() -> None:
    """These CPUs are not free meanwhile."""
    run = Waiting(a=1.0, b=0.0)
    assert not run.wait(600) and run.told == []
