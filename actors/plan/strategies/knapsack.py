"""The knapsack strategy: samples to bags, every bag runs its encodes and then its samples as one packed sequence.

Where that is too much for the memory of workers on every topology, bags are chosen by time alone, and what they hold is
cut into packs that fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.plan.costs.point import Samples
from actors.plan.schedule.balance import Balance, assign, parse_topology
from actors.plan.schedule.evaluator import simulate
from actors.plan.schedule.problem import ItemKey, Problem
from actors.plan.schedule.strategy import Strategy, one_by_one
from actors.plan.types import ENCODED, Cascade, Module, Part, PlanError


@dataclass(frozen=True, slots=True)
class Unit:
    """What goes to a bag as a whole: a sample, or a batch whose pieces the profile cannot price."""

    key: ItemKey
    first: int
    count: int


class Knapsack:
    """Every step alone, on the options' topology or on the best one found."""

    name = "knapsack"

    def plan(self, problem: Problem, seed: int) -> list[Cascade]:
        return one_by_one(problem, lambda step: knapsack_step(problem, step, cut=True))


Rule = Callable[[np.ndarray, Sequence[int], np.ndarray, float | None], Balance]
"""(costs of units by size of bag, sizes of the bags, tokens of units, most tokens of a worker) -> units in bags."""


def knapsack_step(problem: Problem, step: int, rule: Rule = assign, *, cut: bool = False) -> list[Cascade]:
    """Cascades of one step on the options' topology, or on the best one found, balanced by the rule. Raises PlanError
    where packs are too much for the memory of workers, unless they may be `cut`: those who ask for packs because they
    may be quicker have a plan without."""
    units = _units(problem, step)
    if not units:
        return []
    sizes, found, replicas = _choose(UnitPrices(problem), units, rule, cut)
    order: list[Cascade] = []
    offset = 0
    for replica in range(replicas):
        bags = _bags(sizes, offset)
        offset += sum(sizes)
        for bag, members in enumerate(bags):
            mine = [unit for unit, where in zip(units, found) if where == replica * len(sizes) + bag]
            order += _bag_cascades(problem, mine, members, f"r{replica}b{bag}" if replicas > 1 else f"b{bag}")
    return simulate(problem, order)


@dataclass(slots=True)
class UnitPrices:
    """What units take on bags. Those that cost the same are priced once: a step may have thousands of pictures."""

    problem: Problem
    _seconds: dict[tuple[Samples, tuple[Module, ...], int], float | None] = field(default_factory=dict)
    _once: dict[tuple[Samples, int], float] = field(default_factory=dict)

    def seconds(self, unit: Unit, size: int) -> float | None:
        """Encodes at their best degree within the bag, then the dit on the whole bag."""
        problem, item = self.problem, self.problem.items[unit.key]
        modules = tuple(module for module in (*ENCODED, "dit") if problem.needs(unit.key, module))
        key = Samples.of_item(item, unit.count), modules, size
        if key not in self._seconds:
            total = 0.0
            for module in modules:
                modes = problem.modes_at_best(module, item, unit.count)
                if module == "dit":
                    total += dict(modes).get(size, float("inf"))
                else:
                    # Several encodes share the bag, so their area counts.
                    total += min((k * s / size for k, s in modes if k <= size), default=float("inf"))
            self._seconds[key] = total if total < float("inf") else None
        return self._seconds[key]

    def once(self, unit: Unit, size: int) -> float:
        """Seconds of its dit on a bag of this size that a unit does not take again in a pack with others; 0 where
        samples are not packed."""
        problem, item = self.problem, self.problem.items[unit.key]
        if not (problem.profile.extrapolate and problem.needs(unit.key, "dit")):
            return 0.0
        key = Samples.of_item(item, unit.count), size
        if key not in self._once:
            self._once[key] = problem.once_at_best(item, unit.count, size)
        return self._once[key]


