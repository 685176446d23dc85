"""The default strategy: every cascade gets its own degree, place and time; encodes of the next steps fill the gaps.

Steps are planned in order. Within a step a constructive plan comes first, then the population search improves it until
the budget ends; what ran ahead for later steps, and how long workers stay busy, is handed to the next step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.plan.schedule.allot import allot, tails
from actors.plan.schedule.bounds import cheapest, path_bound
from actors.plan.schedule.evaluator import ItemKey
from actors.plan.schedule.gaps import fill
from actors.plan.schedule.listing import Lister
from actors.plan.schedule.problem import ENCODERS, Placement, PlannedJob, Problem
from actors.plan.strategies.search import anneal as search
from actors.plan.strategies.search import native
from actors.plan.strategies.search import space as batch
from actors.plan.strategies.search.cells import plan_cells, worth_cells
from actors.plan.strategies.search.realise import realise
from actors.plan.types import MODULES, Cascade, Module

EncodeKey = tuple[ItemKey, Module, int, int]  # item, module, first sample, samples
# Worth of an encode of the very next step, and of a later one, relative to its share of all workers' time.
WORTHS = ((1.05, 0.8), (1.4, 1.1))
BEAM = 2  # pasts that are kept over a long horizon
LONG_HORIZON = 4
PLACE_S = 4e-5  # calibration of `climb`: placing one job
PATIENCE = 0.85  # the wall clock ends a search after this many budgets, and
GRACE_S = 0.02  # this much more: a budget of milliseconds should not end by chance
CUT_GAIN = 0.1  # share of a step that a cut must save before a run cuts a batch
FEW_JOBS = 6  # a step of so few is also searched with a cut that starts a little worse
FEW_WORKERS = 8


@dataclass(slots=True)
class StepContext:
    """What a step inherits: busy workers, the update barrier, encodes that already ran."""

    free: list[float]
    barrier: float = 0.0
    worths: tuple[float, float] = (1.05, 0.8)
    ran: dict[EncodeKey, tuple[float, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class StepJobs:
    """Jobs that may run during one step: its own, and encodes of later steps (`worth` > 0), which may end up to
    `slack` seconds after the step without delaying theirs."""

    jobs: list[PlannedJob]
    release: list[float]
    worth: list[float]
    slack: list[float]


def cascade_plan(
    problem: Problem, numbers: Sequence[int], seed: int, budget_s: float, plan_s: list[float] | None = None
) -> list[Cascade]:
    """Cascades of all steps, timed.

    A long horizon is planned as a beam: the best few pasts are kept, each goes on with different worths of running
    ahead, and what the rest of the horizon needs at least decides between them. A step's trials share its budget.
    """
    if budget_s > 0:
        native.library()  # compiled on the first call of a machine: not within any step's planning time
    long = len(numbers) >= LONG_HORIZON and budget_s > 0
    width, worths = (BEAM, WORTHS) if long else (1, WORTHS[:1])
    beam = [EarlierSteps(StepContext(free=[0.0] * problem.topology.num_workers), [], [])]
    for step in numbers:
        started = time.perf_counter()
        ahead = [s for s in range(step + 1, step + 1 + problem.options.lookahead) if s in numbers]
        rough = problem.options.replans and step != numbers[0]
        share = budget_s / (len(beam) * len(worths))
        trials = []
        for past in beam:
            for number, worth in enumerate(worths):
                state = replace(past.state, worths=worth)
                chosen, lister = (
                    rough_step(problem, state, step)
                    if rough
                    else plan_step(problem, state, step, ahead, seed + number, share)
                )
                trials.append(past.after(chosen, lister))
        trials.sort(key=lambda past: past.least_end(problem))
        beam = [
            past
            for number, past in enumerate(trials)
            if all(past.least_end(problem) > other.least_end(problem) + 1e-9 for other in trials[:number])
        ][:width]
        if plan_s is not None:
            plan_s.append(time.perf_counter() - started)
    best = min(beam, key=lambda past: past.state.barrier)
    keep = sorted({p.job for p in best.placed})
    index = {old: new for new, old in enumerate(keep)}
    return problem.to_cascades([best.jobs[i] for i in keep], [Placement(index[p.job], p.workers) for p in best.placed])


@dataclass(slots=True)
class EarlierSteps:
    """Steps decided so far, and what they leave."""

    state: StepContext
    jobs: list[PlannedJob]
    placed: list[Placement]

    def after(self, chosen: StepJobs, lister: Lister) -> EarlierSteps:
        placed = self.placed + [Placement(len(self.jobs) + p.job, p.workers) for p in lister.placed]
        return EarlierSteps(_after(chosen, lister, self.state), self.jobs + chosen.jobs, placed)

    def least_end(self, problem: Problem) -> float:
        """Up to a constant of the horizon, when all steps can be over: encodes that ran ahead are worth their share of
        all workers' time, workers that are busy beyond the step cost theirs."""
        state = self.state
        total = sum(problem.topology.speed)
        over = sum(max(time_s - state.barrier, 0.0) for time_s in state.free)
        ran = {(item, module) for item, module, _, _ in state.ran}
        return state.barrier + (over - sum(cheapest(problem, *key)[0] for key in ran)) / total


