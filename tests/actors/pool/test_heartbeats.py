"""Heartbeats tell which workers are silent, leaving or late."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from actors.config import WorkersConfig
from actors.held_state import NodeKeeper
from actors.messages import FormTask, NodeDoor
from actors.pool.heartbeats import Stall, Watch
from actors.pool.monitor import LastHeartbeat, Monitor, MonitorReport, OperatorRequests
from actors.progress import ASIDE, LinkUse, Orders, Progress
from actors.worker.heartbeat import Heartbeat
from actors.worker.outgoing import Outgoing
from actors.worker.surroundings import Surroundings
from actors.worker.work_done import Launched
from ops.comm.links import Sent
from ops.waiting import Cancelled, Patience
from tests.actors.fakes import Handle, Remote

CONFIG = WorkersConfig(suspect_s=20, stall_factor=10)


def progress(
    worker: str,
    since: float,
    predicted_s: float = 1.0,
    collectives: int = 0,
    waiting_in: str = "",
    leaving: bool = False,
) -> Progress:
    return Progress(
        worker=worker,
        generation=1,
        step=7,
        activity=f"dit of {worker}",
        phase="forward",
        since=since,
        predicted_s=predicted_s,
        collectives=collectives,
        waiting_in=waiting_in,
        leaving=leaving,
    )


def report(now: float, *beats: tuple[Progress, float], wishes: OperatorRequests | None = None) -> MonitorReport:
    seen = {p.worker: LastHeartbeat(progress=p, at=at, since=p.since) for p, at in beats}
    return MonitorReport(seen=seen, wishes=wishes or OperatorRequests(), now=now)


def test_a_silent_worker_is_found_once_and_its_return_too() -> None:
    watch = Watch(CONFIG)
    assert watch.look(report(30, (progress("w0", 29), 9), (progress("w1", 29), 29)), ["w0", "w1"]).silent == ("w0",)
    assert watch.look(report(31, (progress("w0", 29), 9)), ["w0"]).silent == ()
    assert watch.look(report(32, (progress("w0", 31), 32)), ["w0"]).heard == ("w0",)


def test_the_late_worker_is_the_one_the_others_wait_for() -> None:
    beats = [
        (progress("w0", 0, waiting_in="all_to_all", collectives=9), 100),
        (progress("w1", 0, collectives=7), 100),
        (progress("w2", 0, waiting_in="all_to_all", collectives=8), 100),
    ]
    stall = Watch(CONFIG).look(report(100, *beats), ["w0", "w1", "w2"]).stall
    assert stall is not None and stall.first_late.worker == "w1" and stall.waiting == ("w0", "w2")
    assert "dit of w1" in str(stall) and str(stall).endswith("planned 1.0 s; w0, w2 wait for it")
    assert str(replace(stall, waiting=())).endswith("nobody waits for it")
    assert str(replace(stall, waiting=("w0",))).endswith("w0 waits for it")


def test_among_waiting_workers_the_one_with_the_fewest_collectives_is_late() -> None:
    beats = [
        (progress(f"w{n}", 0, waiting_in="all_reduce", collectives=count), 100) for n, count in enumerate((5, 3, 5))
    ]
    stall = Watch(CONFIG).look(report(100, *beats), ["w0", "w1", "w2"]).stall
    assert stall is not None and stall.first_late.worker == "w1"


def test_a_cascade_within_its_prediction_is_no_stall_and_a_stall_is_told_once() -> None:
    watch = Watch(CONFIG)
    assert watch.look(report(100, (progress("w0", 60, predicted_s=5), 100)), ["w0"]).stall is None
    late = report(200, (progress("w0", 60, predicted_s=5), 200))
    assert watch.look(late, ["w0"]).stall is not None
    assert watch.look(late, ["w0"]).stall is None


def test_the_end_of_a_step_stalls_where_all_wait_in_it() -> None:
    """Nothing is predicted of it, and who waits there for one that works is not late."""
    waiting = [(progress(f"w{n}", 60, predicted_s=0, waiting_in="broadcast", collectives=n + 3), 100) for n in range(2)]
    works = (progress("w2", 95, predicted_s=9), 100)
    assert Watch(CONFIG).look(report(100, *waiting, works), ["w0", "w1", "w2"]).stall is None
    left_out = (replace(progress("w2", 0, predicted_s=0), generation=0, activity="idle"), 100)
    for others in ((), (left_out,)):
        watch = Watch(CONFIG)
        assert watch.look(report(89, *waiting, *others), ["w0", "w1", "w2"]).stall is None, "29 s"
        stall = watch.look(report(100, *waiting, *others), ["w0", "w1", "w2"]).stall
        assert stall is not None and stall.first_late.worker == "w0" and stall.running_s == 40.0
        assert "all workers wait for each other's packets in 'dit of w0'" in str(stall)
        assert watch.look(report(101, *waiting, *others), ["w0", "w1", "w2"]).stall is None, "told once"


def test_a_turn_of_an_aside_stalls_where_others_wait_for_it() -> None:
    """Nothing is predicted of it either; alone, after the last step, it may take minutes."""
    turn = replace(progress("w0", 60, predicted_s=0), activity="aside s7", phase=ASIDE, limit_s=1020.0)
    waits = progress("w1", 62, predicted_s=0, waiting_in="all_reduce", collectives=3)
    names, watch = ["w0", "w1"], Watch(CONFIG)
    assert watch.look(report(89, (turn, 89), (waits, 89)), names).stall is None, "29 s"
    idle = replace(waits, activity="idle", waiting_in="")
    assert watch.look(report(95, (turn, 95), (idle, 95)), names).stall is None
    stall = watch.look(report(95, (turn, 95), (waits, 95)), names).stall
    assert stall is not None and str(stall) == (
        "stall: w0 has been in 'aside s7' (phase aside, step 7) for 35.0 s, beside the plan; w1 waits for it, at most "
        "1020 s"
    )
    assert watch.look(report(96, (turn, 96), (waits, 96)), names).stall is None, "told once"


def test_a_turn_in_a_gap_of_the_plan_is_no_stall() -> None:
    """Those in a cascade wait for each other, and one that is done for them: nobody for the turn."""
    turn = replace(progress("w0", 60, predicted_s=0), activity="aside s7", phase=ASIDE)
    computes = [progress(name, 50, predicted_s=90, waiting_in="all_to_all", collectives=3) for name in ("w1", "w2")]
    done = progress("w3", 58, predicted_s=0, waiting_in="all_reduce", collectives=3)
    beats = [(one, 99.0) for one in (turn, *computes, done)]
    assert Watch(CONFIG).look(report(99, *beats), ["w0", "w1", "w2", "w3"]).stall is None


@pytest.mark.parametrize("others", [{}, {"phase": ASIDE, "waiting_in": ""}])
def test_thousands_of_workers_are_looked_at_in_a_moment(others: dict[str, Any]) -> None:
    """By the controller, many times within a step: all are in its end, or one is and the others make asides."""
    waits = [progress(f"w{n}", 99, predicted_s=0, waiting_in="all_reduce", collectives=3) for n in range(2000)]
    beats = [waits[0], *(replace(one, **others) for one in waits[1:])]
    seen, names, watch = report(100, *((one, 100.0) for one in beats)), [one.worker for one in beats], Watch(CONFIG)
    began = time.thread_time()
    watch.look(seen, names)
    assert time.thread_time() - began < 0.1


def test_notices_and_wishes_are_told_once() -> None:
    watch = Watch(CONFIG)
    seen = report(
        5, (progress("w0", 5, leaving=True), 5), (progress("w1", 5), 5), wishes=OperatorRequests(drain=("w1", "gone"))
    )
    assert watch.look(seen, ["w0", "w1"]).leaving == ("w0", "w1")
    assert watch.look(seen, ["w0", "w1"]).leaving == ()


def test_the_monitor_orders_older_generations_to_end_and_never_goes_back() -> None:
    monitor = Monitor()
    monitor.announce(4)
    monitor.announce(3)
    assert monitor.beat(progress("w0", 0)).generation == 4
    monitor.ask_stacks(("w0",))
    assert monitor.beat(progress("w0", 0)).dump_stack
    assert not monitor.beat(progress("w0", 0)).dump_stack


def test_the_monitor_forgets_a_worker_and_the_wish_that_it_leaves() -> None:
    monitor = Monitor()
    monitor.beat(progress("w0", 0))
    monitor.drain(("w0", "w1"))
    monitor.scale(3)
    monitor.remove("w0")
    seen = monitor.collect()
    assert seen.seen == {} and seen.wishes == OperatorRequests(target=3, drain=("w1",))


def test_a_heartbeat_that_comes_after_its_worker_has_gone_is_no_worker() -> None:
    """Who drains it waits until it is gone. The next controller's workers have its name."""
    monitor = Monitor()
    monitor.announce(4)
    monitor.remove("w0")
    assert monitor.beat(progress("w0", 0)).generation == 4
    assert monitor.report().seen == {}
    monitor.begin()
    monitor.beat(progress("w0", 0))
    assert list(monitor.report().seen) == ["w0"]


