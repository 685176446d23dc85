"""make_plan: items of consecutive steps, profile and cluster in; a legal, timed plan out. The entry of this package.

    plan = make_plan([items_of_step_t, items_of_step_t_plus_1], profile, cluster, PlanOptions(), first_step=t)
    for cascade in rolling_cut(plan): ...  # what to run now, in order

Budget: `cascade`, `genetic` and `exact` count their work in calibrated units, so the same input, seed and budget give
the same plan on any machine; the wall clock ends a search only when the machine is slower than the calibration, and
then the plan is still legal and never worse than the constructive one. Budget 0 is the constructive plan alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.plan.costs.profile import Profile
from actors.plan.schedule import figures as metrics
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.strategies.exact import improve_exactly
from actors.plan.strategies.flexsp import flexsp_step
from actors.plan.strategies.genetic import genetic_step
from actors.plan.strategies.knapsack import knapsack_step
from actors.plan.strategies.longest_first import longest_first
from actors.plan.strategies.search.steps import CUT_GAIN, StepContext, cascade_plan, plan_step
from actors.plan.strategies.static import static_plan
from actors.plan.types import Cascade, Cluster, EarlyEncode, Item, Plan, PlanError

__all__ = ["STRATEGIES", "PlanOptions", "make_plan", "rolling_cut"]


def make_plan(
    steps: Sequence[Sequence[Item]],
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    *,
    first_step: int = 0,
    done: Sequence[EarlyEncode] = (),
    seed: int = 0,
) -> Plan:
    """Plan the steps in order. Raises PlanError, naming the item and a remedy, when no legal plan exists.

    `done` are encode results of these items that exist already. Only `cascade` lets steps overlap.
    """
    strategy = _STRATEGIES.get(options.strategy)
    if strategy is None:
        raise PlanError(f"strategy {options.strategy!r} is unknown. Use one of {', '.join(STRATEGIES)}.")
    problem = Problem(steps, profile, cluster, options, first_step=first_step, done=done)
    numbers = list(range(first_step, first_step + len(steps)))
    plan_s: list[float] = []
    cascades = strategy(problem, numbers, seed, plan_s)
    return metrics.assemble(problem, cascades, plan_s)


def rolling_cut(plan: Plan, update_waits: bool = False) -> list[Cascade]:
    """What the runtime executes for the plan's first step, in execution order: its own cascades, and encodes of later
    steps that start before the end of its last dit cascade, or with `update_waits` end by it. Encodes of a cut item run
    early together or not at all: the next plan is told of whole items only (`EarlyEncode`)."""
    if not plan.steps:
        return []
    first = plan.steps[0]
    end = max(
        (c.end_s for c in first.cascades if c.module == "dit"),
        default=max((c.end_s for c in first.cascades), default=0.0),
    )
    encodes = [c for step in plan.steps for c in step.cascades if c.step != first.step and c.module != "dit"]
    late = {
        result
        for c in encodes
        if c.start_s >= end - 1e-9 or (update_waits and c.end_s > end + 1e-9)
        for result in _results(c)
    }
    chosen = [c for c in first.cascades if c.step == first.step]
    chosen += [c for c in encodes if late.isdisjoint(_results(c))]
    position = {id(c): number for number, c in enumerate(chosen)}
    return sorted(chosen, key=lambda c: (c.start_s, position[id(c)]))


def _results(cascade: Cascade) -> list[tuple[int, str, str]]:
    return [(cascade.step, part.item, cascade.module) for part in cascade.parts]


def _cascade(problem: Problem, numbers: Sequence[int], seed: int, plan_s: list[float]) -> list[Cascade]:
    """The search's plan, or that of knapsack, which costs milliseconds, where packed bags end earlier."""
    found = cascade_plan(problem, numbers, seed, problem.options.budget_s, plan_s)
    if problem.options.budget_s <= 0 or not numbers:
        return found
    started = time.perf_counter()
    try:
        packed = _concatenate([knapsack_step(problem, step) for step in numbers])
    except PlanError:  # knapsack has no legal plan here
        return found
    seconds = (time.perf_counter() - started) / len(numbers)
    plan_s[:] = [spent + seconds for spent in plan_s]
    last = numbers[0] if problem.options.replans else numbers[-1]
    # a run prices packed bags with less certainty than whole batches: there they must promise a clear gain
    gain = CUT_GAIN if problem.options.replans else 1e-9
    return packed if _cost(problem, packed, last) * (1 + gain) < _cost(problem, found, last) else found


