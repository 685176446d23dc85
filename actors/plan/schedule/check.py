"""The legality check, which every plan passes before it runs. It forgives rounding errors and nothing else.

Bags cannot wait for each other in a circle, whatever a plan says: all workers run their cascades in one order, by their
start, ties by their place in the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import Topology
from actors.plan.schedule.evaluator import cascade_seconds
from actors.plan.schedule.problem import ItemKey, busy_until, done_results, index_items
from actors.plan.types import Cascade, Cluster, EarlyEncode, Item, Plan, PlanError

TOLERANCE_S = 1e-6


def check(
    plan: Plan, steps: Sequence[Sequence[Item]], profile: Profile, cluster: Cluster, done: Sequence[EarlyEncode] = ()
) -> None:
    """Raise PlanError unless the plan runs every sample of every item once, legally, in the profile's durations."""
    topology = Topology(cluster, profile.cross_node)
    items = index_items(steps, plan.steps[0].step if plan.steps else 0)
    cascades = [cascade for step in plan.steps for cascade in step.cascades]
    _check_names(cascades)
    check_each(cascades, items, profile, topology)
    _check_coverage(cascades, items, profile, done)
    _check_exclusive(cascades, busy_until(done, cluster.num_workers))
    _check_predecessors(cascades, items, profile, done)
    _check_barriers(cascades)


def check_each(
    cascades: Sequence[Cascade], items: Mapping[ItemKey, Item], profile: Profile, topology: Topology
) -> None:
    """Raise PlanError unless every cascade is legal by itself: its workers, samples, degree, seconds and memory."""
    for cascade in cascades:
        _check_cascade(cascade, items, profile, topology)
        _check_memory(cascade, items, profile, topology.cluster.least_room_gib)


def _check_names(cascades: Sequence[Cascade]) -> None:
    """Results and calls are found by the ids of their cascades."""
    for (step, name), count in Counter((cascade.step, cascade.id) for cascade in cascades).items():
        if count > 1:
            raise PlanError(f"{count} cascades of step {step} are called {name}; each must have a name of its own.")


def _check_cascade(cascade: Cascade, items: Mapping[ItemKey, Item], profile: Profile, topology: Topology) -> None:
    name = f"cascade {cascade.id}"
    if len(set(cascade.workers)) != len(cascade.workers) or len(cascade.workers) != cascade.degree:
        raise PlanError(f"{name} has degree {cascade.degree} but workers {list(cascade.workers)}.")
    if any(not 0 <= worker < topology.num_workers for worker in cascade.workers):
        raise PlanError(f"{name} uses a worker outside 0..{topology.num_workers - 1}: {list(cascade.workers)}.")
    if not cascade.parts:
        raise PlanError(f"{name} has no samples.")
    for part in cascade.parts:
        item = items.get((cascade.step, part.item))
        if item is None or part.count < 1 or part.first < 0 or part.first + part.count > item.batch:
            raise PlanError(
                f"{name} runs samples {part.first}..{part.first + part.count - 1} of item {part.item!r}, "
                f"which do not exist."
            )
        samples, room_gib = Samples.of_item(item, part.count), topology.cluster.least_room_gib
        if len(cascade.parts) > 1 or (
            part.count == 1 and profile.may_try(cascade.module, samples, cascade.degree, room_gib)
        ):
            continue
        if cascade.degree not in profile.legal_degrees(cascade.module, samples):
            raise PlanError(
                f"{name}: degree {cascade.degree} is not legal for {cascade.module} of batch {part.count}, "
                f"{item.frames}f {item.height}x{item.width}."
            )
    experts = {items[cascade.step, part.item].expert for part in cascade.parts}
    if cascade.module == "dit" and len(experts) > 1:
        raise PlanError(f"{name} packs items of experts {sorted(experts)}; a dit cascade is of one expert.")
    expected = cascade_seconds(cascade, items, profile, topology)
    if abs(cascade.seconds - expected) > TOLERANCE_S * max(1.0, expected):
        raise PlanError(f"{name} lasts {cascade.seconds:.6f} s, the profile says {expected:.6f} s.")


