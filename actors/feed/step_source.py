"""The controller's side of the feeder: data asked for ahead of its step and kept until that is committed."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import ray

from actors.config import RuntimeConfig, TrainConfig, WorkersConfig
from actors.feed.encoders import Encoders
from actors.feed.experts import ExpertDraw
from actors.feed.feeder import Feeder
from actors.feed.growth import Growth
from actors.feed.item_facts import ItemFacts
from actors.feed.pulse import PULSE, ProcessId, Pulse, Silent
from actors.outcome import Tell, silent
from actors.plan.types import Item
from actors.pool.room import Need
from actors.pool.workers import kill_process, uses_gpu
from actors.ray_calls import GONE, get, kill, nodes, remote_of, unwrap, wait
from actors.records.events import FeederRenewed
from actors.refs import Method, RayNode, Ref
from actors.step import DataLost, DrawnItem, Position, StepBatches, StepData, StepItems
from data.buckets import BatchSize
from data.config import DataConfig
from data.dataset.order_state import SizesRecord
from data.engines.engine import make_engine
from data.engines.machine import DecodeNode, asks, settled
from data.engines.placement import beside_me
from data.errors import DataError, DataIOError, DataUnreachable
from ops.geometry import Geometry
from ops.memory.node_room import node_room
from ops.models.config import ModelConfig
from ops.units import GIB, MIB

log = logging.getLogger(__name__)

T = TypeVar("T")
DataCounts = Mapping[str, object]  # JSON, as the data set counts itself


_ALARMS = 5  # a feeder is replaced when it is silent for this many times the engine's stall alarm
_LEAST_PATIENCE_S = 60.0
_REDECODED_S = 30.0  # what comes again after a node's death has come by then
_NODES_S = 5.0  # between two looks at the nodes, while a step is awaited
_LOOK_S = 2.0  # an answer is awaited this long before the feeder's pulse is felt again
_STARTS = 3
_OPENING_S = 3600.0  # a feeder that shall take over has opened the data by then: nothing waits for that
_STARTING_S = 60.0  # and then starts within this, as the run may wait for it
_SPARE_BYTES = GIB  # that a node has left when another feeder is as large as this one
_POSITIONS_KEPT = 256  # of a few kB each, for a checkpoint or a return to an earlier step


class FeederHandle(Protocol):
    """The feeder as the controller knows it (`actors.feed.feeder`)."""

    @property
    def prepare(self) -> Method[[], None]: ...
    @property
    def start(self) -> Method[[int, Position | None, Sequence[str]], DataCounts]: ...
    @property
    def items(self) -> Method[[int], tuple[DrawnItem, ...]]: ...
    @property
    def batches(self) -> Method[[int], StepBatches]: ...
    @property
    def release(self) -> Method[[int], None]: ...
    @property
    def ledger(self) -> Method[[], DataCounts]: ...
    @property
    def token(self) -> Method[[int], Position]: ...
    @property
    def resize(self) -> Method[[SizesRecord], None]: ...
    @property
    def pulse(self) -> Method[[], ProcessId]: ...


@dataclass(kw_only=True, slots=True)
class Successor:
    """A feeder that is opened beside the one that delivers, to take its place. Only steps from `from_step` on depend on
    it. They are not requested until it has taken over, or has been given up."""

    feeder: FeederHandle
    pulse: Pulse
    opened: Ref[None]
    since: float  # monotonic seconds; of its opening, then of its start
    from_step: int | None = None  # set once it is open: the first step not requested from any feeder
    started: Ref[DataCounts] | None = None  # once the position of the data before that step is known


class StepSource:
    """Data of coming steps, requested ahead. A step's references live until `release`.

    A feeder that has grown by too much is renewed: another one opens the data beside it and has all steps from one on
    that nobody was asked for yet. The one before it has answered all that it was asked then, and stays for as long as
    its pixels are used.
    """

    def __init__(
        self,
        make: Callable[[], FeederHandle],
        geometry: Geometry,
        loss_weight: str,
        last_step: int,
        stall_s: float,
        silent_s: float = 60.0,
        nodes: Callable[[], Sequence[RayNode]] = nodes,
        growth: Growth | None = None,
        tell: Tell = silent,
        room: Callable[[], int] = node_room,
    ) -> None:
        """A feeder that delivers nothing for several `stall_s` (`data.engine.stall_s`, the engine's alarm) is replaced,
        and one whose process does not even answer for `silent_s` (`data.engine.silent_s`). So is one that delivers
        nothing after one of the `nodes` has died: Ray Data has waited for minutes for what was decoded there. `growth`
        says how far one may grow, `room` how many bytes are left beside it."""
        self._nodes = nodes
        self._dead: set[str] = set()  # nodes, as far as seen
        self._looked_at = 0.0  # at the nodes
        self._died_at = math.inf  # when the death of a node was seen last, since the data was opened
        self._make, self._geometry, self._loss_weight, self._last = make, geometry, loss_weight, last_step
        self._patience_s = max(_ALARMS * stall_s, _LEAST_PATIENCE_S)
        self._silent_s = silent_s
        self.avoid: tuple[str, ...] = ()  # ids of nodes on which nothing is decoded from the next `open` on
        self._feeder: FeederHandle | None = None
        self._pulse: Pulse | None = None
        self._items: dict[int, Ref[tuple[DrawnItem, ...]]] = {}
        self._told: dict[int, StepItems] = {}  # made of the answers in `_items`
        self._batches: dict[int, Ref[StepBatches]] = {}
        self._asked_at: dict[int, float] = {}
        self._ready: dict[int, StepData] = {}
        self._positions: OrderedDict[int, Position] = OrderedDict()  # before each of the last steps
        self._resized: list[SizesRecord] = []  # decisions on batch sizes: every feeder gets all of them
        self._growth, self._tell, self._room = growth or Growth(), tell, room
        self._feeder_from = 0  # the first step that the feeder delivers
        self._successor: Successor | None = None
        self._retiring: tuple[FeederHandle, Pulse] | None = None  # has delivered the steps before those of the feeder
        self._furthest = -1  # the last step that any feeder was asked for
        self._unread: DataUnreachable | None = None  # what kept the last `open` from its data

    def open(self, first_step: int, token: Position | None = None) -> DataCounts:
        """Start (or start again) the feeder at a step. Returns the dataset's accounting. Raises DataError, also when
        the data is not that of the checkpoint whose `token` is given, and DataIOError. Where that is DataUnreachable,
        `has` raises it as well: whoever cannot wait here may leave it to the next step.

        `token` may stand before `first_step`; the exact position goes before it where this object has seen it.
        """
        for known in (self._items, self._told, self._batches, self._asked_at, self._ready):
            known.clear()
        for later in [step for step in self._positions if step > first_step]:
            del self._positions[later]
        if token is not None and token["step"] == first_step:
            self._positions.setdefault(first_step, token)
        token = self._positions.get(first_step, token)
        self._unread = None
        for attempt in range(_STARTS):
            try:
                return self._open(first_step, token)
            except DataUnreachable as error:
                self._unread = error
                raise
            except (*GONE, Silent) as error:
                log.warning("the feeder died while it opened the data (%d of %d): %s", attempt + 1, _STARTS, error)
        raise DataLost(f"the feeder died {_STARTS} times while it opened the data")

    def _open(self, first_step: int, token: Position | None) -> DataCounts:
        self.close()
        self._dead, self._died_at = self._dead_nodes(), math.inf
        feeder = self._feeder = self._make_resized()
        self._furthest = max(self._furthest, first_step - 1)  # steps that run may still be committed as they are
        self._feeder_from = first_step
        self._growth.begin()
        self._pulse = self._pulse_of(feeder)
        started, opened = time.monotonic(), feeder.start.remote(first_step, token, self.avoid)
        told = started
        while not wait([opened], timeout=_LOOK_S)[0]:  # a first index of a large data set takes its time
            self._pulse.check()
            if (now := time.monotonic()) - told > _LEAST_PATIENCE_S:
                told = now
                log.warning("the data is being opened since %.0f s", now - started)
        return unwrap(lambda: get(opened))

    def _make_resized(self) -> FeederHandle:
        """A feeder whose batches have the sizes that were decided on."""
        feeder = self._make()
        for record in self._resized:
            feeder.resize.remote(record)
        return feeder

    def _pulse_of(self, feeder: FeederHandle) -> Pulse:
        return Pulse(feeder.pulse.options(concurrency_group=PULSE).remote, self._silent_s)

    def request(self, step: int) -> None:
        """Ask for a step ahead of its use; idempotent. Steps past the end of the run are ignored, and those of a feeder
        that has not taken over yet."""
        if step < self._last and not self._is_held(step) and step not in self._items and step not in self._ready:
            self._furthest = max(self._furthest, step)
            self._items[step] = self._open_feeder.items.remote(step)
            self._batches[step] = self._open_feeder.batches.remote(step)
            self._asked_at[step] = time.monotonic()

    def has(self, step: int, timeout_s: float = 0.0) -> bool:
        """Whether a step and the next one, whose encode work may run early, are decoded, after at most this long.

        Raises DataError or DataIOError as soon as one of them has failed, whatever became of the other, and DataLost
        when the feeder is gone or has been silent for too long.
        """
        if self._unread is not None:
            raise self._unread
        self._look_at_growth()
        for wanted in (step, step + 1):
            self.request(wanted)
        asked = [known[s] for s in (step, step + 1) for known in (self._items, self._batches) if s in known]
        done = wait(asked, num_returns=len(asked), timeout=timeout_s)[0] if asked else []
        for answer in done:
            self._get(answer)  # of a failed one its error; the others are lists of references
        if len(done) == len(asked):
            return not self._is_held(step + 1) or self._await_start(timeout_s)
        self._feel_pulse()
        awaited = (self._items, self._batches)
        late = min(s for s in (step, step + 1) if any(s in known and known[s] not in done for known in awaited))
        if (waited := time.monotonic() - self._asked_at[late]) > self._patience_s:
            raise DataLost(f"the feeder has not delivered step {late} in {waited:.0f} s")
        self._look_at_nodes(self._asked_at[late])
        return False

    def _look_at_nodes(self, asked_at: float) -> None:
        """Raises DataLost when what was asked for before a node died has not come by some time after that."""
        now = time.monotonic()
        if now - self._looked_at >= _NODES_S:
            self._looked_at, dead = now, self._dead_nodes()
            if not dead <= self._dead:
                self._dead, self._died_at = dead, now
        if now - self._died_at > _REDECODED_S and asked_at < self._died_at:
            raise DataLost(f"a node died {now - self._died_at:.0f} s ago, and clips that it decoded have not come")

    def _dead_nodes(self) -> set[str]:
        return {node["NodeID"] for node in self._nodes() if not node["Alive"]}

    def items(self, step: int) -> tuple[Item, ...] | None:
        """The items of a step as the planner sees them, or None for one that `request` ignores."""
        if step in self._ready:
            return self._ready[step].items.planned
        self.request(step)
        return self._items_of(step).planned if step in self._items else None

    def data(self, step: int) -> StepData:
        """Everything of a step; waits for its decoding. Raises DataError, DataIOError or DataLost."""
        if step not in self._ready:
            self.request(step)
            items, batches = self._items_of(step), self._get(self._batches[step])
            self._ready[step] = StepData(
                items=items,
                batches=dict(zip(items.items, batches.references, strict=True)),
                cached=batches.cached,
                epoch=batches.epoch,
            )
            self._positions[step + 1] = batches.position
            if step >= self._feeder_from:  # else it is of the one before
                self._growth.seen(batches.feeder_bytes)
            while len(self._positions) > _POSITIONS_KEPT:
                self._positions.popitem(last=False)
            del self._items[step], self._told[step], self._batches[step], self._asked_at[step]
        return self._ready[step]

    def _items_of(self, step: int) -> StepItems:
        """The items of a step with their samples, which are made here: thousands of them take five times as long to be
        sent. That is when the planner is asked, steps before they are dispatched."""
        if step not in self._told:
            self._told[step] = StepItems.of(step, self._get(self._items[step]), self._geometry, self._loss_weight)
        return self._told[step]

    def release(self, step: int) -> Position | None:
        """The step is committed. Returns the data's position after it."""
        for known in [s for s in self._ready if s <= step]:
            del self._ready[known]
        self._open_feeder.release.remote(step)
        if self._retiring is not None:
            self._retiring[0].release.remote(step)
            if step >= self._feeder_from - 1:
                _end(*self._retiring)
                self._retiring = None
        return self._positions.get(step + 1)

    @property
    def next_unasked(self) -> int:
        """The first step whose items have not been asked for, of this feeder or an earlier one."""
        return self._furthest + 1

    def resize(self, record: SizesRecord) -> None:
        """Batches have these sizes from a step on that was not asked for yet; calls of a feeder run in their order."""
        self._resized.append(record)
        if self._feeder is not None:
            self._feeder.resize.remote(record)
        if self._successor is not None:
            self._successor.feeder.resize.remote(record)

    def ledger(self) -> DataCounts:
        return self._get(self._feeder.ledger.remote()) if self._feeder is not None else {}

    def token(self, step: int) -> Position:
        """The data's position before a step. Raises DataLost when no feeder knows it."""
        if step in self._positions:
            return self._positions[step]
        if self._feeder is None:
            raise DataLost("the data is not open")
        return self._get(self._feeder.token.remote(step))

    def close(self) -> None:
        """End the feeder, also one that is stopped and hears nothing, and those before and after it."""
        self._drop_successor()
        if self._retiring is not None:
            _end(*self._retiring)
        if self._feeder is not None:
            _end(self._feeder, self._pulse)
        self._retiring = self._feeder = self._pulse = None

    # -- a feeder that has grown ---------------------------------------------------------------------------------------

    def _is_held(self, step: int) -> bool:
        """Whether a step is for a feeder that has not taken over yet."""
        successor = self._successor
        return successor is not None and successor.from_step is not None and step >= successor.from_step

    def _look_at_growth(self) -> None:
        """Open another feeder where this one has grown, and have it take over; waits for nothing. Raises what the one
        that delivers has failed with."""
        successor = self._successor
        if self._retiring is not None:
            with suppress(*GONE, Silent):  # to know the process of one that hears nothing, when it is to end
                self._retiring[1].check()
        elif successor is None:
            if self._growth.is_over and self.next_unasked < self._last and self._has_room():
                feeder = self._make_resized()
                self._successor = Successor(
                    feeder=feeder,
                    pulse=self._pulse_of(feeder),
                    opened=feeder.prepare.remote(),
                    since=time.monotonic(),
                )
        elif successor.started is not None:
            if self._has_answered(successor, successor.started, _STARTING_S):
                self._take_over(successor)
        elif successor.from_step is not None or self._has_answered(successor, successor.opened, _OPENING_S):
            self._start(successor)

    def _has_room(self) -> bool:
        """Whether two feeders of this size may be here for a while. Where not, this one may grow by as much again."""
        if self._room() > self._growth.now_bytes + _SPARE_BYTES:
            return True
        self._growth.begin()
        return False

    def _has_answered(self, successor: Successor, answer: Ref[None] | Ref[DataCounts], longest_s: float) -> bool:
        """Whether a successor has done what it was asked for. One that has failed, or takes too long, is given up: the
        feeder goes on, and may grow by as much again before another one is tried."""
        waited_s = time.monotonic() - successor.since
        try:
            if wait([answer], timeout=0)[0]:
                unwrap(lambda: get(answer))
                return True
            successor.pulse.check()
        except (ray.exceptions.RayError, DataError, DataIOError, Silent) as error:
            why = str(error)
        else:
            if waited_s <= longest_s:
                return False
            why = f"it has not answered in {waited_s:.0f} s"
        log.warning("no feeder takes over from the one that has grown: %s", why)
        self._drop_successor()
        return False

    def _start(self, successor: Successor) -> None:
        """Have the successor begin at the first step that was not asked for, once the position before that is known."""
        if successor.from_step is None:
            successor.from_step = self.next_unasked
        if successor.from_step >= self._last:
            self._drop_successor()  # the feeder delivers all that is left
        elif (position := self._position_before(successor.from_step)) is not None:
            successor.since = time.monotonic()
            successor.started = successor.feeder.start.remote(successor.from_step, position, self.avoid)

    def _await_start(self, timeout_s: float) -> bool:
        """Wait for the successor, which has the next steps, at most `timeout_s`. Returns False: it takes over at the
        next look."""
        if self._successor is not None and self._successor.started is not None:
            wait([self._successor.started], timeout=timeout_s)
        return False

    def _position_before(self, step: int) -> Position | None:
        """The data's position before a step, if the one before that has been delivered."""
        answer = self._batches.get(step - 1)
        if step not in self._positions and answer is not None and wait([answer], timeout=0)[0]:
            self._positions[step] = self._get(answer).position
        return self._positions.get(step)

    def _take_over(self, successor: Successor) -> None:
        """All steps that were asked for have been delivered; later ones are the successor's."""
        assert successor.from_step is not None, "it has started"
        mib = [round(size / MIB) for size in (self._growth.settled_bytes, self._growth.now_bytes)]
        assert self._pulse is not None, "so has the one before it"
        self._retiring = self._open_feeder, self._pulse
        self._feeder, self._pulse, self._feeder_from = successor.feeder, successor.pulse, successor.from_step
        self._successor = None
        self._growth.begin()
        self._tell(FeederRenewed(from_step=successor.from_step, settled_mib=mib[0], grown_mib=mib[1]))

    def _drop_successor(self) -> None:
        """End the successor, if there is one. Another one is opened where the feeder grows by as much again."""
        if self._successor is not None:
            _end(self._successor.feeder, self._successor.pulse)
        self._successor = None
        self._growth.begin()

    @property
    def _open_feeder(self) -> FeederHandle:
        assert self._feeder is not None, "open() comes before the first step"
        return self._feeder

    def _feel_pulse(self) -> None:
        if self._pulse is None:
            return
        try:
            self._pulse.check()
        except (*GONE, Silent) as error:
            raise DataLost(str(error)) from None

    def _get(self, reference: Ref[T]) -> T:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return unwrap(lambda: get(reference, timeout=_LOOK_S))
            except GONE as error:
                raise DataLost(f"the feeder died: {error}") from None
            except ray.exceptions.GetTimeoutError:
                self._feel_pulse()
                if time.monotonic() > deadline:
                    raise DataLost(f"the feeder has not answered in {self._patience_s:.0f} s") from None


def _end(feeder: FeederHandle, pulse: Pulse | None) -> None:
    """End a feeder, also one that is stopped and hears nothing."""
    kill(feeder)
    if pulse is not None and (stopped := pulse.stopped) is not None:
        kill_process(stopped.node, stopped.pid, stopped.born)


def _heap() -> dict[str, str]:
    """Environment in which all threads of a process share one heap of glibc.

    Every window of Ray Data has threads of its own, and its calls are answered by others yet. With several heaps (up to
    eight a core) freed blocks lie scattered over all: 1.1 KiB a microbatch in a feeder, of memory that nobody uses, and
    0.5 in Ray Data's actor of statistics, in windows 5 to 24 of 256. With one, 0.1 and 0.06. What a feeder starts has
    this environment, too."""
    return {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")}


def actor_factory(plain: type, *arguments: object, **named: object) -> Callable[[], FeederHandle]:
    """A function that starts an actor of this class, an `AnsweringActor`, beside the caller; used again when it
    dies."""

    def start() -> FeederHandle:
        actor = remote_of(plain, {PULSE: 1})
        options = {"num_cpus": 0, "scheduling_strategy": beside_me(), "runtime_env": {"env_vars": _heap()}}
        handle: FeederHandle = actor.options(**options).remote(*arguments, **named)
        return handle

    return start


def feeder_of(
    config: RuntimeConfig, model: ModelConfig, geometry: Geometry, timed: BatchSize | None = None
) -> Callable[[], FeederHandle]:
    """The feeder that a run's config describes; `timed` sizes the batches of buckets with a `target_s`."""
    data = config.data
    if asks(data.engine):
        left = decode_nodes(nodes(), config.workers, gpu=uses_gpu(config.workers))
        data = replace(data, engine=settled(data.engine, left))
    return actor_factory(
        Feeder,
        config=data,
        facts=item_facts(config.data, config.train, config.workers, model, geometry),
        seed=config.train.seed,
        run_dir=config.run_dir,
        engine_of=make_engine,
        timed=timed,
        steps=config.train.steps,
    )


def decode_nodes(nodes: Sequence[RayNode], workers: WorkersConfig, *, gpu: bool) -> list[DecodeNode]:
    """What the cluster's nodes leave to decoding when all workers that have room there have started."""
    need, found, left = Need(workers.cpus_per_worker, 1.0 if gpu else 0.0), list[DecodeNode](), workers.max
    for node in nodes:
        if node["Alive"]:
            here = min(left, need.capacity(node["Resources"]))
            found.append(DecodeNode.of(node["Resources"], here * need.cpus))
            left -= here
    return found


def item_facts(
    data: DataConfig, train: TrainConfig, workers: WorkersConfig, model: ModelConfig, geometry: Geometry
) -> ItemFacts:
    """Facts about the items of a run with these settings and this resolved model."""
    named = bool(data.cache.path)
    device = "cuda" if named and uses_gpu(workers) else "cpu"  # a name alone says which
    factors = tuple(source.loss_weight for source in data.sources)
    return ItemFacts(
        geometry=geometry,
        encoders=Encoders.of(model, device, named=named),
        experts=ExpertDraw.of(model.dit, train, geometry),
        loss_weights=factors if set(factors) != {1.0} else (),
        own_rates=model.dit.clip_rate is not None and data.fps == 0,
    )
