"""Which workers make the run's asides, and when: work of low priority, such as clips, on the workers that train.
Decides, and asks workers.

The rule: an aside that waits goes to the first worker, in order of ranks, that has none, and stays with it, while its
node has host memory for one more. A worker that has one gives it a turn in every step, after its own cascades and
before the end of the step, which waits for the slowest worker anyway; none in a step that an encode outlasts there. How
long a turn is says `actors.worker.aside`. An aside whose worker has died or left begins again on another one. When all
steps are done the rest is made at once. What goes wrong with an aside is reported and never ends the run.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import ray

from actors.aside_turns import AsideWork, TurnReport, TurnTask
from actors.outcome import Tell
from actors.plan.types import Cascade, Module
from actors.ray_calls import GONE, get, wait
from actors.records.events import AsidesAwaited, AsidesLeft, RunEvent
from actors.refs import Ref
from actors.run.dispatch import end_of
from actors.run.failures import failed_turn
from actors.step import Seat
from ops.waiting import Patience

log = logging.getLogger(__name__)

MAX_LOSSES = 3  # of workers while they had one aside
FINISH_S = 600.0  # for the last asides; whoever ends the run meanwhile loses nothing else
_LOOK_S = 1.0
_QUIET_S = 5.0  # after the last step, before an event says what the run waits for


class AsideSource(Protocol):
    """The source of a run's asides (`app.run.asides`)."""

    @property
    def share(self) -> float:
        """The share of the run's time that they may take."""
        ...

    @property
    def expected(self) -> bool:
        """Whether there will be any, for which memory is to be counted."""
        ...

    @property
    def encoders(self) -> Collection[Module]:
        """Modules whose encoders workers need for them. It matters only in a run that spares encoders."""
        ...

    def wanted(self) -> Sequence[AsideWork]:
        """The asides that are wanted since the last call."""
        ...

    def ended(self, report: TurnReport) -> RunEvent | None:
        """An aside is made, or has failed. Returns the event to report, if any."""
        ...

    def dropped(self) -> Container[str]:
        """Names of asides that are not wanted any more."""
        ...


class NoAsides:
    """A source that wants none."""

    share = 0.0
    expected = False
    encoders: Collection[Module] = ()

    def wanted(self) -> list[AsideWork]:
        return []

    def ended(self, report: TurnReport) -> RunEvent | None:
        return None

    def dropped(self) -> Container[str]:
        return ()


@dataclass(kw_only=True)
class AsideQueue:
    """Which asides wait, and which worker has which. Pure.

    queue.add(works); queue.deal({"w0": "node a", "w1": "node a"}); queue.held["w0"]; queue.end("a")
    """

    waiting: deque[AsideWork] = field(default_factory=deque)
    held: dict[str, AsideWork] = field(default_factory=dict)  # by worker
    hopeless: list[AsideWork] = field(default_factory=list)  # have lost too many workers to be tried again
    _losses: Counter[str] = field(default_factory=Counter, init=False)  # by name

    @property
    def left(self) -> tuple[str, ...]:
        """Names of those that are not made."""
        return tuple(work.name for work in (*self.held.values(), *self.waiting))

    def add(self, works: Sequence[AsideWork]) -> None:
        self.waiting.extend(works)

    def deal(self, node_of: Mapping[str, str], most: int | None = None) -> None:
        """These are the workers now, in order of ranks, with their nodes: others give back what they had, a free one
        takes the next, at most `most` at a time on a node."""
        for gone in [name for name in self.held if name not in node_of]:
            self.give_back(gone)
        busy = Counter(node_of[name] for name in self.held)
        for name, node in node_of.items():
            if name not in self.held and self.waiting and (most is None or busy[node] < most):
                self.held[name] = self.waiting.popleft()
                busy[node] += 1

    def give_back(self, worker: str) -> None:
        """Call when a worker is gone: its aside is queued again, first in line. An aside that has lost MAX_LOSSES
        workers is given up instead, since it may be what ended them."""
        if (work := self.held.pop(worker, None)) is None:
            return
        self._losses[work.name] += 1
        if self._losses[work.name] < MAX_LOSSES:
            self.waiting.appendleft(work)
        else:
            self.hopeless.append(work)

    def end(self, aside: str) -> bool:
        """The aside is made, or has failed, on whichever worker. False when it had ended before."""
        for name, work in self.held.items():
            if work.name == aside:
                del self.held[name]
                return True
        for work in self.waiting:
            if work.name == aside:
                self.waiting.remove(work)
                return True
        return False

    def drop(self, names: Container[str]) -> None:
        """These are not wanted any more."""
        self.waiting = deque(work for work in self.waiting if work.name not in names)
        self.held = {worker: work for worker, work in self.held.items() if work.name not in names}


def gaps_of(cascades: Sequence[Cascade], step: int, ranks: int) -> list[float]:
    """Seconds that the plan leaves idle on each rank after its last cascade of the step, until the step's last one."""
    end_s = end_of(cascades, step)
    own = [max((c.end_s for c in cascades if rank in c.workers), default=0.0) for rank in range(ranks)]
    return [max(0.0, end_s - last) for last in own]


def _nodes(world: Sequence[Seat]) -> dict[str, str]:
    return {seat.name: seat.node for seat in world}