def test_a_worker_that_a_new_monitor_never_hears_is_silent_too() -> None:
    watch = Watch(CONFIG)
    assert watch.look(report(100), ["w0"]).silent == ()
    assert watch.look(report(119), ["w0"]).silent == ()
    assert watch.look(report(121), ["w0"]).silent == ("w0",)


@pytest.mark.parametrize("now", [5.0, 1e6])
def test_a_monitor_started_anew_on_another_host_finds_nobody_silent_by_its_clock(now: float) -> None:
    watch = Watch(CONFIG)
    watch.look(replace(report(1000, (progress("w0", 999), 999)), life="a"), ["w0", "w1"])
    for later, silent in ((0, ()), (19, ()), (21, ("w0", "w1"))):
        assert watch.look(replace(report(now + later), life="b"), ["w0", "w1"]).silent == silent


def test_a_monitor_started_anew_is_told_what_the_old_one_knew() -> None:
    old, new = Monitor(), Monitor()
    old.announce(5)
    old.scale(3)
    old.drain(("w1",))
    known = old.report()
    new.drain(("w2",))
    new.restore(known.generation, known.wishes)
    assert new.report().life != known.life
    assert new.report().generation == 5
    assert new.report().wishes == OperatorRequests(target=3, drain=("w1", "w2"))


