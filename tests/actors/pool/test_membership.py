"""Membership as a state machine: named cases, and storms of random events against its promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.config import WorkersConfig
from actors.messages import FailedStart, HostGpu, NodeDoor, NodesApart, WorkerInfo
from actors.plan.types import GpuPlace
from actors.pool.membership import Membership, ShortageOf, _named
from actors.pool.membership_types import (
    Arrival,
    Boundary,
    Break,
    Death,
    Decision,
    Distrust,
    Drain,
    End,
    Event,
    Exclusion,
    Failure,
    FirstStep,
    Form,
    LeaveNotice,
    LifeSign,
    Limits,
    Loading,
    Member,
    NodeRest,
    RecoveredWorker,
    Replacement,
    Request,
    Resize,
    Resources,
    Shortfall,
    Starvation,
    StepDispatch,
    Suspect,
    Tick,
    View,
    Wait,
)

LIMITS = Limits(min=2, max=4, wait_s=100, gather_s=5, recover_s=10, first_step_s=10, confirm_s=3, request_s=30)


class Pool:
    """A membership with a clock that the test moves."""

    def __init__(self, limits: Limits = LIMITS, shortage: ShortageOf = lambda infos: "", home: str = "") -> None:
        self.membership = Membership(limits, shortage=shortage, home=home)
        self.now = 0.0
        self.last = 99  # of those that storms let come
        self.view: View = self.membership.view()

    def see(self, *events: Event, after: float = 0.0) -> list[Decision]:
        self.now += after
        decisions: list[Decision] = []
        for event in events:
            self.view, found = self.membership.observe([event], self.now)
            decisions += found
        return decisions

    def see_at_once(self, *events: Event, after: float = 0.0) -> list[Decision]:
        """In one look of the controller."""
        self.now += after
        self.view, found = self.membership.observe(events, self.now)
        return list(found)

    def run(self, *workers: int) -> Pool:
        """Bring up these workers, node = number // 2, and form the first generation."""
        self.see_at_once(*joined(*workers))
        assert self.view.workers == workers
        return self


def info_of(worker: int, node: str = "", index: int | None = None) -> WorkerInfo:
    place = GpuPlace(index=index)
    return WorkerInfo(
        worker=f"w{worker}", node=node or f"n{worker // 2}", host="h", pid=worker, device="cpu", place=place
    )


def came(worker: int, node: str = "", index: int | None = None) -> Arrival:
    """On node number // 2, unless another one is named."""
    return Arrival(worker=worker, info=info_of(worker, node, index))


def joined(*workers: int) -> list[Event]:
    return [came(worker) for worker in workers]


def form(generation: int, workers: tuple[int, ...], reason: str, clean: bool) -> Form:
    infos = tuple(info_of(worker) for worker in workers)
    return Form(generation=generation, workers=workers, infos=infos, reason=reason, clean=clean)


def of(kind: type, decisions: list[Decision]) -> list:
    return [decision for decision in decisions if isinstance(decision, kind)]


def apart(generation: int, node: str, *others: str) -> Break:
    found = NodesApart(node=node, host=node, others=tuple(NodeDoor(node=o, host=o, address=None) for o in others))
    return Break(generation=generation, reason=found.describe(), apart=(found,))


def test_start_requests_min_without_resources_and_up_to_max_with_them() -> None:
    pool = Pool()
    assert of(Request, pool.see(Tick())) == [Request(count=2)]
    assert of(Request, pool.see(Resources(available=1))) == [Request(count=1)]
    assert of(Request, pool.see(Resources(available=9))) == [Request(count=1)]
    assert of(Request, pool.see(Resources(available=9))) == []
    found = pool.see(came(0), Resources(available=9))
    assert of(Request, found) == [], "the other three are on their way"


def test_request_without_answer_is_made_again() -> None:
    pool = Pool()
    pool.see(Tick())
    assert of(Request, pool.see(Tick(), after=29)) == []
    assert of(Request, pool.see(Tick(), after=1)) == [Request(count=2)]
    assert of(Request, pool.see(Shortfall(count=1))) == [Request(count=1)]


BROKEN = HostGpu(node="n1", host="h", gpu="1")  # of worker 3 and of those in its place


def failed(worker: int, where: HostGpu = BROKEN) -> Shortfall:
    return Shortfall(count=1, failed=FailedStart(worker=f"w{worker}", why="CUDA error", where=where))


def test_a_gpu_on_which_no_worker_starts_is_not_tried_every_few_seconds() -> None:
    pool = Pool().run(0, 1, 2)
    pool.see(FirstStep(), Resources(available=1))
    assert of(NodeRest, pool.see(failed(3))) == []
    assert [r.count for r in of(Request, pool.see(Resources(available=1)))] == [1], "once may be chance"
    why = "2 in a row ended on GPU 1 of h before their first step; the last one: CUDA error"
    assert of(NodeRest, pool.see(failed(4))) == [NodeRest(where=BROKEN, seconds=60.0, why=why)]
    assert pool.view.shunned == ("n1",) and pool.view.workers == (0, 1, 2), "others of its node go on"
    assert pool.see(Tick(), after=59) == [] and pool.view.shunned == ("n1",)
    pool.see(Tick(), after=1)
    assert pool.view.shunned == ()
    assert of(Request, pool.see(Resources(available=1)))
    assert [r.seconds for r in of(NodeRest, pool.see(failed(5)))] == [120.0]


def test_where_a_start_failed_may_be_unknown() -> None:
    pool = Pool().run(0, 1, 2)
    pool.see(FirstStep())
    pool.see(failed(3, HostGpu()), failed(4, HostGpu()))
    assert pool.view.shunned == () and of(Request, pool.see(Resources(available=1))) == []
    assert of(Request, pool.see(Resources(available=1), after=60))


def test_a_run_that_needs_a_worker_asks_for_it_anywhere() -> None:
    pool = Pool().run(0, 1)
    pool.see(FirstStep(), failed(3), failed(4), failed(5, HostGpu()), failed(6, HostGpu()))
    assert pool.view.shunned == ("n1",) and of(Request, pool.see(Resources(available=1))) == []
    assert [r.count for r in of(Request, pool.see(Death(worker=1)))] == [1], "below min"
    assert pool.view.shunned == () and pool.view.at_rest == ("n1",)
    pool.see(Tick(), after=60)
    assert pool.view.at_rest == ()


