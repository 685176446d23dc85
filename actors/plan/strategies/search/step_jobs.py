"""The jobs of one step: its own, with ways to cut its batches, and the encodes of later steps that may run in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.plan.schedule.problem import ItemKey, PlannedJob, Problem, StepContext
from actors.plan.types import ENCODED, MODULES, Module

FEW_WORKERS = 8
SHARES = (0.6, 0.3)  # of a step: the longest that a piece of a cut batch may take

Patterns = dict[tuple[ItemKey, Module], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """Later steps whose encodes may run early. `worths`: what an encode of the very next step, and of a later one, is
    worth relative to its share of all workers' time."""

    steps: tuple[int, ...] = ()
    worths: tuple[float, float] = (1.05, 0.8)


def choices(problem: Problem, context: StepContext, step: int, ahead: StepsAhead) -> list[list[PlannedJob]]:
    """The step's jobs that have not run yet, then the encodes of the steps ahead, which are optional: with the batches
    whole, and with them cut in every way worth a try."""
    whole = own_jobs(problem, context, step)
    later = later_jobs(problem, context, step, ahead)
    cut = [own_jobs(problem, context, step, patterns) for patterns in _cuts(problem, context, step)]
    return [[*own, *later] for own in (whole, *cut)]


def own_jobs(problem: Problem, context: StepContext, step: int, patterns: Patterns | None = None) -> list[PlannedJob]:
    """The step's jobs that have not run yet. A dit job is released by the encodes that have."""
    found: list[PlannedJob] = []
    index: dict[int, int] = {}
    for number, job in enumerate(problem.jobs(patterns, steps=[step])):
        if _key(job) in context.ran:
            continue
        index[number] = len(found)
        release = _last_encode(context, job) if job.module == "dit" else 0.0
        found.append(replace(job, release_s=release, preds=[index[p] for p in job.preds if p in index]))
    return found


def later_jobs(problem: Problem, context: StepContext, step: int, ahead: StepsAhead) -> list[PlannedJob]:
    """Encodes of the steps ahead that have not run yet, with what they are worth in this step."""
    if not ahead.steps:
        return []
    dits = {
        number: [
            (key, *problem.cheapest(key, "dit"))
            for key in problem.items
            if key[0] == number and problem.needs(key, "dit")
        ]
        for number in ahead.steps
    }
    total = sum(problem.topology.speed)
    found = []
    for job in problem.jobs(None, steps=ahead.steps):
        if job.module == "dit" or _key(job) in context.ran:
            continue
        between = sum(area for number in ahead.steps if number <= job.step for _, area, _ in dits[number]) / total
        slack = between - max((quick for item, _, quick in dits[job.step] if item == job.item), default=0.0)
        worth = ahead.worths[0 if job.step == step + 1 else 1] * job.area / total
        found.append(replace(job, preds=[], worth_s=worth, slack_s=max(slack, 0.0)))
    return found


def _key(job: PlannedJob) -> tuple[ItemKey, Module, int, int]:
    return job.item, job.module, job.first, job.count


def _last_encode(context: StepContext, job: PlannedJob) -> float:
    """When the last encode of its samples that ran in an earlier step ends."""
    return max(
        (
            end
            for (item, _, first, count), (end, _) in context.ran.items()
            if item == job.item and first < job.first + job.count and job.first < first + count
        ),
        default=0.0,
    )


def _cuts(problem: Problem, context: StepContext, step: int) -> list[Patterns]:
    """Ways to cut the step's batches: every item that is long against the step into pieces of at most a share of it."""
    if not problem.options.split:
        return []
    keys = [
        key for key, item in problem.items.items() if key[0] == step and item.batch > 1 and problem.needs(key, "dit")
    ]
    started = {item for item, _, _, _ in context.ran} | {key for key, _ in problem.finished}
    total = sum(
        problem.cheapest(key, module)[0]
        for key in problem.items
        if key[0] == step
        for module in MODULES
        if problem.needs(key, module)
    ) / sum(problem.topology.speed)
    found: list[Patterns] = []
    workers = problem.topology.num_workers
    # In a small cluster also the cut that one worker less would get: it may use that many better.
    fewer = (0.6 * workers / (workers - 1),) if 2 < workers <= FEW_WORKERS else ()
    for share in (*SHARES, *fewer):
        patterns = _cut(problem, keys, started, share * total)
        if patterns and patterns not in found:
            found.append(patterns)
    return found


def _cut(problem: Problem, keys: Sequence[ItemKey], started: set[ItemKey], longest_s: float) -> Patterns:
    """Items with a piece beyond `longest_s` in as few pieces as stay within it; their encodes alike where they can."""
    patterns: Patterns = {}
    for key in keys:
        wanted = [p for p in problem.patterns_of(key, "dit") if _longest_piece(problem, key, p) <= longest_s]
        if not wanted or _longest_piece(problem, key, problem.pattern(key, "dit", None)) <= longest_s:
            continue
        pattern = min(wanted, key=len)
        patterns[key, "dit"] = pattern
        for module in ENCODED:
            fits = problem.needs(key, module) and pattern in problem.patterns_of(key, module)
            if fits and key not in started:
                patterns[key, module] = pattern
    return patterns


def _longest_piece(problem: Problem, key: ItemKey, pattern: Sequence[int]) -> float:
    """Seconds of the largest piece at its cheapest degree."""
    modes = problem.modes("dit", problem.items[key], max(pattern))
    return min(((k * s, s) for k, s in modes), default=(0.0, float("inf")))[1]
