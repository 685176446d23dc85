"""The order of everything: which clips meet in which batch of which step. Pure: a function of its inputs and a seed.

    order = SampleOrder(populations, stages, seed=0)
    state = order.start()
    micros = order.advance(state)          # the batches of step 0; `state` now stands before step 1
    token = order.token(state)             # JSON; order.restore(token) continues exactly there

The next source is the one the mixture owes most; which of its rows comes next, `data.dataset.source_rows` says. Only
row numbers wait in bucket queues, never pixels. A bucket emits a batch when it is full, or short when its oldest row
has waited `max_wait` draws, so rare buckets do not starve. When a curriculum stage ends, the rows that wait get new
buckets; none is dropped.
"""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from data.buckets import pick
from data.dataset.order_state import (
    BatchDraw,
    BatchSizes,
    Cursor,
    OrderState,
    Population,
    SampleDraw,
    SourceMark,
    Stage,
)
from data.dataset.order_token import TOKEN_VERSION, DataToken, body_of, state_of
from data.dataset.source_rows import SourceRows
from data.errors import DataError
from data.types import Bucket

LATER_SIZES = 8  # decisions for later steps that a token has; a run makes one or two ahead
MARKS_KEPT = 32  # of a position: a token is restored in a second
START, DROP, PICK, BUCKET = 0, 1, 2, 16  # what a sample's random numbers are used for; bucket draws count up from 16


def uniform(seed: int, source: int, epoch: int, row: int, use: int) -> float:
    """The sample's own random number in [0, 1) for one use. Same on any machine, in any order."""
    key = hashlib.blake2b(struct.pack("<5q", seed, source, epoch, row, use), digest_size=8).digest()
    return (int.from_bytes(key, "little") >> 11) / (1 << 53)


