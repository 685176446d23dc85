"""A whole run out of parts that answer at once: its steps, its generations, its end. No Ray is started."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.config import SnapshotConfig
from actors.held_state import Origin, Snapshot
from actors.letters import Failures
from actors.messages import FinishTask, FormTask, Handover, NodeDoor, NodesApart, OutOfReach, StepReport, WorkerInfo
from actors.outcome import Events, NotRecorded, StopRun
from actors.plan.types import Cascade, Cluster, Item, Part, PlanError, StepPlan
from actors.planning.memory import MemoryForecast
from actors.planning.room import GenerationRoom
from actors.pool.membership import Membership
from actors.pool.membership_types import Arrival, Event, LeaveNotice, Limits, Starvation
from actors.records.events import (
    DataAwaited,
    DataBack,
    DecodingAwaited,
    GenerationEnded,
    GenerationFormed,
    RunFinished,
    RunStarted,
    SpeedsLearned,
    StepsRecovered,
    StorageAwaited,
    StorageBack,
    WorkerDied,
    WorkerDrained,
    WorkersLeftOut,
)
from actors.run.asides import AsideTurns
from actors.run.committer import UncommittedStep
from actors.run.controller import Controller, LookPace
from actors.run.data_wait import DataPace
from actors.run.decode_room import DecodeRoom
from actors.run.shortage import Shortage
from actors.run.speeds import Speeds
from actors.run.steps import StepRunner
from actors.state.checkpoint_files import FirstStateLost
from actors.state.hosts import needs_of_hosts
from actors.state.recovery import CommitLog, Recovery
from actors.step import Seat, StepAssignment, StepData
from data.errors import DataIOError, DataUnreachable
from ops.geometry import Geometry
from ops.typed import ConfigError
from tests.actors.fakes import (
    Handle,
    Listening,
    Remote,
    StateHere,
    collected,
    config_of,
    controller_of,
    pool_here,
    step_items,
)

STEPS = 6


@pytest.fixture(autouse=True)
def ray_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are values here; an exception stands for a call that failed."""

    def get(value: Any, timeout: float | None = None) -> Any:
        if isinstance(value, list):
            return [get(one) for one in value]
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda values, num_returns, timeout: (list(values), []))
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: None)


