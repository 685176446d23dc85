"""The machine of `heddle bench truth`: what its cascades, handoffs and ends of steps take, which Heddle does not know.

Its laws are not those that costs are fitted to. Products of matrices fill whole waves of tiles on 132 multiprocessors,
so few rows leave them half idle and a row more may cost a wave; attention fills them by heads and tiles of queries, and
slows down where keys no longer stay in the cache; a VAE pays for every tile, and more for a pixel of a long one;
small exchanges reach little bandwidth. Handoffs cross an object store, and a step has an end and a rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.messages import CascadeShape, Piece, Span, StepReport, shapes_of
from actors.plan.costs.point import Samples
from actors.plan.types import Cascade, Item, Module
from actors.planning.observations import samples_of
from ops.models.base.tiling import Tiling
from ops.models.wan.config import WanConfig

MODEL = WanConfig(
    num_layers=30, num_heads=12, head_dim=128, ffn_dim=8960, gradient_checkpointing=True, exchange="whole"
)  # its bags hide no exchange
TILING = Tiling(height=256, width=256, height_stride=192, width_stride=192)  # of its VAE
NODES = (4, 4)
SLOW_WORKER, SLOW_SPEED = 2, 0.6
LATE = 0.1
LAUNCHES = 0.03  # seconds of a training cascade however little it computes

_SMS, _TILE = 132, 128  # multiprocessors, and rows and columns of a tile of a product
_PASSES = 4.0  # forward, recomputed forward, backward of two products
_CACHE_ROWS = 24_000  # keys of a sequence that stay in the cache
_LATENT_BYTES = 64 / (4 * 8 * 8)  # of a pixel


def tokens_of(frames: int, height: int, width: int) -> int:
    """Video tokens of a clip."""
    return ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)


@dataclass
class Machine:
    """The hidden truth, and what its workers report."""

    rng: np.random.Generator
    noise: float = 0.04  # standard deviation of a cascade's logarithm
    late: float = LATE  # share of a bag's ranks that come late
    absurd: float = 0.003  # share of spans with an impossible timing
    nodes: tuple[int, ...] = NODES
    slow: int = SLOW_WORKER  # a worker that is slower; -1: none
    launches_s: float = LAUNCHES
    ran: set[tuple[int, CascadeShape]] = field(default_factory=set)  # by worker

    # -- laws --------------------------------------------------------------------------------------------------------

    def seconds(self, module: Module, parts: Sequence[Samples], workers: Sequence[int]) -> float:
        """Seconds of a cascade of these parts on these workers, without noise."""
        return self.normal(module, parts, len(workers), self.spans(workers)) / min(map(self.speed, workers))

    def speed(self, worker: int) -> float:
        """The speed of a worker, 1 for normal."""
        return SLOW_SPEED if worker == self.slow else 1.0

    def spans(self, workers: Sequence[int]) -> bool:
        """Whether a bag lies on several nodes."""
        return len({w // self.nodes[0] for w in workers}) > 1

    def normal(self, module: Module, parts: Sequence[Samples], degree: int, spanning: bool = False) -> float:
        """Seconds of a cascade on workers of normal speed, without noise."""
        if module == "text":
            captions = sum(part.count for part in parts)
            longest = max(part.text_tokens for part in parts)
            share = -(-captions // degree)
            return (
                0.004 + 2e-5 * share * longest + (degree > 1) * self.exchange(8e3 * share * longest, degree, spanning)
            )
        if module == "vae":
            return math.fsum(self._encoded(part, degree, spanning) for part in parts)
        return self._trained(parts, degree, spanning)

    def _encoded(self, part: Samples, degree: int, spanning: bool) -> float:
        """Seconds of a VAE cascade: the busiest member's tiles, and the latents that all members then get."""
        dealt = TILING.dealt(part.count, part.shape, degree)
        long = 1.12 if part.frames > 32 else 1.0
        alone = 0.012 + 0.0015 * dealt.count + 2.6e-9 * long * dealt.pixels
        latents = _LATENT_BYTES * part.count * part.frames * part.height * part.width
        return alone + (self.exchange(latents * (degree - 1) / degree, degree, spanning) if degree > 1 else 0.0)

    def _trained(self, parts: Sequence[Samples], degree: int, spanning: bool) -> float:
        d, layers = MODEL.dim, sum(MODEL.block_counts)
        lengths = [(part.count, tokens_of(*part.shape) + part.text_tokens) for part in parts]
        rows = sum(count * length for count, length in lengths) / degree
        wide, narrow = 2.0 * d * MODEL.ffn_dim, 8.0 * d * d + 2.0 * d * MODEL.ffn_dim  # FLOPs of a row, by outputs
        products = (in_waves(rows, MODEL.ffn_dim) * wide + in_waves(rows, d) * narrow) / 4.6e14
        attention = math.fsum(count * self._attended(length, degree) for count, length in lengths)
        compute = self.launches_s + _PASSES * layers * (products + attention)
        return compute + self.exchanged(parts, degree, spanning)

    def once(self, degree: int, spanning: bool = False) -> float:
        """Seconds of a training cascade of nothing: its launches, and exchanges that send nothing."""
        empty = self.exchange(0.0, degree, spanning) if degree > 1 else 0.0
        return self.launches_s + 16.0 * sum(MODEL.block_counts) * empty

    def exchanged(self, parts: Sequence[Samples], degree: int, spanning: bool) -> float:
        """Seconds of a training cascade in which a member of normal speed waits for the others' rows."""
        if degree == 1:
            return 0.0
        rows = sum(part.count * (tokens_of(*part.shape) + part.text_tokens) for part in parts) / degree
        sent = rows * MODEL.dim * 2 * (degree - 1) / degree  # bytes of one of four exchanges, in four passes
        return 16.0 * sum(MODEL.block_counts) * self.exchange(sent, degree, spanning)

    def _attended(self, length: int, degree: int) -> float:
        """Seconds of one layer's attention of one sequence: tiles of queries of the heads that a member has."""
        work = 4.0 * float(length) ** 2 * MODEL.dim / degree
        blocks = -(-length // _TILE) * MODEL.num_heads / degree
        filled = blocks / (-(-blocks // _SMS) * _SMS)
        cached = 1.0 + 0.25 * max(0.0, 1.0 - _CACHE_ROWS / length)
        return work * cached / filled / 5.2e14

    def exchange(self, sent: float, degree: int, spanning: bool = False) -> float:
        """Seconds of one all-to-all in which a member sends `sent` bytes; bandwidth grows with what goes to each
        peer."""
        half = 2**16 * (degree - 1)  # bytes at which half of the bandwidth is reached
        return 2e-5 * math.log2(degree) + (sent + half) / (4e10 if spanning else 1.6e11)

    def handoff(self, num_bytes: float, across: bool) -> float:
        """Seconds of a handoff of encode results, by the object store."""
        return (0.03 + num_bytes / 2.5e8) if across else (0.01 + num_bytes / 8e8)

    def end_of_step(self, workers: int, spanning: bool) -> float:
        """Gradient sum, update, new parameters."""
        return 0.05 + 0.6 / workers + (0.5 if spanning else 0.2) * (workers - 1) / workers

    def rest_of_step(self, calls: int) -> float:
        """Seconds beside cascades and the end, where a worker has `calls` calls."""
        return 0.02 + 0.004 * calls

    def measured(self, seconds: float) -> float:
        """The seconds with this machine's noise."""
        return seconds * math.exp(self.rng.normal(0, self.noise))

    # -- execution ---------------------------------------------------------------------------------------------------

    def execute(self, cascades: Sequence[Cascade], items: Sequence[Item], step: int) -> tuple[list[StepReport], float]:
        """(what the workers report, seconds of the step)."""
        by_id = {item.id: item for item in items}
        count = sum(self.nodes)
        state = _StepState(free=[0.0] * count, spans=[[] for _ in range(count)])
        for cascade in sorted(cascades, key=lambda c: c.start_s):
            self._run(cascade, by_id, state)
        end_s = self.measured(self.end_of_step(count, len(self.nodes) > 1))
        over, calls = max(state.free) + end_s, max(map(len, state.spans))
        for worker, of in enumerate(state.spans):
            ended = state.free[worker]
            of.append(Span(name="finish", module="finish", cascade="", step=step, start=ended, end=over, degree=count))
        reports = [_report(worker, step, tuple(of)) for worker, of in enumerate(state.spans)]
        return reports, over + self.rest_of_step(calls)

    def _run(self, cascade: Cascade, by_id: Mapping[str, Item], state: _StepState) -> None:
        pieces = tuple(Piece(item=p.item, bucket=by_id[p.item].shape, batch=p.count) for p in cascade.parts)
        parts = Samples.by_shape(samples_of(pieces, {item.id: item.text_tokens for item in by_id.values()}))
        work = self.measured(self.seconds(cascade.module, parts, cascade.workers))
        shapes = shapes_of(cascade.module, pieces, cascade.degree)
        first = {w: any((w, shape) not in self.ran for shape in shapes) for w in cascade.workers}
        if any(first.values()):
            work *= 4.0
        self.ran.update((w, shape) for w in cascade.workers for shape in shapes)
        inputs = self._inputs(cascade, state) if cascade.module == "dit" else _Inputs()
        idle = max(state.free[w] for w in cascade.workers) <= inputs.made
        came = {
            w: max(state.free[w], inputs.there)
            + (self.rng.exponential(0.5) * work if self.rng.random() < self.late else 0.0)
            for w in cascade.workers
        }
        met = max(came.values())
        exposed = self._exposed(cascade, parts, work)
        for worker in cascade.workers:
            told = work if self.rng.random() >= self.absurd else self.rng.choice([math.nan, -1.0, 1e9])
            state.spans[worker].append(
                Span(
                    name=cascade.id,
                    module=cascade.module,
                    cascade=cascade.id,
                    step=cascade.step,
                    start=came[worker],
                    end=met + work,
                    batch=cascade.batch,
                    degree=cascade.degree,
                    pieces=pieces,
                    planned_start_s=cascade.start_s,
                    planned_end_s=cascade.end_s,
                    bag=cascade.workers,
                    work_s=told,
                    wait_s=met - came[worker],
                    exposed_s=exposed[worker],
                    first_here=first[worker],
                    fetched_bytes=int(inputs.num_bytes),
                    fetch_s=inputs.there - inputs.made if inputs.num_bytes and idle else None,
                )
            )
            state.free[worker] = met + work
        if cascade.module != "dit":
            for part in cascade.parts:
                made = _Result(end=met + work, workers=cascade.workers, latents=cascade.module == "vae")
                state.results.setdefault(part.item, []).append(made)
            state.shapes.update({item: one.shape for item, one in by_id.items()})

    def _exposed(self, cascade: Cascade, parts: Sequence[Samples], work: float) -> dict[int, float]:
        """What each member waits for the others inside a cascade of `work` seconds."""
        if cascade.module != "dit" or cascade.degree == 1:
            return dict.fromkeys(cascade.workers, 0.0)
        degree, spanning = cascade.degree, self.spans(cascade.workers)
        computed = 1.0 - self.exchanged(parts, degree, spanning) / self.normal("dit", parts, degree, spanning)
        slowest = min(map(self.speed, cascade.workers))
        return {w: work * (1.0 - computed * slowest / self.speed(w)) for w in cascade.workers}

    def _inputs(self, cascade: Cascade, state: _StepState) -> _Inputs:
        """When all encode results of its samples are there, by the object store where its bag has not made them."""
        found = _Inputs()
        bag = set(cascade.workers)
        for part in cascade.parts:
            frames, height, width = state.shapes.get(part.item, (0, 0, 0))
            for result in state.results.get(part.item, ()):
                there = result.end
                if bag.isdisjoint(result.workers):
                    num_bytes = _LATENT_BYTES * part.count * frames * height * width if result.latents else 1e5
                    across = {w // self.nodes[0] for w in bag}.isdisjoint(w // self.nodes[0] for w in result.workers)
                    there += self.measured(self.handoff(num_bytes, across))
                    found.num_bytes += num_bytes
                    found.made = max(found.made, result.end)
                found.there = max(found.there, there)
        return found


@dataclass(frozen=True, slots=True)
class _Result:
    """Encodes of an item."""

    end: float
    workers: tuple[int, ...]
    latents: bool


@dataclass(slots=True)
class _Inputs:
    """Inputs of a DiT cascade: when they are there, what of them came by the store, and when that was made."""

    there: float = 0.0
    num_bytes: float = 0.0
    made: float = 0.0


@dataclass(slots=True)
class _StepState:
    """What has run so far in a step."""

    free: list[float]
    spans: list[list[Span]]
    results: dict[str, list[_Result]] = field(default_factory=dict)  # by item
    shapes: dict[str, tuple[int, int, int]] = field(default_factory=dict)


class EveryShape(set[tuple[int, CascadeShape]]):
    """Shapes that have all run before."""

    def __contains__(self, shape: object) -> bool:
        return True


def in_waves(rows: float, outputs: int) -> float:
    """Rows that a product with `outputs` outputs costs, in full waves of tiles: at least those that it has."""
    columns = -(-outputs // _TILE)
    tiles = math.ceil(rows / _TILE) * columns
    return max(rows, -(-tiles // _SMS) * _SMS * _TILE / columns)


def _report(worker: int, step: int, spans: tuple[Span, ...]) -> StepReport:
    return StepReport(
        worker=f"w{worker}",
        step=step,
        loss=0.0,
        weight=1.0,
        grad_norm=0.0,
        lr=0.0,
        applied=True,
        spans=spans,
        peak_memory_gib=0.0,
        rss_gib=0.0,
    )