def _choose(
    prices: UnitPrices, units: Sequence[Unit], rule: Rule, cut: bool
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(bag sizes of a replica, bag of every unit over all replicas, replicas): within memory where that can be."""
    try:
        return _choose_among(prices, units, rule, capped=True)
    except PlanError:
        if not cut or prices.problem.profile.needs.most_rows(prices.problem.room_gib) == np.inf:
            raise
    return _choose_among(prices, units, rule, capped=False)


def _choose_among(
    prices: UnitPrices, units: Sequence[Unit], rule: Rule, *, capped: bool
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    problem, workers = prices.problem, prices.problem.topology.num_workers
    spec = problem.options.topology
    if spec:
        sizes = parse_topology(spec, workers)
        replicas = workers // sum(sizes)
        return sizes, _balance(prices, units, sizes * replicas, rule, capped).bag_of, replicas
    legal = sorted({k for unit in units for k, _ in problem.modes("dit", problem.items[unit.key], unit.count)})
    work = [
        min(k * (s - prices.once(u, k)) for k, s in problem.modes("dit", problem.items[u.key], u.count)) for u in units
    ]
    best: tuple[float, tuple[int, ...], Balance] | None = None
    for sizes in _candidate_topologies(work, workers, legal) or [(legal[0],) * (workers // legal[0])]:
        try:
            found = _balance(prices, units, sizes, rule, capped)
        except PlanError:
            continue
        if best is None or max(found.load) < best[0]:
            best = (max(found.load), sizes, found)
    if best is None:
        raise PlanError(f"knapsack: no topology of {workers} workers runs every sample. Use strategy cascade.")
    return best[1], best[2].bag_of, 1


def _candidate_topologies(work: Sequence[float], num_workers: int, legal: Sequence[int]) -> list[tuple[int, ...]]:
    """Bag sizes worth trying: every homogeneous one, and mixes that give each sequence about the share it needs."""
    legal = sorted(k for k in set(legal) if k <= num_workers)
    found = [(size,) * (num_workers // size) for size in legal if num_workers % size == 0]
    share = sum(work) / num_workers if num_workers else 0.0
    for slack in (0.6, 0.8, 1.0, 1.3, 1.7):
        counts = dict.fromkeys(legal, 0.0)
        for weight in work:
            need = weight / (share * slack) if share > 0 else 1.0
            counts[next((size for size in legal if size >= need), legal[-1])] += weight / share if share > 0 else 0.0
        left, mix = num_workers, []
        for size in sorted(legal, reverse=True):
            number = min(left // size, round(counts[size] / size + (0.3 if counts[size] > 0 else 0.0)))
            mix += [size] * number
            left -= size * number
        smallest = legal[0]
        mix += [smallest] * (left // smallest)
        if sum(mix) == num_workers and tuple(sorted(mix)) not in found:
            found.append(tuple(sorted(mix)))
    return found


def _units(problem: Problem, step: int) -> list[Unit]:
    units = []
    for key, item in problem.items.items():
        if key[0] != step:
            continue
        single = problem.options.split and all(
            problem.modes(module, item, 1) for module in (*ENCODED, "dit") if problem.needs(key, module)
        )
        if not single and problem.needs(key, "dit") and not problem.modes("dit", item, item.batch):
            raise PlanError(problem.why_not(key, "dit", item.batch))
        units += [Unit(key, i, 1) for i in range(item.batch)] if single else [Unit(key, 0, item.batch)]
    return units


def _balance(prices: UnitPrices, units: Sequence[Unit], sizes: Sequence[int], rule: Rule, capped: bool) -> Balance:
    """Units in bags by what each adds to a pack; the load of a bag has what its packs take once, too."""
    kinds = sorted(set(sizes))
    costs, once = np.full((len(units), len(kinds)), np.inf), np.zeros((len(units), len(kinds)))
    for row, unit in enumerate(units):
        for column, size in enumerate(kinds):
            seconds = prices.seconds(unit, size)
            if seconds is not None:
                once[row, column] = prices.once(unit, size)
                costs[row, column] = seconds - once[row, column]
    problem, profile, needs = prices.problem, prices.problem.profile, prices.problem.profile.needs
    share = needs.text_share(max(sizes))
    tokens = np.zeros(len(units))
    for row, unit in enumerate(units):
        item = problem.items[unit.key]
        visual = profile.tokens(item.frames, item.height, item.width)
        tokens[row] = unit.count * (share * item.text_tokens + visual)
    rows = needs.most_rows(problem.room_gib) / max(needs.row_weight(size) for size in sizes)
    found = rule(costs, sizes, tokens, rows if capped and rows < np.inf else None)
    of_packs: dict[tuple[int, int], float] = {}
    for row, (unit, bag) in enumerate(zip(units, found.bag_of, strict=True)):
        pack = bag, problem.items[unit.key].expert
        of_packs[pack] = max(of_packs.get(pack, 0.0), once[row, kinds.index(sizes[bag])])
    load = list(found.load)
    for (bag, _), seconds in of_packs.items():
        load[bag] += seconds
    return replace(found, load=tuple(load))


def _bags(sizes: Sequence[int], offset: int) -> list[tuple[int, ...]]:
    """Workers of every bag: larger bags first, so that they stay within nodes."""
    bags: dict[int, tuple[int, ...]] = {}
    for bag in sorted(range(len(sizes)), key=lambda b: (-sizes[b], b)):
        bags[bag] = tuple(range(offset, offset + sizes[bag]))
        offset += sizes[bag]
    return [bags[bag] for bag in range(len(sizes))]


def _bag_cascades(problem: Problem, units: Sequence[Unit], members: tuple[int, ...], name: str) -> list[Cascade]:
    """Encodes dealt to the bag's workers, then the dit: packed when parts can be priced one by one."""
    order: list[Cascade] = []
    free = dict.fromkeys(members, 0.0)
    for module in ENCODED:
        for unit in units:
            if problem.needs(unit.key, module):
                item = problem.items[unit.key]
                modes = [(s, k) for k, s in problem.modes(module, item, unit.count) if k <= len(members)]
                if not modes:
                    raise PlanError(problem.why_not(unit.key, module, unit.count))
                cheapest = min(modes, key=lambda mode: (mode[0] * mode[1], mode[1]))
                seconds, degree = cheapest if len(units) > 1 else min(modes)
                chosen = tuple(sorted(sorted(members, key=lambda w: (free[w], w))[:degree]))
                end = max(free[w] for w in chosen) + seconds
                free.update(dict.fromkeys(chosen, end))
                order.append(_cascade(module, [unit], chosen, len(order), name))
    wanted = [unit for unit in units if problem.needs(unit.key, "dit")]
    packed = [[unit] for unit in wanted]
    if problem.profile.extrapolate:  # a packed sequence for each expert
        experts = sorted({problem.items[unit.key].expert for unit in wanted})
        packed = [[unit for unit in wanted if problem.items[unit.key].expert == expert] for expert in experts]
    for group in packed:
        for pack in _that_fit(problem, group, len(members)):
            order.append(_cascade("dit", pack, members, len(order), name))
    return order


def _that_fit(problem: Problem, units: Sequence[Unit], degree: int) -> list[list[Unit]]:
    """The pack of these units, cut where it is more than a worker's memory holds. A unit alone is legal."""
    if len(units) > 1 and _fits(problem, units, degree):
        return [list(units)]
    packs: list[list[Unit]] = []
    for unit in units:
        if packs and _fits(problem, [*packs[-1], unit], degree):
            packs[-1].append(unit)
        else:
            packs.append([unit])
    return packs


def _fits(problem: Problem, units: Sequence[Unit], degree: int) -> bool:
    profile, counts = problem.profile, Counter[ItemKey]()
    for unit in units:
        counts[unit.key] += unit.count
    parts = [Samples.of_item(problem.items[key], count) for key, count in counts.items()]
    if len(parts) == 1:  # with what was measured of batches of one shape
        return profile.fits("dit", parts[0], degree, problem.room_gib)
    return profile.needs.fits(profile.footprint("dit", parts, degree), problem.room_gib)


def _cascade(module: Module, units: Sequence[Unit], workers: tuple[int, ...], number: int, bag: str) -> Cascade:
    parts: list[Part] = []
    for unit in units:
        last = parts[-1] if parts else None
        if last is not None and last.item == unit.key[1] and last.first + last.count == unit.first:
            parts[-1] = replace(last, count=last.count + unit.count)
        else:
            parts.append(Part(item=unit.key[1], first=unit.first, count=unit.count))
    name = "+".join(dict.fromkeys(part.item for part in parts))
    return Cascade(
        id=f"{name}/{module}/{bag}.{number}",
        module=module,
        step=units[0].key[0],
        parts=tuple(parts),
        degree=len(workers),
        workers=workers,
        start_s=0.0,
        end_s=0.0,
    )


STRATEGY: type[Strategy] = Knapsack