def plan_step(
    problem: Problem, state: StepContext, step: int, ahead: Sequence[int], seed: int, budget_s: float
) -> tuple[StepJobs, Lister]:
    """The best decision found for one step within the budget: whole batches, and batches cut where that may pay.

    Where an update waits for all workers, encodes of later steps only fill the gaps of the step's own best plan: one
    that is not over by then would delay the update.
    """
    started = time.perf_counter()
    if problem.options.update_waits and ahead:
        chosen, lister = plan_step(problem, state, step, [], seed, budget_s)
        _add_later(problem, state, step, ahead, chosen, lister)
        _fill_gaps(chosen, lister, state, started + (PATIENCE + 0.1) * budget_s + GRACE_S)
        lister.free = [_end(chosen, lister, state)] * len(lister.free)
        return chosen, lister
    chosen = step_jobs(problem, state, step, ahead)
    if not chosen.jobs:
        return chosen, Lister(problem, [], state.free)
    if _fresh(state) and worth_cells(problem, chosen.jobs):
        return _by_cells(problem, state, chosen, seed, budget_s)
    variants = [(*constructive(problem, chosen, state), chosen)]
    for patterns in cuts(problem, state, step):
        cut = step_jobs(problem, state, step, ahead, patterns)
        variants.append((*constructive(problem, cut, state), cut))
    # A cut has to show its worth before it may share the budget; with few cascades there is budget for both.
    margin = 1.1 if len(chosen.jobs) <= FEW_JOBS else 1.0
    variants[1:] = sorted((v for v in variants[1:] if v[0] < margin * variants[0][0]), key=lambda found: found[0])[:1]
    # A run has not measured most pieces, and every cascade more costs calls: there a cut must promise a clear gain.
    handicap = [0.0, *[CUT_GAIN if problem.options.replans else 0.0] * len(variants[1:])]
    weighed = [(found[0] * (1 + worse), found[1], found[3]) for found, worse in zip(variants, handicap)]
    score, lister, chosen = min(weighed, key=lambda found: found[0])
    for number, (_, _, tried, jobs) in enumerate(variants):
        if budget_s <= 0:
            break
        share = budget_s / len(variants)
        deadline = started + PATIENCE * share * (number + 1) + GRACE_S
        space = batch.build(problem, jobs.jobs, state.free, state.barrier, jobs.release, jobs.worth, jobs.slack)
        if space is None or not problem.topology.uniform:
            placed = climb(problem, jobs, state, tried, share, seed, deadline)
        else:
            starts = [search.start_from(space, jobs.jobs, order, degrees) for order, degrees in tried]
            found = _searched(space, starts, share, seed, _bound(problem, jobs, state), deadline)
            if found is None:
                continue
            placed = _realised(problem, jobs, state, found, share)
        _fill_gaps(jobs, placed, state, deadline + 0.1 * budget_s)
        reached = _score(jobs, placed, state) * (1 + handicap[number])
        if reached < score - 1e-9:
            score, lister, chosen = reached, placed, jobs
    return chosen, lister


