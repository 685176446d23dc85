"""Lower bounds: seconds that no legal plan goes below whose encodes are of one item each, as all strategies make them.

Where a profile extrapolates, samples of a step share DiT cascades in any way. A pack launches its kernels once and
copies fetched weights once, so what a part adds to it counts for every sample, and launches once for every expert.
Example: clips of 3 s and 2 s on one worker, launches of 0.5 s in each: 4.5 s, however they are planned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.plan.costs.point import Samples
from actors.plan.schedule.problem import ItemKey, Problem
from actors.plan.types import ENCODED, MODULES, Item, Module
from ops.geometry import PixelShape

FEW = 8  # up to which every number of samples of one shape in a cascade is priced
PIECES = 16  # of a batch, that are priced


def step_bound(problem: Problem, step: int, modules: Sequence[Module]) -> float:
    """Seconds that a step needs at least when its work in `modules` runs within it."""
    area, paths = _least(problem, step, modules)
    return max(area / sum(problem.topology.speed), max(paths, default=0.0))


def rolling_bound(problem: Problem) -> float:
    """Mean seconds per step that any plan of the whole horizon needs at least: all work shared by all workers, or the
    sum of what every step needs by itself. Windows of steps do not overlap, as no DiT cascade begins before the last
    one of the step before has ended, and the last window ends after all encodes that its step waits for."""
    count = max(len(problem.numbers), 1)
    apart = sum(step_bound(problem, number, within(problem, number)) for number in problem.numbers)
    area = sum(_least(problem, number, MODULES)[0] for number in problem.numbers)
    return max(area / sum(problem.topology.speed), apart) / count


def within(problem: Problem, step: int) -> tuple[Module, ...]:
    """What a step has to run within its window: encodes of later steps may run before it."""
    return MODULES if step == problem.first_step else ("dit",)


def _least(problem: Problem, step: int, modules: Sequence[Module]) -> tuple[float, list[float]]:
    """(fewest GPU-seconds of a step's work in `modules`, quickest seconds from encode to dit of each item)."""
    keys = [key for key in problem.items if key[0] == step]
    encode = dict.fromkeys(keys, 0.0)
    total = 0.0
    for key in keys:
        for module in ENCODED:
            if module in modules and problem.needs(key, module):
                area, quick = _alone(problem, key, module)
                total += area
                encode[key] = max(encode[key], quick)
    dit = dict.fromkeys(keys, 0.0)
    if "dit" in modules:
        wanted = [key for key in keys if problem.needs(key, "dit")]
        if problem.profile.extrapolate:
            total += _packed(problem, wanted, dit)
        else:
            for key in wanted:
                area, dit[key] = _alone(problem, key, "dit")
                total += area
    return total, [encode[key] + dit[key] for key in keys]


def _alone(problem: Problem, key: ItemKey, module: Module) -> tuple[float, float]:
    """(fewest GPU-seconds, quickest seconds) of cascades of this item alone: as `Problem.cheapest`, or one sample each,
    however many there are."""
    item, (area, quick) = problem.items[key], problem.cheapest(key, module)
    one = problem.modes_at_best(module, item, 1) if problem.options.split else []
    if not one:
        return area, quick
    return (
        min(area, item.batch * min(k * s for k, s in one)),
        min(quick, min(s for _, s in one) / max(problem.topology.speed)),
    )


@dataclass(frozen=True, slots=True)
class _Added:
    """What samples of one shape add at least to cascades that they share with any others."""

    area: float  # GPU-seconds of all of them, without what a cascade has once
    once: float  # GPU-seconds that a cascade with some of them has once


def _packed(problem: Problem, keys: Sequence[ItemKey], quickest: dict[ItemKey, float]) -> float:
    """Fewest GPU-seconds of DiT cascades that these items share in any way; fills in the quickest seconds of each."""
    alike: dict[tuple[int, PixelShape], list[ItemKey]] = {}
    for key in keys:
        item = problem.items[key]
        alike.setdefault((item.expert, item.shape), []).append(key)
    total, once = 0.0, dict[int, float]()
    for (expert, _), group in alike.items():
        items = [problem.items[key] for key in group]
        counts = _counts(problem, items)
        added = _added(problem, items, counts)
        total += added.area
        once[expert] = max(once.get(expert, 0.0), added.once)
        least = _quickest(problem, items, counts)  # no pack is quicker than its dearest part
        quickest.update(dict.fromkeys(group, least if least < math.inf else 0.0))
    return total + sum(once.values())


def _counts(problem: Problem, items: Sequence[Item]) -> list[int]:
    """Samples of one shape that a cascade may have, as far as they are priced here: every number that is small or was
    measured, the most that memory allows, and those of near-equal pieces. Of others a model's seconds for a sample lie
    between theirs, but for the noise of what ran."""
    whole = sum(item.batch for item in items)
    counts = {*range(1, min(whole, FEW) + 1), whole, *problem.profile.known_counts("dit", items[0].shape)}
    for item in items:
        counts |= {item.batch // pieces for pieces in range(1, min(item.batch, PIECES) + 1)}
    lightest = min(items, key=lambda item: item.text_tokens)
    fit = {degree for degree, _ in problem.modes("dit", lightest, whole)}
    for degree in problem.profile.candidate_degrees("dit"):
        if degree not in fit and degree <= problem.cluster.num_workers:
            counts.add(_most(problem, lightest, degree, whole))
    least = 1 if problem.options.split else min(item.batch for item in items)
    return sorted(count for count in counts if least <= count <= whole)


def _most(problem: Problem, item: Item, degree: int, whole: int) -> int:
    """Most samples, fewer than `whole`, that memory allows in a cascade of this degree; 0: none."""
    few, many = 0, whole - 1
    while few < many:
        count = (few + many + 1) // 2
        by_memory = problem.profile.modes("dit", Samples.of_item(item, count), problem.room_gib)
        if any(one == degree for one, _ in by_memory):
            few = count
        else:
            many = count - 1
    return few


def _added(problem: Problem, items: Sequence[Item], counts: Sequence[int]) -> _Added:
    """What items of one shape add."""
    waits = problem.profile.fetched.num_bytes > 0
    areas, launches = [], []
    for one in _as_shared(items):
        for count in counts:
            for degree, seconds in problem.modes_at_best("dit", one, count):
                again = problem.once_at_best(one, count, degree)
                areas.append(degree * (seconds - again) / count)
                launches.append(0.0 if waits else degree * again)  # what others compute may hide a wait for copies
    whole = sum(item.batch for item in items)
    return _Added(whole * min(areas, default=0.0), min(launches, default=0.0))


def _quickest(problem: Problem, items: Sequence[Item], counts: Sequence[int]) -> float:
    """Seconds of the quickest cascade of items of one shape, of any of these counts; infinite where none is legal."""
    shared = _as_shared(items)  # at most four, where each of a thousand items has a text of its own
    offered = (mode for item in shared for count in counts for mode in problem.modes_at_best("dit", item, count))
    return min((seconds for _, seconds in offered), default=math.inf) / max(problem.topology.speed)


def _as_shared(items: Sequence[Item]) -> list[Item]:
    """Items of one shape as they may cost least in cascades that they share, where each has the mean of their text:
    with the least of them mostly, with more of it where a run's noise has made that quicker, and with one token instead
    of none, as 0 is what is not known."""
    texts = {item.text_tokens for item in items}
    if len(texts) > 1:
        least, most = min(texts), max(texts)
        mean = sum(item.batch * item.text_tokens for item in items) / sum(item.batch for item in items)
        texts = {least, max(least, 1), round(mean), most}
    return [replace(items[0], text_tokens=text) for text in sorted(texts)]