class SampleOrder:
    """Turns populations and stages into micro-batches. Holds no position: that is an `OrderState`."""

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
        self._rows = SourceRows(self.populations, seed)
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
        before = bisect_right(self.resized, state.step, key=_from_step)
        if (state.stage, before) not in self._sizes:
            latest, stage = self._latest(state.stage, before), self.stages[state.stage]
            decided = latest.sizes if latest is not None else {}
            self._sizes[state.stage, before] = {b: decided.get(b, size) for b, size in stage.batch.items()}
        return self._sizes[state.stage, before]

    def _latest(self, stage: int, before: int) -> BatchSizes | None:
        """The newest of the first `before` decisions that holds in this stage."""
        for one in reversed(self.resized[:before]):
            if (its := self._stage_of(one.from_step)) <= stage:
                return one if its == stage else None
        return None

    def _stage_of(self, step: int) -> int:
        ends = (number for number, stage in enumerate(self.stages) if not stage.until_step or step < stage.until_step)
        return next(ends, len(self.stages) - 1)

    def _regroup(self, state: OrderState) -> None:
        """Rows that wait come into batches of the sizes that hold from now on; their order and buckets stay."""
        waiting = [(draw, micro.bucket) for micro in state.ready for draw in micro.draws]
        waiting += [(draw, bucket) for bucket, queue in state.queues.items() for draw in queue]
        state.queues, state.ready = {}, []
        for draw, bucket in sorted(waiting, key=lambda pair: pair[0].number):
            self._enqueue(state, bucket, draw)

    def advance(self, state: OrderState) -> list[BatchDraw]:
        """The micro-batches of `state.step`; moves the state to the next step."""
        self._enter_stage(state)
        at = bisect_left(self.resized, state.step, key=_from_step)
        if at < len(self.resized) and self.resized[at].from_step == state.step:
            self._regroup(state)
        stage = self.stages[state.stage]
        while len(state.ready) < stage.items_per_step:
            self._draw(state, stage)
        micros, state.ready = state.ready[: stage.items_per_step], state.ready[stage.items_per_step :]
        state.step += 1
        return micros

    # drawing

    def _draw(self, state: OrderState, stage: Stage) -> None:
        if state.mark_is_due:
            state.marks = [*state.marks[1 - MARKS_KEPT :], SourceMark.of(state)]
        draw, bucket = self._next_draw(state, stage)
        self._enqueue(state, bucket, draw)
        self._emit_overdue(state, stage)

    def _next_draw(self, state: OrderState, stage: Stage) -> tuple[SampleDraw, Bucket]:
        """The next row that a bucket takes; moves the sources, knows nothing of queues."""
        source = self._next_source(state, stage)
        cursor = state.cursors[source]
        while True:
            epoch, row = self._rows.next(source, cursor)
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

    def _bucket(self, stage: Stage, shape: int, source: int, epoch: int, row: int) -> Bucket | None:
        choices = stage.choices[shape]
        if len(choices) == 1 and choices[0].keep >= 1:
            return choices[0].bucket
        return pick(choices, lambda use: uniform(self.seed, source, epoch, row, BUCKET + use))

    # batching

    def _enqueue(self, state: OrderState, bucket: Bucket, draw: SampleDraw) -> None:
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
                self._enqueue(state, bucket, draw)
        self._enter_stage(state)

    # position

    def parts(self, stage: int) -> dict[str, str]:
        """Hashes of what the plan depends on while it is in a stage: this one and those before it. Later ones may still
        be edited, and so may the end of this one."""
        if stage not in self._parts:
            stages = self._hash_of_stages([*self.stages[:stage], replace(self.stages[stage], until_step=0)])
            self._parts[stage] = {"seed": digest(self.seed), "buckets": stages, **self.identity}
        return self._parts[stage]

    @staticmethod
    def _hash_of_stages(stages: Sequence[Stage]) -> str:
        return digest(
            [
                [
                    s.until_step,
                    sorted((str(bucket), size) for bucket, size in s.batch.items()),
                    s.weights,
                    s.items_per_step,
                    s.max_wait,
                    s.by_tokens,
                    s.settings,
                ]
                for s in stages
            ]
        )

    def token(self, state: OrderState) -> DataToken:
        """The position as JSON of a few kB, however many rows wait and however often sizes were decided."""
        token: DataToken = {
            "v": TOKEN_VERSION,
            "step": state.step,
            "stage": state.stage,
            "drawn": state.drawn,
            "passed": state.passed,
            "plan": self.parts(state.stage),
            **body_of(state, self._buckets(state.stage)),
        }
        if needed := self._needed(state):
            token["resized"] = [one.to_json() for one in needed]
        return token

    def _needed(self, state: OrderState) -> list[BatchSizes]:
        """Decisions on which the batches of a position's future depend: what holds at it, and the next ones. A run
        that has gone back may know many more, which its folder has."""
        before = bisect_left(self.resized, state.step, key=_from_step)
        latest = self._latest(state.stage, before)
        return [*([latest] if latest is not None else []), *self.resized[before : before + LATER_SIZES]]

    def restore(self, token: DataToken) -> OrderState:
        """The state a token was made from. Raises DataError, naming what differs, when this is not its plan."""
        if token.get("v") != TOKEN_VERSION:
            raise DataError(f"resume token of version {token.get('v')!r}; this program reads {TOKEN_VERSION}.")
        if token["stage"] >= len(self.stages):
            raise DataError(
                f"the resume token stands in segment {token['stage'] + 1}, data.segments has "
                f"{len(self.stages)}. Restore the segments of the run."
            )
        if changed := self._changed_since(token):
            raise DataError(
                f"the resume token of step {token['step']} was made with other data settings: "
                f"{', '.join(changed)} changed since.{_why(changed)} {_ways_on(token['step'], changed)}"
            )
        stage = self.stages[token["stage"]]
        if 0 < stage.until_step < token["step"]:
            raise DataError(
                f"data.segments ends segment {token['stage'] + 1} at step {stage.until_step}, and the run has "
                f"{token['step']} steps of it or of those before: set its until_step to {token['step']} or more."
            )
        self.adopt(BatchSizes.from_json(record) for record in token.get("resized", ()))
        return state_of(token, self._buckets(token["stage"]), lambda state: self._next_draw(state, stage))

    def _changed_since(self, token: DataToken) -> list[str]:
        """Names of what the plan of a token depended on and is other here."""
        ours, theirs, upto = self.parts(token["stage"]), token["plan"], self.stages[: token["stage"] + 1]
        changed = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if "buckets" in changed and theirs.get("buckets") == self._hash_of_stages(upto):
            changed.remove("buckets")  # of a version that hashed the end of the stage, too
        return changed

    def _buckets(self, stage: int) -> list[Bucket]:
        return sorted(self.stages[stage].batch)


_from_step = attrgetter("from_step")  # of a decision


def _ways_on(step: int, changed: Sequence[str]) -> str:
    """What a person can do whose data is not what a run was trained on up to this step."""
    begin = "begin a new run with what this one has learned (train.init_from)"
    if list(changed) == ["buckets"]:
        return (
            f"Restore them, and let data.segments change buckets, batches, items_per_step and weights of sources from "
            f"here on: end the present segment with until_step: {step} and append another; or {begin}."
        )
    if list(changed) == ["index"]:
        return f"Restore the files, resume with the version of Heddle that has trained so far, or {begin}."
    return f"Restore them, or {begin}."


def _why(changed: Sequence[str]) -> str:
    """A sentence on what a person may not have changed; "" where settings are other ones."""
    if list(changed) != ["index"]:
        return ""
    return (
        " The index lists every sample: files of the sources are other ones, or settings that decide which samples "
        "there are (data.limits, caption, media), or this version of Heddle reads the same ones otherwise (CHANGELOG)."
    )


def _chairman(weights: Sequence[float], drawn: Sequence[int], sources: Sequence[int]) -> int:
    """Tijdeman's chairman assignment (1980): after every draw each source is less than one draw off its share.

    Among the sources that may be served without running ahead, the one whose deadline comes first.
    """
    count, turn = len(weights), sum(drawn) + 1
    slack = 1 / (2 * count - 2)
    owed = [weight * turn - taken for weight, taken in zip(weights, drawn)]
    may = [i for i in range(count) if owed[i] >= slack - 1e-9] or range(count)
    return sources[min(may, key=lambda i: ((1 - slack - owed[i]) / weights[i], i))]


def digest(value: object) -> str:
    """12 hex digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
