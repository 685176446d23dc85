"""`heddle data cache`: makes the entries that a run's cache lacks, on Ray workers with its device and precision.

A worker that is free takes the next unit: some clips of one shape, as many as a step encodes together, or some
captions; texts first, so that each of both encoders is loaded once. One that dies gives back what it was at, and
another is started in its place (`_Crew`). What is written stays: the same command goes on where one was stopped.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from actors.messages import FailedStart, HostGpu
from actors.pool.lookout import FAILED_STARTS
from actors.pool.membership_types import Limits
from actors.pool.own_gpu import own_gpu
from actors.pool.quarantine import Quarantine
from actors.pool.room import Need, where
from actors.pool.workers import cause_of, where_of
from actors.ray_calls import GONE, free_outside, get, kill, remote_of, wait
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
    need: Need,
    tell: Callable[[str], None],
    worker_class: type = FillWorker,
) -> Generator[tuple[tuple[WantedEntry, ...], FilledUnit]]:
    """Makes all that is missing, on up to `workers` workers of the Ray that this process has joined; each has what
    it is in `need` of, and `threads` that decode and write while one of them encodes. Yields the entries of a unit and
    what became of them, as they come.

    Raises FillError, and what a worker raised: what is made stays. Workers end with the iterator.
    """
    plans = plans_of(found)
    crew = _Crew(job, found, plans, min(workers, len(plans)), threads, need, worker_class, tell)
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


@dataclass(eq=False, slots=True)
class _Member:
    """A worker, from its request to its end."""

    name: str
    handle: FillWorkerHandle
    where: HostGpu | None = None  # None: it has not started yet


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to a worker that is awaited."""

    member: _Member
    number: int | None  # of the unit; None: it loads
    since: float


_Answer = HostGpu | FilledUnit | FailedStart