def heartbeat(device: str = "cpu") -> Heartbeat:
    """A heartbeat of a worker in generation 1."""
    config = WorkersConfig(collective_timeout_s=30)
    made = Heartbeat("w0", config, Handle())  # type: ignore[arg-type]
    made.waits_on_device = device == "cuda"
    made.begin(1)
    return made


def test_an_answer_to_a_heartbeat_never_cancels_the_generation_that_has_begun_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = heartbeat()
    old, new = sent.cancel, []

    def answer(reference: object, timeout: float) -> Orders:
        """While the answer is on its way, the worker forms the next generation."""
        new.append(sent.begin(2))
        return Orders(generation=2)

    monkeypatch.setattr(ray, "get", answer)
    sent.beat()
    assert old.is_set() and not new[0].is_set()
    sent.beat()
    assert not any(token.is_set() for token in new)


def test_a_heartbeat_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor's other calls are: at the end of a run Ray would tell the user of each beat that it repeats."""
    asked: list[dict[str, Any]] = []

    class Noted(Remote):
        def options(self, **options: Any) -> Remote:
            asked.append(options)
            return self

    sent = Heartbeat("w0", WorkersConfig(), SimpleNamespace(beat=Noted()))  # type: ignore[arg-type]
    sent.begin(1)
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=1))
    sent.beat()
    assert asked == [{"max_task_retries": 0}]


