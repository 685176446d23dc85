"""Runs the steps of one generation: plan, dispatch, collect. One object per generation; any failure ends it.

Up to two steps are on the workers at a time: the next one is dispatched while the current one runs, so that no worker
waits for the controller between steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import ray

from actors.feed.step_source import StepSource
from actors.letters import FINISH, TURN, Letter, NodeAnswer, RelayedCall, RelayedResult, RelaySeat
from actors.messages import (
    IO,
    CascadeTask,
    MemoryExceeded,
    OutOfReach,
    PublishedResult,
    Snapshot,
    StepReport,
    TurnTask,
)
from actors.plan.types import Cascade, Cluster, EarlyEncode, Item, Module, PlanError
from actors.planning.client import PlannerClient
from actors.planning.room import left_gib
from actors.ray_calls import GONE, get, get_all, wait
from actors.refs import Ref
from actors.run.asides import AsideTurns
from actors.run.communicators import Communicators, StepBags
from actors.run.dispatch import Call, Holdings, calls_of, end_of, finish_of, shapes_of_bags
from actors.run.failures import exceeded_of, failure_of, has_lost_argument, is_out_of_reach, last_line
from actors.run.relay import ENDED_S
from actors.run.relays import NodeRelay, Relays
from actors.run.waits import StepWaits
from actors.step import CollectedStep, GenerationLost, RunningStep, Seat, StepAssignment, StepData, SubmittedCall
from ops.degrees import BagRanks
from ops.typed import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

_METHODS: dict[Module, str] = {"text": "encode_text", "vae": "encode_vae", "dit": "dit"}  # of a worker

_WEIGHT_ERROR = 1e-9  # what rounding may do to a sum of weights
_ROOM_CHANGE = 0.02  # share of the memory for cascades
_QUIET_S = 1.0  # for encodes that outlast a step to end, before a relay makes the next calls
_OTHERS_S = 3.0  # for other workers to find out what one of them has
_NEXT_TRY_S = 60.0  # to take up a relay
_CACHED = "cache/"  # first part of the names of results that were encoded long ago


@dataclass(kw_only=True)
class StepRunner:
    """Dispatches and collects the steps of one generation."""

    generation: int
    world: tuple[Seat, ...]
    cluster: Cluster
    source: StepSource
    planner: PlannerClient
    budget_s: float  # to find a plan
    lookahead: int
    exports: Callable[[int], bool]  # steps after which workers copy their state for keepers and checkpoints
    next_step: int  # to be dispatched
    last_step: int  # exclusive
    forming: list[Ref[None]]  # resolve when the workers have formed the generation
    first_budget_s: float | None = None  # the same for the first plan of the generation
    waits: StepWaits
    asides: AsideTurns
    relays: Relays = field(default_factory=Relays)
    bag_peers: int = 0  # that all bags of a worker have together; 0: no limit
    bags_gib: float = 0.0  # of a GPU that their communicators may come to take
    running: list[RunningStep] = field(default_factory=list)
    _holdings: Holdings = field(default_factory=Holdings)
    _early: dict[int, list[EarlyEncode]] = field(default_factory=dict)  # by step: its encodes that an earlier one runs
    _results: dict[str, Ref[list[PublishedResult]]] = field(default_factory=dict)
    _at_relays: dict[str, str] = field(default_factory=dict)  # published by a call of a letter: cascade -> node
    _outlasting: list[Call] = field(default_factory=list)  # encodes that the last dispatched step does not wait for
    _outlasting_calls: list[SubmittedCall] = field(default_factory=list)
    _planned: bool = False

    def __post_init__(self) -> None:
        self._communicators = Communicators(self.bag_peers)
        self._relay_of: Mapping[str, NodeRelay] = self.relays.of(self.world)
        self._groups = self.relays.groups
        self._letters: dict[str, list[RelayedCall]] = {}  # by node: of the step that is being dispatched
        self._sent: Counter[str] = Counter()  # letters to each node
        self._relays_at = 0.0  # monotonic seconds: no relay is taken up before
        self._formed_by = tuple(self.forming)  # by rank
        self._ranks: dict[str, list[int]] = {}  # by node
        for rank, seat in enumerate(self.world):
            self._ranks.setdefault(seat.node, []).append(rank)

    def count_on(self, speed: tuple[float, ...]) -> None:
        """Plan from now on with these speeds of the workers, in order of ranks."""
        self.cluster = replace(self.cluster, speed=speed)

    def count_on_room(self, done: CollectedStep) -> tuple[float, ...]:
        """Plan from now on with the memory that workers had left for cascades, less what bags will take that are not
        connected yet, once it is another than was counted on: plans that were asked for ahead count on what was known
        then. Returns it, in order of ranks."""
        open_peers = done.running.open_peers or (0,) * len(done.reports)
        found = room_of(
            [
                None if report.room_gib is None else left_gib(report.room_gib, self.bags_gib, peers)
                for report, peers in zip(done.reports, open_peers, strict=True)
            ]
        )
        if changed(self.cluster.room_gib, found):
            self.cluster = replace(self.cluster, room_gib=found)
        return found

    @property
    def at_end(self) -> bool:
        """Every step of the run has been dispatched."""
        return self.next_step >= self.last_step

    def dispatch(self) -> RunningStep:
        """Plan and submit the next step. Raises PlanError, DataError, DataLost."""
        started, step = time.perf_counter(), self.next_step
        budget_s = self.budget_s if self._planned or self.first_budget_s is None else self.first_budget_s
        window, done = self._question(step)
        assignment = self.planner.plan(step, window, self.cluster, done, budget_s)
        planning_s = time.perf_counter() - started
        steps = sorted({c.step for c in assignment.cascades} | {step})
        data = {s: self.source.data(s) for s in steps}
        self._use_cache(data[step])
        submitting = time.perf_counter()
        bags = self._communicators.step([tuple(sorted(cascade.workers)) for cascade in assignment.cascades])
        items, aside_s = {s: d.items for s, d in data.items()}, self.asides.deal(self.world)
        shapes = shapes_of_bags(assignment.cascades, items)
        patience = self.waits.of(step, assignment.cascades, shapes, assignment.step.update_s, aside_s)
        calls = calls_of(
            assignment.cascades,
            items,
            self.generation,
            step,
            self._holdings,
            bags.left,
            patience,
            assignment.rates,
        )
        self._letters = {node: [] for node in self._relay_of}
        self._connect(bags)
        submitted = [(call, self._submit(call, data)) for call in calls]
        outlasted = {call.rank for call in calls if call.task.outlasts}
        self.asides.give(
            self.generation, step, self.world, assignment.cascades, outlasted, patience, elsewhere=self._relay_turn
        )
        export = self.exports(step)
        mine, before = by_rank(calls, len(self.world)), by_rank(self._outlasting, len(self.world))
        tasks = [
            finish_of(rank, mine[rank], self.generation, step, export, before[rank], patience)
            for rank in range(len(self.world))
        ]
        finishes: dict[Ref[tuple[StepReport, Snapshot | None]], int] = {}
        for rank, (seat, task) in enumerate(zip(self.world, tasks, strict=True)):
            if seat.node in self._letters:
                self._letters[seat.node].append(RelayedCall(rank=rank, method=FINISH, name="finish", arguments=(task,)))
            else:
                finishes[seat.handle.finish_step.options(name="finish").remote(task)] = rank
        watched = [*self._outlasting_calls, *(one for _, one in submitted if one is not None)]
        self._outlasting = [call for call in calls if call.task.outlasts]
        end_s = end_of(assignment.cascades, step)
        ends = [self._submit_end(call, end_s) for call in self._outlasting]
        begun = [one for call, one in submitted if call.task.outlasts]
        self._outlasting_calls = [one for one in (*begun, *ends) if one is not None]
        letters = self._send_letters(step)
        running = RunningStep(
            step=step,
            generation=self.generation,
            assignment=assignment,
            data=data[step],
            results=dict(self._results),
            calls=watched,
            open_dits={call.reference: call for call in watched if call.module == "dit"},
            finishes=finishes,
            letters=letters,
            dispatched_at=time.time(),
            dispatch_s=time.perf_counter() - submitting,
            num_calls=len(calls),
            planning_s=planning_s,
            patience=patience,
            speed=self.cluster.speed,
            open_peers=tuple(self._communicators.peers(rank) for rank in range(len(self.world))),
        )
        self.running.append(running)
        self._remember_early(assignment, step)
        if step + 1 < self.last_step:
            window, done = self._question(step + 1)
            self.planner.request(step + 1, window, self.cluster, done, budget_s)
        self._planned = True
        self.next_step += 1
        return running

    def collect(self, timeout_s: float) -> CollectedStep | None:
        """The oldest running step if it ends within the timeout, else None. Raises GenerationLost, or PlanError and
        ConfigError where the workers could not form the generation and no other one would be better."""
        running = self.running[0]
        self._check_forming()
        asked: list[Ref[object]] = [*running.finishes, *running.letters]
        ready, waiting = wait(asked, num_returns=len(asked), timeout=timeout_s)
        self._raise_failures(ready, ended=not waiting)
        if waiting:
            self._check_relays()
            return None
        answers = [running.answers[rank] for rank in range(len(self.world))]
        self._check_weights([report for report, _ in answers])
        self.waits.finished([report for report, _ in answers])
        self.running.pop(0)
        return CollectedStep(
            running=running,
            reports=tuple(report for report, _ in answers),
            snapshots=tuple(s for _, s in answers if s is not None),
            collected_at=time.time(),
        )

    def end_hanging_relays(self) -> dict[str, float]:
        """End relays that hang: what waits for one fails then, also keepers' answers, which others are asked for. Those
        of this generation, by node, with the seconds for which they have not answered."""
        now = time.monotonic()
        hanging = self.relays.silent(now)
        for node in hanging:
            self.relays.lose(node, now)
        return {node: s for node, s in hanging.items() if node in self._relay_of}

    @property
    def awaits_quiet(self) -> bool:
        """Whether no step shall be dispatched until none runs: a node can have a relay again. Not where another relay
        is lost: the next letters end this generation."""
        wanted = bool(self.relays.renewed) and time.monotonic() >= self._relays_at
        return wanted and all(node in self.relays.known for node in self._relay_of)

    def take_up_relays(self) -> None:
        """Call the workers of nodes that can have a relay again through it from the next step on. Only while no step
        runs: a worker takes the calls of two callers in any order. What cannot be taken up now is later."""
        if self.running or not self.awaits_quiet:
            return
        ends = [one.reference for one in self._outlasting_calls]
        if not ends or not wait(ends, num_returns=len(ends), timeout=_QUIET_S)[1]:
            self._relay_of = self.relays.of(self.world)
            self._groups = self.relays.groups
        self._relays_at = time.monotonic() + _NEXT_TRY_S

    def _question(self, step: int) -> tuple[list[tuple[Item, ...]], list[EarlyEncode]]:
        """Items of the step and of those whose encode work may run early, and what of it has already been planned."""
        window: list[tuple[Item, ...]] = []
        for s in range(step, step + 1 + self.lookahead):
            items = self.source.items(s)
            if items is not None:
                window.append(items)
        self.source.request(step + 1 + self.lookahead)
        return window, [done for s in sorted(self._early) for done in self._early[s]]

    def _connect(self, bags: StepBags) -> None:
        """Have the members of bags close those that make room, and connect new ones while they work."""
        connected: dict[int, list[BagRanks]] = {}
        closed: dict[int, list[BagRanks]] = {}
        for of_rank, found in ((connected, bags.connected), (closed, bags.closed)):
            for bag in sorted(found):
                for rank in bag:
                    of_rank.setdefault(rank, []).append(bag)
        for rank in sorted({*connected, *closed}):
            mine, left = tuple(connected.get(rank, ())), tuple(closed.get(rank, ()))
            seat, arguments = self.world[rank], (self.generation, mine, left)
            if seat.node in self._letters:
                self._letters[seat.node].append(
                    RelayedCall(rank=rank, method="prepare", name="prepare", arguments=arguments)
                )
            else:
                seat.handle.prepare.remote(*arguments)

    def _use_cache(self, data: StepData) -> None:
        """Results that were encoded long ago count as published."""
        for (module, item), reference in data.cached.items():
            source = f"{_CACHED}{module}/{item}"
            self._results[source] = reference
            for sample in data.items.items[item].samples:
                self._holdings.published[module, sample.id] = source

    def _submit(self, call: Call, data: dict[int, StepData]) -> SubmittedCall | None:
        """Make a call; None where it went into a letter, whose answer says what becomes of it."""
        seat, task = self.world[call.rank], call.task
        shown, publishes = shape_of(task.name), bool(task.publish) and not task.outlasts
        is_dit = task.module == "dit"
        pixels = [] if is_dit else [data[task.step].batches[item] for item in call.items]
        reads_data = not is_dit or any(source.startswith(_CACHED) for source in call.needs)
        if seat.node in self._letters:
            needed: Sequence[Ref[object] | RelayedResult] = pixels or [self._named(source) for source in call.needs]
            self._relay(call.rank, task, _METHODS[task.module], shown, needed, reads_data, publishes)
            return None
        reference: Ref[object]
        if task.module == "dit":
            results = [self._result(source) for source in call.needs]
            reference = seat.handle.dit.options(name=shown).remote(task, *results)
        else:
            method = seat.handle.encode_text if task.module == "text" else seat.handle.encode_vae
            encoded = method.options(name=shown).remote(task, *pixels)
            reference = encoded
            if publishes:
                self._publish(call, encoded)
        return SubmittedCall(
            worker=seat.name,
            name=task.name,
            module=task.module,
            reference=reference,
            reads_data=reads_data,
        )

    def _submit_end(self, call: Call, end_s: float) -> SubmittedCall | None:
        """The end of an encode that outlasts its step, which ends at `end_s`: after the update in its worker's queue.
        It counts with the next step, and its planned times are from that step's start. None where it is in a letter."""
        seat, planned = self.world[call.rank], call.task
        start_s, over_s = planned.planned_start_s - end_s, planned.planned_end_s - end_s
        task, shown = replace(planned, planned_start_s=start_s, planned_end_s=over_s), shape_of(planned.name)
        if seat.node in self._letters:
            self._relay(call.rank, task, "outlasted", f"end of {shown}", publishes=bool(task.publish))
            return None
        ended = seat.handle.outlasted.options(name=f"end of {shown}").remote(task)
        if task.publish:
            self._publish(call, ended)
        return SubmittedCall(worker=seat.name, name=task.name, module=task.module, reference=ended, reads_data=False)

    def _publish(self, call: Call, reference: Ref[list[PublishedResult]]) -> None:
        task, seat, shown = call.task, self.world[call.rank], shape_of(call.task.name)
        if seat.publishes_later:
            later = seat.handle.published.options(name=f"handoff {shown}", concurrency_group=IO)
            reference = later.remote(task, [reference])
        self._results[task.cascade] = reference

    def _relay(
        self,
        rank: int,
        task: CascadeTask,
        method: str,
        shown: str,
        references: Sequence[Ref[object] | RelayedResult] = (),
        reads_data: bool = False,
        publishes: bool = False,
    ) -> None:
        """Put a call into the letter to its worker's node."""
        node = self.world[rank].node
        self._letters[node].append(
            RelayedCall(
                rank=rank,
                method=method,
                name=shown,
                arguments=(task,),
                references=tuple(references),
                reads_data=reads_data,
                publishes=publishes,
            )
        )
        if publishes:
            self._at_relays[task.cascade] = node

    def _relay_turn(self, rank: int, task: TurnTask) -> bool:
        """Put a turn into the letter to its worker's node, between its cascades and the end of the step. False where
        there is none."""
        if (calls := self._letters.get(self.world[rank].node)) is None:
            return False
        calls.append(RelayedCall(rank=rank, method=TURN, name="aside", arguments=(task,)))
        return True

    def _result(self, source: str) -> Ref[list[PublishedResult]]:
        """What a cascade has published, for a call that is made here."""
        if source not in self._results:
            asked = self._relay_of[self._at_relays[source]].handle.published.options(name="handoff by relay")
            self._results[source] = asked.remote(self.generation, source)
        return self._results[source]

    def _named(self, source: str) -> Ref[list[PublishedResult]] | RelayedResult:
        """The same for a call of a letter: its relay asks the one that has it."""
        if (node := self._at_relays.get(source)) is None:
            return self._results[source]
        return RelayedResult(relay=self._relay_of[node].address, cascade=source)

    def _send_letters(self, step: int) -> dict[Ref[NodeAnswer], tuple[str, ...]]:
        """Send the calls of a step to the nodes that have a relay, by the first of each group. Returns the answers,
        with the nodes of the group."""
        sent: dict[Ref[NodeAnswer], tuple[str, ...]] = {}
        for group in self._groups:
            letters = [self._letter(node, step) for node in group]
            sent[self._relay_of[group[0]].handle.deliver.options(name="letters").remote(letters)] = tuple(group)
        self._sent.update(iter(self._relay_of))
        self._letters = {}
        return sent

    def _letter(self, node: str, step: int) -> Letter:
        here = self._ranks[node] if not self._sent[node] else []
        return Letter(
            node=node,
            relay=self._relay_of[node].address,
            generation=self.generation,
            number=self._sent[node],
            step=step,
            calls=tuple(self._letters[node]),
            seats={rank: _relay_seat(self.world[rank]) for rank in here},
            forming=tuple(self._formed_by[rank] for rank in here),
        )

    def _remember_early(self, assignment: StepAssignment, step: int) -> None:
        """Encode cascades of later steps that run in this one, or ran in one before it, need no cascade there. Their
        ends count from the end of this step, where the plan of the next one begins."""
        end_s = end_of(assignment.cascades, step)
        self._early = {
            s: [replace(one, end_s=max(0.0, one.end_s - end_s)) for one in done]
            for s, done in self._early.items()
            if s > step
        }
        for c in assignment.cascades:
            if c.step > step:
                self._early.setdefault(c.step, []).extend(early_encodes(c, end_s))
        self._holdings.drop_before(step + 1)
        wanted = set(self._holdings.published.values())
        self._results = {cascade: r for cascade, r in self._results.items() if cascade in wanted}
        self._at_relays = {cascade: node for cascade, node in self._at_relays.items() if cascade in wanted}

    def _check_forming(self) -> None:
        """A worker that could not form the generation leaves the others waiting for it in a collective."""
        if not self.forming:
            return
        done, waiting = wait(self.forming, num_returns=len(self.forming), timeout=0)
        if waiting and any(is_out_of_reach(one) for one in done):
            # The others on either side find out now as well: then the next generation has all that reach each other.
            done, waiting = wait(self.forming, num_returns=len(self.forming), timeout=_OTHERS_S)
        dead: list[str] = []
        failed: dict[str, BaseException] = {}
        ended = set(done)
        for seat, reference in zip(self.world, self.forming, strict=False):
            if reference in ended:
                try:
                    get(reference)
                except ray.exceptions.RayTaskError as error:
                    failed[seat.name] = error.cause
                except GONE:
                    dead.append(seat.name)
        if dead:
            raise GenerationLost(dead, {})
        if refused := refusal_of(failed):
            raise refused
        if failed:
            whys = {name: f"could not form the generation: {last_line(str(error))}" for name, error in failed.items()}
            apart = [error.found for error in failed.values() if isinstance(error, OutOfReach)]
            raise GenerationLost([], whys, apart=apart)
        if not waiting:
            self.forming = []

    def _check_weights(self, reports: Sequence[StepReport]) -> None:
        """The workers have checked it before they applied the step; a commit does not rest on that alone."""
        for report in reports:
            if abs(report.weight + report.bad_weight - 1.0) > _WEIGHT_ERROR:
                why = f"step {report.step} has samples of weight {report.weight + report.bad_weight:g} of 1"
                raise GenerationLost([], {report.worker: why})

    def _raise_failures(self, references: Sequence[Ref[object]], ended: bool) -> None:
        """Raise the failures of the oldest step's finishes that are ready, and of the DiT calls of all steps. After
        `ended`, when all its workers have finished the oldest step, its DiT calls have ended, too."""
        dead: list[str] = []
        failed: dict[str, str] = {}
        exceeded: list[MemoryExceeded] = []
        running, ready = self.running[0], set(references)
        ends: dict[Ref[tuple[StepReport, Snapshot | None]], tuple[StepReport, Snapshot | None]] = {}
        fresh = [one for one, rank in running.finishes.items() if one in ready and rank not in running.answers]
        if not _taken(fresh, ends):
            for reference in fresh:
                worker = self.world[running.finishes[reference]].name
                try:
                    ends[reference] = get(reference)
                except GONE as error:
                    log.debug("%s is gone: %s", worker, error)
                    dead.append(worker)
                except ray.exceptions.RayTaskError as error:
                    failed[worker] = str(error.cause)
                    exceeded += exceeded_of(error)
        running.answers.update({running.finishes[reference]: end for reference, end in ends.items()})
        pixels_lost = self._hear(running, ready, dead, failed, exceeded)
        if not dead:
            failed = {**self._failed_calls(ended and not failed, exceeded), **failed}
        if failed and not dead:  # by a worker that is in no generation, as it could not form this one
            self._check_forming()
        if dead or failed:
            raise GenerationLost(dead, failed, pixels_lost or self._pixels_lost(), exceeded)

    def _hear(
        self,
        running: RunningStep,
        ready: Collection[Ref[object]],
        dead: list[str],
        failed: dict[str, str],
        exceeded: list[MemoryExceeded],
    ) -> bool:
        """Take in the answers of relays that have come. Returns whether one says that pixels are lost. Of a node whose
        relay is gone, workers that live leave their groups like all others, and are called directly then."""
        fresh, pixels_lost = [one for one in running.letters if one in ready and one not in running.heard], False
        answers: dict[Ref[NodeAnswer], NodeAnswer] = {}
        lost: dict[str, str] = {}
        now = time.monotonic()
        if not _taken(fresh, answers):
            for reference in fresh:
                try:
                    answers[reference] = get(reference)
                except ray.exceptions.RayError as error:
                    lost[running.letters[reference][0]] = last_line(str(error)) or type(error).__name__
        for reference, one in answers.items():
            if not one.has_failed:
                self.relays.hear(running.letters[reference], now)
            running.answers.update(one.ends)
            for rank, report in one.turns.items():
                self.asides.hear(self.world[rank].name, report)
            dead += one.dead
            failed.update(one.failed)
            exceeded += one.exceeded
            pixels_lost |= one.pixels_lost
            lost.update(one.lost)
        for node, why in {**self.relays.gone(), **lost}.items() if lost else ():
            self.relays.lose(node, now)
            failed[f"relay of node {node[:8]}"] = why
        running.heard.update(answers)
        return pixels_lost

    def _check_relays(self) -> None:
        """A relay that hangs holds up all that its workers say, also that they cannot go on."""
        if found := self.end_hanging_relays():
            whys = {f"relay of node {n[:8]}": f"has not answered for {s:.0f} s" for n, s in found.items()}
            raise GenerationLost([], whys)

    def _failed_calls(self, ended: bool, exceeded: list[MemoryExceeded]) -> dict[str, str]:
        """Workers whose DiT calls failed, and why; adds to what is known to have `exceeded` the memory. A call whose
        argument is gone never reaches its worker; only its reference knows. An encode call says so to the DiT call that
        waits for its result."""
        failed: dict[str, str] = {}
        for running in self.running:
            patience = ENDED_S if ended and running is self.running[0] else 0.0
            dits = running.open_dits
            done, waiting = wait(list(dits), num_returns=len(dits), timeout=patience) if dits else ([], [])
            if patience and waiting:
                call = dits[waiting[0]]
                failed[call.worker] = f"{call.name} has not answered, although its worker has finished the step"
            well = _taken(done, {})
            for reference in done:
                if not well and (why := failure_of(reference, exceeded)):
                    failed.setdefault(dits[reference].worker, f"{dits[reference].name} did not run: {why}")
                else:
                    del dits[reference]
        return failed

    def _pixels_lost(self) -> bool:
        """An encode call whose argument is gone never reaches its worker; only its reference knows."""
        reading = (call.reference for running in self.running for call in running.calls if call.reads_data)
        references = list(dict.fromkeys(reading))  # an encode that outlasts its step is a call of two steps
        done, _ = wait(references, num_returns=len(references), timeout=0) if references else ([], [])
        return any(has_lost_argument(reference) for reference in done)


