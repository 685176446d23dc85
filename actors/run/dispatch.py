"""Turns planned cascades into calls on workers. Pure: no Ray, no clock.

Example: a VAE cascade on worker 2 feeds a DiT cascade on workers (2, 3). Worker 2 keeps the latents, nothing is
published; the DiT call on both ranks says that rank 0 of the bag holds them, and the bag's group carries the chunk of
worker 3. Had the DiT run on (0, 1), worker 2 would publish and both calls would name its result as an argument.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.messages import (
    STORE,
    CascadeShape,
    CascadeTask,
    FinishTask,
    Piece,
    SampleId,
    StepSample,
    SumStart,
    shapes_of,
)
from actors.plan.types import ENCODED, Cascade, Module
from actors.step import StepItem, StepItems
from ops.spatial_temporal.choice import SliceRates
from ops.waiting import Patience

_SAME_S = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One actor call: `needs` are cascades whose published results are passed, `items` those whose batch is passed."""

    rank: int
    task: CascadeTask
    needs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Holdings:
    """Where encode results of coming DiT cascades are: ranks that keep them, and the cascade that published them."""

    kept: dict[tuple[Module, SampleId], tuple[int, ...]] = field(default_factory=dict)
    published: dict[tuple[Module, SampleId], str] = field(default_factory=dict)

    def drop_before(self, step: int) -> None:
        self.kept = {key: value for key, value in self.kept.items() if key[1][0] >= step}
        self.published = {key: value for key, value in self.published.items() if key[1][0] >= step}


def calls_of(
    cascades: Sequence[Cascade],
    steps: Mapping[int, StepItems],
    generation: int,
    current: int,
    holdings: Holdings,
    left: Container[int] = (),
    patience: Patience | None = None,
    rates: SliceRates | None = None,
) -> list[Call]:
    """Calls of one dispatch, in plan order; updates `holdings`. `current` is the step of its DiT cascades, `left` has
    the positions of cascades that close their bag as they end; `patience` and `rates` are for all of them.

    Members of a bag that do the same share one task: a dispatch to a thousand workers makes one per bag.
    """
    end_s = end_of(cascades, current)
    consumer = {s.id: tuple(sorted(c.workers)) for c in cascades if c.module == "dit" for s in _samples(c, steps)}
    outlasting = {n for n, c in enumerate(cascades) if c.step > current and c.end_s > end_s + _SAME_S}
    starts = _sum_starts(cascades, outlasting, current)
    calls: list[Call] = []
    for position, cascade in enumerate(cascades):
        bag, samples = tuple(sorted(cascade.workers)), _samples(cascade, steps)
        places = (
            _gathered(bag, samples, holdings)
            if cascade.module == "dit"
            else _delivered(cascade, bag, samples, consumer, holdings)
        )
        task = replace(
            _task_of(cascade, steps, bag, samples, generation),
            sources=places.sources,
            leave=position in left,
            outlasts=position in outlasting,
            patience=patience,
            rates=rates,
        )
        made: dict[object, CascadeTask] = {}
        for rank in bag:
            start = starts.get((position, rank), SumStart.NEVER)
            keep, publish = places.keep.get(rank, ()), places.publish if rank == bag[0] else ()
            if (own := (start, keep, publish)) not in made:
                made[own] = replace(task, start_sum=start, keep=keep, publish=publish)
            calls.append(Call(rank=rank, task=made[own], needs=places.needs, items=places.items))
    return calls


def shapes_of_bags(
    cascades: Sequence[Cascade], steps: Mapping[int, StepItems]
) -> list[tuple[tuple[int, ...], set[CascadeShape]]]:
    """(ranks, shapes) of every cascade of a dispatch: some may run there for the first time."""
    found = []
    for c in cascades:
        pieces = _pieces(c, steps[c.step].items)
        found.append((c.workers, shapes_of(c.module, pieces, len(c.workers))))
    return found


def end_of(cascades: Sequence[Cascade], step: int) -> float:
    """When the step's last DiT cascade ends by the plan, or its last cascade where it has no DiT."""
    own = [c for c in cascades if c.step == step]
    return max((c.end_s for c in own if c.module == "dit"), default=max((c.end_s for c in own), default=0.0))


def finish_of(
    rank: int,
    calls: Sequence[Call],
    generation: int,
    step: int,
    export: bool,
    before: Sequence[Call] = (),
    patience: Patience | None = None,
) -> FinishTask:
    """The end of a step on one worker: it names every call of the dispatch that this worker must have run, but not an
    encode that outlasts the step. `before` are the encodes that have outlasted the step before."""
    mine = [call.task for call in before if call.rank == rank]
    mine += [call.task for call in calls if call.rank == rank and not call.task.outlasts]
    led = [task for task in mine if task.module == "dit" and task.bag[0] == rank]
    return FinishTask(
        generation=generation,
        step=step,
        export=export,
        cascades=tuple(task.cascade for task in mine),
        weight=sum(sample.weight for task in led for sample in task.samples),
        patience=patience,
    )