def rough_step(problem: Problem, state: StepContext, step: int) -> tuple[StepJobs, Lister]:
    """Some legal plan of a step, in a millisecond: a run plans it again before it is executed."""
    chosen = step_jobs(problem, state, step, [])
    lister = Lister(problem, chosen.jobs, state.free)
    lister.barrier, lister.release = state.barrier, chosen.release
    degrees = allot(problem, chosen.jobs, sum(job.area for job in chosen.jobs) / sum(problem.topology.speed))
    for index in sorted(range(len(chosen.jobs)), key=_by_tail(chosen.jobs, degrees)):
        lister.place(index, degrees[index])
    return chosen, lister


def _searched(
    space: batch.Space,
    starts: Sequence[tuple[np.ndarray, np.ndarray]],
    budget_s: float,
    seed: int,
    bound: float,
    deadline: float,
    population: int = 0,
) -> search.SearchResult | None:
    """The best candidate of the compiled search, or of the vectorised one where there is no compiler."""
    if native.fits(space):
        return native.anneal(space, starts, budget_s, seed, bound, deadline - time.perf_counter())
    return search.anneal(space, starts, budget_s, seed, bound, deadline, population)


def _bound(problem: Problem, chosen: StepJobs, state: StepContext) -> float:
    """No schedule of these jobs ends earlier; a search that reaches it may stop."""
    if state.barrier:
        return state.barrier
    own = [job for job, worth in zip(chosen.jobs, chosen.worth) if worth == 0]
    area = sum(job.area for job in own) / sum(problem.topology.speed)
    return max(area, path_bound(problem, own)) if _fresh(state) else area


Patterns = dict[tuple[ItemKey, Module], tuple[int, ...]]


def cuts(problem: Problem, state: StepContext, step: int) -> list[Patterns]:
    """Ways to cut the step's batches: every item that is long against the step into pieces of at most a share of it."""
    if not problem.options.split:
        return []
    keys = [
        key for key, item in problem.items.items() if key[0] == step and item.batch > 1 and problem.needs(key, "dit")
    ]
    started = {item for item, _, _, _ in state.ran} | {key for key, _ in problem.finished}
    total = sum(
        cheapest(problem, key, module)[0]
        for key in problem.items
        if key[0] == step
        for module in MODULES
        if problem.needs(key, module)
    ) / sum(problem.topology.speed)
    found: list[Patterns] = []
    workers = problem.topology.num_workers
    # In a small cluster also the cut that one worker less would get: it may use that many better.
    fewer = (0.6 * workers / (workers - 1),) if 2 < workers <= FEW_WORKERS else ()
    for share in (0.6, 0.3, *fewer):
        patterns: Patterns = {}
        for key in keys:
            wanted = [p for p in problem.patterns_of(key, "dit") if _longest_piece(problem, key, p) <= share * total]
            whole = problem.pattern(key, "dit", None)
            if _longest_piece(problem, key, whole) > share * total and wanted:
                pattern = min(wanted, key=len)
                patterns[key, "dit"] = pattern
                for module in ENCODERS:
                    fits = problem.needs(key, module) and pattern in problem.patterns_of(key, module)
                    if fits and key not in started:
                        patterns[key, module] = pattern
        if patterns and patterns not in found:
            found.append(patterns)
    return found


def _longest_piece(problem: Problem, key: ItemKey, pattern: Sequence[int]) -> float:
    """Seconds of the largest piece at its cheapest degree."""
    modes = problem.modes("dit", problem.items[key], max(pattern))
    return min(((k * s, s) for k, s in modes), default=(0.0, float("inf")))[1]


def _fresh(state: StepContext) -> bool:
    return not any(state.free) and not state.ran