@pytest.mark.parametrize(("steps", "gpu", "rests"), [(False, "1", True), (True, "1", False), (False, "", False)])
def test_a_gpu_that_ends_its_workers_in_their_first_step_rests(steps: bool, gpu: str, rests: bool) -> None:
    """A worker that has trained on it may end for any reason; so may one without a GPU."""
    pool = Pool().run(0, 1, 2)
    pool.see(FirstStep())
    found = list[Decision]()
    for worker in (3, 4):
        pool.see(Arrival(worker=worker, info=replace(info_of(worker, "n1", 1), gpu=gpu)), Boundary())
        assert pool.view.workers == (0, 1, 2, worker)
        if steps:
            pool.see(FirstStep())
        found += pool.see(Death(worker=worker, reason="died"))
        pool.see(*(RecoveredWorker(worker=w) for w in (0, 1, 2)), FirstStep())
    why = "2 in a row ended on GPU 1 of h before their first step; the last one: died"
    assert [(r.where, r.why) for r in of(NodeRest, found)] == ([(BROKEN, why)] if rests else [])
    assert pool.view.shunned == (("n1",) if rests else ())


def on_gpu(pool: Pool, worker: int, gpu: str) -> None:
    pool.see(Arrival(worker=worker, info=replace(info_of(worker, "n1", 1), gpu=gpu)), Boundary(), FirstStep())


def test_a_worker_that_computes_wrongly_leaves_and_its_node_rests() -> None:
    pool = Pool().run(0, 1, 2)
    on_gpu(pool, 3, "1")
    (rest,) = pool.see(Distrust(worker=3, reason="NaN"))
    assert rest == NodeRest(where=BROKEN, seconds=21600.0, why="GPU 1 of h seems to compute wrongly")
    assert pool.see(Distrust(worker=3, reason="NaN")) == [], "it is leaving"
    drains = of(Drain, pool.see(Boundary()))
    assert [(d.worker, d.reason) for d in drains] == [(3, "GPU 1 of h seems to compute wrongly: NaN")]
    pool.see(FirstStep(), after=100)
    assert pool.view.workers == (0, 1, 2) and pool.view.shunned == ("n1",)


@pytest.mark.parametrize(("gpu", "workers"), [("", (0, 1, 2)), ("1", (0,))])
def test_a_worker_that_the_run_needs_or_that_has_no_gpu_stays(gpu: str, workers: tuple[int, ...]) -> None:
    pool = Pool(replace(LIMITS, min=len(workers) if not gpu else 2))
    pool.see_at_once(*(came(w, "n0") for w in workers))
    on_gpu(pool, 3, gpu)
    assert pool.see(Distrust(worker=3, reason="NaN")) == [] and 3 in pool.view.workers


def test_first_generation_gathers_workers_that_are_still_starting() -> None:
    pool = Pool()
    pool.see(Resources(available=4))
    assert of(Form, pool.see(came(0), came(1), came(2))) == []
    assert [f.workers for f in of(Form, pool.see(came(3)))] == [(0, 1, 2, 3)]


def test_first_generation_does_not_wait_for_a_slow_starter_for_ever() -> None:
    pool = Pool()
    pool.see(Resources(available=3))
    assert of(Form, pool.see(came(0), came(2))) == []
    assert [f.workers for f in of(Form, pool.see(Tick(), after=5))] == [(0, 2)]


def test_workers_are_numbered_node_by_node() -> None:
    pool = Pool()
    pool.see_at_once(came(0, "b"), came(1, "a"), came(2, "b"), came(3, "a"))
    assert pool.view.workers == (1, 3, 0, 2)


def test_workers_of_a_node_are_ranked_by_their_gpus_also_after_a_loss_and_a_rejoin() -> None:
    pool = Pool(replace(LIMITS, max=8))
    gpus = {0: 2, 1: 0, 2: 3, 3: 1}  # worker -> GPU
    pool.see_at_once(*(came(worker, "n", gpu) for worker, gpu in gpus.items()))
    assert pool.view.workers == (1, 3, 0, 2)
    pool.see(Death(worker=1), *(RecoveredWorker(worker=worker) for worker in (0, 2, 3)))
    pool.see(came(9, "n", 0), Boundary())
    assert pool.view.workers == (9, 3, 0, 2), "the newest worker has the first GPU"


def test_newcomer_joins_at_the_step_boundary_only() -> None:
    pool = Pool().run(0, 1)
    assert of(Form, pool.see(came(2, "n1"), Tick())) == []
    forms = of(Form, pool.see(Boundary()))
    assert forms == [form(2, (0, 1, 2), "w2 joins", clean=True)]


def test_boundary_without_change_keeps_the_generation() -> None:
    pool = Pool().run(0, 1)
    assert pool.see(Boundary()) == []
    assert pool.view.generation == 1 and not pool.view.changed


def test_leaving_worker_is_drained_after_the_generation_without_it_is_formed() -> None:
    pool = Pool().run(0, 1, 2)
    assert of(Drain, pool.see(LeaveNotice(worker=1, reason="preempted"))) == []
    decisions = pool.see(Boundary())
    assert [type(d) for d in decisions] == [Form, Drain]
    assert decisions[0].workers == (0, 2) and decisions[1] == Drain(worker=1, reason="preempted")


def test_leaving_below_min_ends_the_generation_cleanly_and_waits() -> None:
    pool = Pool().run(0, 1)
    pool.see(LeaveNotice(worker=0))
    decisions = pool.see(Boundary())
    assert of(End, decisions)[0].clean and of(Drain, decisions)[0].worker == 0
    assert of(Wait, decisions)[0].have == 1 and pool.view.state == "waiting"
    forms = of(Form, pool.see(came(5, "n")))
    assert forms[0].workers == (5, 1) and forms[0].clean


def test_death_ends_the_generation_at_once_and_survivors_form_when_all_answered() -> None:
    pool = Pool().run(0, 1, 2)
    decisions = pool.see(Death(worker=1))
    assert of(End, decisions) == [End(generation=1, reason="worker 1 died", clean=False)]
    assert pool.view.state == "recovering" and pool.view.workers == ()
    assert of(Form, pool.see(RecoveredWorker(worker=0))) == []
    forms = of(Form, pool.see(RecoveredWorker(worker=2)))
    assert forms == [form(2, (0, 2), "worker 1 died", clean=False)]


def test_spare_worker_replaces_a_dead_one_at_once() -> None:
    pool = Pool().run(0, 1)
    pool.see(came(2, "n1"), Death(worker=0))
    assert of(Form, pool.see(RecoveredWorker(worker=1)))[0].workers == (1, 2)


def test_a_suspect_that_answers_in_the_same_look_is_none_any_more() -> None:
    pool = Pool().run(0, 1)
    pool.see(Break(generation=1, reason="timed out"), RecoveredWorker(worker=0))
    found = pool.see_at_once(Suspect(worker=1), RecoveredWorker(worker=1)) + pool.see(Tick(), after=9)
    assert of(Replacement, found) == [] and pool.view.workers == (0, 1)


def test_survivor_that_does_not_answer_is_replaced_and_the_rest_goes_on() -> None:
    pool = Pool().run(0, 1, 2, 3)
    pool.see(Death(worker=0), RecoveredWorker(worker=1), RecoveredWorker(worker=2))
    assert of(Form, pool.see(Tick(), after=9)) == []
    decisions = pool.see(Tick(), after=1)
    assert of(Replacement, decisions)[0].worker == 3
    assert of(Form, decisions)[0].workers == (1, 2)


