"""What the controller sees of workers that start."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.config import WorkersConfig
from actors.messages import FailedStart, HostGpu
from actors.outcome import silent
from actors.pool.lookout import Lookout
from actors.pool.membership_types import LeaveNotice, Loading, Resize, Shortfall
from actors.pool.monitor import Monitor
from actors.pool.requested_size import forget_size, keep_size, kept_size
from actors.pool.workers import Pool, PoolMember, PoolNews, start_monitor, weights_bytes
from actors.process import birth, lives
from actors.progress import LOADING, LinkUse, Progress
from actors.records.events import LinkSlow, MonitorRestarted, MonitorSilent, WorkerLeaving, WorkerLost
from ops.models.config import ModelConfig, VAEConfig
from ops.models.wan.config import WanConfig
from tests.actors.fakes import Handle, Listening
from tests.rays import local_ray

CONFIG = WorkersConfig(min=1, max=4, device="cpu")
FAILED = FailedStart(worker="w5", why="CUDA error: unknown", where=HostGpu(node="n", host="h", gpu="2"))


@pytest.fixture(autouse=True)
def draining(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Ids of nodes that Ray drains; no test here has a Ray to ask."""
    found: set[str] = set()
    monkeypatch.setattr("actors.pool.lookout.draining_nodes", lambda: frozenset(found))
    return found


class Starting:
    """A pool: `pending` start, `names` are known, `failed` could not start at each look."""

    def __init__(self, *pending: str, names: Sequence[str] = (), failed: FailedStart | None = None) -> None:
        self.pending, self.names, self.removed = list(pending), [*pending, *names], list[str]()
        self._failed = (failed,) if failed is not None else ()
        self.misplaced: list[str] = []
        self.shunned: tuple[str, ...] = ()
        self.hosts: dict[str, HostGpu] = {}  # of workers that have a process

    def hosting(self, name: str) -> HostGpu | None:
        return self.hosts.get(name)

    def poll(self) -> PoolNews:
        return PoolNews(failed=self._failed)

    def remove(self, name: str) -> None:
        self.removed.append(name)
        self.pending.remove(name)
        self.names.remove(name)


class Asking(Pool):
    """Workers that Ray has no room for."""

    def _request(self, names: Sequence[str]) -> Iterator[PoolMember]:
        handle: Any = Handle()
        for name in names:
            yield PoolMember(name=name, handle=handle, info_ref=handle, wished=None)

    def _end(self, member: PoolMember, frozen: bool) -> None: ...

    def poll(self) -> PoolNews:
        return PoolNews()