class AsideTurns:
    """The asides of one run: asks workers, hears what they say, tells the source that wanted them."""

    def __init__(self, source: AsideSource, tell: Tell, finish_s: float = FINISH_S, quiet_s: float = _QUIET_S) -> None:
        """The last ones may take `finish_s` after the last step; when they have taken `quiet_s` an event says so."""
        self._source, self._tell, self._finish_s, self._quiet_s = source, tell, finish_s, quiet_s
        self._queue = AsideQueue()
        self._asked: dict[Ref[TurnReport], str] = {}  # -> worker
        self._practised: set[str] = set()  # workers that have made an aside: nothing of the next is compiled there
        self._longest_s = 0.0  # of a turn of such a worker
        self._most: int | None = None

    def limit(self, most: int | None) -> None:
        """A node has host memory for `most` at a time; None: for any number."""
        self._most = most

    def deal(self, world: Sequence[Seat]) -> float | None:
        """Before a step is dispatched to these workers: which of them have an aside. Returns the seconds of the longest
        turn that they have had; 0 where none has an aside, None where one that has has never made any."""
        self._queue.add(self._source.wanted())
        self._hear(0.0)
        self._queue.deal(_nodes(world), self._most)
        holders = self._queue.held.keys()
        return None if holders - self._practised else self._longest_s if holders else 0.0

    def give(
        self,
        generation: int,
        step: int,
        world: Sequence[Seat],
        cascades: Sequence[Cascade],
        outlasted: Container[int],
        patience: Patience,
        elsewhere: Callable[[int, TurnTask], bool] = lambda rank, task: False,
    ) -> None:
        """Ask the workers for turns in this step, whose cascades are dispatched and whose end is not. `outlasted` are
        ranks with an encode that outlasts it. `deal` comes before. `elsewhere` says whether it asks a rank itself; what
        that answers comes by `hear`."""
        if not self._queue.held:
            return
        gaps = gaps_of(cascades, step, len(world))
        for rank, seat in enumerate(world):
            if rank not in outlasted:
                by = partial(elsewhere, rank)
                self._ask(seat, generation, step, gap_s=gaps[rank], patience=patience, elsewhere=by)

    def finish(self, generation: int, world: Sequence[Seat], unwanted: Callable[[], bool] = lambda: False) -> bool:
        """All steps are done: make the asides that are left, on all workers at once, until `unwanted` returns True.
        Events say that the run waits for them, and how many were not made in the end. Returns whether there were any to
        make. Never raises."""
        try:
            return self._finish(generation, world, unwanted)
        except Exception:
            log.exception("the last asides were not made")
            return True

    def _finish(self, generation: int, world: Sequence[Seat], unwanted: Callable[[], bool]) -> bool:
        began, alive, told = time.monotonic(), list(world), False
        worked = bool(self._asked)
        while True:
            gone = self._hear(_LOOK_S)
            took_s = time.monotonic() - began
            alive = [seat for seat in alive if seat.name not in gone]
            self._queue.add(self._source.wanted())
            self._queue.deal(_nodes(alive), self._most)
            if not (left := self._queue.left):
                return worked
            worked = True
            if why := self._why_no_more(alive, took_s > self._finish_s, unwanted):
                self._tell(AsidesLeft(asides=left, why=why))
                return worked
            if not told and took_s >= self._quiet_s:
                told = True
                self._tell(AsidesAwaited(asides=left, limit_s=self._finish_s))
            asked = set(self._asked.values())
            for seat in alive:
                if seat.name not in asked:
                    self._ask(seat, generation, -1, whole=True)

    def _why_no_more(self, alive: Sequence[Seat], is_late: bool, unwanted: Callable[[], bool]) -> str:
        """Why none are made any more after the last step; "" while they are."""
        if not alive:
            return "no worker is left"
        if is_late:
            return f"they were not ready {self._finish_s:.0f} s after the last step"
        return "the run was asked to end" if unwanted() else ""

    def _ask(
        self,
        seat: Seat,
        generation: int,
        step: int,
        *,
        gap_s: float = 0.0,
        patience: Patience | None = None,
        whole: bool = False,
        elsewhere: Callable[[TurnTask], bool] = lambda task: False,
    ) -> None:
        if (work := self._queue.held.get(seat.name)) is None:
            return
        task = TurnTask(
            generation=generation,
            step=step,
            aside=work,
            gap_s=gap_s,
            share=self._source.share,
            whole=whole,
            patience=patience,
        )
        if not elsewhere(task):
            self._asked[seat.handle.turn.options(name="aside").remote(task)] = seat.name

    def hear(self, worker: str, report: TurnReport) -> None:
        """What has become of a worker's turn that was asked for elsewhere."""
        self._take_in(worker, report)
        self._give_up()

    def _hear(self, timeout_s: float) -> set[str]:
        """Take in what workers have answered; returns those that are gone."""
        gone: set[str] = set()
        if not self._asked:
            return gone
        done, _ = wait(list(self._asked), num_returns=1 if timeout_s else len(self._asked), timeout=timeout_s)
        for reference in done:
            worker = self._asked.pop(reference)
            try:
                report = get(reference)
            except GONE:
                gone.add(worker)
                self._queue.give_back(worker)
                continue
            except ray.exceptions.RayError as error:
                work = self._queue.held.get(worker)
                report = failed_turn(work.name if work else "", error)
            self._take_in(worker, report)
        self._give_up()
        return gone

    def _take_in(self, worker: str, report: TurnReport) -> None:
        if worker in self._practised:
            self._longest_s = max(self._longest_s, report.took_s)
        elif report.ended and not report.failed:
            self._practised.add(worker)
        if report.ended and self._queue.end(report.aside):
            self._ended(report)

    def _give_up(self) -> None:
        while self._queue.hopeless:
            why = f"{MAX_LOSSES} workers have died or left while they made it"
            self._ended(TurnReport(aside=self._queue.hopeless.pop().name, ended=True, failed=why))

    def _ended(self, report: TurnReport) -> None:
        try:
            event = self._source.ended(report)
        except Exception:  # whatever it is, the run goes on
            log.exception("%s was not kept", report.aside)
            event = None
        self._queue.drop(self._source.dropped())
        if event is not None:
            self._tell(event)