class Source:
    """One image in every step, decoded at once."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.avoid: tuple[str, ...] = ()

    def open(self, first_step: int, token: object) -> dict[str, Any]:
        self.opened.append(first_step)
        return {}

    def has(self, step: int, timeout_s: float) -> bool:
        return True

    def items(self, step: int) -> tuple[Item, ...] | None:
        return self.data(step).items.planned if step < STEPS else None

    def data(self, step: int) -> StepData:
        items = step_items(step, [(f"s{step}", (1, 64, 96), ["a/0/0"])], Geometry())
        batches: dict[str, Any] = {f"s{step}": "pixels"}
        return StepData(items=items, batches=batches)

    def request(self, step: int) -> None: ...
    def ledger(self) -> dict[str, Any]:
        return {}

    def release(self, step: int) -> None: ...
    def close(self) -> None: ...


class Planning:
    """All on the first worker; `asked` are the clusters that plans were asked for."""

    def __init__(self) -> None:
        self.asked: list[Cluster] = []
        self.fetched: list[bool] = []  # by generation

    def begin(self, fetched: bool) -> None:
        self.fetched.append(fetched)

    def plan(self, step: int, window: Any, cluster: Any, done: Any, budget_s: float) -> StepAssignment:
        self.asked.append(cluster)
        part = Part(item=f"s{step}", first=0, count=1)
        cascades = tuple(
            Cascade(
                id=f"s{step}/{module}/0",
                module=module,
                step=step,
                parts=(part,),
                degree=1,
                workers=(0,),
                start_s=0,
                end_s=1,
            )
            for module in ("text", "vae", "dit")
        )
        plan = StepPlan(step=step, cascades=cascades, makespan_s=1, lower_bound_s=1, planning_s=0, idle_ratio=0)
        return StepAssignment(step=plan, cascades=cascades, planning_s=0.0)

    def request(self, *question: Any) -> None: ...
    def observe(self, *measured: Any) -> None: ...
    def save_learned(self) -> None: ...
    def ask_learned(self) -> None: ...
    def poll(self) -> None: ...
    def close(self) -> None: ...


class Held(StateHere):
    """Every step is held as soon as it is finished; nothing is on disk before the end."""

    def __init__(self, first: int = -1) -> None:
        super().__init__(-1, STEPS - 1, first=first)
        self.keepers = SimpleNamespace(home=lambda rank: f"home of {rank}", hold=lambda snapshots, relays: [])
        self.recovered: list[int] = []
        self.taken_over: list[tuple[tuple[str, ...], int]] = []  # (workers, step)

    def take_over(self, world: Sequence[Seat], step: int) -> list[Any]:
        self.taken_over.append((tuple(seat.name for seat in world), step))
        return []

    def recover(self, commits: CommitLog) -> Recovery:
        newest = commits.newest
        self.recovered.append(newest)
        return Recovery(origin=Origin(step=newest) if newest >= 0 else None, newly_safe=commits.finished)

    def forget_first(self) -> None: ...
    def open(self, origin: Origin | None, generation: int, infos: Sequence[WorkerInfo]) -> None: ...
    def lost_keepers(self) -> None: ...
    def is_exported(self, step: int) -> bool:
        return False

    def saves(self, step: int) -> bool:
        return False

    def after_commit(self, done: Any, position: object, relays: object) -> None: ...


class Workers:
    """Two of them; `dies` says whether a worker dies in a step, `forms` what the forming of a generation raises."""

    def __init__(
        self,
        dies: Callable[[str, int], bool] = lambda name, step: False,
        forms: Callable[[FormTask], Exception | None] = lambda task: None,
    ) -> None:
        self._dies, self._forms = dies, forms
        self.handles: dict[str, Any] = {name: self._worker(name) for name in ("w0", "w1")}
        self.formed: list[FormTask] = []

    def _worker(self, name: str) -> Handle:
        def finish(task: FinishTask) -> tuple[StepReport, Snapshot | None] | Exception:
            if self._dies(name, task.step):
                return ray.exceptions.ActorDiedError()
            return report(name, task.step), None

        def form(task: FormTask) -> Exception | None:
            self.formed.append(task)
            return self._forms(task)

        return Handle(
            form=form,
            finish_step=finish,
            hand_over=lambda step: Handover(worker=name),
        )

    def info(self, name: str) -> WorkerInfo:
        return WorkerInfo(worker=name, node="n", host="h", pid=1, device="cpu")

    def remove(self, name: str, frozen: bool = False) -> None:
        del self.handles[name]

    @property
    def names(self) -> list[str]:
        return list(self.handles)


def report(worker: str, step: int) -> StepReport:
    return StepReport(
        worker=worker,
        step=step,
        loss=1.0,
        weight=1.0,
        grad_norm=1.0,
        lr=1e-4,
        applied=True,
        spans=(),
        peak_memory_gib=0.0,
        rss_gib=0.0,
    )


class Run:
    """A run of two workers that come up at its first look; `later` are events by the step that is dispatched next."""

    def __init__(
        self,
        workers: Workers,
        later: dict[int, list[Event]] | None = None,
        shortage: Shortage | None = None,
        wait_s: float = 120.0,
        cluster: Cluster | None = None,
        listener: Callable[[Run], Listening] = lambda run: Listening(),
        source: Source | None = None,
        first: int = -1,
        data_pace: DataPace | None = None,
        speeds: Speeds | None = None,
    ) -> None:
        self.listener = listener(self)
        self.source, self.state, self.planner = source or Source(), Held(first), Planning()
        coming: dict[int, list[Event]] = later or {}
        up: list[Event] = [Arrival(worker=n, info=workers.info(f"w{n}")) for n in (0, 1)]

        def look() -> list[Event]:
            runner = self.controller.generations.runner
            if runner is None:
                return [up.pop(0) for _ in list(up)]
            return coming.pop(runner.next_step, [])

        self.controller = controller_of(
            self.state,
            config=config_of(cluster=cluster),
            events=Events(self.listener),
            source=self.source,
            planner=self.planner,
            data_pace=data_pace or DataPace(try_s=0.0),
            shortage=shortage,
            speeds=speeds,
            membership=Membership(Limits(min=1, max=2, wait_s=wait_s), generation=0),
            pool=pool_here(handle=workers.handles.__getitem__, remove=workers.remove, names=workers.names, taken=list),
            lookout=SimpleNamespace(
                look=look,
                stop="",
                hopeless="",
                frozen={},
                last_heard=lambda name: "",
                late=lambda: "",
                try_again=lambda: None,
            ),
        )
        self.outcome = self.controller.train()

    def told(self, *kinds: type) -> list[Any]:
        return [event for event in self.listener.told if isinstance(event, kinds)]


def test_a_cluster_file_that_does_not_match_ends_a_run_before_its_first_step() -> None:
    run = Run(Workers(), cluster=Cluster(nodes=(1, 1)))
    assert run.outcome.code == 2 and run.listener.steps == [] and run.told(GenerationFormed) == []
    assert run.outcome.reason == (
        "workers.cluster describes nodes of 1 and 1 GPUs, and h has 2 workers. Correct the file, or leave "
        "workers.cluster empty: a run then takes what its workers tell."
    )


def test_plans_count_on_the_speeds_of_the_cluster_file() -> None:
    """Nobody has measured any, so they stay."""
    run = Run(Workers(), cluster=Cluster(nodes=(2,), speed=(1.0, 0.5)))
    assert run.outcome.code == 0 and run.told(SpeedsLearned) == []
    assert len(run.planner.asked) == STEPS and {cluster.speed for cluster in run.planner.asked} == {(1.0, 0.5)}


def test_the_first_plan_of_a_generation_counts_on_the_speeds_that_are_known() -> None:
    """A worker that is known to be slow stays, the other one is lost."""
    speeds = Speeds()
    speeds.factors(("w0", "w1"))
    speeds._told["w0"] = 0.5
    run = Run(Workers(dies=lambda name, step: (name, step) == ("w1", 3)), speeds=speeds)
    assert run.outcome.code == 0 and {cluster.speed for cluster in run.planner.asked} == {(0.5, 1.0), (0.5,)}


def test_a_run_takes_every_step_once_and_ends_with_the_last_on_disk() -> None:
    run = Run(Workers())
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS)) and run.source.opened == [0]
    assert [type(event) for event in run.told(GenerationFormed, RunStarted, RunFinished)] == [
        GenerationFormed,
        RunStarted,
        RunFinished,
    ]
    assert run.told(GenerationFormed)[0].workers == ("w0", "w1") and run.told(GenerationFormed)[0].from_step == 0
    assert run.state.asked == ["keep_last", "seal_last", "free_memory"] and run.controller.left == ""


def test_a_controller_asks_for_the_state_of_the_newest_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be of a step that the one before it could not say to keepers any more."""
    monkeypatch.setattr(Listening, "newest_line", lambda listener: (4, 2))
    assert Run(Workers()).state.recorded == (4, 2)