def test_a_heartbeat_says_what_went_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The surroundings know the hosts of the generation, and the links are measured by their addresses."""
    made, sent = heartbeat(), list[Progress]()
    now = [100.0]
    given = Sent(num_bytes=5 * 2**20, busy_s=2.0, newest=0.0, fills=True)
    made._outgoing = Outgoing(lambda hosts: dict.fromkeys(hosts, given), lambda: now[0])
    made._monitor = Handle(beat=sent.append)  # type: ignore[assignment]
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=1))
    made.surroundings = Surroundings(1.0, lambda doors, within_s: [], lambda doors: {})
    doors = tuple(NodeDoor(node=f"n{n}", host=f"host{n}", address=(f"10.0.0.{n}", 4000 + n)) for n in range(2))
    doors = (*doors, NodeDoor(node="n2", host="host0", address=("10.0.0.0", 4002)))  # on the same host: no network
    home = cast(NodeKeeper, None)
    task = FormTask(generation=1, rank=0, world=2, store=("", 0), origin=None, home=home, nodes=(0, 1), doors=doors)
    made.surroundings.enter(task)
    made.beat()
    now[0] += 40.0
    made.beat()
    assert [one.links for one in sent] == [
        (),
        (
            LinkUse(
                host="host0", other="host1", num_bytes=5 * 2**20, busy_s=2.0, rate=2.5 * 2**20, fills=True, over_s=40.0
            ),
        ),
    ]
    made.surroundings.leave()
    made.beat()
    assert sent[-1].links == ()


def launched(name: str, since: float, predicted_s: float) -> Launched:
    return Launched(
        name=name,
        cascade=name,
        step=7,
        since=since,
        predicted_s=predicted_s,
        has_ended=lambda: False,
        span=lambda: pytest.fail("no heartbeat waits for a cascade"),
    )


@pytest.mark.parametrize("host", ["idle", "text s7", "finish s7"])
def test_what_a_worker_does_is_what_its_device_does(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """The host has queued two cascades, and may wait for the device at the end of the step."""
    made = heartbeat("cuda")
    sent: list[Progress] = []
    running: list[Launched | None] = [launched("dit s7", 100.0, 20.0), launched("vae s7", 101.0, 0.5), None]
    made.on_device = lambda: running[0]
    made._monitor = Handle(beat=sent.append)  # type: ignore[assignment]
    made.groups = SimpleNamespace(progress={}, failure="")  # type: ignore[assignment]
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=1))
    made.activity(host, "reduce", 7, 0.0, Patience(limit_s=30.0))
    if host == "idle":
        made.idle()
    made.beat()
    assert (sent[-1].activity, sent[-1].since, sent[-1].predicted_s, sent[-1].limit_s) == ("dit s7", 100.0, 20.0, 30.0)
    made._since -= 31.0
    made.beat()
    assert made.cancel.is_set() and "dit s7" in made.cancel.reason
    del running[0]
    made.beat()
    assert (sent[-1].activity, sent[-1].predicted_s) == ("vae s7", 0.5)
    del running[0]
    made.beat()
    assert sent[-1].activity == host


def test_a_device_that_does_not_answer_keeps_no_heartbeat_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that loads a kernel answers when the device has ended what is queued, maybe a wait for other workers."""
    made, sent, answers = heartbeat("cuda"), list[Progress](), threading.Event()

    def on_device() -> Launched:
        assert answers.wait(60)
        return launched("dit s7", 100.0, 20.0)

    made.on_device = on_device
    made._monitor = Handle(beat=sent.append)  # type: ignore[assignment]
    made.groups = SimpleNamespace(progress={}, failure="", begun=7)  # type: ignore[assignment]
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=2))
    made.activity("text s7", "encode", 7, 1.0)
    beats = threading.Thread(target=lambda: [made.beat() for _ in range(3)])
    beats.start()
    beats.join(20)
    in_time = [(one.activity, one.collectives) for one in sent]
    answers.set()
    beats.join(60)
    assert in_time == [("text s7", 7)] * 3, "with none it would be named as the worker that the others wait for"
    assert made.cancel.is_set(), "also the answer is obeyed"
    assert made._looking is not None
    made._looking.join(60)
    made.beat()
    assert sent[-1].activity == "dit s7"