def test_workers_that_wait_for_room_are_asked_for_anew_when_other_nodes_are_shunned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray keeps to the nodes of the first request: a place that is free again would stay so, and the run wait. A worker
    that loads has its place."""
    monitor, pool = Monitor(), Asking()
    handle: Any = Handle(collect=monitor.collect)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr("actors.pool.lookout.free_outside", lambda nodes: {})
    lookout = Lookout(CONFIG, pool, handle, silent)
    pool.start(1)
    pool.shunned = ("n1",)
    pool.start(2)
    monitor.beat(
        Progress(
            worker="w1",
            generation=-1,
            step=-1,
            activity=LOADING,
            phase="",
            since=0.0,
            predicted_s=0.0,
            collectives=0,
            waiting_in="",
        )
    )
    assert Shortfall(count=1) in lookout.look() and pool.pending == ["w1", "w2"], "w0 might have started on n1"
    assert not any(isinstance(event, Shortfall) for event in lookout.look())
    pool.shunned = ()
    assert Shortfall(count=1) in lookout.look() and pool.pending == ["w1"]
    assert [name for (name,) in handle.remove.asked] == ["w0", "w2"]


@pytest.mark.parametrize(
    ("activity", "age_s", "given_up"), [(LOADING, 700, True), (LOADING, 500, False), ("", 700, False)]
)
def test_a_worker_that_hangs_while_it_loads_is_given_up_one_that_waits_for_room_is_not(
    monkeypatch: pytest.MonkeyPatch, activity: str, age_s: float, given_up: bool
) -> None:
    """Its clock is eleven minutes late, which says nothing about how long it loads."""
    monitor, now = Monitor(), time.monotonic()
    if activity:
        monkeypatch.setattr(time, "monotonic", lambda: now - age_s)
        monitor.beat(
            Progress(
                worker="w3",
                generation=-1,
                step=-1,
                activity=activity,
                phase="",
                since=time.time() - 660,
                predicted_s=0.0,
                collectives=0,
                waiting_in="",
            )
        )
        monkeypatch.setattr(time, "monotonic", lambda: now)
    handle, pool, listener = Handle(collect=monitor.collect), Starting("w3"), Listening()
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    lookout = Lookout(CONFIG, pool, handle, listener.on_event, start_s=600)
    events: list[Any] = lookout.look()
    assert any(isinstance(event, Shortfall) and event.count == 1 for event in events) == given_up
    assert (Loading(count=1) in events) == (bool(activity) and not given_up)
    assert not any(isinstance(event, Loading) for event in lookout.look()), "told when it changes"
    assert pool.removed == [name for (name,) in handle.remove.asked] == (["w3"] if given_up else [])
    assert listener.kinds == ([WorkerLost] if given_up else [])


@pytest.mark.parametrize(("ready", "patience_s"), [(1, 600.0), (0, 225.0)])
def test_a_worker_whose_process_hangs_before_it_is_heard_is_given_up_one_that_waits_for_room_is_not(
    monkeypatch: pytest.MonkeyPatch, ready: int, patience_s: float
) -> None:
    """A run that waits for workers (workers.wait_s, 300 s) tries another one before it ends. Three that hang are not
    hopeless: they are of one node. w4 gets its GPU late."""
    monitor, now, listener = Monitor(), 1000.0, Listening()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    handle, pool = Handle(collect=monitor.collect), Starting("w1", "w2", "w3", "w4", names=["w0"][:ready])
    where = HostGpu(node="n", host="h")
    pool.hosts = dict.fromkeys(("w1", "w2", "w3"), where)
    lookout = Lookout(CONFIG, pool, handle, listener.on_event, start_s=600)
    given_up: dict[float, list[Any]] = {}
    while now < 1000 + 2 * patience_s:
        if now > 1000 + 0.5 * patience_s:
            pool.hosts["w4"] = where
        if failed := [event.failed for event in lookout.look() if isinstance(event, Shortfall)]:
            given_up[now - 1000] = failed
        now += 5.0
    (first, alike), (second, late) = given_up.items()
    assert [failed.worker for failed in alike] == ["w1", "w2", "w3"] and [failed.worker for failed in late] == ["w4"]
    assert patience_s < first < patience_s + 30 and first + 0.4 * patience_s < second
    assert {failed.where for failed in alike} == {where} and "h: its process has not begun to load" in alike[0].why
    assert listener.kinds.count(WorkerLost) == 4 and not lookout.hopeless
    assert [name for (name,) in handle.remove.asked] == pool.removed == ["w1", "w2", "w3", "w4"]


def test_a_slow_start_has_its_whole_time_while_enough_others_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """`workers.wait_s` does not run meanwhile, which is a twentieth of the time that a start may take here."""
    monitor, now = Monitor(), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    pool = Starting("w0", "w1", "w2")
    pool.hosts = dict.fromkeys(("w1", "w2"), HostGpu(node="n", host="h"))
    handle = Handle(collect=monitor.collect)
    lookout = Lookout(replace(CONFIG, wait_s=30.0), pool, handle, silent, start_s=600)
    while now < 1500:
        monitor.beat(Progress.of_start("w0"))
        lookout.look()
        now += 5.0
    assert pool.removed == []


def test_a_spare_that_could_not_start_is_forgotten_when_workers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, pool = Handle(collect=Monitor().collect), Starting(failed=FAILED)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    lookout = Lookout(CONFIG, pool, handle, silent)
    for _ in range(3):
        assert Shortfall(count=1, failed=FAILED) in lookout.look()
    assert "CUDA error" in lookout.hopeless
    assert handle.remove.asked == [("w5",)] * 3, "heddle workers list does not show it for ever"
    lookout.try_again()
    assert not lookout.hopeless
    lookout.look()
    assert not lookout.hopeless, "three more, not one"


def test_workers_that_storage_did_not_answer_while_they_loaded_make_no_run_hopeless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that load at once meet the same fault of a file server: the run ended with exit code 1."""
    handle = Handle(collect=Monitor().collect)
    unanswered = replace(FAILED, why="OSError: [Errno 116] Stale file handle: '/w/dit'", passes=True)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    pool = Starting(failed=FAILED)
    lookout = Lookout(CONFIG, pool, handle, silent)
    for _ in range(2):
        lookout.look()
    pool._failed = (unanswered,)
    for _ in range(3):
        assert Shortfall(count=1, failed=unanswered) in lookout.look()
    assert not lookout.hopeless
    pool._failed = (FAILED,)
    lookout.look()
    assert lookout.hopeless == "3 workers in a row failed to start: CUDA error: unknown"