def test_suspected_survivor_does_not_hold_up_recovery() -> None:
    pool = Pool().run(0, 1, 2, 3)
    pool.see(Suspect(worker=3), Death(worker=0))
    assert 3 not in {m.worker for m in pool.view.members}
    pool.see(RecoveredWorker(worker=1))
    assert of(Form, pool.see(RecoveredWorker(worker=2)))[0].workers == (1, 2)


def test_suspect_that_stays_silent_is_replaced_and_one_that_returns_is_not() -> None:
    pool = Pool().run(0, 1, 2)
    pool.see(Suspect(worker=2), Tick())
    assert pool.see(LifeSign(worker=2), Tick(), after=2) == []
    assert pool.see(Tick(), after=10) == []
    pool.see(Suspect(worker=2, reason="no heartbeat for 20 s"))
    decisions = pool.see(Tick(), after=3)
    assert of(Replacement, decisions) == [Replacement(worker=2, reason="no heartbeat for 20 s")]
    assert not of(End, decisions)[0].clean


def test_workers_that_die_together_end_one_generation() -> None:
    pool = Pool().run(0, 1, 2, 3)
    decisions = pool.see(Death(worker=0), Death(worker=1))
    assert len(of(End, decisions)) == 1
    pool.see(RecoveredWorker(worker=2))
    assert of(Form, pool.see(RecoveredWorker(worker=3)))[0].workers == (2, 3)


def test_lost_workers_are_asked_for_again() -> None:
    pool = Pool().run(0, 1, 2)
    decisions = pool.see(Death(worker=0), Death(worker=1))
    assert sum(r.count for r in of(Request, decisions)) == 1, "only up to min without known resources"
    assert of(Request, pool.see(Resources(available=5))) == [Request(count=2)]


def test_too_few_for_too_long_ends_resumable_and_stays_ended() -> None:
    pool = Pool().run(0, 1)
    pool.see(Death(worker=0), RecoveredWorker(worker=1))
    assert of(Failure, pool.see(Tick(), after=99)) == []
    assert of(Failure, pool.see(Tick(), after=1))[0].code == 75
    assert pool.see(came(9, "n"), Tick()) == []


def test_wait_is_said_once_per_change() -> None:
    pool = Pool()
    assert len(of(Wait, pool.see(Tick(), Tick(), Tick()))) == 1
    assert str(of(Wait, pool.see(came(0, "n")))[0]) == ("waiting for workers: 1 of at least 2 are ready")


def test_broken_without_a_death_recovers_with_the_same_workers_and_not_for_ever() -> None:
    pool = Pool().run(0, 1)
    for _ in range(LIMITS.max_breaks):
        assert of(End, pool.see(Break(generation=pool.view.generation, reason="collective timed out")))
        assert of(Form, pool.see(RecoveredWorker(worker=0), RecoveredWorker(worker=1)))[0].workers == (0, 1)
    assert of(Failure, pool.see(Break(generation=pool.view.generation, reason="timed out")))[0].code == 1


def test_a_break_that_the_next_plan_avoids_is_not_counted() -> None:
    """Running out of memory may take several limits until a plan fits."""
    pool = Pool().run(0, 1)
    for _ in range(3 * LIMITS.max_breaks):
        ends = of(End, pool.see(Break(generation=pool.view.generation, reason="out of memory", learned=True)))
        assert len(ends) == 1 and not ends[0].clean
        pool.see(RecoveredWorker(worker=0), RecoveredWorker(worker=1))
    for _ in range(LIMITS.max_breaks):
        assert of(End, pool.see(Break(generation=pool.view.generation, reason="timed out")))
        pool.see(RecoveredWorker(worker=0), RecoveredWorker(worker=1))
    assert of(Failure, pool.see(Break(generation=pool.view.generation, reason="timed out")))


def test_a_finished_step_forgives_earlier_breaks() -> None:
    pool = Pool().run(0, 1)
    for _ in range(3 * LIMITS.max_breaks):
        pool.see(
            Break(generation=pool.view.generation, reason="x"), RecoveredWorker(worker=0), RecoveredWorker(worker=1)
        )
        assert pool.view.state == "running"
        pool.see(FirstStep())


def test_a_boundary_without_a_finished_step_forgives_nothing() -> None:
    pool, broken = Pool().run(0, 1), []
    for worker in range(2, 12):  # at every try somebody joins
        pool.see(came(worker, "n"), Boundary())
        broken += of(Failure, pool.see(Break(generation=pool.view.generation, reason="x")))
        pool.see(LeaveNotice(worker=worker), *(RecoveredWorker(worker=m.worker) for m in pool.view.members))
    assert [fail.code for fail in broken] == [1]


def test_a_step_that_ends_its_worker_every_time_ends_the_run_and_is_named() -> None:
    """An out-of-memory kill or a crash in native code: it went on for ever."""
    pool = Pool(Limits(min=2, max=2, max_losses=5)).run(0, 1)
    for worker in range(2, 100):
        decisions = pool.see(
            Death(worker=worker - 1, reason="died, last heard of in 'dit 9f 64x96 b2 sp1' (phase backward) of step 7")
        )
        if fails := of(Failure, decisions):
            break
        pool.see(*(RecoveredWorker(worker=m.worker) for m in pool.view.members), came(worker, "n"))
        assert pool.view.state == "running"
    assert worker == 7, "after six losses"
    assert fails[0].code == 1
    assert "worker 6 died, last heard of in 'dit 9f 64x96 b2 sp1' (phase backward) of step 7" in fails[0].reason


def test_a_worker_that_this_run_ended_explains_no_break() -> None:
    """A cascade slower than all patience: its worker was killed and a new one began the same, for ever."""
    pool, fails = Pool(Limits(min=2, max=2, recover_s=10, first_step_s=10)).run(0, 1), []
    for worker in range(2, 100):
        fails = of(
            Failure, pool.see(Break(generation=pool.view.generation, reason="w0: the sum timed out; w1 is late"))
        )
        if fails:
            break
        pool.see(RecoveredWorker(worker=0))
        assert of(Replacement, pool.see(Tick(), after=10)) != []
        pool.see(came(worker, "n"))
    assert len(fails) == 1 and fails[0].code == 1 and "w1 is late" in fails[0].reason and worker == 5


def test_a_first_step_that_compiles_for_minutes_is_waited_for_and_a_later_one_is_not() -> None:
    pool = Pool(Limits(min=2, max=2, recover_s=10, first_step_s=600)).run(0, 1)
    pool.see(Break(generation=1, reason="the sum timed out"), RecoveredWorker(worker=0))
    assert of(Replacement, pool.see(Tick(), after=500)) == []
    assert of(Form, pool.see(RecoveredWorker(worker=1))) != [], "with what it has compiled"
    pool.see(FirstStep(), Break(generation=2, reason="the sum timed out"), RecoveredWorker(worker=0))
    assert of(Replacement, pool.see(Tick(), after=10)) != []


