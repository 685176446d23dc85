"""The order of everything: which clips meet in which batch of which step. Pure: a function of its inputs and a seed.

    order = SampleOrder(populations, stages, seed=0)
    state = order.start()
    micros = order.advance(state)          # the batches of step 0; `state` now stands before step 1
    token = order.token(state)             # JSON; order.restore(token) continues exactly there

Within a source, shards are permuted per epoch and rows are shuffled within windows of a few shards, so reads stay near
each other and no global permutation is held. The next source is the one the mixture owes most. Only row numbers wait
in bucket queues, never pixels. A bucket emits a batch when it is full, or short when its oldest row has waited
`max_wait` draws, so rare buckets do not starve. When a curriculum stage ends, the
rows that wait get new buckets; none is dropped.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import numpy as np

from data.buckets import Choice, pick
from data.errors import DataError
from data.ledger import DrawsRecord
from data.types import Bucket

TOKEN_VERSION = 2
PACK_ABOVE_BYTES = 2048  # a longer token is compressed
LISTED_MOST = 256  # most waiting rows that a token lists; if there are more, a restore draws them again
MARK_EVERY = 2048  # draws between two marks, positions to draw from again
MARKS_KEPT = 32  # marks of a source: a token is restored in a second
START, DROP, PICK, BUCKET = 0, 1, 2, 16  # what a sample's random numbers are used for; bucket draws count up from 16


def uniform(seed: int, source: int, epoch: int, row: int, use: int) -> float:
    """The sample's own random number in [0, 1) for one use. Same on any machine, in any order."""
    key = hashlib.blake2b(struct.pack("<5q", seed, source, epoch, row, use), digest_size=8).digest()
    return (int.from_bytes(key, "little") >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class SampleDraw:
    """A row drawn for training. `number` counts the draws of the run."""

    source: int
    epoch: int
    row: int
    number: int


@dataclass(frozen=True, slots=True)
class BatchDraw:
    """One bucket batch: the draws that meet in it."""

    bucket: Bucket
    draws: tuple[SampleDraw, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """The rows of a source as the planner sees them."""

    name: str
    shard_bounds: np.ndarray  # int64 [shards + 1]: rows of shard s are bounds[s]:bounds[s + 1]
    shape: np.ndarray  # int32 [rows]: number of the row's shape, -1 for rows that no stage trains
    window: int  # shards shuffled together


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A curriculum segment with everything resolved; valid for steps before `until_step` (0: without end)."""

    until_step: int
    choices: tuple[tuple[Choice, ...], ...]  # per shape, empty when no bucket takes it
    batch: Mapping[Bucket, int]
    tokens: Mapping[Bucket, int]  # of one sample, for mixtures by tokens
    weights: tuple[float, ...]  # per source, sum 1
    items_per_step: int
    max_wait: int
    by_tokens: bool = False
    settings: str = ""  # what `choices` came from, for the identity of the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Clips per batch of each bucket from a step on, instead of those that a stage began with. A decision of the run:
    once made it is data, so that any number of workers and any resume see the same batches."""

    from_step: int
    sizes: Mapping[Bucket, int]

    def to_json(self) -> SizesRecord:
        return {"from": self.from_step, "sizes": {str(bucket): size for bucket, size in sorted(self.sizes.items())}}

    @classmethod
    def from_json(cls, record: SizesRecord) -> BatchSizes:
        """Raises DataError for sizes below 1."""
        sizes = {Bucket.parse(name): int(size) for name, size in record["sizes"].items()}
        if min(sizes.values(), default=1) < 1:
            raise DataError(f"batch sizes {record['sizes']} from step {record['from']} on must be at least 1.")
        return cls(from_step=int(record["from"]), sizes=sizes)


@dataclass(slots=True)
class Cursor:
    """Where a source stands, and how much the mixture has taken of it in this stage."""

    epoch: int = 0
    window: int = 0
    position: int = 0
    drawn: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class SourceMark:
    """Where the sources stood before draw `number`."""

    number: int
    cursors: tuple[Cursor, ...]

    @classmethod
    def of(cls, state: OrderState) -> SourceMark:
        return cls(state.drawn, tuple(copy(cursor) for cursor in state.cursors))


@dataclass(slots=True)
class OrderState:
    """The planner's position: everything the future depends on. Stands before step `step`.

    `marks` are earlier positions of the same stage, oldest first; the future does not depend on them.
    """

    step: int
    stage: int
    drawn: int  # admitted draws so far
    passed: int  # draws without a bucket: by the probabilities of a table, or dropped when a stage ended
    cursors: list[Cursor]
    queues: dict[Bucket, list[SampleDraw]] = field(default_factory=dict)
    ready: list[BatchDraw] = field(default_factory=list)
    marks: list[SourceMark] = field(default_factory=list)

    def copy(self) -> OrderState:
        return OrderState(
            self.step,
            self.stage,
            self.drawn,
            self.passed,
            [copy(cursor) for cursor in self.cursors],
            {bucket: list(queue) for bucket, queue in self.queues.items()},
            list(self.ready),
            list(self.marks),
        )

    @property
    def waiting(self) -> int:
        return sum(map(len, self.queues.values())) + sum(len(micro.draws) for micro in self.ready)


SizesRecord = TypedDict("SizesRecord", {"from": int, "sizes": dict[str, int]})
TokenBody = TypedDict(
    "TokenBody",
    {
        "cursors": list[list[int]],  # a row per source, see `_plain`
        "queues": dict[str, list[list[int]]],  # rows that wait, by bucket; columns, see `_columns`
        # finished batches: [bucket, rows], or [its number, how many]
        "ready": list[list[str | int | list[list[int]]]],
        "from": list[int | list[list[int]]],  # many waiting rows are drawn again from here: [draw number, cursors]
        "again": list[int],  # how many of each bucket still wait then
        "listed": dict[str, list[list[int]]],  # older ones, by number of the bucket
        "packed": str,  # all of these, compressed
    },
    total=False,
)
"""What a token lists: few waiting rows one by one, many by where to draw them from again."""


class DataToken(TokenBody):
    """The position of the data as JSON."""

    v: int
    step: int
    stage: int
    drawn: int
    passed: int
    plan: dict[str, str]
    resized: NotRequired[list[SizesRecord]]
    draws: NotRequired[DrawsRecord | None]


class SampleOrder:
    """Turns populations and stages into micro-batches. Holds no position: that is the State."""

    def __init__(
        self,
        populations: Sequence[Population],
        stages: Sequence[Stage],
        seed: int,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        """`identity` names what else the plan depends on (index, settings), each with a hash. Raises DataError when a
        source that a stage draws from has no row for it."""
        self.populations, self.stages, self.seed = tuple(populations), tuple(stages), seed
        self.identity = dict(identity or {})
        self.resized: tuple[BatchSizes, ...] = ()  # in the order of their steps
        self._sizes: dict[tuple[int, int], Mapping[Bucket, int]] = {}  # (stage, resizes before) -> clips per batch
        self._orders: dict[int, tuple[tuple[int, int], np.ndarray]] = {}  # source -> (epoch, window), permuted rows
        self._shards: dict[int, tuple[int, np.ndarray]] = {}  # source -> epoch, permuted shards
        self._parts: dict[int, dict[str, str]] = {}
        for number, stage in enumerate(self.stages):
            self._check_supply(number, stage)

    def _check_supply(self, number: int, stage: Stage) -> None:
        if not any(stage.weights):
            raise DataError(f"segment {number + 1} draws from no source: all weights are 0.")
        takes = np.array([bool(choices) for choices in stage.choices] + [False])  # the last answers for shape -1
        for weight, population in zip(stage.weights, self.populations):
            if weight and not takes[population.shape].any():
                raise DataError(
                    f"source {population.name} has no sample that a bucket of segment {number + 1} takes. "
                    f"See `heddle data stats`, or widen data.buckets."
                )

    def start(self) -> OrderState:
        state = OrderState(step=0, stage=0, drawn=0, passed=0, cursors=[Cursor() for _ in self.populations])
        state.marks = [SourceMark.of(state)]
        return state

    def adopt(self, decisions: Iterable[BatchSizes]) -> None:
        """Follow these decisions, too; one that is known for the same step stays. Positions at or before the step of a
        decision stand as they are."""
        known = {one.from_step: one for one in (*decisions, *self.resized)}
        self.resized = tuple(known[step] for step in sorted(known))
        self._sizes.clear()

    def sizes(self, state: OrderState) -> Mapping[Bucket, int]:
        """Clips per batch of every bucket of the state's stage, at its step."""
        stage, before = self.stages[state.stage], sum(one.from_step <= state.step for one in self.resized)
        if (state.stage, before) not in self._sizes:
            mine = [one for one in self.resized[:before] if self._stage_of(one.from_step) == state.stage]
            latest = mine[-1].sizes if mine else {}
            self._sizes[state.stage, before] = {b: latest.get(b, size) for b, size in stage.batch.items()}
        return self._sizes[state.stage, before]

    def _stage_of(self, step: int) -> int:
        ends = (number for number, stage in enumerate(self.stages) if not stage.until_step or step < stage.until_step)
        return next(ends, len(self.stages) - 1)

    def _regroup(self, state: OrderState, stage: Stage) -> None:
        """Rows that wait come into batches of the sizes that hold from now on; their order and buckets stay."""
        waiting = [(draw, micro.bucket) for micro in state.ready for draw in micro.draws]
        waiting += [(draw, bucket) for bucket, queue in state.queues.items() for draw in queue]
        state.queues, state.ready = {}, []
        for draw, bucket in sorted(waiting, key=lambda pair: pair[0].number):
            self._enqueue(state, stage, bucket, draw)

    def advance(self, state: OrderState) -> list[BatchDraw]:
        """The micro-batches of `state.step`; moves the state to the next step."""
        self._enter_stage(state)
        if any(one.from_step == state.step for one in self.resized):
            self._regroup(state, self.stages[state.stage])
        stage = self.stages[state.stage]
        while len(state.ready) < stage.items_per_step:
            self._draw(state, stage)
        micros, state.ready = state.ready[: stage.items_per_step], state.ready[stage.items_per_step :]
        state.step += 1
        return micros

    # drawing

    def _draw(self, state: OrderState, stage: Stage) -> None:
        if state.drawn - state.marks[-1].number >= MARK_EVERY:
            state.marks = [*state.marks[1 - MARKS_KEPT :], SourceMark.of(state)]
        draw, bucket = self._next_draw(state, stage)
        self._enqueue(state, stage, bucket, draw)
        self._emit_overdue(state, stage)

    def _next_draw(self, state: OrderState, stage: Stage) -> tuple[SampleDraw, Bucket]:
        """The next row that a bucket takes; moves the sources, knows nothing of queues."""
        source = self._next_source(state, stage)
        cursor = state.cursors[source]
        while True:
            epoch, row = self._next_row(source, cursor)
            shape = self.populations[source].shape[row]
            if shape < 0:
                continue
            bucket = self._bucket(stage, int(shape), source, epoch, row)
            if bucket is not None:
                break
            state.passed += 1
        state.drawn += 1
        cursor.drawn += 1
        cursor.tokens += stage.tokens[bucket]
        return SampleDraw(source, epoch, row, state.drawn - 1), bucket

    def _next_source(self, state: OrderState, stage: Stage) -> int:
        active = [source for source, weight in enumerate(stage.weights) if weight]
        if len(active) == 1:
            return active[0]
        if stage.by_tokens:
            total = sum(cursor.tokens for cursor in state.cursors)
            return max(active, key=lambda s: (stage.weights[s] * total - state.cursors[s].tokens, stage.weights[s], -s))
        return _chairman([stage.weights[s] for s in active], [state.cursors[s].drawn for s in active], active)

    def _next_row(self, source: int, cursor: Cursor) -> tuple[int, int]:
        order = self._order(source, cursor.epoch, cursor.window)
        while cursor.position >= len(order):
            cursor.position, cursor.window = 0, cursor.window + 1
            population = self.populations[source]
            if cursor.window * population.window >= len(population.shard_bounds) - 1:
                cursor.window, cursor.epoch = 0, cursor.epoch + 1
            order = self._order(source, cursor.epoch, cursor.window)
        cursor.position += 1
        return cursor.epoch, int(order[cursor.position - 1])

    def _order(self, source: int, epoch: int, window: int) -> np.ndarray:
        """Permuted rows of a window of permuted shards."""
        held = self._orders.get(source)
        if held is not None and held[0] == (epoch, window):
            return held[1]
        population = self.populations[source]
        bounds, size = population.shard_bounds, population.window
        shards = self._shard_order(source, epoch)[window * size : (window + 1) * size]
        rows = np.concatenate([np.arange(bounds[s], bounds[s + 1]) for s in shards])
        order = _generator(self.seed, source, epoch, window).permutation(rows)
        self._orders[source] = ((epoch, window), order)
        return order

    def _shard_order(self, source: int, epoch: int) -> np.ndarray:
        held = self._shards.get(source)
        if held is None or held[0] != epoch:
            count = len(self.populations[source].shard_bounds) - 1
            held = (epoch, _generator(self.seed, source, epoch, -1).permutation(count))
            self._shards[source] = held
        return held[1]

    def _bucket(self, stage: Stage, shape: int, source: int, epoch: int, row: int) -> Bucket | None:
        choices = stage.choices[shape]
        if len(choices) == 1 and choices[0].keep >= 1:
            return choices[0].bucket
        return pick(choices, lambda use: uniform(self.seed, source, epoch, row, BUCKET + use))

    # batching

    def _enqueue(self, state: OrderState, stage: Stage, bucket: Bucket, draw: SampleDraw) -> None:
        queue = state.queues.setdefault(bucket, [])
        queue.append(draw)
        if len(queue) >= self.sizes(state)[bucket]:
            self._emit(state, bucket)

    def _emit(self, state: OrderState, bucket: Bucket) -> None:
        state.ready.append(BatchDraw(bucket, tuple(state.queues.pop(bucket))))

    def _emit_overdue(self, state: OrderState, stage: Stage) -> None:
        """Rows enter a queue in draw order, so its first is its oldest."""
        overdue = [bucket for bucket, queue in state.queues.items() if state.drawn - queue[0].number > stage.max_wait]
        for bucket in sorted(overdue, key=lambda bucket: state.queues[bucket][0].number):
            self._emit(state, bucket)

    def _enter_stage(self, state: OrderState) -> None:
        stage = self.stages[state.stage]
        if not stage.until_step or state.step < stage.until_step:
            return
        state.stage += 1
        waiting = [draw for micro in state.ready for draw in micro.draws]
        waiting += [draw for queue in state.queues.values() for draw in queue]
        state.queues, state.ready = {}, []
        for cursor in state.cursors:
            cursor.drawn = cursor.tokens = 0  # the shares of a mixture are those of its own stage
        state.marks = [SourceMark.of(state)]
        stage = self.stages[state.stage]
        for draw in sorted(waiting, key=lambda draw: draw.number):
            shape = int(self.populations[draw.source].shape[draw.row])
            bucket = self._bucket(stage, shape, draw.source, draw.epoch, draw.row)
            if bucket is None:
                state.passed += 1
            else:
                self._enqueue(state, stage, bucket, draw)
        self._enter_stage(state)

    # position

    def parts(self, stage: int) -> dict[str, str]:
        """Hashes of what the plan depends on, up to and including a stage: later stages may still be edited."""
        if stage not in self._parts:
            stages = [
                [
                    s.until_step,
                    sorted((str(bucket), size) for bucket, size in s.batch.items()),
                    s.weights,
                    s.items_per_step,
                    s.max_wait,
                    s.by_tokens,
                    s.settings,
                ]
                for s in self.stages[: stage + 1]
            ]
            self._parts[stage] = {"seed": digest(self.seed), "buckets": digest(stages), **self.identity}
        return self._parts[stage]

    def token(self, state: OrderState) -> DataToken:
        """The position as JSON of a few kB, however many rows wait.

        Few rows are listed. For many, the token says from where to draw again and how many of each bucket still wait.
        Rows leave a bucket in the order they came, so the waiting ones are the last of those draws.
        """
        body: TokenBody = {"cursors": _plain(state.cursors)}
        if state.waiting > LISTED_MOST:
            body.update(self._counts(state))
        else:
            body["queues"] = {str(bucket): _columns(queue) for bucket, queue in state.queues.items()}
            body["ready"] = [[str(micro.bucket), _columns(micro.draws)] for micro in state.ready]
        text = json.dumps(body, separators=(",", ":"))
        if len(text) > PACK_ABOVE_BYTES:
            body = {"packed": base64.b85encode(zlib.compress(text.encode(), 9)).decode()}
        token: DataToken = {
            "v": TOKEN_VERSION,
            "step": state.step,
            "stage": state.stage,
            "drawn": state.drawn,
            "passed": state.passed,
            "plan": self.parts(state.stage),
            **body,
        }
        if self.resized:
            token["resized"] = [one.to_json() for one in self.resized]
        return token

    def _counts(self, state: OrderState) -> TokenBody:
        """Waiting rows as numbers to draw again. Rows older than every mark (they waited long, or come from the stage
        before) are listed. `ready` counts the rows of each finished batch; all other rows wait in the queues."""
        buckets = sorted(self.stages[state.stage].batch)
        waiting = _waiting(state, buckets)
        oldest = min(draws[0].number for draws in waiting if draws)
        reaching = [mark for mark in state.marks if mark.number <= oldest]
        mark = reaching[-1] if reaching else state.marks[0]
        again = [sum(draw.number >= mark.number for draw in draws) for draws in waiting]
        listed = {
            str(number): _columns(draws[: len(draws) - count])
            for number, (draws, count) in enumerate(zip(waiting, again))
            if len(draws) > count
        }
        return {
            "from": [mark.number, _plain(mark.cursors)],
            "again": again,
            "listed": listed,
            "ready": [[buckets.index(micro.bucket), len(micro.draws)] for micro in state.ready],
        }

    def restore(self, token: DataToken) -> OrderState:
        """The state a token was made from. Raises DataError, naming what differs, when this is not its plan."""
        if token.get("v") != TOKEN_VERSION:
            raise DataError(f"resume token of version {token.get('v')!r}; this program reads {TOKEN_VERSION}.")
        if token["stage"] >= len(self.stages):
            raise DataError(
                f"the resume token stands in segment {token['stage'] + 1}, data.segments has "
                f"{len(self.stages)}. Restore the segments of the run."
            )
        ours, theirs = self.parts(token["stage"]), token["plan"]
        changed = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if changed:
            raise DataError(
                f"the resume token of step {token['step']} was made with other data settings: "
                f"{', '.join(changed)} changed since. Restore them, or start a new run."
            )
        self.adopt(BatchSizes.from_json(record) for record in token.get("resized", ()))
        body: TokenBody = token
        if "packed" in token:
            body = json.loads(zlib.decompress(base64.b85decode(token["packed"])))
        state = OrderState(
            step=token["step"],
            stage=token["stage"],
            drawn=token["drawn"],
            passed=token["passed"],
            cursors=[Cursor(*numbers) for numbers in body["cursors"]],
        )
        if "from" in body:
            self._draw_again(state, body)
        else:
            state.marks = [SourceMark.of(state)]
            state.queues = {Bucket.parse(name): _draws(rows) for name, rows in body["queues"].items()}
            for name, rows in body["ready"]:
                assert isinstance(name, str) and isinstance(rows, list), "queues that are listed, batches that are not"
                state.ready.append(BatchDraw(Bucket.parse(name), tuple(_draws(rows))))
        return state

    def _draw_again(self, state: OrderState, body: TokenBody) -> None:
        """Fill the queues of a state from `_counts`."""
        stage = self.stages[state.stage]
        number, cursors = body["from"]
        assert isinstance(number, int) and isinstance(cursors, list), "not a draw number and cursors"
        then = OrderState(
            step=state.step,
            stage=state.stage,
            drawn=number,
            passed=0,
            cursors=[Cursor(*numbers) for numbers in cursors],
        )
        then.marks = [SourceMark.of(then)]
        buckets = sorted(stage.batch)
        last = {bucket: deque[SampleDraw](maxlen=count) for bucket, count in zip(buckets, body["again"])}
        while then.drawn < state.drawn:
            if then.drawn - then.marks[-1].number >= MARK_EVERY:
                then.marks.append(SourceMark.of(then))
            draw, bucket = self._next_draw(then, stage)
            last[bucket].append(draw)
        state.marks = then.marks
        waiting = [
            [*(_draws(body["listed"].get(str(number), [[], [], [], []]))), *last[bucket]]
            for number, bucket in enumerate(buckets)
        ]
        for position, count in body["ready"]:
            assert isinstance(position, int) and isinstance(count, int), "queues that are counted, batches that are not"
            state.ready.append(BatchDraw(buckets[position], tuple(waiting[position][:count])))
            del waiting[position][:count]
        state.queues = {bucket: draws for bucket, draws in zip(buckets, waiting) if draws}


def _chairman(weights: Sequence[float], drawn: Sequence[int], sources: Sequence[int]) -> int:
    """Tijdeman's chairman assignment (1980): after every draw each source is less than one draw off its share.

    Among the sources that may be served without running ahead, the one whose deadline comes first.
    """
    count, turn = len(weights), sum(drawn) + 1
    slack = 1 / (2 * count - 2)
    owed = [weight * turn - taken for weight, taken in zip(weights, drawn)]
    may = [i for i in range(count) if owed[i] >= slack - 1e-9] or range(count)
    return sources[min(may, key=lambda i: ((1 - slack - owed[i]) / weights[i], i))]


def _generator(*key: int) -> np.random.Generator:
    bits = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(bits, "little")))


def _waiting(state: OrderState, buckets: Sequence[Bucket]) -> list[list[SampleDraw]]:
    """Waiting rows of each bucket in the order they came: finished batches, then the queue."""
    waiting: dict[Bucket, list[SampleDraw]] = {bucket: [] for bucket in buckets}
    for micro in state.ready:
        waiting[micro.bucket] += micro.draws
    for bucket, queue in state.queues.items():
        waiting[bucket] += queue
    return [waiting[bucket] for bucket in buckets]


def _plain(cursors: Sequence[Cursor]) -> list[list[int]]:
    return [[c.epoch, c.window, c.position, c.drawn, c.tokens] for c in cursors]


def _columns(draws: Sequence[SampleDraw]) -> list[list[int]]:
    """Column by column, draw numbers as differences: half as long when compressed."""
    numbers = [draw.number for draw in draws]
    steps = [number - before for number, before in zip(numbers, [0, *numbers])]
    return [[draw.source for draw in draws], [draw.epoch for draw in draws], [draw.row for draw in draws], steps]


def _draws(columns: Sequence[Sequence[int]]) -> list[SampleDraw]:
    sources, epochs, rows, steps = columns
    return [SampleDraw(*fields) for fields in zip(sources, epochs, rows, itertools.accumulate(steps))]


def digest(value: object) -> str:
    """12 hex digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
