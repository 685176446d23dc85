"""The compiled search: its schedules are real, it needs no luck, and without a compiler the plan is still a plan."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import CrossNode
from actors.plan.schedule.check import check
from actors.plan.schedule.evaluator import to_cascades
from actors.plan.schedule.listing import ListSchedule
from actors.plan.schedule.problem import PlannedJob, PlanOptions, Problem, StepContext
from actors.plan.strategies.search import anneal, native
from actors.plan.strategies.search.improve import realise
from actors.plan.strategies.search.space import Space, build
from actors.plan.strategies.search.step_jobs import StepsAhead, choices
from actors.plan.types import Cluster, Item
from actors.planning.make_plan import make_plan
from ops.models.wan.config import WanConfig
from tests.actors.plan.options import counted

needs_compiler = pytest.mark.skipif(native.library() is None, reason="the C search was not built")
ROOT = Path(__file__).resolve().parents[3]
SHAPES = [(6, 5), (6, 13), (5, 25), (3, 41), (2, 57), (1, 81), (1, 97), (1, 113), (1, 129)]


def step_of(*numbers: int) -> list[Item]:
    return [
        Item(id=f"i{n}", batch=SHAPES[number][0], frames=SHAPES[number][1], height=1280, width=720)
        for n, number in enumerate(numbers)
    ]


def idle(problem: Problem) -> tuple[StepContext, list[PlannedJob]]:
    """The jobs of the first step and the encodes of all later ones, before anything ran."""
    context = StepContext.idle(problem.topology.num_workers)
    return context, choices(problem, context, 0, StepsAhead(tuple(range(1, len(problem.steps)))))[0]


def plainest(space: Space) -> tuple[np.ndarray, np.ndarray]:
    """The candidate of all first modes."""
    return np.full(space.num_jobs, 0.5), np.zeros(space.num_jobs, dtype=np.intp)


@needs_compiler
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=5), min_size=1, max_size=2),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_a_found_schedule_takes_no_longer_when_it_is_placed_for_real(
    h100: Profile, steps: list[list[int]], nodes: int, seed: int
) -> None:
    """Forward or from its end, alone or with encodes of the next step: the evaluator's end is the search's makespan."""
    problem = Problem([step_of(*step) for step in steps], h100, Cluster(nodes=(8,) * nodes), PlanOptions())
    context, jobs = idle(problem)
    space = build(problem, jobs, context)
    assert space is not None and native.fits(space)
    found = native.anneal(space, [plainest(space)], 0.01, seed, 0.0, 60.0)
    assert found is not None
    placed = realise(problem, jobs, context, found, 0.01)
    end = max(placed.end[i] for i, job in enumerate(jobs) if not job.optional)
    spanned = any(len(nodes) > 1 for nodes in found.nodes)  # rails may cost more than the best case that is searched
    assert end <= found.makespan * (1.3 if spanned else 1 + 1e-9)


def of_bags(costs: tuple[float, float, float], workers: int, nodes: int, degrees: tuple[int, ...] = ()) -> Problem:
    """Six shapes, encoded, for a model whose bags over nodes take these seconds for a row and for a peer,
    or this share."""
    profile = Profile.from_flops(WanConfig(num_heads=8), tflops=1.0, degrees=(1, 2, 4, 8))
    profile.cross_node = CrossNode(row_s=costs[0], peer_s=costs[1], penalty=costs[2])
    items = [replace(item, cached=("text", "vae")) for item in step_of(1, 3, 4, 5, 8, 8)]
    return Problem([items], profile, Cluster(nodes=(workers,) * nodes), PlanOptions(degrees=degrees))


def evaluated(problem: Problem, jobs: list[PlannedJob], placed: ListSchedule) -> float:
    return max(cascade.end_s for cascade in to_cascades(problem, jobs, placed.placed))


costs_of_nodes = st.tuples(st.floats(0, 1e-3), st.floats(0, 1.0), st.floats(0, 2.0))


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(costs_of_nodes, st.sampled_from([(2, 2, 4), (4, 2, 8), (2, 4, 8), (1, 2, 2)]))
def test_the_searches_price_a_bag_over_nodes_as_the_evaluator_does(
    costs: tuple[float, float, float], sizes: tuple[int, int, int]
) -> None:
    """Bags of all workers, one after the other: the end is the sum of their prices."""
    workers, nodes, degree = sizes
    problem = of_bags(costs, workers, nodes, (degree,))
    context, jobs = idle(problem)
    space = build(problem, jobs, context)
    assert space is not None
    parts = [Samples.of_item(item, item.batch) for item in problem.steps[0]]
    prices = [problem.profile.seconds("dit", p, degree) + problem.profile.penalty("dit", p, degree) for p in parts]
    compiled = native.anneal(space, [plainest(space)], 0.002, 0, 0.0, 60.0)
    vectorised = anneal.anneal(space, [plainest(space)], 0.002, 0, 0.0, time.perf_counter() + 60.0)
    assert compiled is not None
    assert compiled.makespan == pytest.approx(math.fsum(prices))
    assert vectorised.makespan == pytest.approx(math.fsum(prices))
    placed = realise(problem, jobs, context, compiled, 0.01)
    assert evaluated(problem, jobs, placed) == pytest.approx(math.fsum(prices)) == max(placed.end)


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(costs_of_nodes, st.sampled_from([(2, 2), (4, 2), (2, 4), (3, 2)]), st.integers(0, 5))
def test_whatever_bags_the_search_chooses_it_prices_them_as_the_evaluator_does(
    costs: tuple[float, float, float], sizes: tuple[int, int], seed: int
) -> None:
    problem = of_bags(costs, *sizes)
    context, jobs = idle(problem)
    space = build(problem, jobs, context)
    assert space is not None
    found = native.anneal(space, [plainest(space)], 0.002, seed, 0.0, 60.0)
    assert found is not None
    placed = realise(problem, jobs, context, found, 0.01)
    assert evaluated(problem, jobs, placed) == pytest.approx(found.makespan) == max(placed.end)


@needs_compiler
def test_the_vectorised_and_the_compiled_search_agree_on_a_small_step(
    h100: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(1, 7)
    compiled = make_plan([step], h100, Cluster(nodes=(8,)), counted(budget_s=0.2)).steps[0].makespan_s
    monkeypatch.setattr(native, "library", lambda: None)
    vectorised = make_plan([step], h100, Cluster(nodes=(8,)), counted(budget_s=0.2)).steps[0].makespan_s
    assert compiled == pytest.approx(vectorised, rel=1e-6)


def test_without_a_compiler_the_step_is_still_planned(h100: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    steps = [step_of(8, 5, 3, 1), step_of(7, 4, 2, 0)]
    plan = make_plan(steps, h100, Cluster(nodes=(8, 8)), counted(budget_s=0.05))
    check(plan, steps, h100, Cluster(nodes=(8, 8)))


@needs_compiler
def test_a_search_that_no_longer_helps_ends_before_its_budget(h100: Profile) -> None:
    problem = Problem([step_of(0, 6)], h100, Cluster(nodes=(8,)), PlanOptions())
    context, jobs = idle(problem)
    space = build(problem, jobs, context)
    assert space is not None
    found = native.anneal(space, [plainest(space)], 10.0, 0, 0.0, 60.0)
    assert found is not None and found.rounds < 0.2 * native.evaluations_for(space, 10.0)


@needs_compiler
def test_the_wall_clock_ends_a_search(h100: Profile) -> None:
    problem = Problem([step_of(*range(9))], h100, Cluster(nodes=(8,) * 4), PlanOptions())
    context, jobs = idle(problem)
    space = build(problem, jobs, context)
    assert space is not None
    found = native.anneal(space, [plainest(space)], 100.0, 0, 0.0, 0.05)
    assert found is None or found.rounds < 0.05 * native.evaluations_for(space, 100.0)


@needs_compiler
def test_a_search_built_from_another_version_is_not_used() -> None:
    assert native.library(version=native.VERSION + 1) is None


@needs_compiler
def test_a_copy_of_the_tree_without_built_files_uses_the_installed_search(tmp_path: Path) -> None:
    """As a job submitted to a cluster runs."""
    assert native.library(tree=tmp_path) is not None


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_a_wheel_carries_the_search_and_is_made_without_a_compiler_too(compiler: str, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "actors", tmp_path / "actors", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "made", "."]
    environment = {**os.environ, "CC": compiler}
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert made.returncode == 0, made.stderr
    (wheel,) = (tmp_path / "made").iterdir()
    assert (str(native.BUILT) in zipfile.ZipFile(wheel).namelist()) == (compiler == "cc")