def _by_cells(
    problem: Problem, state: StepContext, chosen: StepJobs, seed: int, budget_s: float
) -> tuple[StepJobs, Lister]:
    """A large step from idle workers, without early encodes: they are many enough to fill each other's gaps."""
    own = [i for i, worth in enumerate(chosen.worth) if worth == 0]
    chosen = _alone([chosen.jobs[i] for i in own])

    def plan_cell(part: Problem, jobs: Sequence[PlannedJob], seconds: float) -> tuple[float, list[Placement]]:
        cell_jobs = _alone(jobs)
        empty = StepContext(free=[0.0] * part.topology.num_workers)
        space = batch.build(part, jobs) if seconds > 0 else None
        if space is None:
            score, lister, _ = constructive(part, cell_jobs, empty)
            return score, lister.placed
        starts = [search.start_from(space, jobs, order, degrees) for order, degrees in side_by_side(part, jobs)]
        found = _searched(space, starts, seconds, seed, 0.0, time.perf_counter() + 4 * seconds, population=64)
        if found is None:
            return float("inf"), []
        better = _realised(part, cell_jobs, empty, found, seconds)
        return max(better.end), better.placed

    placed = plan_cells(problem, chosen.jobs, plan_cell, budget_s)
    lister = Lister(problem, chosen.jobs, state.free)
    for decision in placed:
        lister.fix(decision.job, decision.workers)
    return chosen, lister


def _alone(jobs: Sequence[PlannedJob]) -> StepJobs:
    """Jobs of one step that begins with idle workers."""
    return StepJobs(list(jobs), [0.0] * len(jobs), [0.0] * len(jobs), [0.0] * len(jobs))


def step_jobs(
    problem: Problem,
    state: StepContext,
    step: int,
    ahead: Sequence[int],
    patterns: dict[tuple[ItemKey, Module], tuple[int, ...]] | None = None,
) -> StepJobs:
    """The step's jobs that have not run yet, and the encodes of the steps ahead."""
    own = problem.jobs(patterns, steps=[step])
    later = [job for job in problem.jobs(None, steps=list(ahead)) if job.module != "dit"] if ahead else []
    result = StepJobs([], [], [], [])
    dits = {
        number: [
            (key, *cheapest(problem, key, "dit"))
            for key in problem.items
            if key[0] == number and problem.needs(key, "dit")
        ]
        for number in ahead
    }
    index: dict[int, int] = {}
    total = sum(problem.topology.speed)
    for number, job in enumerate(own + later):
        key = (job.item, job.module, job.first, job.count)
        if key in state.ran:
            continue
        release = max(
            (
                end
                for (item, _, first, count), (end, _) in state.ran.items()
                if item == job.item and first < job.first + job.count and job.first < first + count
            ),
            default=0.0,
        )
        index[number] = len(result.jobs)
        result.release.append(release if job.module == "dit" else 0.0)
        worth, slack = 0.0, 0.0
        if job.step != step:
            between = sum(area for number in ahead if number <= job.step for _, area, _ in dits[number]) / total
            slack = between - max((quick for item, _, quick in dits[job.step] if item == job.item), default=0.0)
            worth = state.worths[0 if job.step == step + 1 else 1] * job.area / total
            job.preds = []
        result.worth.append(worth)
        result.slack.append(max(slack, 0.0))
        job.preds = [index[p] for p in job.preds if p in index]
        result.jobs.append(job)
    return result


def _add_later(
    problem: Problem, state: StepContext, step: int, ahead: Sequence[int], chosen: StepJobs, lister: Lister
) -> None:
    """Put the encodes of the steps ahead behind the jobs of a planned step; the schedule makes room for them."""
    more = step_jobs(problem, state, step, ahead)
    for index in [i for i, worth in enumerate(more.worth) if worth > 0]:
        chosen.jobs.append(more.jobs[index])
        chosen.release.append(more.release[index])
        chosen.worth.append(more.worth[index])
        chosen.slack.append(more.slack[index])
        lister.begin.append(0.0)
        lister.end.append(0.0)
    lister.jobs = chosen.jobs