def _cost(problem: Problem, cascades: Sequence[Cascade], last: int) -> float:
    """End of step `last`, less what encodes of later steps have saved by then."""
    dits = [c for c in cascades if c.step <= last and c.module == "dit"] or [c for c in cascades if c.step <= last]
    end = max((c.end_s for c in dits), default=0.0)
    ahead = sum(c.seconds * c.degree for c in cascades if c.step > last and c.module != "dit" and c.end_s <= end + 1e-9)
    return end - ahead / problem.topology.num_workers


def _static(problem: Problem, numbers: Sequence[int], seed: int, plan_s: list[float]) -> list[Cascade]:
    started = time.perf_counter()
    plans = static_plan(problem, numbers)[1]
    plan_s += [(time.perf_counter() - started) / max(len(numbers), 1)] * len(numbers)
    return _concatenate(plans)


def _by_step(
    plan_one: Callable[[Problem, int, int], list[Cascade]],
) -> Callable[[Problem, Sequence[int], int, list[float]], list[Cascade]]:
    """A strategy that plans every step alone: steps run one after the other, nothing overlaps."""

    def plan_all(problem: Problem, numbers: Sequence[int], seed: int, plan_s: list[float]) -> list[Cascade]:
        plans = []
        for step in numbers:
            started = time.perf_counter()
            plans.append(plan_one(problem, step, seed))
            plan_s.append(time.perf_counter() - started)
        return _concatenate(plans)

    return plan_all


def _longest_first(problem: Problem, step: int, seed: int) -> list[Cascade]:
    jobs = problem.jobs(steps=[step])
    return problem.to_cascades(jobs, longest_first(problem, jobs)[1].placed) if jobs else []


def _genetic(problem: Problem, step: int, seed: int) -> list[Cascade]:
    jobs = problem.jobs(steps=[step])
    return problem.to_cascades(jobs, genetic_step(problem, jobs, seed, problem.options.budget_s).placed) if jobs else []


def _exact(problem: Problem, step: int, seed: int) -> list[Cascade]:
    state = StepContext(free=[0.0] * problem.topology.num_workers)
    chosen, lister = plan_step(problem, state, step, [], seed, problem.options.budget_s)
    if not chosen.jobs:
        return []
    best = improve_exactly(problem, chosen.jobs, lister, seed)
    found = problem.to_cascades(chosen.jobs, best.placed)
    try:  # packed bags are not in its space; the yardstick of the others must know them
        packed = knapsack_step(problem, step)
    except PlanError:
        return found
    return packed if _cost(problem, packed, step) < _cost(problem, found, step) else found


def _concatenate(plans: Sequence[Sequence[Cascade]]) -> list[Cascade]:
    """Steps one after the other."""
    offset = 0.0
    result: list[Cascade] = []
    for plan in plans:
        result += [replace(c, start_s=c.start_s + offset, end_s=c.end_s + offset) for c in plan]
        offset = max((c.end_s for c in result), default=offset)
    return result


_STRATEGIES: dict[str, Callable[[Problem, Sequence[int], int, list[float]], list[Cascade]]] = {
    "static": _static,
    "longest_first": _by_step(_longest_first),
    "flexsp": _by_step(lambda problem, step, seed: flexsp_step(problem, step)),
    "flexsp_greedy": _by_step(lambda problem, step, seed: flexsp_step(problem, step, greedy=True)),
    "knapsack": _by_step(lambda problem, step, seed: knapsack_step(problem, step)),
    "cascade": _cascade,
    "genetic": _by_step(_genetic),
    "exact": _by_step(_exact),
}
STRATEGIES = tuple(_STRATEGIES)
