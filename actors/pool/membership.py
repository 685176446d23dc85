"""Which workers belong to the run: a pure state machine from events to decisions. No clock, no Ray, no logging inside.

The controller passes it the events that it has seen, and carries out the decisions that it returns (the types of both
are in actors.pool.membership_types):

    view, decisions = membership.observe([Arrival(worker=3, info=info)], now=time.monotonic())
    for decision in decisions:
        match decision:
            case Form(): self.form(decision)
            ...

Life of a worker:    Request -> Arrival -> ready -> Form -> active -> (loss of a peer)
                     recovering -> RecoveredWorker -> ready -> Form -> active ...
It ends by Drain (it goes, at a step boundary), Death, or Replacement (it does not answer: kill it).

Words for a worker that goes, each with one meaning in the whole program:
    leave       a worker announces that it goes, after a preemption notice or `heddle workers drain` (LeaveNotice)
    drain       it is let go at a step boundary, when it is in no generation any more (Drain)
    hand over   it closes the process groups of an ended generation, and says which shards of the training state it
                holds (RecoveredWorker)
    remove      pool, monitor or keepers forget it, and its process is ended (Pool.remove, Monitor.remove)
    release     the data of a committed step may leave the memory (StepSource.release); never of workers

Two nodes may be up and yet not reach each other through the network. A worker on a node that the others do not reach
stays in the pool, but no generation holds it. Another one is requested in its place, on a node within reach; when that
has come and the pool is above `max`, the one beyond reach is drained.

Promises:
    A generation holds only live workers that are ready, at least `min` and at most `max` of them.
    The pool keeps no more than `max` workers.
    Numbers of generations only grow.
    The run fails after a bounded number of generations in a row that finish no step, whatever ended them.
    A worker that is gone never comes back under its number, and late events about it are ignored.
    As soon as enough ready workers reach each other and have the memory to train together, and no survivor within their
    reach still has to answer, the next `observe` forms a generation of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.messages import HostGpu, WorkerInfo
from actors.outcome import Exit
from actors.pool.membership_types import (
    NOTICE_S,
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
    MemberPhase,
    NodeRest,
    RecoveredWorker,
    Replacement,
    Request,
    Resize,
    Resources,
    Shortfall,
    Starvation,
    State,
    StepDispatch,
    Suspect,
    Tick,
    View,
    Wait,
)
from actors.pool.quarantine import Quarantine
from actors.pool.reach import NodeReach
from ops.counted import counted, first_of

ShortageOf = Callable[[Sequence[WorkerInfo]], str]  # what memory these workers lack to train together; "" for none

_ANEW = "nodes that were out of reach may decode again"


class Membership:
    """The pool of one run. `generation` continues the numbers of an earlier controller of the same run."""

    def __init__(
        self, limits: Limits, *, generation: int = 0, shortage: ShortageOf = lambda infos: "", home: str = ""
    ) -> None:
        """`shortage` is called with what workers that are ready have reported. `home` is the controller's node."""
        self._limits, self._reach = limits, NodeReach(limits, home)
        self._shortage = shortage
        self._generation = generation
        self._state: State = "waiting"
        self._workers: tuple[int, ...] = ()  # of the running generation
        self._members: dict[int, Member] = {}
        self._gone: set[int] = set()
        self._available = 0
        self._step_limit_s = 0.0
        self._loading = 0
        self._starves = False
        self._anew = False  # the running generation is to be formed again, of the same workers
        self._requested = 0
        self._requested_at = 0.0
        self._waiting_since: float | None = None
        self._waited_since: float | None = None  # `_waiting_since` until the running generation was formed
        # How often storage has kept a worker from loading, in this wait and since one has loaded, and when it last did.
        self._unanswered, self._unanswered_at = 0, -math.inf
        self._announced: tuple[int, int, bool] | None = None  # the last Wait's (have, need, whether for memory)
        self._quarantine = Quarantine(limits.rest_s, limits.rest_longest_s)
        self._resting: set[str] = set()  # nodes; "" stands for all
        self._left_out: tuple[int, ...] = ()  # workers that the last Exclusion named
        self._others = False  # workers have come or gone since some were left out
        self._enough_since: float | None = None
        self._formed = False
        self._clean = True
        self._breaks = 0  # generations without a finished step, since the last finished one, by how they ended
        self._losses = 0
        self._lost_in = 0  # the newest generation that counts as ended by a loss
        self._proven = False  # the newest generation has finished a step
        self._why = "start"
        self._out: list[Decision] = []

    def observe(self, events: Sequence[Event], now: float) -> tuple[View, tuple[Decision, ...]]:
        """Take in events in the order in which they were seen, all by the time `now` (seconds, monotonic), then decide
        once for all of them. Returns the pool after that, and the decisions to carry out, in order.

        A decision looks at every member. A thousand workers often come, or leave their groups, at the same time: pass
        their events in one call."""
        before = (self._state, self._generation, self._workers)
        self._out = []
        for event in events:
            if not self._has_failed():
                self._take(event, now)
        if not self._has_failed():
            self._settle(any(isinstance(event, Boundary) for event in events), now)
        changed = before != (self._state, self._generation, self._workers)
        return self.view(changed=changed), tuple(self._out)

    def view(self, *, changed: bool = False) -> View:
        return View(
            state=self._state,
            generation=self._generation,
            workers=self._workers,
            members=tuple(self._members.values()),
            requested=self._requested,
            limits=self._limits,
            changed=changed,
            anew=self._anew,
            shunned=self._shunned(),
            at_rest=tuple(sorted(self._resting - {""})),
        )

    # Events -----------------------------------------------------------------------------------------------------

    def _take(self, event: Event, now: float) -> None:
        match event:
            case Arrival():
                self._join(event, now)
            case RecoveredWorker():
                self._recovered(event.worker, now)
            case LifeSign():
                self._update(event.worker, suspected_at=None, suspicion="")
            case Suspect():
                if event.worker in self._members and self._members[event.worker].suspected_at is None:
                    self._update(event.worker, suspected_at=now, suspicion=event.reason)
            case LeaveNotice():
                self._update(event.worker, leaving=event.reason or "leaving")
            case Distrust():
                self._distrust(event, now)
            case Death():
                self._lose(event.worker, event.reason, now)
            case Resources():
                self._available = event.available
            case Shortfall():
                self._requested = max(0, self._requested - event.count)
                if event.failed is not None:
                    if event.failed.passes:
                        self._unanswered, self._unanswered_at = self._unanswered + 1, now
                    self._ended_early(event.failed.where, event.failed.why, now)
            case Break():
                self._broken(event, now)
            case StepDispatch():
                self._step_limit_s = event.limit_s
            case Loading():
                self._loading = event.count
            case Starvation():
                self._starves = event.starves
            case Resize():
                self._limits = replace(self._limits, min=event.min, max=event.max)
            case FirstStep():
                self._breaks = self._losses = 0
                self._proven = self._state == "running"
                for worker in self._workers:
                    self._update(worker, proven=True)
                    self._quarantine.worked(_where(self._members[worker]))
                self._reach.trained({self._members[worker].node for worker in self._workers})
            case Boundary() | Tick():
                pass

    def _join(self, event: Arrival, now: float) -> None:
        if event.worker in self._gone or event.worker in self._members:
            return
        self._requested, self._unanswered = max(0, self._requested - 1), 0
        self._members[event.worker] = Member(worker=event.worker, info=event.info, phase="ready", since=now)
        self._others = True

    def _recovered(self, worker: int, now: float) -> None:
        member = self._members.get(worker)
        if member is not None and member.phase == "recovering":
            self._update(worker, phase="ready", since=now, suspected_at=None, suspicion="")
            self._others |= not member.left_out

    def _broken(self, event: Break, now: float) -> None:
        if self._state != "running" or event.generation != self._generation:
            return  # a late report of what was already answered
        self._breaks += not event.learned and not event.apart
        if event.apart:  # no worker of the generation has begun: the wait for one that can goes on
            self._waiting_since = self._waited_since
        self._reach.broken(event.apart, now)
        if self._breaks > self._limits.max_breaks:
            self._fail(
                Exit.FAILURE, f"{self._breaks} generations broke in a row without finishing a step: {event.reason}"
            )
        else:
            self._break(event.reason, now)

    def _count_loss(self, reason: str) -> None:
        """Count a generation that has ended by the loss of a worker, once however many it lost. Breaks without such a
        reason are counted from zero again, also where survivors reported this one before the loss was seen."""
        if self._lost_in == self._generation:
            return
        self._lost_in = self._generation
        self._breaks = 0
        self._losses += 1
        if self._losses > self._limits.max_losses:
            self._fail(
                Exit.FAILURE,
                f"{self._losses} generations in a row lost a worker before they finished a step; the last one: "
                f"{reason}. Such a step ends its worker every time: look at that worker's log, or give it more memory",
            )

    def _update(self, worker: int, **changes: object) -> None:
        if worker in self._members:
            self._members[worker] = replace(self._members[worker], **changes)  # type: ignore[arg-type]

    def _lose(self, worker: int, reason: str, now: float, *, replaced: bool = False) -> None:
        """Forget a worker that is gone, and count that as the end of its generation. With one exception: the generation
        had broken before, and this run ends the worker as it did not leave its groups in time (`replaced`). That break
        still counts as one without a loss, as a step that is too slow will be too slow again."""
        member = self._members.pop(worker, None)
        if member is None:
            return
        self._others = True
        self._gone.add(worker)
        if member.info.gpu and not member.proven:
            self._ended_early(_where(member), reason, now)
        reason = f"worker {worker} {reason}"
        if member.phase == "active" or (member.phase == "recovering" and not replaced):
            self._count_loss(reason)
        if member.phase == "active" and self._state != "failed":
            self._break(reason, now)

    def _ended_early(self, where: HostGpu, why: str, now: float) -> None:
        """A worker there has ended before its first step."""
        if (rest_s := self._quarantine.ended(where, now)) is not None:
            count, place = self._quarantine.count(where), str(where)
            there = f"{count} in a row ended{f' on {place}' if place else ''} before their first step"
            last = why.removeprefix(f"{place}: ")
            self._out.append(NodeRest(where=where, seconds=rest_s, why=f"{there}; the last one: {last}"))

    def _distrust(self, event: Distrust, now: float) -> None:
        """The worker leaves, and its node rests, if it has a GPU and the run has enough others."""
        member, rest_s = self._members.get(event.worker), self._limits.distrust_s
        if member is None or not _where(member).gpu or len(self._within_reach()) <= self._limits.min or member.leaving:
            return
        where = _where(member)
        self._quarantine.distrust(where, now, rest_s)
        self._out.append(NodeRest(where=where, seconds=rest_s, why=f"{where} seems to compute wrongly"))
        self._update(event.worker, leaving=f"{where} seems to compute wrongly: {event.reason}")

    def _break(self, reason: str, now: float) -> None:
        """The running generation is lost; its survivors must leave their groups and answer."""
        if self._state != "running":
            return
        self._out.append(End(generation=self._generation, reason=reason, clean=False))
        self._stop("recovering", "recovering", reason, now)
        self._clean = False

    def _stop(self, state: State, phase: MemberPhase, reason: str, now: float) -> None:
        self._state, self._workers, self._why = state, (), reason
        for member in self._with("active"):
            self._update(member.worker, phase=phase, since=now)

    def _fail(self, code: int, reason: str) -> None:
        self._state, self._workers = "failed", ()
        self._out.append(Failure(code=code, reason=reason))

    def _has_failed(self) -> bool:
        return self._state == "failed"

    def _with(self, *phases: MemberPhase) -> list[Member]:
        return [member for member in self._members.values() if member.phase in phases]

    # Decisions --------------------------------------------------------------------------------------------------

    def _settle(self, boundary: bool, now: float) -> None:
        self._replace_silent(now)
        self._resting = self._quarantine.resting(now)
        if self._has_failed():
            return
        self._try_apart(now)
        self._look_again()
        self._shrink()
        if boundary and self._state == "running":
            self._change(now)
        self._drain()
        if self._state != "running":
            self._form_or_wait(now)
        if not self._has_failed():
            self._request(now)

    def _replace_silent(self, now: float) -> None:
        for member in list(self._members.values()):
            reason = self._overdue(member, now)
            if reason and member.worker in self._members:
                self._out.append(Replacement(worker=member.worker, reason=reason))
                self._lose(member.worker, f"was replaced: {reason}", now, replaced=True)
                if self._has_failed():
                    return

    def _overdue(self, member: Member, now: float) -> str:
        limits = self._limits
        suspected = member.suspected_at
        if suspected is not None and (member.phase == "recovering" or now - suspected >= limits.confirm_s):
            return member.suspicion
        if member.phase != "recovering":
            return ""
        recover_s = max(limits.recover_s, self._step_limit_s + NOTICE_S if self._step_limit_s else 0.0)
        recover_s = recover_s if self._proven else max(recover_s, limits.first_step_s)
        return f"did not leave its broken groups within {recover_s:g} s" if now - member.since >= recover_s else ""

    def _shrink(self) -> None:
        """Above `max`, the least useful workers go: first those that the others do not reach, then those that are
        ready, recovering, and active, of each the newest first."""
        if len(self._members) <= self._limits.max:
            return
        staying = self._staying()
        within = {member.worker for member in self._within_reach()}
        order = {"ready": 0, "recovering": 1, "active": 2}
        staying.sort(key=lambda member: (member.worker in within, order[member.phase], -member.worker))
        for member in staying[: max(0, len(staying) - self._limits.max)]:
            why = "" if member.worker in within else ", and the others do not reach it"
            self._update(member.worker, leaving=f"the pool holds at most {self._limits.max}{why}")

    def _drain(self) -> None:
        for member in [m for m in self._members.values() if m.leaving and m.phase != "active"]:
            del self._members[member.worker]
            self._gone.add(member.worker)
            self._out.append(Drain(worker=member.worker, reason=member.leaving))

    def _change(self, now: float) -> None:
        """At a step boundary: where members want to leave, or ready ones can join, form the next generation of those
        that stay. With fewer than `min` of them this one ends, and the pool waits."""
        staying = [m for m in self._with("active", "ready") if not m.leaving]
        if {m.worker for m in staying} == set(self._workers):
            if self._anew:
                self._form(staying, _ANEW, clean=True, now=now)
            return
        reaching, apart = self._reach.among(staying)
        staying, why = self._fitting(reaching)
        why = why or apart
        if {m.worker for m in staying} == set(self._workers) and not self._anew:
            self._leave_out(why)
            return
        reason = (self._describe_change(staying) or _ANEW) + (f" ({why})" if why else "")
        if len(staying) < self._limits.min:
            self._out.append(End(generation=self._generation, reason=reason, clean=True))
            self._stop("waiting", "ready", reason, now)
            self._clean = True
            return
        leavers = [m.worker for m in self._with("active") if m not in staying]
        self._form(staying, reason, clean=True, now=now)
        for worker in leavers:
            self._update(worker, phase="ready", since=now)  # no longer in a generation: drained next, or left out
        self._leave_out(why)

    def _staying(self) -> list[Member]:
        return [member for member in self._members.values() if not member.leaving]

    def _within_reach(self) -> list[Member]:
        """The members that stay, without those that wait beyond the reach of the others."""
        return self._reach.among(self._staying())[0]

    def _shunned(self) -> tuple[str, ...]:
        """Nodes for which no worker is asked, sorted."""
        apart = self._reach.beyond({member.node for member in self._within_reach()}, also_tried=False)
        return tuple(sorted({*apart, *self._at_rest()} - {""}))

    def _at_rest(self) -> set[str]:
        """Nodes at rest, "" for all; none while the run needs every worker that it can get."""
        return self._resting if len(self._within_reach()) >= self._limits.min else set()

    def _try_apart(self, now: float) -> None:
        """Networks are mended: after a while, let two nodes that did not reach each other be tried together again.

        If the run lacks CPUs that decode clips (`Starvation`) and one of the two nodes has no worker left that could
        try, forget that they are apart and form the generation anew: then clips are decoded on that node again."""
        waits = self._state == "waiting" or self._starves
        if self._starves:
            self._anew |= self._reach.forget_lost(now, {member.node for member in self._members.values()})
        self._others |= self._reach.try_again(now, soon=waits)

    def _fitting(self, members: list[Member]) -> tuple[list[Member], str]:
        """(members that have the memory to train together, what all of them would lack: "" if they have it).

        Members are taken out one by one until the rest fits: always the newest of the node that has the fewest. What
        lies on a node once is shared by its workers, so each of them holds more of it the fewer they are."""
        chosen, first = list(members), ""
        while len(chosen) >= self._limits.min:
            why = self._shortage(tuple(m.info for m in sorted(chosen, key=_by_node)))
            if not why:
                return chosen, first
            first = first or why
            counts = Counter(member.node for member in chosen)
            chosen.remove(min(chosen, key=lambda member: (counts[member.node], -member.worker)))
        return (chosen if self._formed else members), first  # the first step's planner says what is missing

    def _leave_out(self, why: str) -> None:
        """Members outside of the generation that are ready, or will be, wait until other workers come or go."""
        found = tuple(m.worker for m in self._with("ready", "recovering") if not m.leaving)
        for worker in found:
            self._update(worker, left_out=True)
        if found and found != self._left_out:
            self._out.append(Exclusion(workers=found, why=why))
        self._left_out = found

    def _look_again(self) -> None:
        """If workers have come or gone, those that were left out may fit now."""
        if not self._others:
            return
        self._others = False
        for member in [member for member in self._members.values() if member.left_out]:
            self._update(member.worker, left_out=False)

    def _describe_change(self, staying: list[Member]) -> str:
        after = {m.worker for m in staying}
        came = sorted(after - set(self._workers))
        went = sorted(set(self._workers) - after)
        return ", ".join(
            f"{_named(workers)} {word}{'s' if len(workers) == 1 else ''}"
            for word, workers in (("join", came), ("leave", went))
            if workers
        )

    def _form_or_wait(self, now: float) -> None:
        ready = self._with("ready")
        # A survivor that the others do not reach would be left out anyway, and its answer may get lost as well.
        reaching, apart = self._reach.among([*ready, *self._with("recovering")])
        expected = reaching if len(reaching) >= self._limits.min else self._members.values()
        if any(member.phase == "recovering" for member in expected):
            return
        chosen, why = self._fitting(reaching)
        why = why or apart
        if len(chosen) < self._limits.min:
            self._enough_since = None
            self._wait(len(ready), now, why)
            return
        if self._enough_since is None:
            self._enough_since = now
        if not self._formed and self._requested and now - self._enough_since < self._limits.gather_s:
            return
        self._form(chosen, self._why, clean=self._clean, now=now)
        self._leave_out(why)

    def _form(self, members: list[Member], reason: str, *, clean: bool, now: float) -> None:
        members = sorted(members, key=_by_node)
        self._generation += 1
        self._state = "running"
        self._workers = tuple(m.worker for m in members)
        for worker in self._workers:
            self._update(worker, phase="active", since=now)
        self._formed, self._clean, self._proven, self._anew = True, True, False, False
        self._waited_since, self._waiting_since = self._waiting_since, None
        self._announced = self._enough_since = None
        infos = tuple(m.info for m in members)
        self._out.append(
            Form(
                generation=self._generation,
                workers=self._workers,
                infos=infos,
                reason=reason,
                clean=clean,
                apart=self._reach.beyond({member.node for member in members}, also_tried=True),
            )
        )

    def _wait(self, have: int, now: float, why: str) -> None:
        on_their_way = self._loading if why else have + self._loading >= self._limits.min
        if self._waiting_since is None:
            self._unanswered = 0
        if self._waiting_since is None or (on_their_way and not self._unanswered):
            self._waiting_since = now  # those that load for too long are given up elsewhere
        self._state = "waiting"
        until = self._waiting_since + self._limits.wait_s
        # Where storage does not answer every new try loads for a while: the clock runs through all of them, and ends
        # the run with the next that fails, once as many have as load: fewer are single ones. Those that go on may load
        # for longer, as storage may be back.
        ends = self._unanswered_at == now and self._unanswered >= self._loading
        if now >= until and (ends or not on_their_way):
            lack = f"{have} of at least {self._limits.min} workers"
            lack = f"{counted(have, 'worker')} that cannot train together ({why})" if why else lack
            self._fail(
                Exit.RESUMABLE,
                f"{lack} for more than {self._limits.wait_s:g} s (workers.wait_s); resume when there is capacity, or "
                f"lower workers.min",
            )
        elif self._announced != (have, self._limits.min, bool(why)):
            self._announced = (have, self._limits.min, bool(why))
            self._out.append(Wait(have=have, need=self._limits.min, until=until, why=why))

    def _request(self, now: float) -> None:
        if self._requested and now - self._requested_at >= self._limits.request_s:
            self._requested = 0  # they did not come; ask again
        here = len(self._within_reach()) + self._requested
        available = 0 if "" in self._at_rest() else self._available
        count = min(self._limits.max - here, max(self._limits.min - here, available))
        if count > 0:
            self._requested += count
            self._requested_at = now
            self._available = max(0, self._available - count)
            self._out.append(Request(count=count))


def _where(member: Member) -> HostGpu:
    return HostGpu(node=member.node, host=member.info.host, gpu=member.info.gpu)


def _by_node(member: Member) -> tuple[str, int, int]:
    """Workers of a node are ranked by the indices of their GPUs there, else in the order in which they came."""
    return member.node, member.info.place.index or 0, member.worker


def _named(workers: Sequence[int]) -> str:
    """The first of them by name, as people know them."""
    return first_of([f"w{worker}" for worker in workers])