def test_a_cascade_stalls_by_the_time_that_the_device_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by that since its call, in which the device ran those before it; and also when the host has gone on to the
    end of the step, for which nothing is planned."""
    monitor, watch, made, clocks = Monitor(), Watch(CONFIG), heartbeat("cuda"), Clocks(monkeypatch)
    made._monitor = Handle(beat=monitor.beat)  # type: ignore[assignment]
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    running = [launched("dit s7", clocks.now, 20.0), launched("text s7", clocks.now, 0.01)]
    made.on_device = lambda: running[0]
    made.activity("finish s7", "reduce", 7, 0.0, Patience(limit_s=900.0))

    def stall_after(seconds: float) -> Stall | None:
        clocks.now += seconds
        made.beat()
        return watch.look(replace(monitor.report(), now=clocks.now), ["w0"]).stall

    assert stall_after(0) is None and stall_after(150) is None
    del running[0]
    assert stall_after(1) is None and stall_after(25) is None
    stall = stall_after(10)
    assert stall is not None and stall.first_late.activity == "text s7" and stall.running_s == 35.0


@pytest.mark.parametrize(
    ("device", "age_s", "activity", "cancelled"),
    [
        ("cuda", 50, "finish s3", True),
        ("cuda", 10, "finish s3", False),
        ("cuda", 50, "idle", False),
        ("cpu", 50, "finish s3", False),
    ],
)
def test_a_wait_that_hangs_on_a_device_is_cancelled_after_the_collectives_time_out(
    monkeypatch: pytest.MonkeyPatch, device: str, age_s: float, activity: str, cancelled: bool
) -> None:
    sent, clocks = heartbeat(device), Clocks(monkeypatch)
    sent.groups = SimpleNamespace(progress={}, failure="")  # type: ignore[assignment]
    if activity == "idle":
        sent.idle()
    else:
        sent.activity(activity, "reduce", step=3, predicted_s=0.0)
    clocks.now += age_s
    clocks.wall += 1000  # it is set, which says nothing about how long that takes
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=1))
    sent.beat()
    assert sent.cancel.is_set() == cancelled


def test_an_error_that_only_the_communicator_knows_ends_the_generation_with_the_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On NCCL the collective itself never ends; without this the worker would wait for its whole patience."""
    sent = heartbeat("cuda")
    sent.groups = SimpleNamespace(progress={}, failure="the group (0, 1) has an error")  # type: ignore[assignment]
    sent.activity("finish s3", "reduce", step=3, predicted_s=0.0)
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=1))
    sent.beat()
    with pytest.raises(Cancelled, match=r"the group \(0, 1\) has an error, seen by a heartbeat of w0"):
        sent.cancel.check("finish")


@pytest.mark.parametrize(("age_s", "cancelled"), [(50, False), (301, True)])
def test_a_cascade_that_may_take_longer_is_not_given_up_before(
    monkeypatch: pytest.MonkeyPatch, age_s: float, cancelled: bool
) -> None:
    sent, clocks = heartbeat("cuda"), Clocks(monkeypatch)
    sent.groups = SimpleNamespace(progress={}, failure="")  # type: ignore[assignment]
    sent.activity("dit s3", "forward", 3, 60.0, Patience(limit_s=300.0, why="5 x 60 s of step 3"))
    assert sent.progress.limit_s == 300.0
    clocks.now += age_s
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=1))
    sent.beat()
    assert sent.cancel.is_set() == cancelled
    if cancelled:
        assert sent.cancel.reason.endswith("has not ended within 300 s (5 x 60 s of step 3)")
        assert "'dit s3' of w" in sent.cancel.reason