def _check_memory(cascade: Cascade, items: Mapping[ItemKey, Item], profile: Profile, room_gib: float) -> None:
    """All parts of a cascade share the memory of its workers."""
    samples = [Samples.of_item(items[cascade.step, part.item], part.count) for part in cascade.parts]
    found = profile.footprint(cascade.module, samples, cascade.degree)
    single = cascade.batch == 1 and profile.needs.may_try(found, room_gib)
    if single or profile.needs.fits(found, room_gib):
        return
    need, limit = profile.needs.gib(found), profile.needs.limits.get(found.line)
    if need is not None and need > room_gib:
        why = f"needs {need:.2f} GiB, and a worker has {room_gib:.2f} GiB for it"
    else:
        why = f"is not below the {limit or 0:,.0f} units at which memory ran out"
    size = f"{cascade.module} of {found.units:,.0f} units at degree {cascade.degree}"
    raise PlanError(f"cascade {cascade.id} ({size}) {why}.")


def _check_coverage(
    cascades: Sequence[Cascade], items: dict[ItemKey, Item], profile: Profile, done: Sequence[EarlyEncode]
) -> None:
    runs: dict[tuple[ItemKey, str], list[int]] = {}
    for cascade in cascades:
        for part in cascade.parts:
            key = (cascade.step, part.item)
            counts = runs.setdefault((key, cascade.module), [0] * items[key].batch)
            for sample in range(part.first, part.first + part.count):
                counts[sample] += 1
    skipped = {(key, result.module) for key, result in done_results(done, items)}
    for key, item in items.items():
        for module in ("text", "vae", "dit"):
            exists = module in item.cached or (key, module) in skipped
            wanted = 0 if exists or not profile.has(module) else 1
            counts = runs.get((key, module), [0] * item.batch)
            if any(count != wanted for count in counts):
                raise PlanError(
                    f"item {item.id!r}: {module} runs {counts} times per sample, it must run {wanted} times."
                )


def _check_exclusive(cascades: Sequence[Cascade], busy_s: Sequence[float]) -> None:
    per_worker: dict[int, list[Cascade]] = {}
    for cascade in cascades:
        for worker in cascade.workers:
            per_worker.setdefault(worker, []).append(cascade)
    for worker, queue in per_worker.items():
        queue.sort(key=lambda cascade: (cascade.start_s, cascade.end_s))
        if queue[0].start_s < busy_s[worker] - TOLERANCE_S:
            raise PlanError(
                f"worker {worker} runs {queue[0].id} at {queue[0].start_s:.3f} s, before its encode of the step before "
                f"ends at {busy_s[worker]:.3f} s."
            )
        for first, second in pairwise(queue):
            if second.start_s < first.end_s - TOLERANCE_S:
                raise PlanError(f"worker {worker} runs {first.id} and {second.id} at the same time.")


def _check_predecessors(
    cascades: Sequence[Cascade], items: dict[ItemKey, Item], profile: Profile, done: Sequence[EarlyEncode]
) -> None:
    produced: dict[tuple[ItemKey, int], list[tuple[float, tuple[int, ...], str]]] = {}
    for key, result in done_results(done, items):
        for sample in result.samples(items[key]):
            produced.setdefault((key, sample), []).append((result.end_s, result.workers, "an earlier encode"))
    for cascade in cascades:
        if cascade.module != "dit":
            for part in cascade.parts:
                for sample in range(part.first, part.first + part.count):
                    found = produced.setdefault(((cascade.step, part.item), sample), [])
                    found.append((cascade.end_s, cascade.workers, cascade.id))
    for cascade in cascades:
        if cascade.module != "dit":
            continue
        bag = set(cascade.workers)
        for part in cascade.parts:
            key = (cascade.step, part.item)
            for sample in range(part.first, part.first + part.count):
                for end, workers, name in produced.get((key, sample), ()):
                    end += profile.wait_for_inputs(items[key], part.count, bag, workers)
                    if cascade.start_s < end - TOLERANCE_S:
                        raise PlanError(
                            f"{cascade.id} starts at {cascade.start_s:.3f} s, before {name} has "
                            f"delivered at {end:.3f} s."
                        )


def _check_barriers(cascades: Sequence[Cascade]) -> None:
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for cascade in cascades:
        if cascade.module == "dit":
            first[cascade.step] = min(first.get(cascade.step, cascade.start_s), cascade.start_s)
            last[cascade.step] = max(last.get(cascade.step, cascade.end_s), cascade.end_s)
    numbers = sorted(first)
    for earlier, later in pairwise(numbers):
        if first[later] < last[earlier] - TOLERANCE_S:
            raise PlanError(
                f"step {later} starts its dit at {first[later]:.3f} s, before step {earlier} ends at "
                f"{last[earlier]:.3f} s: the weights are not updated yet."
            )