def test_a_size_that_was_asked_for_outlives_monitor_and_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    monitor = Monitor()

    def lookout() -> Lookout:
        return Lookout(
            CONFIG, Starting(), Handle(collect=monitor.collect), silent, keep_size=partial(keep_size, tmp_path)
        )

    lookout().look()
    assert kept_size(tmp_path) is None, "nobody has asked"
    for size in (2, 3):
        monitor.scale(size)
        assert Resize(min=1, max=size) in lookout().look() and kept_size(tmp_path) == size
    monitor.scale(4)  # as many as there may be
    lookout().look()
    assert kept_size(tmp_path) == 4
    forget_size(tmp_path)
    assert kept_size(tmp_path) is None


@pytest.mark.parametrize(("target", "recalled"), [(1, ["w4", "w3"]), (4, ["w4"]), (5, [])])
def test_in_a_pool_that_is_made_smaller_those_that_wait_for_room_go_first(
    monkeypatch: pytest.MonkeyPatch, target: int, recalled: list[str]
) -> None:
    """w2 loads its modules already."""
    monitor, pool = Monitor(), Starting("w2", "w3", "w4", names=["w0", "w1"])
    monitor.beat(replace(Progress.of_start("w2"), activity=LOADING))
    handle = Handle(collect=monitor.collect)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    lookout = Lookout(WorkersConfig(min=1, max=6, device="cpu"), pool, handle, silent)
    lookout.look()
    monitor.scale(target)
    events = lookout.look()
    assert Resize(min=1, max=target) in events and pool.removed == recalled
    assert [event.count for event in events if isinstance(event, Shortfall)] == ([len(recalled)] if recalled else [])


def test_a_dead_worker_is_named_with_what_it_was_last_heard_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, pool = Monitor(), Starting(names=["w1", "w2", "w3"])
    busy = ("dit 9f 64x96 b2 sp1 s7", "backward")
    for name, (activity, phase), waiting_in in (("w1", busy, ""), ("w2", busy, "sum"), ("w3", ("idle", "idle"), "")):
        monitor.beat(
            Progress(
                worker=name,
                generation=1,
                step=7,
                activity=activity,
                phase=phase,
                since=0.0,
                predicted_s=1.0,
                collectives=3,
                waiting_in=waiting_in,
            )
        )
    handle = Handle(collect=monitor.collect)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    lookout = Lookout(CONFIG, pool, handle, silent)
    lookout.look()
    assert lookout.last_heard("w2") == "last heard of in 'dit 9f 64x96 b2 sp1 s7' (phase backward) of step 7"
    assert lookout.last_heard("w3") == "last heard of idle, after step 7 or in it"
    assert "w1" in lookout.late() and lookout.last_heard("w9") == ""


