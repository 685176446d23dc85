"""Turns planned cascades into calls on workers. Pure: no Ray, no clock.

Example: a VAE cascade on worker 2 feeds a DiT cascade on workers (2, 3). Worker 2 keeps the latents, nothing is
published; the DiT call on both ranks says that rank 0 of the bag holds them, and the bag's group carries the chunk of
worker 3. Had the DiT run on (0, 1), worker 2 would publish and both calls would name its result as an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.messages import STORE, CascadeTask, FinishTask, Piece, SampleId, StepSample, SumStart
from actors.plan.types import Cascade, Module
from actors.step import StepSamples

ENCODERS: tuple[Module, ...] = ("text", "vae")
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
    steps: Mapping[int, StepSamples],
    generation: int,
    current: int,
    holdings: Holdings,
    left: Container[int] = (),
) -> list[Call]:
    """Calls of one dispatch, in plan order; updates `holdings`. `current` is the step of its DiT cascades, `left` has
    the positions of cascades that close their bag as they end."""
    end_s = end_of(cascades, current)
    consumer = {s.id: tuple(sorted(c.workers)) for c in cascades if c.module == "dit" for s in _samples(c, steps)}
    calls: list[Call] = []
    for position, cascade in enumerate(cascades):
        made = (
            _dit_calls(cascade, steps, generation, holdings)
            if cascade.module == "dit"
            else _encode_calls(cascade, steps, generation, consumer, holdings)
        )
        outlasts = cascade.step > current and cascade.end_s > end_s + _SAME_S
        if outlasts or position in left:
            made = [replace(c, task=replace(c.task, leave=position in left, outlasts=outlasts)) for c in made]
        calls += made
    return _with_sum_starts(calls)


def end_of(cascades: Sequence[Cascade], step: int) -> float:
    """When the step's last DiT cascade ends by the plan, or its last cascade where it has no DiT."""
    own = [c for c in cascades if c.step == step]
    return max((c.end_s for c in own if c.module == "dit"), default=max((c.end_s for c in own), default=0.0))


def finish_of(
    rank: int, calls: Sequence[Call], generation: int, step: int, export: bool, before: Sequence[Call] = ()
) -> FinishTask:
    """The end of a step on one worker: it names every call of the dispatch that this worker must have run, but not an
    encode that outlasts the step. `before` are those that have outlasted the step before."""
    mine = [call.task for call in before if call.rank == rank]
    mine += [call.task for call in calls if call.rank == rank and not call.task.outlasts]
    led = [task for task in mine if task.module == "dit" and task.bag[0] == rank]
    return FinishTask(
        generation=generation,
        step=step,
        export=export,
        cascades=tuple(task.cascade for task in mine),
        weight=sum(sample.weight for task in led for sample in task.samples),
    )


def _with_sum_starts(calls: Sequence[Call]) -> list[Call]:
    """The calls with the place where each worker starts its gradient sum: as soon as it adds nothing more to it.

    A cascade of one worker may start buckets inside its backward. Once a worker has started them it joins no bag before
    the end of the step: all its bag collectives are launched before its buckets, on every worker (see
    ops.gradient_sum). Workers without a call start at the end of the step, which is at once. An encode that outlasts
    the step has its collectives after it.
    """
    starts: dict[int, tuple[int, SumStart]] = {}
    for position, call in enumerate(calls):
        if call.task.outlasts:
            continue
        starts.setdefault(call.rank, (position, SumStart.BEFORE))
        if len(call.task.bag) > 1:
            starts[call.rank] = (position, SumStart.AFTER)
        elif call.task.module == "dit":
            starts[call.rank] = (position, SumStart.DURING)
    marked = list(calls)
    for position, start in starts.values():
        marked[position] = replace(marked[position], task=replace(marked[position].task, start_sum=start))
    return marked


def _samples(cascade: Cascade, steps: Mapping[int, StepSamples]) -> tuple[StepSample, ...]:
    of_item = steps[cascade.step].samples
    return tuple(s for part in cascade.parts for s in of_item[part.item][part.first : part.first + part.count])


def _encode_calls(
    cascade: Cascade,
    steps: Mapping[int, StepSamples],
    generation: int,
    consumer: Mapping[SampleId, tuple[int, ...]],
    holdings: Holdings,
) -> list[Call]:
    bag, samples, module = tuple(sorted(cascade.workers)), _samples(cascade, steps), cascade.module
    publish: list[int] = []
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
    items = tuple(dict.fromkeys(s.item for s in samples))
    return [
        Call(
            rank=rank,
            items=items,
            task=_task(
                cascade,
                steps,
                generation,
                samples,
                bag,
                keep=tuple(keeps[rank]),
                publish=tuple(publish) if rank == bag[0] else (),
            ),
        )
        for rank in bag
    ]


def _dit_calls(cascade: Cascade, steps: Mapping[int, StepSamples], generation: int, holdings: Holdings) -> list[Call]:
    bag, samples = tuple(sorted(cascade.workers)), _samples(cascade, steps)
    sources: dict[str, tuple[int, ...]] = {}
    needs: dict[str, None] = {}
    for module in ENCODERS:
        found = []
        for sample in samples:
            inside = [rank for rank in holdings.kept.get((module, sample.id), ()) if rank in bag]
            if inside:
                found.append(bag.index(inside[0]))
            else:
                needs[holdings.published[module, sample.id]] = None
                found.append(STORE)
        sources[module] = tuple(found)
    return [
        Call(rank=rank, needs=tuple(needs), task=_task(cascade, steps, generation, samples, bag, sources=sources))
        for rank in bag
    ]


def _task(
    cascade: Cascade,
    steps: Mapping[int, StepSamples],
    generation: int,
    samples: tuple[StepSample, ...],
    bag: tuple[int, ...],
    *,
    sources: dict[str, tuple[int, ...]] | None = None,
    keep: tuple[int, ...] = (),
    publish: tuple[int, ...] = (),
) -> CascadeTask:
    buckets = steps[cascade.step].buckets
    batches = Counter(s.item for s in samples)
    pieces = tuple(Piece(item=item, bucket=buckets[item], batch=batch) for item, batch in batches.items())
    frames, height, width = pieces[0].bucket
    packed = "" if len(pieces) == 1 else "+"
    name = f"{cascade.module} {frames}f{packed} {height}x{width} b{len(samples)} sp{len(bag)} s{cascade.step}"
    return CascadeTask(
        generation=generation,
        step=cascade.step,
        cascade=cascade.id,
        name=name,
        module=cascade.module,
        bag=bag,
        samples=samples,
        pieces=pieces,
        planned_start_s=cascade.start_s,
        planned_end_s=cascade.end_s,
        sources=sources or {},
        keep=keep,
        publish=publish,
    )
