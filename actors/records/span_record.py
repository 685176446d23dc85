"""One line of timeline.jsonl: a stretch of work on one worker, as it was measured and as it was planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from actors.records.lines import line_of, parts_of, record_of

_LATER = ("need_gib", "work_s", "wait_s", "exposed_s")  # that the first versions did not write


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """The samples of one item inside a cascade; a packed cascade has several."""

    item: str
    bucket: tuple[int, int, int]
    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanRecord:
    """A span with its worker. `start` and `end` are unix seconds; planned times are seconds from `step_start`."""

    step: int  # of its samples, which may be later than the step during which it ran
    worker: str
    node: str
    name: str
    module: str  # text | vae | dit | finish
    cascade: str
    item: str
    bucket: tuple[int, int, int] | None  # None: of several, or no cascade
    pieces: tuple[PieceRecord, ...]  # empty in files of version 0.1, whose cascades are of one bucket
    batch: int
    degree: int
    start: float
    end: float
    planned_start_s: float
    planned_end_s: float
    step_start: float  # when the step began during which it ran
    generation: int
    phases: Mapping[str, float]  # seconds inside: handoff, forward, backward, reduce, ...
    handoff_bytes: int
    handoff_s: float
    need_gib: float | None = None  # memory that it took beside the states; None: nobody counted
    work_s: float | None = None  # apart from waiting for its bag and from the gradient sum; None: nobody measured it
    wait_s: float = 0.0  # for the others of its bag to come
    exposed_s: float = 0.0  # nothing was computed because the result of a collective was awaited

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def planned(self) -> tuple[float, float] | None:
        """Planned (start, end) in seconds from the start of the executing step; None for work that no plan lists."""
        if not self.planned_end_s > self.planned_start_s:  # also for NaN, which a missing key is
            return None
        return self.planned_start_s, self.planned_end_s

    def line(self) -> dict[str, object]:
        """The span's object in timeline.jsonl."""
        return next(lines_of([self]))


def lines_of(spans: Sequence[SpanRecord]) -> Iterator[dict[str, object]]:
    """Their objects in timeline.jsonl. The spans of a bag hold the same pieces, which are taken apart once: a step of a
    thousand workers has thousands of spans (4,096: 15 ms, each by itself 29)."""
    names, values = parts_of(SpanRecord)
    taken_apart: dict[int, list[dict[str, object]]] = {}  # by the id of a tuple, which `spans` keep alive
    for span in spans:
        line: dict[str, object] = dict(zip(names, values(span), strict=True))
        if (pieces := taken_apart.get(id(span.pieces))) is None:
            pieces = taken_apart[id(span.pieces)] = [line_of(piece) for piece in span.pieces]
        line["pieces"] = pieces
        for name in _LATER:
            if not line[name] and (name != "need_gib" or line[name] is None):
                del line[name]
        yield line


def span_of(line: Mapping[str, object]) -> SpanRecord:
    """An object of timeline.jsonl, of this or an earlier version. Raises RecordError for a value of the wrong type."""
    return record_of(SpanRecord, line)