def test_workers_of_a_node_that_ray_drains_leave_and_its_room_is_none(
    monkeypatch: pytest.MonkeyPatch, draining: set[str]
) -> None:
    """As a pod that Kubernetes deletes; Ray ends what still runs there soon."""
    monitor, listener, outside = Monitor(), Listening(), list[list[str]]()
    for name, node in (("w1", "stays"), ("w2", "goes"), ("w3", "goes")):
        monitor.beat(replace(Progress.of_start(name, node=node), activity="idle"))
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr("actors.pool.lookout.free_outside", lambda nodes: outside.append(list(nodes)) or {})
    pool = Starting(names=["w1", "w2", "w3"])
    pool.shunned = ("broken",)
    lookout = Lookout(CONFIG, pool, Handle(collect=monitor.collect), listener.on_event)
    assert not any(isinstance(event, LeaveNotice) for event in lookout.look())
    draining.add("goes")
    leaves = [LeaveNotice(worker=2), LeaveNotice(worker=3)]
    assert [event for event in lookout.look() if isinstance(event, LeaveNotice)] == leaves
    assert not any(isinstance(event, LeaveNotice) for event in lookout.look()), "it is told once"
    assert listener.kinds == [WorkerLeaving] * 2 and outside == [["broken"], *[["broken", "goes"]] * 2]


def test_slow_links_between_members_are_reported_once_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, listener = Monitor(), Listening()
    links = (("w1", "host2", 20.0), ("w1", "host3", 16.0), ("w2", "host1", 0.1), ("w2", "host3", 0.1))
    for name in ("w1", "w2", "w9"):
        uses = tuple(
            LinkUse(
                host=f"host{name[1]}",
                other=other,
                num_bytes=2**24,
                busy_s=busy_s,
                rate=2**24 / busy_s,
                fills=True,
                over_s=30.0,
            )
            for who, other, busy_s in (*links, ("w9", "host1", 25.0))
            if who == name
        )
        monitor.beat(replace(Progress.of_start(name), activity="idle", links=uses))
    times = iter((0.0, 1.0, 31.0, 62.0, 93.0))
    handle = Handle(collect=lambda: replace(monitor.collect(), now=next(times)))
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "available_resources", dict)
    lookout = Lookout(CONFIG, Starting(names=["w1", "w2"]), handle, listener.on_event)
    for _ in range(5):
        lookout.look()
    assert listener.kinds == [LinkSlow], "w9 is none of the pool's"
    assert listener.told[0].describe() == (
        "the network is slow from host1 to host2: 0.8 MiB/s, 160 between others; data was on its way for 20 of 30 s; "
        "so is 1 other link, all of host1"
    )


