"""Runs the steps of one generation: plan, dispatch, collect. One object per generation; any failure ends it.

Up to two steps are on the workers at a time: the next one is dispatched while the current one runs, so that no worker
waits for the controller between steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from actors.dispatch import Call, Holdings, calls_of
from actors.gone import GONE
from actors.messages import IO, FinishTask, StepReport
from actors.plan.types import Cluster, Done, Module
from actors.planner import Assignment
from actors.snapshots import Snapshot
from actors.source import PlannerClient, StepData, StepSource

log = logging.getLogger(__name__)

_LOST_ARGUMENT = "input arguments for this task could not be computed"  # Ray's words; its type is that of the cause


class GenerationLost(RuntimeError):
    """The generation cannot go on. `dead` workers are gone, `failed` ones said why they could not do their part.

    `pixels_lost`: batches are gone with the process or node that held them and must be decoded again.
    """

    def __init__(self, dead: Sequence[str], failed: dict[str, str], pixels_lost: bool = False) -> None:
        self.dead, self.failed, self.pixels_lost = tuple(dead), failed, pixels_lost
        super().__init__("; ".join([f"{name} died" for name in dead] + [f"{n}: {why}" for n, why in failed.items()]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A worker's place in a generation: its rank is its index in the world."""

    name: str
    node: str
    handle: Any
    publishes_later: bool = False


@dataclass(kw_only=True, slots=True)
class RunningStep:
    """A dispatched step."""

    step: int
    generation: int
    assignment: Assignment
    data: StepData
    finishes: list[Any]
    results: dict[str, Any]  # cascade id -> reference of its published result
    dispatched_at: float
    dispatch_s: float
    num_calls: int
    plan_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedStep:
    """A step that all workers have finished."""

    running: RunningStep
    reports: tuple[StepReport, ...]
    snapshots: tuple[Snapshot, ...]
    collected_at: float


