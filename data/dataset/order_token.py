"""A position of the order as JSON of a few kB, however many rows wait.

Few waiting rows are listed. For many, the token says from where to draw again and how many of each bucket still wait:
rows leave a bucket in the order they came, so the waiting ones are the last of those draws.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict

from data.dataset.order_state import BatchDraw, Cursor, OrderState, SampleDraw, SizesRecord, SourceMark
from data.ledger import DrawsRecord
from data.types import Bucket

TOKEN_VERSION = 2
PACK_ABOVE_BYTES = 2048  # a longer token is compressed
LISTED_MOST = 256  # most waiting rows that a token lists; if there are more, a restore draws them again

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


DrawNext = Callable[[OrderState], tuple[SampleDraw, Bucket]]
"""The next row that a bucket of the state's stage takes; moves the sources alone."""


def body_of(state: OrderState, buckets: Sequence[Bucket]) -> TokenBody:
    """Sources and waiting rows of a state whose stage has these buckets, sorted."""
    body: TokenBody = {"cursors": _plain(state.cursors)}
    if state.waiting > LISTED_MOST:
        body.update(_counts(state, buckets))
    else:
        body["queues"] = {str(bucket): _columns(queue) for bucket, queue in state.queues.items()}
        body["ready"] = [[str(micro.bucket), _columns(micro.draws)] for micro in state.ready]
    text = json.dumps(body, separators=(",", ":"))
    if len(text) > PACK_ABOVE_BYTES:
        body = {"packed": base64.b85encode(zlib.compress(text.encode(), 9)).decode()}
    return body


def state_of(token: DataToken, buckets: Sequence[Bucket], draw_next: DrawNext) -> OrderState:
    """The state that a token was made from; `buckets` as `body_of`."""
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
        _draw_again(state, body, buckets, draw_next)
    else:
        state.marks = [SourceMark.of(state)]
        state.queues = {Bucket.parse(name): _draws(rows) for name, rows in body["queues"].items()}
        for name, rows in body["ready"]:
            assert isinstance(name, str) and isinstance(rows, list), "queues that are listed, batches that are not"
            state.ready.append(BatchDraw(Bucket.parse(name), tuple(_draws(rows))))
    return state


def _counts(state: OrderState, buckets: Sequence[Bucket]) -> TokenBody:
    """Waiting rows as numbers to draw again. Rows older than every mark (they waited long, or come from the stage
    before) are listed. `ready` counts the rows of each finished batch; all other rows wait in the queues."""
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


def _draw_again(state: OrderState, body: TokenBody, buckets: Sequence[Bucket], draw_next: DrawNext) -> None:
    """Fill the queues of a state from `_counts`."""
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
    last = {bucket: deque[SampleDraw](maxlen=count) for bucket, count in zip(buckets, body["again"])}
    while then.drawn < state.drawn:
        if then.mark_is_due:
            then.marks.append(SourceMark.of(then))
        draw, bucket = draw_next(then)
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
