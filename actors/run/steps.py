"""Runs the steps of one generation: plan, dispatch, collect. One object per generation; any failure ends it.

Up to two steps are on the workers at a time: the next one is dispatched while the current one runs, so that no worker
waits for the controller between steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import ray

from actors.feed.step_source import StepSource
from actors.held_state import Snapshot
from actors.letters import Failures, NodeAnswer
from actors.messages import OutOfReach, StepReport
from actors.plan.types import Cascade, Cluster, EarlyEncode, Item, PlanError
from actors.planning.client import PlannerClient
from actors.planning.room import left_gib
from actors.ray_calls import GONE, get, get_all, wait
from actors.refs import Ref
from actors.run.asides import AsideTurns
from actors.run.communicators import Communicators
from actors.run.dispatch import Call, Holdings, calls_of, end_of, finish_of, shapes_of_bags
from actors.run.failures import error_of, exceeded_of, has_lost_argument, is_out_of_reach, last_line, why_of
from actors.run.relay import ENDED_S
from actors.run.relay_book import Relays
from actors.run.submitter import CACHED, Submitter
from actors.run.waits import StepWaits
from actors.state.checkpoint_files import FirstStateLost
from actors.step import CollectedStep, GenerationLost, RunningStep, Seat, StepAssignment, StepData, SubmittedCall
from ops.typed import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

_WEIGHT_ERROR = 1e-9  # what rounding may do to a sum of weights
_ROOM_CHANGE = 0.02  # share of the memory for cascades
_QUIET_S = 1.0  # for encodes that outlast a step to end, before a relay makes the next calls
_OTHERS_S = 3.0  # for other workers to find out, too, which nodes they do not reach
_NEXT_TRY_S = 60.0  # to take up a relay


@dataclass(kw_only=True)
class StepRunner:
    """Dispatches and collects the steps of one generation."""

    generation: int
    world: tuple[Seat, ...]
    cluster: Cluster
    source: StepSource
    planner: PlannerClient
    budget_s: float  # to find a plan; `first_budget_s`, if given, for the first two of the generation
    lookahead: int
    exports: Callable[[int], bool]  # steps after which workers copy their state for keepers and checkpoints
    next_step: int  # to be dispatched
    last_step: int  # exclusive
    forming: list[Ref[None]]  # resolve when the workers have formed the generation
    first_budget_s: float | None = None
    waits: StepWaits
    asides: AsideTurns
    relays: Relays = field(default_factory=Relays)
    bag_peers: int = 0  # at most, of a worker in all its bags together; 0: no limit
    bags_gib: float = 0.0  # of a GPU, that communicators of bags may come to take
    running: list[RunningStep] = field(default_factory=list)
    _holdings: Holdings = field(default_factory=Holdings, init=False)
    # by step: its encodes that run in an earlier step
    _early: dict[int, list[EarlyEncode]] = field(default_factory=dict, init=False)
    # encodes that the last dispatched step does not wait for
    _outlasting: list[Call] = field(default_factory=list, init=False)
    _outlasting_calls: list[SubmittedCall] = field(default_factory=list, init=False)
    _planned: bool = field(default=False, init=False)
    _relays_at: float = field(default=0.0, init=False)  # monotonic seconds: no relay is taken up before
    _communicators: Communicators = field(init=False)
    _submitter: Submitter = field(init=False)

    def __post_init__(self) -> None:
        self._communicators = Communicators(self.bag_peers)
        self._submitter = Submitter(
            generation=self.generation, world=self.world, relays=self.relays, forming=tuple(self.forming)
        )

    def count_on(self, speed: tuple[float, ...]) -> None:
        """Plan from now on with these speeds of the workers, in order of ranks."""
        self.cluster = replace(self.cluster, speed=speed)

    def count_on_room(self, done: CollectedStep) -> tuple[float, ...]:
        """Plan from now on with the memory that workers had left for cascades in this step, less what communicators of
        bags will take that are not connected yet. Small changes are ignored, as each makes plans that were asked for
        ahead useless. Returns that memory (GiB) in order of ranks."""
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
        """Plan and submit the next step. Raises PlanError, DataError, DataIOError, DataLost."""
        started, step = time.perf_counter(), self.next_step
        budget_s = self.budget_s if self._planned or self.first_budget_s is None else self.first_budget_s
        window, done = self._question(step)
        assignment = self.planner.plan(step, window, self.cluster, done, budget_s)
        running = self._submit(step, assignment, planning_s=time.perf_counter() - started)
        self.running.append(running)
        self._remember_early(assignment, step)
        self._planned = True
        self.next_step += 1
        if not self.at_end:
            window, done = self._question(self.next_step)
            self.planner.request(self.next_step, window, self.cluster, done, budget_s)
        return running

    def _submit(self, step: int, assignment: StepAssignment, planning_s: float) -> RunningStep:
        """Make the calls of a step in the order in which workers run them: bags, cascades, turns of asides, the end of
        the step, and after it the ends of encodes that outlast it."""
        cascades, ranks = assignment.cascades, range(len(self.world))
        data = {s: self.source.data(s) for s in sorted({c.step for c in cascades} | {step})}
        self._use_cache(data[step])
        submitting = time.perf_counter()
        bags = self._communicators.step([tuple(sorted(cascade.workers)) for cascade in cascades])
        items, aside_s = {s: d.items for s, d in data.items()}, self.asides.deal(self.world)
        shapes = shapes_of_bags(cascades, items)
        patience = self.waits.of(step, cascades, shapes, assignment.step.update_s, aside_s)
        calls = calls_of(cascades, items, self.generation, step, self._holdings, bags.left, patience, assignment.rates)
        mine, before = by_rank(calls, len(ranks)), by_rank(self._outlasting, len(ranks))
        export = self.exports(step)
        finishes = [finish_of(r, mine[r], self.generation, step, export, before[r], patience) for r in ranks]
        outlasting = [call for call in calls if call.task.outlasts]

        submitter, end_s = self._submitter, end_of(cascades, step)
        submitter.begin()
        submitter.connect(bags)
        submitted = [submitter.submit(call, data) for call in calls]
        busy = {call.rank for call in outlasting}
        self.asides.give(self.generation, step, self.world, cascades, busy, patience, elsewhere=submitter.relay_turn)
        ending = submitter.submit_finishes(finishes)
        ends = [submitter.submit_end(call, end_s) for call in outlasting]
        letters = submitter.send_letters(step)

        watched = [*self._outlasting_calls, *(one for one in submitted if one is not None)]
        begun = [one for call, one in zip(calls, submitted, strict=True) if call.task.outlasts]
        self._outlasting, self._outlasting_calls = outlasting, [one for one in (*begun, *ends) if one is not None]
        return RunningStep(
            step=step,
            generation=self.generation,
            assignment=assignment,
            data=data[step],
            calls=watched,
            open_dits={call.reference: call for call in watched if call.module == "dit"},
            finishes=ending,
            letters=letters,
            dispatch_s=time.perf_counter() - submitting,
            num_calls=len(calls),
            planning_s=planning_s,
            patience=patience,
            speed=self.cluster.speed,
            open_peers=tuple(self._communicators.peers(rank) for rank in ranks),
        )

    def collect(self, timeout_s: float) -> CollectedStep | None:
        """The oldest running step if it ends within the timeout, else None. Raises as `check_forming`."""
        running = self.running[0]
        self.check_forming()
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
            collected_at=time.monotonic(),
            finished_at=time.time(),
        )

    def end_hanging_relays(self) -> dict[str, float]:
        """Kill relays that have stopped answering. Calls that wait on such a relay then fail, keepers' answers among
        them; other keepers are asked instead. Returns the silent relays of this generation: node -> seconds without an
        answer."""
        now = time.monotonic()
        hanging = self.relays.silent(now)
        for node in hanging:
            self.relays.lose(node, now)
        return {node: s for node, s in hanging.items() if node in self._submitter.relay_of}

    @property
    def awaits_quiet(self) -> bool:
        """True if dispatch must pause until no step is running, because a node's relay has been restarted and can only
        be adopted then. False while another relay is still lost: the next letter to it ends the generation anyway."""
        wanted = bool(self.relays.renewed) and time.monotonic() >= self._relays_at
        return wanted and all(node in self.relays.known for node in self._submitter.relay_of)

    def take_up_relays(self) -> None:
        """Adopt restarted relays: from the next step on, the workers of their nodes are called through them. Only while
        no step runs, since a worker may run the calls of two callers in any order. A relay that cannot be adopted now
        is tried again later."""
        if self.running or not self.awaits_quiet:
            return
        ends = [one.reference for one in self._outlasting_calls]
        if not ends or not wait(ends, num_returns=len(ends), timeout=_QUIET_S)[1]:
            self._submitter.take_up_relays()
        self._relays_at = time.monotonic() + _NEXT_TRY_S

    def _question(self, step: int) -> tuple[list[tuple[Item, ...]], list[EarlyEncode]]:
        """Items of the step and of later steps whose encodes may run early in it; and the early encodes already
        planned."""
        window: list[tuple[Item, ...]] = []
        for s in range(step, step + 1 + self.lookahead):
            items = self.source.items(s)
            if items is not None:
                window.append(items)
        self.source.request(step + 1 + self.lookahead)
        return window, [done for s in sorted(self._early) for done in self._early[s]]

    def _use_cache(self, data: StepData) -> None:
        """Encode results that came out of the cache count as published."""
        for (module, item), reference in data.cached.items():
            source = f"{CACHED}{module}/{item}"
            self._submitter.results[source] = reference
            for sample in data.items.items[item].samples:
                self._holdings.published[module, sample.id] = source

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
        self._submitter.forget_but(set(self._holdings.published.values()))

    def check_forming(self) -> None:
        """Raises GenerationLost, or the error that `refusal_of` picks, if a worker could not form the generation: it
        leaves the others waiting in a collective."""
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
            raise GenerationLost(Failures(dead=dead))
        if refused := refusal_of(failed):
            raise refused
        if failed:
            whys = {name: f"could not form the generation: {last_line(str(error))}" for name, error in failed.items()}
            apart = [error.found for error in failed.values() if isinstance(error, OutOfReach)]
            raise GenerationLost(Failures(failed=whys), apart)
        if not waiting:
            self.forming = []

    def _check_weights(self, reports: Sequence[StepReport]) -> None:
        """Raises GenerationLost unless the weights of the step's samples sum to 1. Workers have checked that before
        they applied the step; a commit does not rest on that alone."""
        for report in reports:
            if abs(report.weight + report.bad_weight - 1.0) > _WEIGHT_ERROR:
                why = f"step {report.step} has samples of weight {report.weight + report.bad_weight:g} of 1"
                raise GenerationLost(Failures(failed={report.worker: why}))

    def _raise_failures(self, references: Sequence[Ref[object]], ended: bool) -> None:
        """Raise the failures of the oldest step's finishes and letters that are ready, and of the DiT calls of all
        steps. After `ended`, when all its workers have finished the oldest step, its DiT calls have ended, too."""
        running, ready = self.running[0], set(references)
        found = self._failed_finishes(running, ready)
        found.add(self._hear(running, ready))
        if not found.dead:
            calls = self._failed_calls(ended and not found.failed)
            calls.add(found)  # what a worker says at the end of the step is kept as its reason
            found = calls
        if found.failed and not found.dead:  # by a worker that is in no generation, as it could not form this one
            self.check_forming()
        if found:
            found.pixels_lost = found.pixels_lost or self._pixels_lost()
            raise GenerationLost(found)

    def _failed_finishes(self, running: RunningStep, ready: Collection[Ref[object]]) -> Failures:
        """Keep the answers of finishes that are ready in the running step. Returns which of them have failed."""
        found = Failures()
        ends: dict[Ref[tuple[StepReport, Snapshot | None]], tuple[StepReport, Snapshot | None]] = {}
        fresh = [one for one, rank in running.finishes.items() if one in ready and rank not in running.answers]
        if not _taken(fresh, ends):
            for reference in fresh:
                worker = self.world[running.finishes[reference]].name
                try:
                    ends[reference] = get(reference)
                except GONE as error:
                    log.debug("%s is gone: %s", worker, error)
                    found.dead.append(worker)
                except ray.exceptions.RayTaskError as error:
                    found.failed[worker] = str(error.cause)
                    found.exceeded += exceeded_of(error)
        running.answers.update({running.finishes[reference]: end for reference, end in ends.items()})
        return found

    def _hear(self, running: RunningStep, ready: Collection[Ref[object]]) -> Failures:
        """Keep the answers of relays that have come in the running step. Returns the failures they tell of, and relays
        that are gone: the workers of such a node live, leave their groups like all others, and are called directly
        from then on."""
        found = Failures()
        fresh = [one for one in running.letters if one in ready and one not in running.heard]
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
            found.add(one.failures)
            lost.update(one.lost)
        for node, why in {**self.relays.gone(), **lost}.items() if lost else ():
            self.relays.lose(node, now)
            found.failed[f"relay of node {node[:8]}"] = why
        running.heard.update(answers)
        return found

    def _check_relays(self) -> None:
        """Raises GenerationLost if a relay hangs: nothing that its workers report gets through, not even that they
        cannot go on."""
        if hanging := self.end_hanging_relays():
            whys = {f"relay of node {n[:8]}": f"has not answered for {s:.0f} s" for n, s in hanging.items()}
            raise GenerationLost(Failures(failed=whys))

    def _failed_calls(self, ended: bool) -> Failures:
        """DiT calls that have failed. A call whose argument is gone never reaches its worker; only its reference knows.
        An encode call says so to the DiT call that waits for its result."""
        found = Failures()
        for running in self.running:
            patience = ENDED_S if ended and running is self.running[0] else 0.0
            dits = running.open_dits
            done, waiting = wait(list(dits), num_returns=len(dits), timeout=patience) if dits else ([], [])
            if patience and waiting:
                call = dits[waiting[0]]
                found.failed[call.worker] = f"{call.name} has not answered, although its worker has finished the step"
            well = _taken(done, {})
            for reference in done:
                error = None if well else error_of(reference)
                if error is not None and (why := why_of(error)):
                    found.failed.setdefault(dits[reference].worker, f"{dits[reference].name} did not run: {why}")
                    found.exceeded += exceeded_of(error)
                else:
                    del dits[reference]
        return found

    def _pixels_lost(self) -> bool:
        """Whether data that a call of the running steps reads is gone, pixels or results out of the cache: such a call
        never reaches its worker; only its reference knows."""
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
    """Whether the memory for cascades of some worker differs by more than comes and goes with kept results."""
    if len(before) != len(now):
        return True
    return any(abs(a - b) > _ROOM_CHANGE * max(a, 1e-9) for a, b in zip(before, now, strict=True))


def by_rank(calls: Sequence[Call], ranks: int) -> list[list[Call]]:
    """The calls of each rank, in their order."""
    found: list[list[Call]] = [[] for _ in range(ranks)]
    for call in calls:
        found[call.rank].append(call)
    return found


def refusal_of(failed: Mapping[str, BaseException]) -> PlanError | ConfigError | FirstStateLost | None:
    """The error that must end the run, out of those of workers that could not form a generation; None if another
    generation may succeed. It ends if a node lacks room for what its workers share, their devices cannot follow a
    setting, or there is no state to begin with."""
    for name, error in failed.items():
        if isinstance(error, MemoryError):
            return PlanError(f"{name} could not form the generation: {error}")
    return next((error for error in failed.values() if isinstance(error, ConfigError | FirstStateLost)), None)
