"""make_plan: items of consecutive steps, profile and cluster in; a legal, timed plan out. The entry of this package.

    plan = make_plan([items_of_step_t, items_of_step_t_plus_1], profile, cluster, PlanOptions(), first_step=t)
    for cascade in rolling_cut(plan): ...  # what to run now, in order

Budget: `cascade`, `genetic` and `exact` count their work in calibrated units, so the same input, seed and budget give
the same plan on any machine; the wall clock ends a search only when the machine is slower than the calibration, and
then the plan is still legal and never worse than the constructive one. Budget 0 is the constructive plan alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module

from actors.plan.costs.profile import Profile
from actors.plan.registry import STRATEGIES
from actors.plan.schedule.evaluator import simulate
from actors.plan.schedule.figures import assemble
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.schedule.strategy import Strategy
from actors.plan.types import Cascade, Cluster, EarlyEncode, Item, Plan, PlanError


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
    strategy = strategy_named(options.strategy)
    if not profile.has("dit"):
        raise PlanError("the profile has no point of the DiT, so no step can be priced. Measure one.")
    problem = Problem(steps, profile, cluster, options, first_step=first_step, done=done)
    started = time.perf_counter()
    cascades = strategy.plan(problem, seed)
    if any(problem.busy_s):  # strategies may think all workers idle
        cascades = simulate(problem, cascades)
    planning_s = (time.perf_counter() - started) / max(len(steps), 1)
    return assemble(problem, cascades, planning_s)


def strategy_named(name: str) -> Strategy:
    """A strategy, ready to plan. Raises PlanError when there is none of that name."""
    if name not in STRATEGIES:
        raise PlanError(f"strategy {name!r} is unknown. Use one of {', '.join(STRATEGIES)}.")
    made: Strategy = import_module(f"actors.plan.strategies.{name}").STRATEGY()
    return made


def rolling_cut(plan: Plan) -> list[Cascade]:
    """What the runtime executes for the plan's first step, in execution order: its own cascades, and encodes of later
    steps that start before the end of its last dit cascade. Those that end after it are the last ones of their workers.
    Encodes of a cut item run early all together, or none does: the next plan knows whole items only (`EarlyEncode`).
    """
    if not plan.steps:
        return []
    first = plan.steps[0]
    end = max(
        (c.end_s for c in first.cascades if c.module == "dit"),
        default=max((c.end_s for c in first.cascades), default=0.0),
    )
    encodes = [c for step in plan.steps for c in step.cascades if c.step != first.step and c.module != "dit"]
    late = {result for c in encodes if c.start_s >= end - 1e-9 for result in _results(c)}
    chosen = [c for c in first.cascades if c.step == first.step]
    chosen += [c for c in encodes if late.isdisjoint(_results(c))]
    position = {id(c): number for number, c in enumerate(chosen)}
    return sorted(chosen, key=lambda c: (c.start_s, position[id(c)]))


def _results(cascade: Cascade) -> list[tuple[int, str, str]]:
    return [(cascade.step, part.item, cascade.module) for part in cascade.parts]