class Clocks:
    """The monitor's: monotonic, and that of the wall, which somebody sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.wall = 5000.0, 1.7e9
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.wall + self.now)


@pytest.mark.parametrize("skew_s", [-660.0, 0.0, 90.0])
def test_a_worker_whose_clock_is_wrong_is_neither_late_nor_old(monkeypatch: pytest.MonkeyPatch, skew_s: float) -> None:
    clocks, monitor, watch = Clocks(monkeypatch), Monitor(), Watch(CONFIG)
    began = replace(progress("w0", since=time.time() + skew_s), predicted_s=3.0)
    monitor.beat(began)
    clocks.now += 5
    monitor.beat(began)
    seen = monitor.report()
    assert seen.now - seen.seen["w0"].since == 5
    assert watch.look(seen, ["w0"]).stall is None
    clocks.now += 40
    monitor.beat(replace(began, phase="backward"))
    stall = watch.look(monitor.report(), ["w0"]).stall
    assert stall is not None and stall.running_s == 45, "a phase later it is the same cascade"


def test_a_clock_that_is_set_silences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, monitor, watch = Clocks(monkeypatch), Monitor(), Watch(CONFIG)
    monitor.beat(progress("w0", 0))
    clocks.wall += 3600
    clocks.now += 1
    assert watch.look(monitor.report(), ["w0"]).silent == ()


def test_a_new_controller_numbers_anew_and_inherits_no_wish_that_a_worker_leaves() -> None:
    monitor = Monitor()
    monitor.beat(progress("w1", 0))
    monitor.announce(4)
    monitor.drain(("w1",))
    monitor.scale(3)
    begun = monitor.begin()
    assert begun.wishes == OperatorRequests(target=3) and begun.generation == 4 and begun.seen == {}


def test_a_met_wish_to_stop_does_not_stop_the_next_controller() -> None:
    monitor = Monitor()
    monitor.scale(3)
    monitor.stop("Ctrl-C")
    monitor.stopped()
    assert monitor.report().wishes.stop == "" and monitor.report().wishes.target == 3


class Unlucky:
    """Whatever it is asked for, it finds too many files open."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(24, f"{name}: too many open files")


@pytest.mark.parametrize("measure", ["on_device", "groups", "_outgoing", "surroundings"])
def test_what_cannot_be_measured_keeps_no_heartbeat_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, measure: str
) -> None:
    made, sent = heartbeat("cuda"), list[Progress]()
    made._monitor = Handle(beat=sent.append)  # type: ignore[assignment]
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=1))
    made.activity("dit s7", "forward", 7, 1.0)
    setattr(made, measure, (lambda: Unlucky().cascade) if measure == "on_device" else Unlucky())
    made.beat()
    made.beat()
    assert [(one.activity, one.links) for one in sent] == [("dit s7", ())] * 2
    told = [record.getMessage() for record in caplog.records]
    assert told and len(told) == len(set(told)), "each of its errors is logged once"
    monkeypatch.setattr(ray, "get", lambda reference, timeout: Orders(generation=2))
    made.beat()
    assert made.cancel.is_set(), "the answer is obeyed"


def test_heartbeats_go_on_after_any_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that sends none is replaced."""

    class Over(BaseException):
        """Ends the thread that goes on for ever."""

    outcomes = iter(
        [OSError("bad file"), KeyError("w0"), OSError("again"), ray.exceptions.RayError("gone"), None, Over()]
    )

    def answer(reference: object, timeout: float) -> Orders:
        if (outcome := next(outcomes)) is not None:
            raise outcome
        return Orders(generation=1)

    made = heartbeat()
    monkeypatch.setattr(ray, "get", answer)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(Over):
        made._beat_for_ever()
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [OSError, KeyError]
