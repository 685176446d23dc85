"""`heddle data cache`: makes the entries that a run's cache lacks, on Ray workers with its device and precision.

A worker that is free takes the next unit: some clips of one shape, as many as a step encodes together, or some
captions; texts first, so that each of both encoders is loaded once. One that dies gives back what it was at, and
another is started in its place. What is written stays: the same command goes on where one was stopped.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from actors.ray_calls import get, kill, remote_of, wait
from actors.refs import Ref
from app.caching.worker import FilledUnit, FillJob, FillUnit, FillWorker, FillWorkerHandle
from app.kept.wanted import CacheLook, WantedEntry
from app.sampling.chunk_limit import ChunkLimit
from app.sampling.crew import LOOK_S, START_S, line_of
from data.cache import EntryKind
from data.dataset.every_draw import item_of
from data.types import DataItem
from ops.counted import counted
from ops.geometry import PixelShape

log = logging.getLogger(__name__)

MAX_LOSSES = 3  # of workers while they made one unit; then it is the unit that ends them
_TEXTS_AT_ONCE = 32
_PIXELS_AT_ONCE = 1 << 26  # of clips that a worker decodes together: 256 MiB of memory


class FillError(RuntimeError):
    """Workers that fill a cache have died, or do not answer, or cannot write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FillPlan:
    """A unit before it is given out: its clips are named, and not looked up in the index yet."""

    number: int
    entries: tuple[WantedEntry, ...]


def fill(
    job: FillJob,
    found: CacheLook,
    workers: int,
    *,
    threads: int,
    options: Mapping[str, float],
    tell: Callable[[str], None] = print,
    worker_class: type = FillWorker,
) -> Generator[tuple[tuple[WantedEntry, ...], FilledUnit]]:
    """Makes all that is missing, on up to `workers` workers of the Ray that this process has joined; each has Ray's
    `options`, and `threads` that decode and write while one of them encodes. Yields the entries of a unit and what
    became of them, as they come.

    Raises FillError, and what a worker raised: what is made stays. Workers end with the iterator.
    """
    plans = plans_of(found)
    crew = _Crew(job, found, plans, min(workers, len(plans)), threads, options, worker_class, tell)
    try:
        for answer in crew.answers():
            yield plans[answer.number].entries, answer
    finally:
        crew.close()


def plans_of(found: CacheLook) -> list[FillPlan]:
    """All that is missing, texts first."""
    missing = [account.missing for _, account in sorted(found.kinds.items(), key=lambda pair: pair[0] != "text")]
    groups = [group for some in missing for group in _together(some)]
    return [FillPlan(number=number, entries=group) for number, group in enumerate(groups)]