def _taken(references: Collection[Ref[T]], into: dict[Ref[T], T]) -> bool:
    """Whether none of these ended calls has failed, by one question to Ray; then their values are in `into`."""
    listed = list(references)
    try:
        into.update(zip(listed, get_all(listed), strict=True) if listed else ())
    except ray.exceptions.RayError:
        return False
    return True


def _relay_seat(seat: Seat) -> RelaySeat:
    return RelaySeat(name=seat.name, handle=seat.handle, publishes_later=seat.publishes_later)


def early_encodes(cascade: Cascade, end_s: float) -> list[EarlyEncode]:
    """What later plans know of an early encode in a step that ends at `end_s`."""
    over_s = max(0.0, cascade.end_s - end_s)
    return [
        EarlyEncode(
            item=part.item,
            module=cascade.module,
            workers=cascade.workers,
            end_s=over_s,
            first=part.first,
            count=part.count,
        )
        for part in cascade.parts
    ]


def room_of(rooms: Sequence[float | None]) -> tuple[float, ...]:
    """Memory for cascades of each worker, or nothing where one of them has no limit. Rounded down to MiB."""
    known = [room for room in rooms if room is not None]
    return tuple(math.floor(room * 1024) / 1024 for room in known) if len(known) == len(rooms) else ()


def changed(before: tuple[float, ...], now: tuple[float, ...]) -> bool:
    """Whether the room of the workers is another, by more than comes and goes with kept results."""
    if len(before) != len(now):
        return True
    return any(abs(a - b) > _ROOM_CHANGE * max(a, 1e-9) for a, b in zip(before, now, strict=True))


def by_rank(calls: Sequence[Call], ranks: int) -> list[list[Call]]:
    """The calls of each rank, in their order."""
    found: list[list[Call]] = [[] for _ in range(ranks)]
    for call in calls:
        found[call.rank].append(call)
    return found


def shape_of(name: str) -> str:
    """Name of a call: that of its cascade without the step, which its bar on Ray's timeline has (`ray_calls.bar`)."""
    return name.rpartition(" s")[0]


def refusal_of(failed: Mapping[str, BaseException]) -> PlanError | ConfigError | None:
    """What ends the run, of errors of workers that could not form a generation: a node without room for what they
    share, or a setting that their devices cannot follow. Both would be so again."""
    for name, error in failed.items():
        if isinstance(error, MemoryError):
            return PlanError(f"{name} could not form the generation: {error}")
    return next((error for error in failed.values() if isinstance(error, ConfigError)), None)