def test_a_survivor_has_as_long_to_answer_as_the_others_waited_for_it() -> None:
    limits = Limits.of(WorkersConfig(collective_timeout_s=500, first_step_s=100))
    assert limits.recover_s >= 500 and limits.first_step_s >= limits.recover_s


def test_a_survivor_may_be_in_a_cascade_as_long_as_its_plan_allows() -> None:
    pool = Pool().run(0, 1, 2)
    pool.see(FirstStep(), StepDispatch(limit_s=600.0), Break(generation=1, reason="the sum timed out"))
    pool.see(RecoveredWorker(worker=0), RecoveredWorker(worker=1))
    assert of(Replacement, pool.see(Tick(), after=600)) == []
    assert [r.worker for r in of(Replacement, pool.see(Tick(), after=60))] == [2]


def test_patience_for_too_few_workers_does_not_run_while_enough_load() -> None:
    """A model of 40 GB comes over NFS in half an hour; one of two loads, or none does: that is no capacity."""
    pool = Pool()
    pool.see(Tick())
    assert of(Failure, pool.see(Loading(count=2), after=50)) == []
    assert of(Failure, pool.see(Tick(), after=1800)) == []
    pool.see(Loading(count=1))
    assert of(Failure, pool.see(Tick(), after=99)) == []
    assert [fail.code for fail in of(Failure, pool.see(Tick(), after=1))] == [75]


UNANSWERED = Shortfall(count=1, failed=FailedStart(worker="w0", why="OSError: Stale file handle", passes=True))


def load_in_vain(pool: Pool) -> list[Failure]:
    """Two workers begin to load, which storage keeps from it after a while."""
    pool.see(Loading(count=2), after=2)
    return of(Failure, pool.see_at_once(UNANSWERED, UNANSWERED, Loading(count=0), after=38))


def test_a_run_whose_storage_stays_away_ends_though_each_new_try_loads_for_a_while() -> None:
    """The patience for too few workers began anew with each of them, as they would have been enough."""
    pool = Pool()
    pool.see(Tick())
    assert load_in_vain(pool) + load_in_vain(pool) == []
    assert of(Failure, pool.see_at_once(Loading(count=3), UNANSWERED, after=20)) == []
    assert of(Failure, pool.see(Tick(), after=10)) == [], "two load that may be enough"
    assert [fail.code for fail in of(Failure, pool.see_at_once(Loading(count=2), UNANSWERED, after=1))] == [75]


def test_once_storage_is_back_workers_may_load_for_as_long_as_they_need() -> None:
    pool = Pool()
    pool.see(Tick())
    load_in_vain(pool)
    assert of(Failure, pool.see(Loading(count=2), Tick(), after=1800)) == []
    pool.see(came(0, "n0"))
    assert of(Failure, pool.see(Loading(count=1), UNANSWERED, after=50)) == [], "its patience is whole again"


def test_single_workers_that_storage_fails_end_no_run_while_enough_load() -> None:
    pool = Pool(Limits(min=2, max=4, wait_s=100))
    pool.see(Tick())
    for after in (2, 96):
        pool.see(Loading(count=4), after=after)
        assert of(Failure, pool.see_at_once(UNANSWERED, Loading(count=3), after=5)) == []


@pytest.mark.parametrize(
    "ends",
    [(Death(worker=1), RecoveredWorker(worker=0)), (LeaveNotice(worker=1, reason="preempted"), Boundary())],
    ids=["a worker is lost", "a worker leaves"],
)
def test_what_storage_did_before_a_wait_is_none_of_it(ends: tuple[Event, ...]) -> None:
    """Ten hours later its patience ran while a worker's successor loaded, which failed for another reason."""
    pool = Pool().run(0, 1)
    pool.see(UNANSWERED)
    pool.see(*ends, after=36_000)
    assert of(Failure, pool.see(Loading(count=1), Tick(), after=90)) == []
    assert of(Failure, pool.see(Tick(), after=90)) == []
    assert of(Failure, pool.see(Loading(count=0), Tick(), after=1)) == [], "its patience is whole"


def test_late_report_about_an_old_generation_is_ignored() -> None:
    pool = Pool().run(0, 1, 2)
    pool.see(Death(worker=2), RecoveredWorker(worker=0), RecoveredWorker(worker=1))
    assert pool.see(Break(generation=1, reason="late"), Death(worker=2), RecoveredWorker(worker=2)) == []
    assert pool.view.workers == (0, 1)


def test_resize_shrinks_at_the_boundary_from_the_newest() -> None:
    pool = Pool().run(0, 1, 2, 3)
    pool.see(Resize(min=1, max=2))
    decisions = pool.see(Boundary())
    assert of(Form, decisions)[0].workers == (0, 1)
    assert {d.worker for d in of(Drain, decisions)} == {2, 3}


def test_a_gone_worker_never_returns_under_its_number() -> None:
    pool = Pool().run(0, 1, 2)
    pool.see(Death(worker=2), came(2, "n"), RecoveredWorker(worker=0), RecoveredWorker(worker=1))
    assert pool.view.workers == (0, 1)


def test_generations_continue_the_numbers_of_an_earlier_controller() -> None:
    membership = Membership(Limits.of(WorkersConfig(min=1, max=1)), generation=41)
    _, decisions = membership.observe([came(7)], 0.0)
    assert decisions == (form(42, (7,), "start", clean=True),)


# Many at once -------------------------------------------------------------------------------------------------------