def _together(missing: Sequence[WantedEntry]) -> Iterator[tuple[WantedEntry, ...]]:
    """Entries that are made together: clips of one shape, in the order of the data; captions as they come."""
    together: dict[object, list[WantedEntry]] = defaultdict(list)
    for one in missing:
        shape = _shape(one)
        most = _TEXTS_AT_ONCE
        if shape is not None:
            batch = one.cut.batch if one.cut is not None else 1
            most = max(1, min(batch, _PIXELS_AT_ONCE // (shape[0] * shape[1] * shape[2])))
        group = together[shape, one.cut is not None and one.cut.crop, one.item is not None]
        group.append(one)
        if len(group) >= most or one.item is not None:
            yield tuple(group)
            group.clear()
    for group in together.values():
        if group:
            yield tuple(group)


def _shape(one: WantedEntry) -> PixelShape | None:
    """The shape of the clip that it is made of."""
    if one.cut is not None:
        return one.cut.bucket.shape
    return one.item.bucket.shape if one.item is not None else None


def unit_of(plan: FillPlan, found: CacheLook) -> FillUnit:
    """What a worker gets of it."""
    first = plan.entries[0]
    item: DataItem | None = first.item
    if first.cut is not None:
        cuts = [one.cut for one in plan.entries if one.cut is not None]
        item = item_of(found.dataset, f"cache.{plan.number}", cuts)
    return FillUnit(
        number=plan.number,
        kind=first.kind,
        keys=tuple(one.key for one in plan.entries),
        captions=tuple(one.caption for one in plan.entries) if first.kind == "text" else (),
        job=item.job if item is not None else None,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to a worker that is awaited."""

    handle: FillWorkerHandle
    number: int | None  # of the unit; None: it loads
    since: float


class _Crew:
    """Workers that take a unit whenever they are free. One that dies gives its units back, and another is started in
    its place."""

    def __init__(
        self,
        job: FillJob,
        found: CacheLook,
        plans: Sequence[FillPlan],
        size: int,
        threads: int,
        options: Mapping[str, float],
        worker_class: type,
        tell: Callable[[str], None],
    ) -> None:
        self._job, self._found, self._size, self._tell = job, found, size, tell
        self._threads = threads
        self._actor = remote_of(worker_class).options(**options, max_restarts=0, max_concurrency=threads)
        self._waiting, self._plans = deque(range(len(plans))), plans
        self._losses: dict[int, int] = defaultdict(int)
        self._members: list[FillWorkerHandle] = []
        self._awaited: dict[Ref[FilledUnit | None], _Call] = {}
        self._limits: dict[EntryKind, ChunkLimit] = defaultdict(ChunkLimit)
        self._hired_at = 0.0
        self._loaded = 0

    def answers(self) -> Iterator[FilledUnit]:
        """What became of every unit, as it is known. Raises what a worker raised, and FillError."""
        for _ in range(self._size):
            self._hire()
        unanswered = len(self._plans)
        while unanswered:
            ready, _ = wait(list(self._awaited), timeout=LOOK_S)
            self._check_patience()  # also while others answer
            for reference in ready:
                answer = self._hear(reference)
                if answer is not None:
                    unanswered -= 1
                    yield answer

    def close(self) -> None:
        for handle in self._members:
            kill(handle)
        self._members.clear()

    def _hire(self) -> None:
        handle: FillWorkerHandle = self._actor.remote()
        self._members.append(handle)
        self._awaited[handle.load.remote(self._job)] = _Call(handle, None, time.monotonic())
        self._hired_at = time.monotonic()

    def _hear(self, reference: Ref[FilledUnit | None]) -> FilledUnit | None:
        import ray

        if (call := self._awaited.pop(reference, None)) is None:  # of a worker that has been replaced meanwhile
            return None
        try:
            answer = get(reference)
        except ray.exceptions.RayActorError as error:
            self._replace(call, error)
            return None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        if call.number is None:
            self._loaded += 1
            if self._loaded == self._size:
                self._tell(f"note: {counted(self._size, 'worker')} loaded")
        else:
            entries = self._plans[call.number].entries
            self._limits[entries[0].kind].took(len(entries), time.monotonic() - call.since)
        self._employ(call.handle)
        return answer

    def _employ(self, handle: FillWorkerHandle) -> None:
        """Give a worker units until it has one for each of its threads; only of one kind at a time, as each takes
        another encoder, and one alone that a worker has died of."""
        while self._waiting:
            mine = [call.number for call in self._awaited.values() if call.handle is handle and call.number is not None]
            kinds = {self._plans[number].entries[0].kind for number in mine}
            following = self._waiting[0]
            alone = bool(self._losses[following]) or any(self._losses[number] for number in mine)
            if len(mine) >= self._threads or (mine and alone):
                return
            if kinds and kinds != {self._plans[following].entries[0].kind}:
                return
            self._waiting.popleft()
            answer = handle.fill.remote(unit_of(self._plans[following], self._found))
            self._awaited[answer] = _Call(handle, following, time.monotonic())

    def _check_patience(self) -> None:
        """Replace a worker that hangs. Raises FillError where none has started."""
        now = time.monotonic()
        for answer, call in list(self._awaited.items()):
            if call.number is None:
                continue
            entries, seconds = self._plans[call.number].entries, now - call.since
            if seconds > self._limits[entries[0].kind].seconds(len(entries) * self._threads):
                kill(call.handle)
                self._awaited.pop(answer)
                self._replace(call, TimeoutError(f"it has not answered for {seconds:.0f} s."))
                return
        if all(call.number is None for call in self._awaited.values()) and now - self._hired_at > START_S:
            raise FillError(f"no worker has started within {START_S:.0f} s.")

    def _replace(self, call: _Call, error: Exception) -> None:
        """All that it was at waits again, and a new worker starts. Raises FillError where that would not help."""
        if call.number is None:
            raise FillError(f"a worker died while it started: {line_of(error)}")
        lost = [call.number]
        for answer, other in list(self._awaited.items()):
            if other.handle is call.handle and other.number is not None:
                lost.append(other.number)
                self._awaited.pop(answer)
        for one in lost:
            self._losses[one] += 1
        if hopeless := [one for one in lost if self._losses[one] >= MAX_LOSSES]:
            name = self._found.name_of(self._plans[hopeless[0]].entries[0])
            raise FillError(
                f"{MAX_LOSSES} workers died or hung while they encoded {name}: {line_of(error)} What is written stays."
            )
        log.warning("a worker died while it encoded; another one takes its place: %s", line_of(error))
        self._waiting.extendleft(sorted(lost, reverse=True))
        self._members.remove(call.handle)
        self._hire()
