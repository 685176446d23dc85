"""Lower bounds of a step: no plan can be faster. Area over all workers, and the longest path of one item."""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.schedule.evaluator import ItemKey
from actors.plan.schedule.problem import ENCODERS, PlannedJob, Problem
from actors.plan.types import Module


def cheapest(problem: Problem, key: ItemKey, module: Module) -> tuple[float, float]:
    """(fewest GPU-seconds, quickest seconds) of a module of an item over all cuts of its batch."""
    area, quick = float("inf"), float("inf")
    item = problem.items[key]
    shape = (module, item.batch, item.frames, item.height, item.width, item.text_tokens)
    if shape in problem.cheapest:
        return problem.cheapest[shape]
    largest = max(problem.cluster.nodes)
    span = problem.topology.best_span
    fastest = max(problem.topology.speed)
    for pattern in problem.patterns_of(key, module):
        pattern_area, pattern_quick = 0.0, 0.0
        for count in pattern:
            modes = [(k, s * (span if k > largest else 1.0)) for k, s in problem.modes(module, item, count)]
            if not modes:
                return 0.0, 0.0
            pattern_area += min(k * s for k, s in modes)
            pattern_quick = max(pattern_quick, min(s for _, s in modes))
        area = min(area, pattern_area)
        quick = min(quick, pattern_quick / fastest)
    problem.cheapest[shape] = (area, quick)
    return area, quick


def step_bound(problem: Problem, step: int, modules: Sequence[Module] = (*ENCODERS, "dit")) -> float:
    """Seconds that a step needs at least when its work in `modules` runs within it."""
    area, path = 0.0, 0.0
    for key in problem.items:
        if key[0] != step:
            continue
        encode, dit = 0.0, 0.0
        for module in modules:
            if problem.needs(key, module):
                module_area, quick = cheapest(problem, key, module)
                area += module_area
                if module == "dit":
                    dit = quick
                else:
                    encode = max(encode, quick)
        path = max(path, encode + dit)
    return max(area / sum(problem.topology.speed), path)


def path_bound(problem: Problem, jobs: Sequence[PlannedJob]) -> float:
    """Seconds of the longest way from an encode through the jobs that consume it, all at their quickest degree."""
    largest, fastest = max(problem.cluster.nodes), max(problem.topology.speed)
    quick = [
        min(s * (problem.topology.best_span if k > largest else 1.0) for k, s in job.modes) / fastest for job in jobs
    ]
    return max((quick[i] + max((quick[p] for p in job.preds), default=0.0) for i, job in enumerate(jobs)), default=0.0)


def mean_bound(problem: Problem) -> float:
    """Mean seconds per step that any plan of the whole horizon needs: all areas over all workers."""
    area = sum(
        cheapest(problem, key, module)[0]
        for key in problem.items
        for module in (*ENCODERS, "dit")
        if problem.needs(key, module)
    )
    return area / sum(problem.topology.speed) / max(len(problem.steps), 1)