def _sum_starts(
    cascades: Sequence[Cascade], outlasting: Container[int], current: int
) -> dict[tuple[int, int], SumStart]:
    """The start of each worker's gradient sum, by (position of the cascade, rank): as soon as it adds nothing more.
    `outlasting` are the positions of encodes that outlast the step, `current`.

    A cascade of one worker may start buckets inside its backward. Once a worker has started them it joins no bag before
    the end of the step: all its bag collectives are launched before its buckets, on every worker (see
    ops.update.own_gradients). Workers without a call start at the end of the step, which is at once. An encode that
    outlasts the step has its collectives after it. Where another worker's DiT cascade of this step waits for an encode,
    the sum cannot end before it, and starts after it: on a GPU a sum that waits takes multiprocessors from the encode,
    and what waits in there for the whole device would never end.
    """
    starts: dict[int, tuple[int, SumStart]] = {}
    for position, cascade in enumerate(cascades):
        if position in outlasting:
            continue
        for rank in cascade.workers:
            starts.setdefault(rank, (position, SumStart.BEFORE))
            if len(cascade.workers) > 1:
                starts[rank] = (position, SumStart.AFTER)
            elif cascade.module == "dit":
                starts[rank] = (position, SumStart.DURING)
            elif cascade.step == current and starts[rank][1] != SumStart.BEFORE:
                starts[rank] = (position, SumStart.AFTER)
    return {(position, rank): start for rank, (position, start) in starts.items()}


def _samples(cascade: Cascade, steps: Mapping[int, StepItems]) -> tuple[StepSample, ...]:
    items = steps[cascade.step].items
    return tuple(s for part in cascade.parts for s in items[part.item].samples[part.first : part.first + part.count])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Where the results that a cascade makes or needs are: the fields of its calls and tasks of these names."""

    keep: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by rank
    publish: tuple[int, ...] = ()  # by the first rank
    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()


def _delivered(
    cascade: Cascade,
    bag: tuple[int, ...],
    samples: Sequence[StepSample],
    consumer: Mapping[SampleId, tuple[int, ...]],
    holdings: Holdings,
) -> _Places:
    """Places for an encode cascade. `consumer`: by sample, the ranks of the DiT cascade that needs its results."""
    module, publish = cascade.module, []
    keeps: dict[int, list[int]] = {rank: [] for rank in bag}
    for i, sample in enumerate(samples):
        users = consumer.get(sample.id)  # unknown when its DiT cascade is planned later: keep everywhere and publish
        overlap = bag if users is None else tuple(rank for rank in bag if rank in users)[:1]
        for rank in overlap:
            keeps[rank].append(i)
        if overlap:
            holdings.kept[module, sample.id] = overlap
        if users is None or not overlap:
            publish.append(i)
            holdings.published[module, sample.id] = cascade.id
    return _Places(
        keep={rank: tuple(kept) for rank, kept in keeps.items()},
        publish=tuple(publish),
        items=tuple(dict.fromkeys(s.item for s in samples)),
    )


def _gathered(bag: tuple[int, ...], samples: Sequence[StepSample], holdings: Holdings) -> _Places:
    """Places for a DiT cascade: results that its own ranks keep come first, published ones only where none is kept."""
    sources: dict[str, tuple[int, ...]] = {}
    needs: dict[str, None] = {}
    for module in ENCODED:
        found = []
        for sample in samples:
            inside = [rank for rank in holdings.kept.get((module, sample.id), ()) if rank in bag]
            if inside:
                found.append(bag.index(inside[0]))
            else:
                needs[holdings.published[module, sample.id]] = None
                found.append(STORE)
        sources[module] = tuple(found)
    return _Places(sources=sources, needs=tuple(needs))


def _task_of(
    cascade: Cascade,
    steps: Mapping[int, StepItems],
    bag: tuple[int, ...],
    samples: tuple[StepSample, ...],
    generation: int,
) -> CascadeTask:
    """The part of a cascade's task that is the same for all its ranks."""
    pieces = _pieces(cascade, steps[cascade.step].items)
    frames, height, width = pieces[0].bucket
    packed = "" if len(pieces) == 1 else "+"
    return CascadeTask(
        generation=generation,
        step=cascade.step,
        cascade=cascade.id,
        name=f"{cascade.module} {frames}f{packed} {height}x{width} b{len(samples)} sp{len(bag)} s{cascade.step}",
        module=cascade.module,
        bag=bag,
        samples=samples,
        pieces=pieces,
        planned_start_s=cascade.start_s,
        planned_end_s=cascade.end_s,
    )


def _pieces(cascade: Cascade, items: Mapping[str, StepItem]) -> tuple[Piece, ...]:
    """The cascade's samples by item, in order."""
    batches: dict[str, int] = {}
    for part in cascade.parts:
        batches[part.item] = batches.get(part.item, 0) + part.count
    return tuple(Piece(item=item, bucket=items[item].bucket, batch=batch) for item, batch in batches.items())