def test_the_time_to_load_grows_with_the_weights_and_the_workers_that_read_them(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "model.safetensors").write_bytes(bytes(1000))
    model = ModelConfig(dit=WanConfig(path=str(tmp_path)), vae=VAEConfig(kind="diffusers", path=str(tmp_path)))
    assert weights_bytes(model) == 1000 and weights_bytes(ModelConfig()) == 0
    assert WorkersConfig(max=64).start_patience_s(40 * 10**9) > 40e9 * 64 / 1.5e9, "a shared storage of 1.5 GB/s"
    assert WorkersConfig().start_patience_s(0) == 600
    assert WorkersConfig(start_s=50).start_patience_s(10**12) == 50


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.RayActorError(),
        ray.exceptions.OutOfMemoryError("a node ran low"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_monitor_that_is_gone_is_waited_for_also_one_that_was_ended_for_memory(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert asking_in_vain(monkeypatch, error).look()


def test_a_monitor_that_ray_has_given_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarted where /tmp was full it never came: notices, stops and hung workers went unheard. The next controller
    makes another one."""
    lookout = asking_in_vain(monkeypatch, ray.exceptions.RuntimeEnvSetupError("No space left on device"))
    with pytest.raises(ray.exceptions.RuntimeEnvSetupError):
        lookout.look()


def asking_in_vain(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Lookout:
    """Its monitor is gone."""

    def gone(value: object, timeout: float) -> None:
        raise error

    handle: Any = Handle()
    monkeypatch.setattr("actors.pool.lookout.get", gone)
    monkeypatch.setattr("actors.pool.lookout.free_outside", lambda nodes: {})
    return Lookout(CONFIG, Asking(), handle, silent)


def test_a_monitor_that_lives_and_does_not_answer_holds_nobody_up_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen one does not hear Ray. Where another one does not come, it is given twice the time."""
    now, waited, killed, signals, listener = [0.0], list[float](), list[float](), list[Any](), Listening()
    monitors, silent = [Monitor()], [False]

    def get(report: object, timeout: float) -> object:
        waited.append(timeout if silent[0] else 0.0)
        now[0] += waited[-1]
        if silent[0]:
            raise ray.exceptions.GetTimeoutError
        return report

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda asked, timeout, fetch_local: ([], asked) if silent[0] else (asked, []))
    monkeypatch.setattr(ray, "available_resources", dict)
    monkeypatch.setattr("actors.pool.lookout.node_of_process", lambda handle: "n")
    monkeypatch.setattr("actors.pool.lookout.kill", lambda handle, no_restart: killed.append(now[0]))
    monkeypatch.setattr("actors.pool.lookout.kill_process", lambda *process: signals.append(process))
    handle = Handle(collect=lambda: monitors[-1].collect())
    lookout = Lookout(CONFIG, Starting(), handle, listener.on_event)
    lookout.look()
    silent[0] = True
    while now[0] < 100:
        lookout.look()
        now[0] += 0.5
    assert sum(waited) == 3.0 and len(handle.collect.asked) == 4, "each look would wait for a question of its own"
    assert killed == [pytest.approx(CONFIG.suspect_s, abs=2), pytest.approx(3 * CONFIG.suspect_s, abs=3)]
    assert signals == 2 * [("n", os.getpid(), birth(os.getpid()))]
    silent[0] = False
    lookout.look()  # the answer to the old question
    monitors.append(Monitor())
    lookout.look()
    assert listener.kinds == [MonitorSilent, MonitorSilent, MonitorRestarted] and len(handle.restore.asked) == 1
    assert "has not answered for 20 s" in listener.told[0].describe()


def test_a_large_report_that_comes_late_is_given_time_to_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the transfer from another node with the call that waits for it: a healthy monitor was ended, and no look
    saw anything any more."""
    busy = [True]

    def get(report: object, timeout: float) -> object:
        if timeout < (2.0 if busy[0] else 0.1):
            raise ray.exceptions.GetTimeoutError
        return report

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda asked, timeout, fetch_local: ([], asked) if busy[0] else (asked, []))
    monkeypatch.setattr(ray, "available_resources", dict)
    handle = Handle(collect=Monitor().collect)
    lookout = Lookout(CONFIG, Starting(), handle, silent)
    lookout.look()
    lookout.look()
    busy[0] = False
    assert lookout._report() is not None and len(handle.collect.asked) == 1


@pytest.mark.cluster
@pytest.mark.faults
def test_a_monitor_whose_process_is_stopped_is_started_again() -> None:
    listener, until = Listening(), time.monotonic() + 120
    with local_ray(num_cpus=1, log_to_driver=False):
        monitor = start_monitor("run")
        lookout = Lookout(replace(CONFIG, suspect_s=3.0), Starting(), monitor, listener.on_event)
        first = ray.get(monitor.collect.remote())  # type: ignore[call-overload]
        lookout.look()
        os.kill(first.pid, signal.SIGSTOP)
        while MonitorRestarted not in listener.kinds:
            assert time.monotonic() < until
            lookout.look()
            time.sleep(0.2)
        assert not lives(first.pid, first.born)
    assert listener.kinds[0] is MonitorSilent