def test_the_step_in_which_a_worker_dies_is_computed_again_by_the_others() -> None:
    workers = Workers(dies=lambda name, step: (name, step) == ("w1", 3))
    run = Run(workers)
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS)), "each step counts once"
    assert [event.worker for event in run.told(WorkerDied)] == ["w1"] and workers.names == ["w0"]
    first, second = run.told(GenerationFormed)
    assert (second.workers, second.from_step) == (("w0",), 3) and run.state.recovered == [-1, 2]
    assert [event.clean for event in run.told(GenerationEnded)] == [False]
    assert [event.step for event in run.told(StepsRecovered)] == [3]
    assert [(task.generation, task.world) for task in workers.formed] == [
        *[(first.generation, 2)] * 2,
        (second.generation, 1),
    ]


def test_seconds_of_a_run_are_what_they_were_whoever_sets_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here somebody sets it back by an hour at every look."""
    back, lines = itertools.count(2e9, -3600.0), list[Any]()
    monkeypatch.setattr(time, "time", lambda: next(back))

    class Lines(Listening):
        def on_step(self, metrics: Any, timeline: Any, plan: Any) -> None:
            super().on_step(metrics, timeline, plan)
            lines.append(metrics)

    run = Run(Workers(dies=lambda name, step: (name, step) == ("w1", 3)), listener=lambda run: Lines())
    told = [event.seconds for event in run.told(GenerationFormed, StepsRecovered)]
    assert len(lines) == STEPS and len(told) == 3
    assert all(0 <= seconds < 600 for seconds in [*told, *(line.step_s for line in lines)])


def test_a_worker_that_leaves_finishes_what_is_dispatched_and_goes_between_two_steps() -> None:
    workers = Workers()
    run = Run(workers, later={2: [LeaveNotice(worker=1)]})
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS)) and workers.names == ["w0"]
    assert [event.worker for event in run.told(WorkerDrained)] == ["w1"] and not run.told(GenerationEnded, WorkerDied)
    assert run.told(GenerationFormed)[1].from_step == run.state.recovered[1] + 1 == 2


class FullDisk(Listening):
    """The steps from `first` on cannot be recorded, in the first `tries`."""

    def __init__(self, first: int, tries: int, then: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._first, self._left, self._then = first, tries, then

    def on_step(self, metrics: Any, timeline: Any, plan: Any) -> None:
        if metrics.step >= self._first and self._left:
            self._left -= 1
            self._then()
            raise NotRecorded("No space left on device: runs/x") from OSError(28, "No space left on device")
        super().on_step(metrics, timeline, plan)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look of the committer is a second later."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(
        "actors.run.committer.time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
    )


@pytest.mark.usefixtures("at_once")
def test_a_run_on_a_full_disk_finishes_what_is_under_way_and_goes_on_when_there_is_room() -> None:
    dispatched: list[int] = []

    def full(run: Run) -> Listening:
        return FullDisk(1, 50, lambda: dispatched.append(run.controller.generations.runner.next_step))  # type: ignore[union-attr]

    run = Run(Workers(), listener=full)
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS)) and max(dispatched) == 3
    assert len(run.told(StorageAwaited)) == len(run.told(StorageBack)) == 1 and len(run.told(GenerationFormed)) == 1


class SilentStorage(Source):
    """Step 3 cannot be read before the feeder has been opened `opens` times; nor can the data be opened before, where
    `shut` says so."""

    def __init__(self, opens: int, error: Exception, *, shut: bool = False) -> None:
        super().__init__()
        self._opens, self._error, self._shut = opens, error, shut

    def open(self, first_step: int, token: object) -> dict[str, Any]:
        super().open(first_step, token)
        if self._shut and len(self.opened) < self._opens:
            raise self._error
        return {}

    def has(self, step: int, timeout_s: float) -> bool:
        if step == 3 and len(self.opened) < self._opens:
            raise self._error
        return super().has(step, timeout_s)


EIO = DataUnreachable("read /nfs/0.tar at 512: Input/output error (5 attempts)")


def test_a_run_whose_data_does_not_answer_finishes_what_is_under_way_and_goes_on_when_it_does() -> None:
    run = Run(Workers(), source=SilentStorage(4, EIO))
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS)), "each step counts once"
    assert run.source.opened == [0, 3, 3, 3] and run.state.recovered == [-1, 2], "all before it counted first"
    (awaited,), (back,) = run.told(DataAwaited), run.told(DataBack)
    assert awaited.step == 3 and "/nfs/0.tar" in awaited.why and back.seconds < 60
    assert [event.from_step for event in run.told(GenerationFormed)] == [0, 3]


def test_a_worker_that_dies_while_the_data_does_not_answer_is_no_matter() -> None:
    workers = Workers(dies=lambda name, step: (name, step) == ("w1", 2))
    run = Run(workers, source=SilentStorage(5, EIO))
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS))
    assert len(run.told(WorkerDied)) == len(run.told(DataAwaited)) == len(run.told(DataBack)) == 1


@pytest.mark.parametrize("error", [DataIOError("0.tar is gone since it was indexed"), EIO])
def test_data_that_is_lost_or_does_not_answer_for_too_long_ends_the_run(error: Exception) -> None:
    before = time.monotonic()
    with pytest.raises(type(error)):
        Run(Workers(), source=SilentStorage(10**6, error), data_pace=DataPace(try_s=0.01, longest_s=0.2))
    assert (time.monotonic() - before > 0.2) == (error is EIO)


def test_a_run_that_is_continued_waits_for_its_data_and_one_that_begins_does_not() -> None:
    run = Run(Workers(), source=SilentStorage(3, EIO, shut=True), first=1)
    assert run.outcome.code == 0 and run.listener.steps == [2, 3, 4, 5] and run.source.opened == [2, 2, 2]
    (started,) = run.told(RunStarted)
    assert started.from_step == 2 and len(run.told(DataAwaited)) == 1 == len(run.told(DataBack))
    with pytest.raises(DataUnreachable):
        Run(Workers(), source=SilentStorage(3, EIO, shut=True))


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_dies_while_nothing_can_be_recorded_costs_the_steps_that_did_not_count() -> None:
    workers = Workers(dies=lambda name, step: (name, step) == ("w1", 3))
    run = Run(workers, listener=lambda run: FullDisk(2, 50))
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS))
    assert [event.from_step for event in run.told(GenerationFormed)] == [0, 2] and run.state.recovered == [-1, 1]


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_comes_before_a_generation_has_begun_on_a_full_disk_joins_it() -> None:
    """There is no step then that could be recorded, and none is begun before the boundary."""
    later: dict[int, list[Event]] = {99: []}

    def forms(task: FormTask) -> None:
        if task.generation == 2:
            later[2] = [Arrival(worker=2, info=workers.info("w2"))]

    workers = Workers(dies=lambda name, step: (name, step) == ("w1", 3), forms=forms)
    workers.handles["w2"] = workers._worker("w2")
    run = Run(workers, later=later, listener=lambda run: FullDisk(2, 50))
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS))
    assert [event.workers for event in run.told(GenerationFormed)] == [("w0", "w1"), ("w0",), ("w0", "w2")]
    assert [event.from_step for event in run.told(GenerationFormed)] == [0, 2, 2]


@pytest.mark.usefixtures("at_once")
def test_a_run_that_is_stopped_on_a_full_disk_ends_at_once_with_what_counts() -> None:
    def full(run: Run) -> Listening:
        return FullDisk(2, 10**6, lambda: setattr(run.controller.lookout, "stop", "Ctrl-C"))

    run = Run(Workers(), listener=full)
    assert run.outcome.code == 75 and run.outcome.last_step == 1 and run.state.asked[0] == "keep_last"


@pytest.mark.parametrize("between_generations", [True, False])
def test_a_stop_waits_for_a_finished_step_to_be_held_only_while_a_generation_runs(between_generations: bool) -> None:
    """Slurm and Kubernetes end the process half a minute later. Nobody asks the keepers between two generations, and
    what they hold of the step goes to disk at the end."""
    controller = controller_of(StateHere(-1))
    step = UncommittedStep(collected=collected(8, 3), copying={}, waiting=["late"], since=0.0)  # type: ignore[list-item]
    controller.committer._open.append(step)
    runner: Any = SimpleNamespace(running=[])
    controller.generations.runner = None if between_generations else runner
    controller.lookout.stop = "stopped by a signal"
    if between_generations:
        with pytest.raises(StopRun, match="stopped by a signal"):
            controller._stop_if_asked(1000.0)
    else:
        controller._stop_if_asked(1000.0)
        with pytest.raises(StopRun):
            controller._stop_if_asked(1001.0 + controller.config.workers.collective_timeout_s)


def test_workers_that_die_one_after_the_other_end_the_run_with_what_it_has() -> None:
    run = Run(Workers(dies=lambda name, step: step == (4 if name == "w0" else 2)), wait_s=0.5)
    assert run.outcome.code == 75 and run.outcome.last_step == 3 and run.listener.steps == [0, 1, 2, 3]


def test_a_step_is_judged_by_the_speeds_that_its_plan_counted_on() -> None:
    """A step that was dispatched before a worker was found to be slow expected of it what it expects of any."""
    heard: list[dict[str, float]] = []
    speeds = SimpleNamespace(
        observe=lambda reports, planned_with: heard.append(planned_with), factors=lambda names, expected: (1.0, 0.5)
    )
    runner = SimpleNamespace(
        world=[SimpleNamespace(name="w0", node="n"), SimpleNamespace(name="w1", node="n")],
        cluster=SimpleNamespace(speed=(1.0, 0.5)),
    )
    controller: Any = SimpleNamespace(
        config=SimpleNamespace(planner=SimpleNamespace(strategy="cascade")), speeds=speeds, events=None
    )
    for speed in ((), (1.0, 0.5)):
        done: Any = SimpleNamespace(reports=(), running=SimpleNamespace(speed=speed))
        Controller._learn_speeds(controller, runner, done)  # type: ignore[arg-type]
    assert heard == [{}, {"w0": 1.0, "w1": 0.5}]


def test_a_relay_that_hangs_is_ended_also_while_only_a_commit_waits_for_it() -> None:
    lost: list[str] = []
    relays = SimpleNamespace(silent=lambda now: {"a": 61.0, "b": 70.0}, lose=lambda node, now: lost.append(node))
    runner = SimpleNamespace(running=[], world=(), relays=relays, _submitter=SimpleNamespace(relay_of={"a": None}))
    runner.take_up_relays = runner.check_forming = lambda: None
    runner.end_hanging_relays = lambda: StepRunner.end_hanging_relays(runner)  # type: ignore[arg-type]
    controller = SimpleNamespace(
        generations=SimpleNamespace(runner=runner),
        committer=SimpleNamespace(settle=lambda world, quiet, timeout_s: None),
        _dispatch=lambda runner: None,
        _at_boundary=lambda runner: None,
        _try_data=lambda: None,
    )
    Controller._advance(controller)  # type: ignore[arg-type]
    assert lost == ["a", "b"]
    assert runner.end_hanging_relays() == {"a": 61.0}, "no call of this generation goes through b's"


def test_a_node_whose_object_store_is_too_small_is_told_so_before_any_worker_forms() -> None:
    workers = Workers()
    told = workers.info
    weights = 200 * 2**30 // 16
    workers.info = lambda name: replace(told(name), node=name, store_gib=0.5, shared_gib=2.0)  # type: ignore[method-assign]
    room = GenerationRoom(sizes=MemoryForecast(parameters=weights, trained=weights, parameter_bytes=4, state_bytes=16))
    shortage = Shortage(snapshot=SnapshotConfig(), room=room)
    with pytest.raises(PlanError, match=r"node h has an object store of 0\.50 GiB.*take 0\.56 GiB"):
        Run(workers, shortage=shortage)
    assert workers.formed == []


def test_every_generation_makes_as_many_samples_at_a_time_as_its_nodes_have_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, limits = Workers(dies=lambda name, step: (name, step) == ("w1", 3)), []
    monkeypatch.setattr(AsideTurns, "limit", lambda turns, most: limits.append(most))
    told = workers.info
    workers.info = lambda name: replace(told(name), host_room_gib=100.0)  # type: ignore[method-assign]
    weights = 2 * 2**30 // 16
    room = GenerationRoom(sizes=MemoryForecast(parameters=weights, trained=weights, parameter_bytes=4, state_bytes=16))
    shortage = Shortage(snapshot=SnapshotConfig(), room=room, samples=True)
    assert Run(workers, shortage=shortage).outcome.code == 0
    (need,) = [need for _, need, _ in needs_of_hosts([workers.info("w0")], 2.0, 16, SnapshotConfig(), 0.5)]
    assert limits == [1 + int((100.0 - need.total) / 0.5)] * 2


@pytest.mark.parametrize(
    ("cause", "ends"),
    [
        (MemoryError("no room for 54,506 MiB of shared memory (gradients)"), PlanError),
        (ConfigError("train.memory.gradients: the memory of the node's GPUs cannot be used (PCIe)."), ConfigError),
        (FirstStateLost("train.init_from: /runs/a/checkpoints/step-3 is gone."), FirstStateLost),
    ],
)
@pytest.mark.parametrize("first_seen", ["by itself", "behind a finish that failed"])
def test_what_no_other_generation_would_do_better_ends_the_run_at_once(
    cause: Exception, ends: type[Exception], first_seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = ray.exceptions.RayTaskError("form", "", cause)
    workers = Workers(forms=lambda task: failed if task.generation < 4 else None)
    if first_seen != "by itself":  # looked at when the step's own calls have failed for it
        stale = ray.exceptions.RayTaskError("finish", "", RuntimeError("the worker is in no generation"))
        for handle in workers.handles.values():
            handle.finish_step = Remote(lambda task: stale)
        looks = iter([False])
        check = StepRunner.check_forming
        monkeypatch.setattr(StepRunner, "check_forming", lambda runner: next(looks, True) and check(runner))
    with pytest.raises(ends, match=str(cause)[:20]):
        Run(workers)
    assert [task.generation for task in workers.formed] == [1, 1]


def test_what_a_worker_lacks_that_could_not_form_may_be_there_the_next_time() -> None:
    failed = ray.exceptions.RayTaskError("form", "", RuntimeError("a peer has gone"))
    workers = Workers(forms=lambda task: failed if task.generation == 1 else None)
    run = Run(workers)
    assert run.outcome.code == 0 and {task.generation for task in workers.formed} == {1, 2}
    assert "could not form the generation: a peer has gone" in run.told(GenerationEnded)[0].why


def test_a_generation_that_cannot_be_formed_ends_also_while_its_data_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The data may be late for the same reason, such as a node that is out of reach, and come for the next one."""
    failed = ray.exceptions.RayTaskError("form", "", RuntimeError("a peer has gone"))
    workers = Workers(forms=lambda task: failed if task.generation == 1 else None)
    looks = iter(range(1000))

    def has(source: Source, step: int, timeout_s: float) -> bool:
        assert next(looks, None) is not None, "the run waits for ever"
        return workers.formed[-1].generation > 1

    monkeypatch.setattr(Source, "has", has)
    run = Run(workers)
    assert run.outcome.code == 0 and {task.generation for task in workers.formed} == {1, 2}