@dataclass(kw_only=True)
class StepRunner:
    """Dispatches and collects the steps of one generation."""

    generation: int
    world: tuple[Seat, ...]
    cluster: Cluster
    source: StepSource
    planner: PlannerClient
    budget_s: float
    lookahead: int
    exports: Callable[[int], bool]  # steps after which workers copy their state for keepers and checkpoints
    last_step: int
    forming: list[Any]  # references that resolve when the workers have formed the generation
    running: list[RunningStep] = field(default_factory=list)
    _holdings: Holdings = field(default_factory=Holdings)
    _done: list[Done] = field(default_factory=list)
    _results: dict[str, Any] = field(default_factory=dict)
    _bags: set[tuple[int, ...]] = field(default_factory=set)
    _encodes: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=3))  # of the last dispatches

    def dispatch(self, step: int) -> RunningStep:
        """Plan and submit one step. Raises PlanError, DataError, DataLost."""
        started = time.perf_counter()
        window, done = self._question(step)
        assignment = self.planner.plan(step, window, self.cluster, done, self.budget_s)
        plan_s = time.perf_counter() - started
        steps = sorted({c.step for c in assignment.cascades} | {step})
        data = {s: self.source.data(s) for s in steps}
        self._use_cache(data[step])
        submitting = time.perf_counter()
        calls = calls_of(
            assignment.cascades, {s: d.samples for s, d in data.items()}, self.generation, step, self._holdings
        )
        self._connect(calls)
        self._encodes.append([])
        for call in calls:
            self._submit(call, data)
        finish = FinishTask(generation=self.generation, step=step, export=self.exports(step))
        running = RunningStep(
            step=step,
            generation=self.generation,
            assignment=assignment,
            data=data[step],
            results=dict(self._results),
            finishes=[seat.handle.finish_step.options(name="finish").remote(finish) for seat in self.world],
            dispatched_at=time.time(),
            dispatch_s=time.perf_counter() - submitting,
            num_calls=len(calls),
            plan_s=plan_s,
        )
        self.running.append(running)
        self._remember_early(assignment, step)
        if step + 1 < self.last_step:
            self.planner.request(step + 1, *self._question(step + 1)[:1], self.cluster, self._done, self.budget_s)
        return running

    def collect(self, timeout_s: float) -> CollectedStep | None:
        """The oldest running step if it ends within the timeout, else None. Raises GenerationLost."""
        running = self.running[0]
        self._check_forming()
        ready, waiting = ray.wait(running.finishes, num_returns=len(running.finishes), timeout=timeout_s)
        if waiting:
            self._raise_failures(ready)
            return None
        self._raise_failures(ready)
        answers = ray.get(running.finishes)
        self.running.pop(0)
        return CollectedStep(
            running=running,
            reports=tuple(report for report, _ in answers),
            snapshots=tuple(s for _, s in answers if s is not None),
            collected_at=time.time(),
        )

    def _question(self, step: int) -> tuple[list[tuple[Any, ...]], list[Done]]:
        """Items of the step and of those whose encode work may run early, and what of it has already been planned."""
        window = []
        for s in range(step, step + 1 + self.lookahead):
            items = self.source.items(s)
            if items is not None:
                window.append(items.items)
        self.source.request(step + 1 + self.lookahead)
        return window, self._done

    def _connect(self, calls: Sequence[Call]) -> None:
        """Have the members of bags that this generation has not used yet connect behind the running work."""
        fresh = {c.task.bag for c in calls if len(c.task.bag) > 1} - self._bags
        self._bags |= fresh
        for rank, seat in enumerate(self.world):
            if mine := tuple(sorted(bag for bag in fresh if rank in bag)):
                seat.handle.prepare.remote(self.generation, mine)

    def _use_cache(self, data: StepData) -> None:
        """Results that were encoded long ago count as published."""
        for (module, item), reference in data.cached.items():
            source = f"cache/{module}/{item}"
            self._results[source] = reference
            for sample in data.samples.samples[item]:
                self._holdings.published[cast(Module, module), sample.id] = source

    def _submit(self, call: Call, data: dict[int, StepData]) -> None:
        handle, task = self.world[call.rank].handle, call.task
        batches = [data[task.step].batches[item] for item in call.items]
        shown = shape_of(task.name)
        if task.module == "dit":
            handle.dit.options(name=shown).remote(task, *[self._results[c] for c in call.needs])
            return
        method = handle.encode_text if task.module == "text" else handle.encode_vae
        reference = method.options(name=shown).remote(task, *batches)
        self._encodes[-1].append(reference)
        if task.publish and self.world[call.rank].publishes_later:
            later = handle.published.options(name=f"handoff {shown}", concurrency_group=IO)
            self._results[task.cascade] = later.remote(task, [reference])
        elif task.publish:
            self._results[task.cascade] = reference

    def _remember_early(self, assignment: Assignment, step: int) -> None:
        """Encode cascades of later steps that run in this one need no cascade there."""
        early = [c for c in assignment.cascades if c.step > step]
        self._done = [Done(item=part.item, module=c.module, workers=c.workers) for c in early for part in c.parts]
        wanted = {c.id for c in early}
        self._results = {cascade: r for cascade, r in self._results.items() if cascade in wanted}
        self._holdings.drop_before(step + 1)

    def _check_forming(self) -> None:
        """A worker that could not form the generation leaves the others waiting for it in a collective."""
        if not self.forming:
            return
        done, waiting = ray.wait(self.forming, num_returns=len(self.forming), timeout=0)
        failed: dict[str, str] = {}
        for seat, reference in zip(self.world, self.forming, strict=False):
            if reference in done:
                try:
                    ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    failed[seat.name] = f"could not form the generation: {error.cause}"
                except GONE:
                    raise GenerationLost([seat.name], {}) from None
        if failed:
            raise GenerationLost([], failed)
        if not waiting:
            self.forming = []

    def _raise_failures(self, references: Sequence[Any]) -> None:
        dead: list[str] = []
        failed: dict[str, str] = {}
        for seat, reference in zip(self.world, self.running[0].finishes):
            if reference not in references:
                continue
            try:
                ray.get(reference)
            except GONE as error:
                log.debug("%s is gone: %s", seat.name, error)
                dead.append(seat.name)
            except ray.exceptions.RayTaskError as error:
                failed[seat.name] = str(error.cause)
        if dead or failed:
            raise GenerationLost(dead, failed, self._pixels_lost())

    def _pixels_lost(self) -> bool:
        """An encode call whose argument is gone never reaches its worker; only its reference knows."""
        references = [r for dispatched in self._encodes for r in dispatched]
        done, _ = ray.wait(references, num_returns=len(references), timeout=0) if references else ([], [])
        return any(has_lost_argument(reference) for reference in done)


def shape_of(name: str) -> str:
    """Name of a call: that of its cascade without the step, which its bar on Ray's timeline has (`actors.bars`)."""
    return name.rpartition(" s")[0]


def has_lost_argument(call: Any) -> bool:
    """Whether an ended call of a worker never ran because its pixels were lost, or could not be decoded again."""
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return isinstance(error.cause, ray.exceptions.ObjectLostError) or _LOST_ARGUMENT in str(error)
    except GONE as error:
        log.debug("an encode call failed: %s", error)
    except ray.exceptions.RayError:
        return True
    return False
