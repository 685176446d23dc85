"""Clips that nobody can decode: a run says so once, and when CPUs are free again it knows."""

from __future__ import annotations

from dataclasses import replace

from actors.records.events import DecodingAwaited, RunEvent
from actors.run.decode_room import DecodeRoom
from data.config import EngineConfig

ENGINE = EngineConfig(decode_cpus=1.0)


class Waiting:
    """A run that waits; `free` is what its nodes have free."""

    def __init__(self, engine: EngineConfig = ENGINE, **free: float) -> None:
        self.free, self.told, self.now, self.looks = free, list[RunEvent](), 0.0, 0
        self.room = DecodeRoom(engine, self.told.append, self._look)

    def _look(self) -> dict[str, dict[str, float]]:
        self.looks += 1
        return {node: {"CPU": cpus} if cpus else {} for node, cpus in self.free.items()}

    def wait(self, seconds: float, *avoid: str) -> bool:
        """Whether it lacks CPUs, after it has waited so long."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            self.room.awaited(avoid, self.now)
        return self.room.lacks


def test_free_cpus_out_of_reach_alone_are_told_once_with_what_helps() -> None:
    run = Waiting(a=0.5, b=6.0)
    assert not run.wait(29, "b") and run.told == [], "decoding may take its time"
    assert run.wait(300, "b")
    assert run.told == [DecodingAwaited(cpus=1.0, nodes_avoided=1, cpus_avoided=6.0)]
    told = run.told[0].describe()
    assert "no node within reach of the workers has 1 CPU free" in told and "1 node out of reach has 6 free" in told
    assert "data.engine.decode_cpus" in told and "heddle workers scale" in told
    assert run.looks < 70, "nodes are looked at every five seconds"


def test_it_is_over_when_a_cpu_is_free_or_the_clips_have_come() -> None:
    run = Waiting(a=0.0, b=6.0)
    assert run.wait(40, "b")
    run.free["a"] = 1.0
    assert not run.wait(6, "b")
    run.free["a"] = 0.0
    assert run.wait(6, "b") and len(run.told) == 1, "nothing new"
    run.room.came()
    assert not run.room.lacks and not run.wait(29, "b")
    assert run.wait(10) is False, "now b may decode"


def test_a_cluster_whose_workers_take_all_cpus_is_told_too() -> None:
    run = Waiting(a=0.0, b=0.5)
    assert run.wait(40) and "no node has 1 CPU free" in run.told[0].describe()
    assert "out of reach" not in run.told[0].describe()


def test_a_pool_of_processes_asks_ray_for_no_cpu() -> None:
    run = Waiting(replace(ENGINE, kind="pool"), a=0.0)
    assert not run.wait(100) and run.looks == 0