def looked_at(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a member is looked at, or asked what memory it has, until `count` workers have come, been lost with
    one of them, left their groups, and formed again."""
    looks = 0
    overdue = Membership._overdue

    def counted(membership: Membership, member: Member, now: float) -> str:
        nonlocal looks
        looks += 1
        return overdue(membership, member, now)

    def asked(infos: Sequence[WorkerInfo]) -> str:
        nonlocal looks
        looks += len(infos)
        return ""

    monkeypatch.setattr(Membership, "_overdue", counted)
    pool = Pool(replace(LIMITS, min=2, max=count), asked)
    pool.see_at_once(Resources(available=count))
    pool.see_at_once(*(came(n, f"n{n // 8}") for n in range(count)))
    assert pool.view.generation == 1 and len(pool.view.workers) == count
    pool.see_at_once(Death(worker=0))
    pool.see_at_once(*(RecoveredWorker(worker=n) for n in range(1, count)))
    assert pool.view.generation == 2 and len(pool.view.workers) == count - 1
    return looks


def test_what_a_look_has_seen_of_twice_as_many_workers_is_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = looked_at(64, monkeypatch), looked_at(128, monkeypatch)
    assert few < 8 * 64 and many <= 2 * few + 8


def test_workers_that_come_in_one_look_join_one_generation() -> None:
    pool = Pool().run(0, 1)
    pool.see(Death(worker=0))
    found = pool.see_at_once(RecoveredWorker(worker=1), *joined(2, 3))
    assert [form.workers for form in of(Form, found)] == [(1, 2, 3)], "and do not wait for a boundary"


def test_a_worker_that_leaves_its_groups_and_dies_in_one_look_is_in_no_generation() -> None:
    pool = Pool().run(0, 1, 2)
    pool.see(Death(worker=0))
    pool.see_at_once(RecoveredWorker(worker=1), RecoveredWorker(worker=2), Death(worker=1))
    assert pool.view.state == "waiting" and [member.worker for member in pool.view.members] == [2]


# Memory -------------------------------------------------------------------------------------------------------------


def no_loner(infos: Sequence[WorkerInfo]) -> str:
    """A worker that is alone on its node, node = number // 2, would have to hold all that its node shares."""
    workers = [int(info.worker[1:]) for info in infos]
    alone = [worker for worker in workers if len(workers) > 1 and worker ^ 1 not in workers]
    return f"{alone[0]} is alone" if alone else ""


def test_a_worker_with_whom_memory_would_be_short_waits_until_another_comes() -> None:
    pool = Pool(shortage=no_loner).run(0, 1)
    pool.see(*joined(2))
    assert pool.view.change_pending
    assert pool.see(Boundary()) == [Exclusion(workers=(2,), why="2 is alone")]
    assert pool.view.workers == (0, 1) and not pool.view.change_pending, "steps go on"
    assert pool.see(Boundary(), Tick()) == [], "nothing is said twice"
    pool.see(*joined(3))
    assert pool.view.change_pending
    (form,) = of(Form, pool.see(Boundary()))
    assert form.workers == (0, 1, 2, 3) and not pool.view.change_pending


def test_who_is_left_alone_on_a_node_leaves_the_generation_and_may_come_back() -> None:
    pool = Pool(shortage=no_loner).run(0, 1, 2, 3)
    pool.see(LeaveNotice(worker=3))
    found = pool.see(Boundary())
    assert [form.workers for form in of(Form, found)] == [(0, 1)]
    assert of(Exclusion, found) == [Exclusion(workers=(2,), why="2 is alone")]
    assert [drain.worker for drain in of(Drain, found)] == [3]
    pool.see(Death(worker=0), RecoveredWorker(worker=1))
    assert pool.view.state == "waiting", "1 and 2 are alone, each on its node"
    pool.see(*joined(5, 4))
    assert pool.view.workers == (4, 5)


def test_a_run_that_shrinks_below_its_memory_waits_and_says_why() -> None:
    pool = Pool(shortage=no_loner).run(0, 1, 2, 3)
    found = pool.see(Death(worker=1), Death(worker=2), RecoveredWorker(worker=0), RecoveredWorker(worker=3))
    (wait,) = of(Wait, found)
    assert (wait.have, wait.need) == (2, 2)
    assert str(wait) == ("waiting for workers: 2 of at least 2 are ready, which cannot train together: 0 is alone")
    assert of(Failure, pool.see(Loading(count=1), Tick(), after=200)) == [], "one is loading that may change it"
    pool.see(Loading(count=0))
    (fail,) = of(Failure, pool.see(Tick(), after=101))
    assert fail.code == 75 and "2 workers that cannot train together (0 is alone)" in fail.reason


def recovered(*workers: int) -> list[Event]:
    return [RecoveredWorker(worker=worker) for worker in workers]


def test_nodes_that_do_not_reach_each_other_are_not_formed_together_until_a_while_has_passed() -> None:
    pool = Pool().run(0, 1, 2)
    pool.see(FirstStep())
    pool.see(apart(1, "n0", "n1"))
    found = pool.see(*recovered(0, 1, 2))
    assert [form.workers for form in of(Form, found)] == [(0, 1)], "the smaller node stays out"
    (left_out,) = of(Exclusion, found)
    assert left_out.workers == (2,) and "n0 does not reach n1" in left_out.why
    pool.see(FirstStep())
    assert pool.see(Boundary(), Tick(), after=LIMITS.apart_s / 2) == [], "steps go on"
    pool.see(Tick(), after=LIMITS.apart_s)
    assert pool.view.change_pending, "the network may be mended"
    (form,) = of(Form, pool.see(Boundary()))
    assert form.workers == (0, 1, 2)


def test_a_survivor_beyond_reach_is_not_waited_for() -> None:
    """Its answer may get lost like anything else on the way."""
    pool = Pool().run(0, 1, 2)
    pool.see(FirstStep())
    pool.see(apart(1, "n0", "n1"))
    found = pool.see(*recovered(0), Tick())
    assert of(Form, found) == [], "1 is within reach, and will answer"
    found = pool.see(*recovered(1))
    assert [form.workers for form in of(Form, found)] == [(0, 1)]
    assert [one.workers for one in of(Exclusion, found)] == [(2,)]
    assert of(Exclusion, pool.see(FirstStep(), *recovered(2), Boundary())) == [], "said already"
    pool.see(Tick(), after=LIMITS.apart_s)
    (form,) = of(Form, pool.see(Boundary()))
    assert form.workers == (0, 1, 2)
    pool.see(apart(3, "n0", "n1"), *recovered(0, 1))
    assert pool.view.workers == (0, 1)
    (replaced,) = of(Replacement, pool.see(FirstStep(), Tick(), after=LIMITS.first_step_s + 1))
    assert replaced.worker == 2, "it never answered"
    assert pool.view.workers == (0, 1), "and steps went on all the while"


def test_nodes_apart_end_no_run_however_often_they_are_tried() -> None:
    """Each try is one generation without a finished step, and its workers were not at fault."""
    pool = Pool().run(0, 1, 2)
    for _ in range(2 * LIMITS.max_breaks):
        pool.see(apart(pool.view.generation, "n1", "n0"), *recovered(*pool.view.workers))
        pool.see(*recovered(0, 1, 2))
        assert pool.view.workers == (0, 1)
        pool.see(Tick(), after=LIMITS.apart_longest_s)
        pool.see(Boundary())
        assert pool.view.workers == (0, 1, 2)


def test_of_three_nodes_the_one_that_neither_of_the_others_reaches_stays_out() -> None:
    pool = Pool().run(0, 2, 4)
    pool.see(apart(1, "n0", "n1"), *recovered(0, 2, 4))
    assert pool.view.workers == (0, 4), "of the first two nobody knows which is at fault: the newer one stays out"
    other = Pool().run(0, 2, 4)
    other.see_at_once(apart(1, "n0", "n1", "n2"))
    other.see(*recovered(0, 2, 4))
    assert other.view.workers == (2, 4), "two others do not reach n0"


def test_nodes_that_were_late_are_back_in_a_minute_and_those_that_stay_apart_are_tried_ever_less() -> None:
    pool = Pool(replace(LIMITS, min=1)).run(0, 2)

    def seconds_apart() -> float:
        pool.see(apart(pool.view.generation, "n0", "n1"), *recovered(*pool.view.workers))
        pool.see(FirstStep())
        assert pool.view.workers == (0,)
        began = pool.now
        while pool.view.workers == (0,):
            pool.see(Tick(), Boundary(), after=1.0)
        return pool.now - began

    tries = [seconds_apart() for _ in range(6)]
    assert tries == pytest.approx([60, 120, 240, 480, 600, 600], abs=2.0)
    pool.see(FirstStep())  # together: the network is mended
    assert seconds_apart() == pytest.approx(60, abs=2.0)


@pytest.mark.parametrize(
    ("workers", "pairs", "stay"),
    [
        ((0, 2, 4), [("n0", "n2")], (0, 2)),  # a chain: n1 reaches both
        ((0, 2, 4, 6), [("n0", "n2"), ("n0", "n3"), ("n1", "n2"), ("n1", "n3")], (0, 2)),  # halves: the older one
        ((0, 2, 4, 5, 6, 7), [("n0", "n2"), ("n0", "n3"), ("n1", "n2"), ("n1", "n3")], (4, 5, 6, 7)),  # the larger one
        ((0, 1, 2, 4), [("n0", "n1"), ("n0", "n2")], (0, 1)),  # as many on either side
        ((0, 2, 4, 6), [("n1", "n0"), ("n1", "n2"), ("n1", "n3")], (0, 4, 6)),  # one that none of the others reaches
    ],
)
def test_as_many_workers_as_reach_each_other_are_formed(
    workers: tuple[int, ...], pairs: list[tuple[str, str]], stay: tuple[int, ...]
) -> None:
    pool = Pool(replace(LIMITS, max=6)).run(*workers)
    found = tuple(apart(1, one, other).apart[0] for one, other in pairs)
    pool.see(Break(generation=1, reason="apart", apart=found))
    pool.see(*recovered(*workers))
    assert pool.view.workers == stay


@pytest.mark.parametrize(("home", "stay"), [("n0", (0, 1)), ("n1", (2, 3, 4, 5)), ("n2", (6,)), ("n9", (2, 3, 4, 5))])
def test_the_controller_s_node_stays_however_many_workers_it_does_not_reach(home: str, stay: tuple[int, ...]) -> None:
    pool = Pool(replace(LIMITS, min=1, max=7), home=home)
    nodes = {0: "n0", 1: "n0", 2: "n1", 3: "n1", 4: "n1", 5: "n1", 6: "n2"}
    pool.see_at_once(*(came(worker, node) for worker, node in nodes.items()))
    pairs = (("n0", "n1"), ("n0", "n2"), ("n1", "n2"))
    found = tuple(apart(1, one, other).apart[0] for one, other in pairs)
    pool.see(Break(generation=1, reason="apart", apart=found), *recovered(*nodes))
    assert pool.view.workers == stay


def test_nodes_apart_count_against_the_wait_for_enough_workers() -> None:
    pool = Pool().run(0, 2)
    found = [*pool.see(apart(1, "n0", "n1")), *pool.see(*recovered(0, 2))]
    (wait,) = of(Wait, found)
    assert "n0 does not reach n1" in str(wait)
    tries = 0
    while not (failures := of(Failure, found)) and tries < 20:
        found = pool.see(Tick(), after=LIMITS.apart_waiting_s)
        if of(Form, found):  # tried again, in vain
            pool.see(apart(pool.view.generation, "n0", "n1"))
            found = pool.see(*recovered(0, 2))
            tries += 1
    (fail,) = failures
    assert fail.code == 75 and "n0 does not reach n1" in fail.reason
    assert pool.now <= LIMITS.wait_s + 2 * LIMITS.apart_waiting_s


def two_of_four_out_of_reach() -> Pool:
    """Workers 2 and 3 wait on n1, which n0 does not reach."""
    pool = Pool().run(0, 1, 2, 3)
    pool.see(FirstStep(), apart(1, "n0", "n1"), *recovered(0, 1, 2, 3))
    assert pool.view.workers == (0, 1)
    return pool


def test_others_take_the_place_of_workers_out_of_reach_which_are_then_let_go() -> None:
    pool = two_of_four_out_of_reach()
    assert pool.view.shunned == ("n1",), "a worker there would wait, too"
    assert of(Request, pool.see(Resources(available=9))) == [Request(count=2)]
    assert of(Drain, pool.see(Tick())) == [], "they may be within reach again before others have come"
    found = pool.see(*joined(4))
    assert [(drain.worker, "do not reach it" in drain.reason) for drain in of(Drain, found)] == [(3, True)]
    assert pool.view.change_pending
    found = pool.see(*joined(5), Boundary())
    assert [drain.worker for drain in of(Drain, found)] == [2]
    assert pool.view.workers == (0, 1, 4, 5)
    assert of(Request, pool.see(Resources(available=9))) == []
    pool.see(FirstStep(), Tick(), Boundary(), after=LIMITS.apart_s)
    assert pool.view.shunned == () and pool.view.workers == (0, 1, 4, 5), "nobody is left to be tried"
    pool.see(Death(worker=5), *recovered(0, 1, 4))
    (form,) = of(Form, pool.see(Tick(), *joined(2 + 1000), Boundary()))
    assert form.apart == ("n1",), "what is decoded there can still not be fetched, as far as anybody knows"
    pool.see(LeaveNotice(worker=1002))
    (form,) = of(Form, pool.see(came(1003, "n1"), Boundary()))
    assert form.apart == () and 1003 in form.workers, "a worker there finds out"


def test_workers_within_reach_again_keep_their_place_and_others_that_come_late_are_let_go() -> None:
    pool = two_of_four_out_of_reach()
    assert of(Request, pool.see(Resources(available=2))) == [Request(count=2)]
    pool.see(Tick(), Boundary(), after=LIMITS.apart_s)
    assert pool.view.workers == (0, 1, 2, 3) and pool.view.shunned == ()
    found = pool.see(FirstStep(), *joined(4, 5), Boundary())
    assert sorted(drain.worker for drain in of(Drain, found)) == [4, 5]
    assert pool.view.workers == (0, 1, 2, 3) and of(Request, pool.see(Resources(available=9))) == []


def test_a_run_without_cpus_that_decode_tries_the_nodes_out_of_reach_sooner() -> None:
    pool = two_of_four_out_of_reach()
    pool.see(Tick(), Starvation(starves=True), after=LIMITS.apart_waiting_s - 1)
    assert not pool.view.change_pending
    pool.see(Starvation(starves=False), Tick(), after=2)
    assert not pool.view.change_pending, "its clips come"
    pool.see(Starvation(starves=True))
    (form,) = of(Form, pool.see(Boundary()))
    assert form.workers == (0, 1, 2, 3) and form.apart == ()


def test_a_run_without_cpus_that_decode_goes_back_to_nodes_that_no_worker_is_left_to_try() -> None:
    pool = two_of_four_out_of_reach()
    pool.see(Resources(available=9))
    pool.see(*joined(4, 5), Boundary())
    assert pool.view.workers == (0, 1, 4, 5) and not pool.view.change_pending
    pool.see(FirstStep(), Tick(), after=LIMITS.apart_longest_s)
    assert not pool.view.change_pending, "others decode"
    pool.see(Starvation(starves=True))
    assert pool.view.change_pending
    (form,) = of(Form, pool.see(Boundary()))
    assert form.workers == (0, 1, 4, 5) and form.apart == () and "decode again" in form.reason and form.clean
    assert not pool.view.change_pending and of(Form, pool.see(Tick(), Boundary())) == []


def test_workers_out_of_reach_do_not_count_for_the_least_either() -> None:
    pool = Pool().run(0, 2)
    found = pool.see(apart(1, "n0", "n1"), *recovered(0, 2))
    assert of(Request, found) == [Request(count=1)], "also where no room is known: it may be made"
    assert of(Form, pool.see(*joined(1)))[0].workers == (0, 1)


def test_before_anything_has_run_the_planner_says_what_is_missing() -> None:
    """No worker that may come is known to help: its refusal ends the run with the changes that would."""
    assert Pool(shortage=lambda infos: "all are too small").run(0, 1).view.workers == (0, 1)
    gathered = Pool(shortage=no_loner)
    gathered.see(*joined(0, 1, 2))
    assert gathered.view.workers == (0, 1), "but those that fit begin"


# Storms -------------------------------------------------------------------------------------------------------------

WORKERS = st.integers(0, 11)
SEEN = st.one_of(  # what a look may see, also of workers that are not there; deaths and breaks of such come alone
    st.builds(came, WORKERS, st.sampled_from("abc")),
    st.builds(RecoveredWorker, worker=WORKERS),
    st.builds(LifeSign, worker=WORKERS),
    st.builds(Distrust, worker=WORKERS, reason=st.just("NaN")),
    st.builds(LeaveNotice, worker=WORKERS),
    st.builds(Starvation, starves=st.booleans()),
    st.builds(Loading, count=st.integers(0, 3)),
    st.builds(Suspect, worker=WORKERS),
    st.builds(Resources, available=st.integers(0, 5)),
    st.builds(Shortfall, count=st.integers(0, 2)),
    st.builds(failed, st.integers(0, 9), st.builds(HostGpu, node=st.sampled_from(["", "a", "b"]), gpu=st.just("1"))),
    st.builds(Tick),
)
UNPROVEN = st.one_of(
    SEEN,
    st.builds(Boundary),
    st.builds(Death, worker=WORKERS),
    st.builds(Break, generation=st.integers(0, 6), reason=st.just("x")),
    st.builds(lambda number, nodes: apart(number, *nodes), st.integers(0, 6), st.permutations("abc")),
)
EVENTS = UNPROVEN | st.builds(FirstStep)
# What depends on the pool: without these hardly any generation forms, and none after another.
USUAL = st.sampled_from(["one comes", "survivors answer", "one dies", "it breaks"])
DELAYS = st.sampled_from([0.0, 0.1, 4.0, 40.0])
Drawn = Event | str


def storms(most: int, events: st.SearchStrategy[Event] = EVENTS) -> st.SearchStrategy[list[tuple[Drawn, float]]]:
    """As many usual events as others, with the seconds before each. A list without a least size has five on average,
    and those storms formed no generation at all."""
    either = st.booleans().flatmap(lambda usual: USUAL if usual else events)
    return st.lists(st.tuples(either, DELAYS), min_size=most // 4, max_size=most)


def meant(pool: Pool, drawn: Drawn) -> list[Event]:
    """The events of this pool that a drawn one stands for."""
    match drawn:
        case "one comes":
            pool.last += 1
            return [came(pool.last, "abc"[pool.last % 3])]
        case "survivors answer":
            return [RecoveredWorker(worker=m.worker) for m in pool.view.members if m.phase == "recovering"]
        case "one dies":
            return [Death(worker=worker) for worker in pool.view.workers[:1]]
        case "it breaks":
            return [Break(generation=pool.view.generation, reason="timed out")]
        case str():
            raise AssertionError(drawn)
        case event:
            return [event]


class Model:
    """What the outside world knows: which workers are alive, which last said that they are ready. Checks every decision
    against it."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.gone: set[int] = set()
        self.idle: set[int] = set()  # said that they can join since they last joined or since their generation broke
        self.infos: dict[int, WorkerInfo] = {}  # what each said of itself when it came
        self.last_generation = 0

    def before(self, event: Event) -> None:
        match event:
            case Arrival() if event.worker not in self.gone | self.alive:
                self.alive.add(event.worker)
                self.idle.add(event.worker)
                self.infos[event.worker] = event.info
            case RecoveredWorker() if event.worker in self.alive:
                self.idle.add(event.worker)
            case Death():
                self.lose(event.worker)

    def lose(self, worker: int) -> None:
        if worker in self.alive:
            self.alive.discard(worker)
            self.idle.discard(worker)
            self.gone.add(worker)

    def check(self, decision: Decision, limits: Limits, running: set[int]) -> None:
        match decision:
            case End(clean=False):
                self.idle -= running  # survivors must answer before they are used again
            case Drain() | Replacement():
                assert decision.worker not in self.gone
                self.lose(decision.worker)
            case Form():
                assert decision.generation > self.last_generation
                self.last_generation = decision.generation
                assert limits.min <= len(decision.workers) <= limits.max
                assert len(set(decision.workers)) == len(decision.workers)
                assert set(decision.workers) <= self.alive
                assert set(decision.workers) <= self.idle
                assert decision.infos == tuple(self.infos[worker] for worker in decision.workers)


def has_enough(view: View) -> bool:
    """Whether a generation must form at the next look, as nobody is waited for."""
    waits = any(m.phase == "recovering" for m in view.members) or view.requested
    ready = [m for m in view.members if m.phase == "ready" and m.node not in view.shunned]
    return view.state != "running" and not waits and len(ready) >= view.limits.min


@settings(max_examples=400, deadline=None)
@given(storms(80), st.integers(1, 3))
def test_storm_of_events_keeps_every_promise(storm: list[tuple[Drawn, float]], least: int) -> None:
    limits = Limits(
        min=least,
        max=4,
        wait_s=1e6,
        gather_s=5,
        recover_s=10,
        first_step_s=10,
        confirm_s=3,
        max_breaks=10**6,
        max_losses=10**6,
    )
    pool, model = Pool(limits), Model()
    for event, after in ((event, after) for drawn, after in storm for event in meant(pool, drawn)):
        running = set(pool.view.workers)
        model.before(event)
        for decision in pool.see(event, after=after):
            model.check(decision, limits, running)
        assert pool.view.state != "failed"
        assert set(pool.view.workers) <= {m.worker for m in pool.view.members if m.phase == "active"}
        assert {m.worker for m in pool.view.members} <= model.alive
        assert len([m for m in pool.view.members if not m.leaving]) <= limits.max
        if has_enough(pool.view):  # progress: nobody left to wait for means a generation, unless too few
            for decision in pool.see(Tick()):
                model.check(decision, limits, set())
            assert pool.view.state == "running"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(SEEN | USUAL, min_size=1, max_size=4), DELAYS), min_size=10, max_size=40))
def test_storm_of_looks_keeps_every_promise(storm: list[tuple[list[Drawn], float]]) -> None:
    """Events of one look are decided on together."""
    limits = Limits(min=2, max=4, wait_s=1e6, gather_s=5, recover_s=10, first_step_s=10, confirm_s=3,
                    max_breaks=10**6, max_losses=10**6)  # fmt: skip
    pool, model = Pool(limits), Model()
    for drawn, after in storm:
        look = [event for one in drawn for event in meant(pool, one)]
        running = set(pool.view.workers)
        for event in look:
            model.before(event)
        for decision in pool.see_at_once(*look, after=after):
            model.check(decision, limits, running)
        members = pool.view.members
        assert {m.worker for m in members} <= model.alive
        assert len([m for m in members if not m.leaving]) <= limits.max
        if has_enough(pool.view):
            for decision in pool.see(Tick()):
                model.check(decision, limits, set())
            assert pool.view.state == "running"


@settings(max_examples=150, deadline=None)
@given(storms(80))
def test_in_any_storm_no_generation_but_the_first_has_too_little_memory(storm: list[tuple[Drawn, float]]) -> None:
    limits = Limits(min=2, max=5, wait_s=1e6, gather_s=5, recover_s=10, first_step_s=10, confirm_s=3,
                    max_breaks=10**6, max_losses=10**6)  # fmt: skip

    def short(infos: Sequence[WorkerInfo]) -> str:
        counts = Counter(info.node for info in infos)
        return "one is alone" if len(counts) > 1 and min(counts.values()) == 1 else ""

    pool, formed = Pool(limits, short), 0
    for event, after in ((event, after) for drawn, after in storm for event in meant(pool, drawn)):
        for form in of(Form, pool.see(event, after=after)):
            assert not formed or not short(form.infos)
            formed += 1
        members = pool.view.members
        ready = [m.info for m in members if m.phase == "ready"]
        waits = any(m.phase == "recovering" for m in members) or pool.view.requested
        if pool.view.state != "running":
            assert waits or len(ready) < limits.min or short(ready)
        if isinstance(event, Boundary) and pool.view.state == "running":
            assert not pool.view.change_pending, "the run goes on until something else happens"


@settings(max_examples=100, deadline=None)
@given(storms(60))
def test_after_any_storm_enough_ready_workers_run_again(storm: list[tuple[Drawn, float]]) -> None:
    limits = Limits(
        min=2,
        max=3,
        wait_s=1e6,
        gather_s=5,
        recover_s=10,
        first_step_s=10,
        confirm_s=3,
        max_breaks=10**6,
        max_losses=10**6,
    )
    pool = Pool(limits)
    for drawn, after in storm:
        pool.see(*meant(pool, drawn), after=after)
    pool.see(*(Death(worker=m.worker) for m in pool.view.members))
    for worker in (1000, 1001):
        pool.see(came(worker, "z"))
    pool.see(Tick(), after=2 * limits.gather_s)
    assert pool.view.state == "running" and pool.view.workers == (1000, 1001)


@settings(max_examples=60, deadline=None)
@given(
    storms(30, UNPROVEN),
    st.lists(st.sampled_from(["die", "break", "silent", "frozen", "node"]), min_size=1, max_size=6),
)
def test_no_run_goes_on_for_ever_without_a_finished_step(storm: list[tuple[Drawn, float]], ends: list[str]) -> None:
    """After any storm the same ends of generations come again and again, and whatever was lost is replaced at once."""
    limits = Limits(min=2, max=3, wait_s=1e6, gather_s=0, recover_s=10, first_step_s=20, confirm_s=3)
    most = (limits.max_losses + 1) * (limits.max_breaks + 1)
    pool, fresh, forms = Pool(limits), 1000, 0
    for drawn, after in storm:
        forms += len([form for form in of(Form, pool.see(*meant(pool, drawn), after=after)) if not form.clean])
    for round_ in range(10 * most):
        decisions = end_generation(pool, ends[round_ % len(ends)])
        answers: list[Event] = [RecoveredWorker(worker=m.worker) for m in pool.view.members if m.phase == "recovering"]
        for worker in range(fresh, fresh + 3):
            answers.append(came(worker, "abc"[worker % 3]))
        fresh += 3
        decisions += pool.see(*answers, Tick(), after=1)
        forms += len(of(Form, decisions))
        if pool.view.state == "failed":
            break
    assert pool.view.state == "failed" and forms <= most + len(storm) + 1


def end_generation(pool: Pool, how: str) -> list[Decision]:
    """Let the running generation end this way, if there is one."""
    if not pool.view.workers:
        return pool.see(Tick(), after=50)
    worker = pool.view.workers[0]
    broken = Break(generation=pool.view.generation, reason="timed out")
    match how:
        case "die":
            return pool.see(Death(worker=worker))
        case "break":
            return pool.see(broken)
        case "silent":
            others = [RecoveredWorker(worker=w) for w in pool.view.workers[1:]]
            return pool.see(broken, *others) + pool.see(Tick(), after=30)
        case "frozen":
            return pool.see(Suspect(worker=worker)) + pool.see(Tick(), after=5)
        case _:
            node = next(m.node for m in pool.view.members if m.worker == worker)
            return pool.see(*(Death(worker=m.worker) for m in pool.view.members if m.node == node))


@settings(max_examples=50, deadline=None)
@given(storms(60))
def test_same_events_same_decisions(storm: list[tuple[Drawn, float]]) -> None:
    first, second = ([pool.see(*meant(pool, d), after=a) for d, a in storm] for pool in (Pool(), Pool()))
    assert first == second


def test_many_workers_that_come_or_go_at_once_are_named_in_short() -> None:
    assert _named([2]) == "w2" and _named([2, 3, 5, 7]) == "w2, w3, w5, w7"
    assert _named(range(64)) == "w0, w1, w2, w3 and 60 more"
