"""A virtual worker: it answers the controller's calls as `actors.worker.worker` does, and waits where that computes.

Kept is what the controller can see of a worker: calls of one caller run one after the other in their order;
the members of a bag meet before they begin; a step ends when all workers have come; a worker that has not run what the
end of its step names, or has run it twice, refuses to end it; calls of a generation that is over are refused. A cascade
lasts as long as the true profile says, times noise, and now and then half as long again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
from ray.exceptions import ActorDiedError

from actors.held_state import Snapshot
from actors.messages import (
    CascadeTask,
    FinishTask,
    FormTask,
    Handover,
    PublishedResult,
    Span,
    StaleGeneration,
    StepReport,
)
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import Topology
from actors.plan.types import Cluster
from actors.progress import Progress
from actors.refs import Ref
from app.bench.cluster.physics import Physics
from ops.config import OptimizerConfig
from ops.shards import shard_bounds, state_names

ELEMENTS = 1 << 24  # of the state that virtual workers share; none of them has any
_NAMES = state_names(OptimizerConfig())  # of its arrays


T = TypeVar("T")
MeetingKey = tuple[int, *tuple[int | str, ...]]  # of a meeting; the first part is its generation


class Home(Protocol):
    """A host as its workers know it (`app.bench.cluster.host`)."""

    physics: Physics
    profile: Profile

    def seat(self, generation: int, rank: int) -> None: ...
    async def meet_first(self, key: MeetingKey, total: int) -> None: ...
    async def meet(self, key: MeetingKey, bag: Sequence[int] | None, total: int, brought: float = 0.0) -> float: ...


class VirtualWorker:
    """One of a `Host`; `take` is called for every call of the controller."""

    def __init__(self, name: str, node: str, host: Home) -> None:
        self.name, self.node, self.host = name, node, host
        self.dead = False
        self.beats: asyncio.Task[None] | None = None
        self.progress = Progress.of_start(name)
        self._turns: Counter[str] = Counter()  # by caller: the number of its next call
        self._waiting: dict[tuple[str, int], asyncio.Event] = {}
        self._busy = asyncio.Lock()
        self._running: asyncio.Task[object] | None = None
        self._seat: FormTask | None = None
        self._topology: Topology | None = None
        self._broken = ""  # why no call of this generation is answered any more
        self._ran: Counter[str] = Counter()  # cascades since the end of the last step
        self._weight = 0.0  # of the samples of the cascades that it has led since then
        self._spans: list[Span] = []
        self._outlasting: dict[str, asyncio.Task[Span]] = {}

    # -- calls in their order ------------------------------------------------------------------------------------------

    async def take(self, caller: str, number: int, method: str, arguments: Sequence[object]) -> object:
        """Call `method` when all calls of this caller with smaller numbers have ended, and none of another runs."""
        if number != self._turns[caller] and not self.dead:
            await self._waiting.setdefault((caller, number), asyncio.Event()).wait()
        async with self._busy:
            if self.dead:
                raise ActorDiedError()
            self._running = asyncio.ensure_future(getattr(self, method)(*arguments))
            try:
                return await self._running
            except asyncio.CancelledError:
                raise ActorDiedError() from None
            finally:
                self._turns[caller] += 1
                if (following := self._waiting.pop((caller, self._turns[caller]), None)) is not None:
                    following.set()

    def die(self) -> None:
        """The process is gone: whatever was asked of it fails."""
        self.dead = True
        for task in [self._running, self.beats, *self._outlasting.values()]:
            if task is not None:
                task.cancel()
        for one in self._waiting.values():
            one.set()

    # -- a generation --------------------------------------------------------------------------------------------------

    async def form(self, task: FormTask) -> None:
        """Enter a generation; fetch the part of the state."""
        self._seat, self._broken = task, ""
        counts = Counter(task.nodes)
        cluster = Cluster(nodes=tuple(counts[node] for node in sorted(counts)))
        self._topology = Topology(cluster, self.host.profile.cross_node)
        self._drop_half_done()
        self.host.seat(task.generation, task.rank)
        self._now(f"form g{task.generation}", "form", -1, 0.0, generation=task.generation)
        await asyncio.sleep(self._real_s(self.host.physics.restore_s if task.origin is not None else 0.0))
        await self.host.meet_first((task.generation, "form"), task.world)
        self.idle()

    async def hand_over(self, step: int | None) -> Handover:
        """Leave the generation; hand over the state after a step."""
        self._broken = "the generation has ended"
        self._drop_half_done()
        self.idle()
        return Handover(worker=self.name, snapshot=None if step is None or self._seat is None else self._snapshot(step))

    async def prepare(self, generation: int, bags: object, closed: object = ()) -> None:
        """Bags take no time to connect."""

    # -- cascades ------------------------------------------------------------------------------------------------------

    async def encode_text(self, task: CascadeTask, *batches: object) -> list[PublishedResult]:
        return await self._encode(task)

    async def encode_vae(self, task: CascadeTask, *batches: object) -> list[PublishedResult]:
        return await self._encode(task)

    async def outlasted(self, task: CascadeTask) -> list[PublishedResult]:
        """The end of an encode that has outlasted its step."""
        self._check(task.generation)
        span = await self._outlasting.pop(task.cascade)
        span = replace(span, planned_start_s=task.planned_start_s, planned_end_s=task.planned_end_s)
        self._done(task, span)
        return published(task)

    async def dit(self, task: CascadeTask, *results: Ref[list[PublishedResult]]) -> None:
        """Forward and backward; `results` are references to what others have encoded."""
        self._check(task.generation)
        for reference in results:
            await resolve(reference)
        if results:
            await asyncio.sleep(self._real_s(self.host.physics.link_s))
        span = await self._run(task)
        self._done(task, span)
        if task.bag[0] == self._rank:
            self._weight += sum(sample.weight for sample in task.samples)

    async def finish_step(self, task: FinishTask) -> tuple[StepReport, Snapshot | None]:
        """The end of a step: all workers meet, and the update takes its time."""
        self._check(task.generation)
        if self._ran != Counter(task.cascades) or abs(self._weight - task.weight) > 1e-9:
            raise self._fail(f"step {task.step} ends with {sorted(self._ran)}, not with {sorted(task.cascades)}")
        started = time.time()
        self._now(f"finish s{task.step}", "reduce", task.step, 0.0)
        assert self._seat is not None
        weight = await self._met(("finish", task.step), None, self._weight)
        met = time.time()
        await asyncio.sleep(self._real_s(self.host.physics.update_s))
        finish = Span(
            name=f"finish s{task.step}",
            module="finish",
            cascade="",
            step=task.step,
            start=started,
            end=time.time(),
            wait_s=met - started,
        )
        report = StepReport(
            worker=self.name,
            step=task.step,
            loss=0.0,
            weight=weight,
            grad_norm=0.0,
            lr=0.0,
            applied=True,
            spans=(*self._spans, finish),
            peak_memory_gib=0.0,
            rss_gib=0.0,
        )
        self._ran.clear()
        self._spans, self._weight = [], 0.0
        self.idle()
        return report, self._snapshot(task.step) if task.export else None

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        assert self._seat is not None
        return self._seat.rank

    async def _encode(self, task: CascadeTask) -> list[PublishedResult]:
        self._check(task.generation)
        if task.outlasts:
            self._outlasting[task.cascade] = asyncio.ensure_future(self._run(task))
            return []
        self._done(task, await self._run(task))
        return published(task)

    async def _run(self, task: CascadeTask) -> Span:
        """Meet the others of the bag, then wait as long as the cascade takes."""
        came = time.time()
        self._now(task.name, task.module, task.step, task.planned_end_s - task.planned_start_s)
        if len(task.bag) > 1:
            await self._met((task.step, task.cascade), task.bag)
        met = time.time()
        work_s = self.seconds(task)
        await asyncio.sleep(work_s)
        ended = time.time()
        return Span(
            name=task.name,
            module=task.module,
            cascade=task.cascade,
            step=task.step,
            start=came,
            end=ended,
            batch=len(task.samples),
            degree=len(task.bag),
            pieces=task.pieces,
            planned_start_s=task.planned_start_s,
            planned_end_s=task.planned_end_s,
            bag=task.bag,
            work_s=ended - met,
            wait_s=met - came,
        )

    def seconds(self, task: CascadeTask) -> float:
        """Real seconds of a cascade, equal on all of its bag: the truth and the noise."""
        assert self._topology is not None
        samples: Counter[tuple[int, int, int]] = Counter()
        for piece in task.pieces:
            samples[piece.bucket] += piece.batch
        key = f"{task.generation}/{task.step}/{task.cascade}"
        return self.host.physics.cascade_s(self.host.profile, self._topology, task.module, samples, task.bag, key)

    def _done(self, task: CascadeTask, span: Span) -> None:
        self._ran[task.cascade] += 1
        self._spans.append(span)
        self.idle()

    async def _met(self, place: tuple[int | str, ...], bag: Sequence[int] | None, brought: float = 0.0) -> float:
        """Returns when all of the bag are there, or all workers, with what they brought together."""
        assert self._seat is not None
        total = self._seat.world if bag is None else len(bag)
        try:
            return await self.host.meet((self._seat.generation, *place), bag, total, brought)
        except RuntimeError as error:
            raise self._fail(str(error)) from None

    def _check(self, generation: int) -> None:
        if self._broken or self._seat is None or generation != self._seat.generation:
            raise StaleGeneration(self._broken or f"generation {generation} is not that of {self.name}")

    def _fail(self, why: str) -> RuntimeError:
        self._broken = self._broken or why
        return RuntimeError(why)

    def _drop_half_done(self) -> None:
        for task in self._outlasting.values():
            task.cancel()
        self._outlasting.clear()
        self._ran.clear()
        self._spans, self._weight = [], 0.0

    def _snapshot(self, step: int) -> Snapshot:
        """Where its shard of this step would lie."""
        assert self._seat is not None
        lo, hi = _bounds(self._seat.world)[self._seat.rank]
        return Snapshot(
            step=step,
            generation=self._seat.generation,
            rank=self._seat.rank,
            lo=lo,
            hi=hi,
            total=ELEMENTS,
            bank=0,
            names=_NAMES,
            updates=step + 1,
        )

    def _real_s(self, virtual_s: float) -> float:
        return self.host.physics.real_s(virtual_s)

    def idle(self) -> None:
        """The worker waits for a call."""
        self._now("idle", "idle", self.progress.step, 0.0)

    def _now(self, activity: str, phase: str, step: int, predicted_s: float, generation: int | None = None) -> None:
        self.progress = replace(
            self.progress,
            activity=activity,
            phase=phase,
            step=step,
            since=time.time(),
            predicted_s=predicted_s,
            generation=self.progress.generation if generation is None else generation,
        )


@lru_cache(maxsize=4)
def _bounds(world: int) -> list[tuple[int, int]]:
    return shard_bounds(ELEMENTS, world)


def published(task: CascadeTask) -> list[PublishedResult]:
    """What an encode leaves for other workers: a row of one number for every sample."""
    rows = np.zeros((1, 1), np.float32)
    return [PublishedResult(module=task.module, id=task.samples[i].id, rows=rows, ok=True) for i in task.publish]


async def resolve(reference: Ref[T]) -> T:
    """The value of a reference, of Ray or of a thread."""
    held: object = reference
    if isinstance(held, Future):
        held = asyncio.wrap_future(held)
    assert isinstance(held, Awaitable), f"{held!r} is no reference"
    value: T = await held
    return value