def constructive(
    problem: Problem, chosen: StepJobs, state: StepContext
) -> tuple[float, Lister, list[tuple[list[int], list[int]]]]:
    """(score, best schedule, all (order, degrees) tried): allotments for a few target times, own jobs only first."""
    own = [i for i, worth in enumerate(chosen.worth) if worth == 0]
    ahead = [i for i, worth in enumerate(chosen.worth) if worth > 0]
    jobs = chosen.jobs
    area = max(sum(jobs[i].area for i in own) / sum(problem.topology.speed), 1e-9)
    path = max(
        (jobs[i].quickest + max((jobs[p].quickest for p in jobs[i].preds), default=0.0) for i in own), default=0.0
    )
    best: tuple[float, Lister] | None = None
    tried = []
    for target in sorted({path, 1.2 * path, 0.5 * area, 0.7 * area, area, 1.25 * area, 1.6 * area, 2.2 * area}):
        degrees = allot(problem, jobs, target)
        tried.append((sorted(own, key=_by_tail(jobs, degrees)), degrees))
    tried += side_by_side(problem, jobs, own)
    for order, degrees in tried:
        lister = Lister(problem, jobs, state.free)
        lister.barrier, lister.release = state.barrier, chosen.release
        for index in order:
            lister.place(index, degrees[index])
        score = _score(chosen, lister, state)
        if best is None or score < best[0] - 1e-9:
            best = (score, lister)
    assert best is not None
    if ahead:
        _fill_gaps(chosen, best[1], state, time.perf_counter() + 0.05 * PATIENCE)
        degrees = [len(best[1].where[i]) if i in best[1].where else job.modes[0][0] for i, job in enumerate(jobs)]
        filled = [placed.job for placed in best[1].placed]
        tried.insert(0, (filled, degrees))
        best = (_score(chosen, best[1], state), best[1])
    return best[0], best[1], [(order + [i for i in ahead if i not in order], degrees) for order, degrees in tried]


def side_by_side(
    problem: Problem, jobs: Sequence[PlannedJob], own: Sequence[int] | None = None
) -> list[tuple[list[int], list[int]]]:
    """(order, degrees) in which nodes encode all items side by side, then run their dits, longest or shortest first."""
    own = range(len(jobs)) if own is None else own
    area = max(sum(jobs[i].area for i in own) / sum(problem.topology.speed), 1e-9)
    found = []
    for share in (0.12, 0.2, 0.3):
        whole = _whole_nodes(problem, jobs, share * area)
        length = [job.seconds(k) for job, k in zip(jobs, whole)]
        for sign in (-1, 1):
            order = sorted(own, key=lambda i: (jobs[i].module == "dit", sign * length[i], i))
            found.append((order, whole))
    return found


def _fill_gaps(chosen: StepJobs, lister: Lister, state: StepContext, deadline: float) -> None:
    """Encodes of later steps into what is idle; the most urgent and largest first."""
    optional = sorted(
        (i for i, worth in enumerate(chosen.worth) if worth > 0 and i not in lister.where),
        key=lambda i: (chosen.jobs[i].step, -chosen.worth[i], i),
    )
    if optional:
        fill(lister, optional, _end(chosen, lister, state), deadline)


def _end(chosen: StepJobs, lister: Lister, state: StepContext) -> float:
    """End of the step: of its last dit, or of its last encode where it has no dit."""
    own = [i for i, worth in enumerate(chosen.worth) if worth == 0 and i in lister.where]
    dits = [i for i in own if chosen.jobs[i].module == "dit"] or own
    return max((lister.end[i] for i in dits), default=state.barrier)