def test_a_run_whose_clips_nobody_can_decode_says_so_once_and_goes_on_when_somebody_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it lasts the membership knows, for which nodes out of reach are worth a try sooner."""
    clock, looks, seen = itertools.count(0, 10), itertools.count(), list[bool]()
    node: dict[str, Any] = {"NodeID": "n", "Alive": True, "Resources": {"CPU": 0.0}}
    monkeypatch.setattr("actors.run.controller.DecodeRoom", partial(DecodeRoom, nodes=lambda: [node]))
    monkeypatch.setattr(
        "actors.run.controller.time", SimpleNamespace(**{**vars(time), "monotonic": lambda: next(clock)})
    )
    observe = Membership.observe

    def noted(self: Membership, events: Sequence[Event], now: float) -> Any:
        seen.extend(event.starves for event in events if isinstance(event, Starvation))
        return observe(self, events, now)

    def has(source: Source, step: int, timeout_s: float) -> bool:
        """Somebody adds CPUs when the run has waited for a while; the clips come then."""
        now = next(looks)
        if now == 30:
            node["Resources"] = {"CPU": 64.0}
        return now > 40

    monkeypatch.setattr(Membership, "observe", noted)
    monkeypatch.setattr(Source, "has", has)
    run = Run(Workers())
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS))
    assert len(run.told(DecodingAwaited)) == 1 and seen == [True, False]


class Apart(Workers):
    """Each on a node of its own, and the two nodes do not reach each other."""

    def __init__(self) -> None:
        other = NodeDoor(node="node of w1", host="host1", address=("10.0.0.2", 4000))
        found = OutOfReach(NodesApart(node="node of w0", host="host0", others=(other,)))
        failed = ray.exceptions.RayTaskError("form", "", found)
        super().__init__(forms=lambda task: failed if task.world == 2 and task.rank == 0 else None)

    def info(self, name: str) -> WorkerInfo:
        door = (f"10.0.0.{name[1:]}", 4000)
        return replace(super().info(name), node=f"node of {name}", host=f"host{name[1:]}", door=door)


@pytest.mark.parametrize("one_fetches", [True, False])
def test_the_planner_hears_where_the_weights_of_a_generation_lie(one_fetches: bool) -> None:
    """If one worker fetches blocks from host memory, all do."""

    class Deciding(Workers):
        def info(self, name: str) -> WorkerInfo:
            return replace(super().info(name), parameters="node" if one_fetches and name == "w1" else "replicated")

    run = Run(Deciding())
    assert run.outcome.code == 0 and run.planner.fetched == [one_fetches]


def test_a_run_goes_on_with_the_nodes_that_reach_each_other() -> None:
    workers = Apart()
    run = Run(workers)
    assert run.outcome.code == 0 and run.listener.steps == list(range(STEPS))
    assert [event.workers for event in run.told(GenerationFormed)] == [("w0", "w1"), ("w0",)]
    assert "host0 does not reach host1 (10.0.0.2)" in run.told(GenerationEnded)[0].why
    (left_out,) = run.told(WorkersLeftOut)
    assert left_out.workers == ("w1",) and workers.names == ["w0", "w1"], "it waits, and may be tried again"
    assert run.source.avoid == ("node of w1",) and len(run.source.opened) == 2, "nothing is decoded there any more"
    doors = [[(door.host, door.address) for door in task.doors] for task in workers.formed]
    assert doors[0] == doors[1] == [("host0", ("10.0.0.0", 4000)), ("host1", ("10.0.0.1", 4000))]


def test_looks_that_take_long_are_further_apart_but_never_more_than_two_seconds() -> None:
    pace = LookPace(least_s=0.2, longest_s=2.0, share=0.02)
    assert pace.after(0.0) == pace.after(0.004) == 0.2, "a small cluster is looked at as often as ever"
    assert pace.after(0.02) == pytest.approx(1.0) and pace.after(0.5) == 2.0


def test_dit_calls_that_have_ended_well_are_asked_once_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ray, "get", lambda references: asked.append(references) or [None] * len(references))
    calls = [SimpleNamespace(reference=f"dit {n}", module="dit", worker=f"w{n}", name="dit s0") for n in range(3)]
    runner = SimpleNamespace(running=[SimpleNamespace(open_dits={call.reference: call for call in calls})])
    for _ in range(3):
        assert StepRunner._failed_calls(runner, False) == Failures()  # type: ignore[arg-type]
    assert asked == [["dit 0", "dit 1", "dit 2"]]


def test_of_calls_that_ended_together_each_that_failed_is_named() -> None:
    failed = [ray.exceptions.RayTaskError("dit", "", ValueError(why)) for why in ("no room", "no data")]
    calls = [
        SimpleNamespace(reference=reference, module="dit", worker=f"w{n}", name="dit s0")
        for n, reference in enumerate((failed[0], "well", failed[1]))
    ]
    running = SimpleNamespace(open_dits={call.reference: call for call in calls})
    found = StepRunner._failed_calls(SimpleNamespace(running=[running]), False)  # type: ignore[arg-type]
    assert found == Failures(failed={"w0": "dit s0 did not run: no room", "w2": "dit s0 did not run: no data"})
    assert list(running.open_dits) == failed
