"""`heddle plan`: what a cluster would do with a workload, before a GPU is touched.

    heddle plan --workload W.json --profile P.json --cluster 2x8 --compare static,flexsp,knapsack,cascade
    heddle plan --config configs/runs/demo.yaml --from-data --cluster 1x4 --gantt plan.png

Calls the same functions as the planner of a run: every plan shown has passed the legality check.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actors.feed.experts import ExpertDraw
from actors.plan.costs.profile import Profile
from actors.plan.registry import STRATEGIES
from actors.plan.schedule.bounds import rolling_bound
from actors.plan.schedule.check import check
from actors.plan.schedule.figures import StepFigures, figures, windows
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.spared import from_cache
from actors.plan.types import Cluster, Item, Plan
from actors.planning.adapt import adapted
from actors.planning.make_plan import make_plan
from actors.planning.options import options_of
from actors.records.plan_record import PlanRecord
from app.inputs.account import account_json, account_lines, print_buckets
from app.inputs.batches import with_limits
from app.inputs.cluster import cluster_of, read_cluster
from app.inputs.compiling import with_compiling
from app.inputs.data_codes import check_workers, items_from_codes, workers_of
from app.inputs.items import batches_of, items_from_buckets, items_from_data, open_dataset
from app.inputs.limits import largest_batches, longest_clips
from app.inputs.memory import MemoryView, view_memory
from app.inputs.profiles import load_profile, profile_of
from app.inputs.shared_cores import with_shared_cores
from app.inputs.workload import read_workload
from app.kept.wanted import cache_preview
from app.plan.memory import cascade_gib, need_lines, pixel_line, state_lines, with_room
from app.settings.config import RunConfig, from_here
from app.settings.out_files import check_page, check_writable, put_text
from data.dataset.coverage import Accounting, account, check_coverage
from ops.counted import counted
from ops.degrees import exchanged
from ops.ranges import SECONDS
from ops.typed import ConfigError

PlannedSteps = Sequence[Sequence[Item]]
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The options of the command as they were typed."""

    workload: Path | None
    config: Path | None
    overrides: Sequence[str]
    from_data: bool
    profile: Path | None
    cluster: str
    strategies: Sequence[str]  # none: the config's, cascade for a workload
    budget_s: float | None
    steps: int
    seed: int | None  # of buckets drawn from a config; None: 0
    shares: Sequence[str] = ()
    codes: str = ""  # KnapFormer's, instead of buckets of the config

    def check(self) -> None:
        """Raises ConfigError where options are wrong, or do not go together."""
        for strategy in self.strategies:
            if strategy not in STRATEGIES:
                raise ConfigError(f"--strategy {strategy!r} is not one of {', '.join(STRATEGIES)}.")
        if (self.workload is None) == (self.config is None):
            raise ConfigError("give either --workload FILE or --config RUN.yaml.")
        if self.shares and (self.workload is not None or self.from_data):
            raise ConfigError("--share is for buckets drawn from --config; a workload or real data has its own shares.")
        if self.codes and (self.workload is not None or self.from_data or self.shares):
            raise ConfigError("--codes makes a workload for the model of --config; leave out what else makes one.")
        if self.seed is not None and self.from_data:
            raise ConfigError("--seed is for buckets drawn from --config; real data is drawn by train.seed of the run.")
        if self.budget_s is not None and not 0 <= self.budget_s <= SECONDS:
            raise ConfigError(f"--budget {self.budget_s:g} is not a number of seconds from 0 to {SECONDS:g}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """What is planned, wherever it came from."""

    steps: PlannedSteps
    profile: Profile
    cluster: Cluster
    options: PlanOptions
    memory: MemoryView | None = None  # of a run whose devices are known
    adapts: bool = False  # options that these workers cannot follow: the nearest, as a run does
    account: Accounting | None = None  # of real data
    pixels: str = ""  # of a run: what decoded clips take of memory, in words

    def items(self, plan: Plan) -> dict[tuple[int, str], Item]:
        """Items by step and id."""
        return {(step.step, item.id): item for step, items in zip(plan.steps, self.steps) for item in items}

    def bound(self) -> float:
        """Mean seconds per step that no plan can beat."""
        return rolling_bound(Problem(self.steps, self.profile, self.cluster, self.options))


def run_plan(
    request: PlanRequest, out: Path | None = None, gantt: Path | None = None, page: Path | None = None
) -> None:
    """Plan, check, print the table, write what was asked for. Raises ConfigError, DataError and PlanError."""
    request.check()
    if gantt is not None and gantt.suffix.lower() not in PICTURES:
        raise ConfigError(f"--gantt {gantt} has no name of a picture; give a file that ends in {PICTURES[0]}.")
    for name, path in (("--json", out), ("--gantt", gantt)):
        check_writable([path], name)
    check_page(page, "--html")
    problem = _from_workload(request) if request.workload else _from_config(request)
    strategies = request.strategies or (problem.options.strategy,)
    plans = [planned(problem, strategy) for strategy in strategies]
    workers = problem.cluster.num_workers
    items = sum(len(step) for step in problem.steps)
    print(
        f"{counted(items, 'item')} in {counted(len(problem.steps), 'step')} on {counted(workers, 'worker')} "
        f"({problem.profile.model} on {problem.profile.device})"
    )
    print(table(plans, problem))
    print("\n".join(degree_lines(plans, problem.profile)))
    if line := update_line(plans, problem):
        print(line)
    if problem.memory is not None:
        needs = need_lines(problem.memory, plans[0], problem.items(plans[0]), problem.profile)
        print("\n".join([*state_lines(problem.memory), *needs]))
    if problem.pixels:
        print(problem.pixels)
    for line in [*longest_clips(problem.profile), *largest_batches(problem.profile)]:
        print(f"limit     {line}")
    for note in problem.profile.notes:
        print(f"note: {note}")
    if out:
        data = {"data": account_json(problem.account)} if problem.account is not None else {}
        found = [plan_json(plan) | data for plan in plans]
        put_text(out, json.dumps(found[0] if len(found) == 1 else found, indent=1, allow_nan=False) + "\n")
        print(f"json      {out}")
    if gantt:
        from app.plan.pictures import write_gantt

        write_gantt(gantt, plans, problem.cluster, problem.items(plans[0]))
        print(f"gantt     {gantt}")
    if page:
        from app.plan.pictures import write_page

        text = table(plans, problem)
        if problem.account is not None:
            text = "\n".join([*account_lines(problem.account, most_named=len(problem.account.dropped)), "", text])
        write_page(page, plans, problem.cluster, problem.items(plans[0]), text)
        print(f"page      {page}")


def _from_workload(request: PlanRequest) -> PlanInputs:
    assert request.workload is not None
    if request.profile is None:
        raise ConfigError("--workload needs --profile P.json: the latencies to plan with.")
    if request.from_data:
        raise ConfigError("--from-data takes its items from --config; leave --workload out.")
    for option, given in (
        ("--set", request.overrides),
        ("--steps", request.steps),
        ("--seed", request.seed is not None),
    ):
        if given:
            raise ConfigError(f"{option} is for --config, and a workload has its own steps; leave {option} out.")
    workload = read_workload(request.workload)
    spec = request.cluster or workload.cluster
    if not spec:
        raise ConfigError("give --cluster, for example 2x8 (nodes x GPUs) or a YAML file.")
    # A file of many steps is a preview of a run: it may look further ahead and think longer than a run's planner can.
    budget_s = (0.2 if len(workload.steps) == 1 else 1.0) if request.budget_s is None else request.budget_s
    options = PlanOptions(budget_s=budget_s, lookahead=2)
    return PlanInputs(
        steps=workload.steps,
        profile=load_profile(request.profile),
        cluster=read_cluster(spec),
        options=options,
    )


def _from_config(request: PlanRequest) -> PlanInputs:
    from ops.models.folders import resolve

    assert request.config is not None
    config = from_here(RunConfig.load(request.config, request.overrides))
    if request.profile:
        config = replace(config, planner=replace(config.planner, profile=str(request.profile)))
    if request.cluster:
        config = replace(config, workers=replace(config.workers, cluster=request.cluster))
    if request.codes:
        if not config.workers.cluster:
            config = replace(config, workers=replace(config.workers, cluster=f"1x{workers_of(request.codes)}"))
        check_workers(request.codes, cluster_of(config).num_workers)  # before a model is looked at, which takes a while
    config, decided = with_compiling(config)
    if decided:
        print(f"note: {decided}")
    model, geometry = resolve(config.model)
    profile = profile_of(config, model, geometry)
    cluster = cluster_of(config)
    config, _ = with_limits(config, model, geometry, profile, cluster)
    view = view_memory(config, model, geometry, profile, cluster)
    cluster = with_room(cluster, view)
    steps: PlannedSteps
    found = None
    if request.codes:
        coded = items_from_codes(request.codes, cluster.num_workers, request.steps or 8, request.seed or 0, geometry)
        cached = from_cache(config.data.cache)
        steps = tuple(tuple(replace(item, cached=cached) for item in items) for items in coded)
    elif request.from_data:
        dataset = open_dataset(config, geometry, profile)
        found = account(dataset, request.steps or None, config.train.steps)
        print("\n".join(account_lines(found)))
        check_coverage(dataset.ledger, config.data.min_coverage)
        if line := cache_preview(config)[0]:
            print(line)
        steps = items_from_data(dataset, request.steps or 8, config, model)
    else:
        batches = batches_of(config, geometry, profile)
        print_buckets(batches, config, geometry)
        steps = items_from_buckets(config, model, batches, request.steps or 8, request.seed or 0, request.shares)
        experts = ExpertDraw.of(model.dit, config.train, geometry)
        steps = tuple(experts.routed(number, items) for number, items in enumerate(steps))
    shared, sharing = with_shared_cores(cluster, config)
    if sharing:
        print(f"note: {sharing}")
    return PlanInputs(
        steps=steps,
        profile=profile,
        cluster=shared,
        options=preview_options(config, request.budget_s),
        memory=view,
        adapts=config.planner.misfit == "adapt",
        account=found,
        pixels=pixel_line(steps, config),
    )


def preview_options(config: RunConfig, budget_s: float | None = None) -> PlanOptions:
    """The run's own options, but for one: no step is planned a second time, so every plan shown is one that would
    run."""
    budget_s = config.planner.budget_s if budget_s is None else budget_s
    return options_of(config.planner, budget_s=budget_s, replans=False)


def planned(problem: PlanInputs, strategy: str) -> Plan:
    """A plan that has passed the check. Prints which options a run would change for these workers. Raises PlanError."""
    options = replace(problem.options, strategy=strategy)
    if problem.adapts:
        options, told = adapted(options, problem.steps, problem.profile, problem.cluster)
        for sentence in told:
            print(f"note: {sentence} (planner.misfit: adapt)")
    plan = make_plan(problem.steps, problem.profile, problem.cluster, options)
    check(plan, problem.steps, problem.profile, problem.cluster)
    return plan


HEAD = ("strategy", "step", "bound", "over", "idle", "WIR", "CV step", "CV comp", "peak", "planning")


def table(plans: Sequence[Plan], problem: PlanInputs) -> str:
    """One line per strategy: means over the steps; peak memory and planning time are the largest."""
    rows = [HEAD]
    for plan in plans:
        balance = step_figures(plan, problem)
        seconds = _mean([step.makespan_s for step in plan.steps])
        bound = problem.bound()
        peak = peak_gib(plan, problem)
        rows.append(
            (
                plan.strategy,
                f"{seconds:.3f} s",
                f"{bound:.3f} s",
                f"{100 * (seconds / bound - 1):.1f}%" if bound else "-",
                f"{100 * _mean([figure.idle_ratio for figure in balance]):.1f}%",
                _number(_mean([figure.wir for figure in balance])),
                f"{100 * _mean([figure.cv_step for figure in balance]):.1f}%",
                f"{100 * _mean([figure.cv_compute for figure in balance]):.1f}%",
                f"{peak:.1f} GiB" if peak else "-",
                f"{1000 * max(step.planning_s for step in plan.steps):.0f} ms",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def degree_lines(plans: Sequence[Plan], profile: Profile) -> list[str]:
    """How many DiT cascades of each plan have which degree, and what bags send whose ranks share heads."""
    lines: list[str] = []
    seen: set[int] = set()
    for plan in plans:
        counts = Counter(c.degree for step in plan.steps for c in step.cascades if c.module == "dit")
        seen |= counts.keys()
        degrees = ", ".join(f"{counts[degree]} at {degree}" for degree in sorted(counts))
        lines.append(f"degrees   {plan.strategy}: {degrees or 'no DiT cascade'}")
    heads = profile.num_heads or 0  # of a file that does not say, no degree is known to share any
    for degree in sorted(seen):
        if heads % degree:
            lines.append(
                f"          {degree} does not divide {heads} heads: ranks share some, and send "
                f"{exchanged(heads, degree):.2f} times what Ulysses would"
            )
    return lines


def update_line(plans: Sequence[Plan], problem: PlanInputs) -> str:
    """What comes after every step of the table; "" where nobody has measured it."""
    update_s = max((step.update_s for plan in plans for step in plan.steps), default=0.0)
    if not update_s:
        return ""
    remainder_s = max(step.remainder_s for plan in plans for step in plan.steps)
    between = f" and {remainder_s:.3f} s beside cascades, as a run has learned" if remainder_s else ""
    whole = ", ".join(f"{plan.strategy} {step_seconds(plan):.3f} s" for plan in plans)
    here = (problem.cluster.num_workers, len(problem.cluster.nodes))
    known = any((one.workers, one.nodes) == here for one in problem.profile.update.points)
    return (
        f"update    {update_s:.3f} s more at the end of each step (gradient sum, optimizer, new parameters; "
        f"{'measured' if known else 'by what was measured on other numbers of workers'}){between}: {whole} per step "
        f"in all"
    )


def step_seconds(plan: Plan) -> float:
    """Mean seconds per step, its end and remainder included as far as they are known: `predicted_s` of a run."""
    return _mean([step.seconds for step in plan.steps])


def step_figures(plan: Plan, problem: PlanInputs) -> list[StepFigures]:
    """Balance of each step of a plan."""
    items, workers = problem.items(plan), problem.cluster.num_workers

    def tokens_of(step: int, name: str) -> int:
        item = items[step, name]
        return problem.profile.tokens(item.frames, item.height, item.width) + item.text_tokens

    cascades, numbers = [cascade for step in plan.steps for cascade in step.cascades], [s.step for s in plan.steps]
    spans = windows(cascades, numbers)
    return [figures(cascades, span, workers, step, tokens_of) for span, step in zip(spans, numbers, strict=True)]


def peak_gib(plan: Plan, problem: PlanInputs) -> float:
    """The largest predicted memory of any cascade; 0 where the profile knows none."""
    items = problem.items(plan)
    peaks = [0.0]
    for cascade in (cascade for step in plan.steps for cascade in step.cascades):
        peaks.append(cascade_gib(cascade, items, problem.profile) or 0.0)
    return max(peaks)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def plan_json(plan: Plan) -> dict[str, object]:
    """A plan as other programs read it."""
    steps = [PlanRecord.of(step, step.cascades, step.planning_s).line() for step in plan.steps]
    return {"strategy": plan.strategy, "steps": steps}