class _Crew:
    """Workers that take a unit whenever they are free. One that dies gives its units back, and another is started in
    its place. One that does not start, or cannot load an encoder, is named, and asked for again as a run does
    (`actors.pool.quarantine`): the others go on, and the work ends only where none is left and as many in a row have
    failed as end a run."""

    def __init__(
        self,
        job: FillJob,
        found: CacheLook,
        plans: Sequence[FillPlan],
        size: int,
        threads: int,
        need: Need,
        worker_class: type,
        tell: Callable[[str], None],
    ) -> None:
        limits = Limits.of(job.workers)
        self._job, self._found, self._size, self._tell = job, found, size, tell
        self._threads, self._need, self._actor = threads, need, remote_of(worker_class)
        self._options = {"num_cpus": need.cpus, **own_gpu(need.gpus), "max_restarts": 0, "max_concurrency": threads}
        self._waiting, self._plans = deque(range(len(plans))), plans
        self._losses: dict[int, int] = defaultdict(int)
        self._members: list[_Member] = []
        self._awaited: dict[Ref[_Answer], _Call] = {}
        self._limits: dict[EntryKind, ChunkLimit] = defaultdict(ChunkLimit)
        self._quarantine = Quarantine(limits.rest_s, limits.rest_longest_s)
        self._failed_starts = 0  # in a row
        self._hired, self._hired_at = 0, 0.0
        self._told = False  # that all have loaded

    def answers(self) -> Iterator[FilledUnit]:
        """What became of every unit, as it is known. Raises what a worker raised in its work, and FillError."""
        unanswered = len(self._plans)
        while unanswered:
            self._hire_missing(unanswered)
            ready, _ = wait(list(self._awaited), timeout=LOOK_S)
            self._check_patience()  # also while others answer
            for reference in ready:
                answer = self._hear(reference)
                if answer is not None:
                    unanswered -= 1
                    yield answer

    def close(self) -> None:
        for member in self._members:
            kill(member.handle)
        self._members.clear()

    def _hire_missing(self, unanswered: int) -> None:
        """Ask for the workers that are not there, elsewhere than on nodes at rest: without room there the others go on
        alone, and where none is left, no node rests."""
        resting = self._quarantine.resting(time.monotonic())
        shunned = tuple(sorted(resting - {""}))
        while len(self._members) < min(self._size, unanswered):
            if resting and self._members and ("" in resting or not self._need.capacity(free_outside(shunned))):
                return
            self._hire(shunned if self._members else ())

    def _hire(self, shunned: Sequence[str]) -> None:
        placed = where(None, shunned) if shunned else {}
        name = f"w{self._hired}"
        member = _Member(name, self._actor.options(**self._options, **placed).remote(name))
        self._members.append(member)
        self._awaited[member.handle.load.remote(self._job)] = _Call(member, None, time.monotonic())
        self._hired, self._hired_at = self._hired + 1, time.monotonic()

    def _hear(self, reference: Ref[_Answer]) -> FilledUnit | None:
        import ray

        if (call := self._awaited.pop(reference, None)) is None:  # of a worker that is gone meanwhile
            return None
        member = call.member
        try:
            answer = get(reference)
        except GONE as error:
            if call.number is None:
                place = where_of(error)
                self._no_start(call, FailedStart(worker=member.name, why=cause_of(error), where=place))
            else:
                self._replace(call, error)
            return None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        if isinstance(answer, FailedStart):
            self._no_start(call, answer)
            return None
        if isinstance(answer, HostGpu):
            member.where = answer
            self._tell_loaded()
            self._employ(member)
            return None
        assert call.number is not None and member.where is not None, "a unit is given to one that has started"
        self._failed_starts = 0
        self._quarantine.worked(member.where)
        entries = self._plans[call.number].entries
        self._limits[entries[0].kind].took(len(entries), time.monotonic() - call.since)
        self._employ(member)
        return answer

    def _tell_loaded(self) -> None:
        if not self._told and len(self._members) == self._size and all(one.where for one in self._members):
            self._told = True
            self._tell(f"note: {counted(self._size, 'worker')} loaded")

    def _employ(self, member: _Member) -> None:
        """Give a worker units until it has one for each of its threads; only of one kind at a time, as each takes
        another encoder, and one alone that a worker has died of."""
        while self._waiting:
            mine = list(self._units_of(member).values())
            kinds = {self._plans[number].entries[0].kind for number in mine}
            following = self._waiting[0]
            alone = bool(self._losses[following]) or any(self._losses[number] for number in mine)
            if len(mine) >= self._threads or (mine and alone):
                return
            if kinds and kinds != {self._plans[following].entries[0].kind}:
                return
            self._waiting.popleft()
            answer = member.handle.fill.remote(unit_of(self._plans[following], self._found))
            self._awaited[answer] = _Call(member, following, time.monotonic())

    def _units_of(self, member: _Member) -> dict[Ref[_Answer], int]:
        """Those that it is at, by their answers."""
        calls = self._awaited.items()
        return {answer: call.number for answer, call in calls if call.member is member and call.number is not None}

    def _check_patience(self) -> None:
        """Replace a worker that hangs. Raises FillError where none has started."""
        now = time.monotonic()
        for answer, call in list(self._awaited.items()):
            if call.number is None:
                continue
            entries, seconds = self._plans[call.number].entries, now - call.since
            if seconds > self._limits[entries[0].kind].seconds(len(entries) * self._threads):
                kill(call.member.handle)
                self._awaited.pop(answer)
                self._replace(call, TimeoutError(f"it has not answered for {seconds:.0f} s."))
                return
        if all(call.number is None for call in self._awaited.values()) and now - self._hired_at > START_S:
            raise FillError(f"no worker has started within {START_S:.0f} s.")

    def _no_start(self, call: _Call, failed: FailedStart) -> None:
        """The worker of a call does not start, or load an encoder: what it was at waits again. Raises FillError where
        none is left, and another would not start either."""
        self._give_back(call)
        kill(call.member.handle)
        now = time.monotonic()
        rest_s = self._quarantine.ended(failed.where, now)
        self._failed_starts += 1
        place = str(failed.where)
        why = failed.why if not place or place in failed.why else f"{place}: {failed.why}"
        if not self._members and self._failed_starts >= FAILED_STARTS:
            raise FillError(
                f"{counted(self._failed_starts, 'worker')} in a row failed to start, and none is left: {why} "
                f"What is written stays."
            )
        rest = f"; its node rests for {rest_s:.0f} s" if rest_s and self._members else ""
        left = f"The work goes on with {counted(len(self._members), 'worker')}" if self._members else "Another is tried"
        self._tell(f"note: worker {failed.worker} did not start: {why}{rest}. {left}.")
        for member in [one for one in self._members if one.where]:
            self._employ(member)

    def _replace(self, call: _Call, error: Exception) -> None:
        """All that its worker was at waits again, and a new one starts. Raises FillError where that would not help."""
        for one in (lost := self._give_back(call)):
            self._losses[one] += 1
        if hopeless := [one for one in lost if self._losses[one] >= MAX_LOSSES]:
            name = self._found.name_of(self._plans[hopeless[0]].entries[0])
            raise FillError(
                f"{MAX_LOSSES} workers died or hung while they encoded {name}: {line_of(error)} What is written stays."
            )
        log.warning("a worker died while it encoded; another one takes its place: %s", line_of(error))
        for member in [one for one in self._members if one.where]:
            self._employ(member)

    def _give_back(self, call: _Call) -> list[int]:
        """The worker of a call is gone. Returns the units that it was at, which wait again."""
        lost = self._units_of(call.member)
        for answer in lost:
            self._awaited.pop(answer)
        given = sorted({*lost.values(), *([] if call.number is None else [call.number])})
        self._waiting.extendleft(reversed(given))
        self._members.remove(call.member)
        return given