def climb(
    problem: Problem,
    chosen: StepJobs,
    state: StepContext,
    tried: Sequence[tuple[list[int], list[int]]],
    budget_s: float,
    seed: int,
    deadline: float,
) -> Lister:
    """Search for workers of unequal speed or nodes of unequal size: one schedule at a time, small changes that do not
    hurt are kept. Slower than the population search, but it sees every worker."""
    source = random.Random(seed)
    chain = {index: number for number, group in enumerate(batch.chains(chosen.jobs)) for index in group}
    groups = batch.chains(chosen.jobs)

    def schedule(order: Sequence[int], degrees: Sequence[int]) -> tuple[float, Lister]:
        lister = Lister(problem, chosen.jobs, state.free)
        lister.barrier, lister.release = state.barrier, chosen.release
        turn = [iter(group) for group in groups]
        for index in order:
            lister.place(own := next(turn[chain[index]]), degrees[own])
        return _score(chosen, lister, state), lister

    starts = [([i for i in order if chosen.worth[i] == 0], degrees) for order, degrees in tried]
    best = min(((*schedule(order, degrees), order, degrees) for order, degrees in starts), key=lambda found: found[0])
    for _ in range(int(budget_s / (len(starts[0][0]) * PLACE_S))):
        if time.perf_counter() > deadline:
            break
        order, degrees = list(best[2]), list(best[3])
        for _ in range(source.randint(1, 2)):
            if source.random() < 0.5:
                order.insert(source.randrange(len(order)), order.pop(source.randrange(len(order))))
            else:
                index = source.choice(order)
                degrees[index] = source.choice(chosen.jobs[index].modes)[0]
        score, lister = schedule(order, degrees)
        if score <= best[0]:
            best = (score, lister, order, degrees)
    return best[1]


def _by_tail(jobs: Sequence[PlannedJob], degrees: Sequence[int]) -> Callable[[int], tuple[float, int]]:
    tail = tails(jobs, degrees)
    return lambda index: (-tail[index], index)


def _whole_nodes(problem: Problem, jobs: Sequence[PlannedJob], limit: float) -> list[int]:
    """Encoders at their cheapest degree within `limit` seconds, dits at the largest degree inside a node: nodes encode
    side by side, then run their dits one after the other."""
    largest = max(problem.cluster.nodes)
    degrees = []
    for job in jobs:
        if job.module == "dit":
            degrees.append(max((k for k, _ in job.modes if k <= largest), default=job.modes[0][0]))
        else:
            degrees.append(min((k * s if s <= limit else 1e9 + s, k) for k, s in job.modes)[1])
    return degrees


def _realised(
    problem: Problem, chosen: StepJobs, state: StepContext, found: search.SearchResult, budget_s: float
) -> Lister:
    own = [worth == 0 for worth in chosen.worth]
    return realise(problem, chosen.jobs, found, state.free, state.barrier, chosen.release, own, budget_s)


def _score(chosen: StepJobs, lister: Lister, state: StepContext) -> float:
    """End of the step plus what later steps pay: encodes left to them, and workers that are busy beyond it."""
    end = _end(chosen, lister, state)
    left = sum(worth for i, worth in enumerate(chosen.worth) if worth > 0 and i not in lister.where)
    if not any(chosen.worth):
        return end
    over = sum(max(time - end, 0.0) for time in lister.free) / len(lister.free)
    delay = max(
        (
            lister.end[i] - end - chosen.slack[i]
            for i, worth in enumerate(chosen.worth)
            if worth > 0 and i in lister.where
        ),
        default=0.0,
    )
    return end + left + over + max(delay, 0.0)


def _after(chosen: StepJobs, lister: Lister, state: StepContext) -> StepContext:
    ran = dict(state.ran)
    barrier = state.barrier
    for placed in lister.placed:
        job = chosen.jobs[placed.job]
        if job.module == "dit":
            barrier = max(barrier, lister.end[placed.job])
        else:
            ran[job.item, job.module, job.first, job.count] = (lister.end[placed.job], placed.workers)
    return StepContext(free=list(lister.free), barrier=barrier, worths=state.worths, ran=ran)


assert ENCODERS == ("text", "vae")
