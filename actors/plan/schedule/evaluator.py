"""The one evaluator: start and end of every cascade from order, degrees, workers and predecessors.

Every strategy, `heddle plan` and the runtime's predicted timeline use these rules:
a worker does one thing at a time, in list order; a dit cascade starts after the encodes of its samples (plus the
handoff, if its bag holds none of their workers) and after the last dit cascade of the step before (the update barrier);
encode cascades of any step start as soon as their workers are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import Topology
from actors.plan.types import Cascade, Cluster, EarlyEncode, Item, PlanError

ItemKey = tuple[int, str]  # step, item id: ids need to be unique within a step only


def index_items(steps: Sequence[Sequence[Item]], first_step: int = 0) -> dict[ItemKey, Item]:
    """Items by (step, id). Raises PlanError when an id occurs twice in a step."""
    items: dict[ItemKey, Item] = {}
    for number, step in enumerate(steps, first_step):
        for item in step:
            if (number, item.id) in items:
                raise PlanError(f"step {number}: item {item.id!r} occurs twice. Give every item of a step its own id.")
            items[number, item.id] = item
    return items


def done_results(done: Sequence[EarlyEncode], items: Mapping[ItemKey, Item]) -> list[tuple[ItemKey, EarlyEncode]]:
    """The first item of each finished encode's id; results of items that are not planned are left out."""
    first: dict[str, ItemKey] = {}
    for key in items:
        first.setdefault(key[1], key)
    return [(first[result.item], result) for result in done if result.item in first]


def cascade_seconds(cascade: Cascade, items: Mapping[ItemKey, Item], profile: Profile, topology: Topology) -> float:
    """Predicted duration: the parts' price at this degree times the factor of the bag.

    Equal-shaped parts are priced as one batch; unequal ones (a knapsack bag) run one after the other.
    """
    shapes: dict[tuple[int, int, int], tuple[int, float]] = {}
    for part in cascade.parts:
        item = items[cascade.step, part.item]
        count, text = shapes.get((item.frames, item.height, item.width), (0, 0.0))
        shapes[item.frames, item.height, item.width] = (count + part.count, text + part.count * item.text_tokens)
    seconds = sum(
        profile.seconds(cascade.module, count, *shape, cascade.degree, round(text / count))
        for shape, (count, text) in shapes.items()
    )
    return seconds * topology.factor(cascade.workers)


def simulate(
    order: Iterable[Cascade],
    steps: Sequence[Sequence[Item]],
    profile: Profile,
    cluster: Cluster,
    *,
    first_step: int = 0,
    done: Sequence[EarlyEncode] = (),
    topology: Topology | None = None,
) -> list[Cascade]:
    """Time cascades in list order; their own start_s and end_s are ignored. Starts are as early as the rules allow."""
    topology = topology or Topology(cluster, profile.cross_node)
    items = index_items(steps, first_step)
    free = [0.0] * topology.num_workers
    encoded: dict[tuple[ItemKey, int], list[tuple[float, tuple[int, ...]]]] = {}
    for key, result in done_results(done, items):
        for sample in range(items[key].batch):
            encoded.setdefault((key, sample), []).append((0.0, result.workers))
    step_end: dict[int, float] = {}
    timed = []
    for cascade in order:
        start = max(free[worker] for worker in cascade.workers)
        if cascade.module == "dit":
            start = max([start] + [end for step, end in step_end.items() if step < cascade.step])
            bag = set(cascade.workers)
            for part in cascade.parts:
                key = (cascade.step, part.item)
                for sample in range(part.first, part.first + part.count):
                    for end, workers in encoded.get((key, sample), ()):
                        start = max(start, end + handoff_seconds(bag, workers, items[key], part.count, profile))
        end = start + cascade_seconds(cascade, items, profile, topology)
        for worker in cascade.workers:
            free[worker] = end
        if cascade.module == "dit":
            step_end[cascade.step] = max(step_end.get(cascade.step, 0.0), end)
        else:
            for part in cascade.parts:
                for sample in range(part.first, part.first + part.count):
                    encoded.setdefault(((cascade.step, part.item), sample), []).append((end, cascade.workers))
        timed.append(replace(cascade, start_s=start, end_s=end))
    return timed


def handoff_seconds(bag: set[int], producers: Sequence[int], item: Item, count: int, profile: Profile) -> float:
    """Zero in place, that is when the bag holds a worker of the producer; else the profile's transfer time."""
    if not bag.isdisjoint(producers):
        return 0.0
    return profile.handoff_seconds(count, item.frames, item.height, item.width)
