"""KnapFormer's figures: its scenarios drawn again from its data codes, balanced by its rule and by ours.

WIR follows from the drawn lengths alone. A step lasts as long as its busiest GPU; how fast a GPU is in a bag of some
size, which includes what exchanges of attention take there, comes from the printed seconds of both scenarios together.
"""

from __future__ import annotations

import statistics
from functools import cache

import numpy as np

from actors.plan.schedule.balance import (
    Balance,
    assign,
    balance,
    by_occupancy,
    occupancy_rule,
    parse_topology,
    workload,
)
from app.bench.papers.block import block_s
from app.bench.papers.figure import Reproduce, Reproduction, papers
from app.bench.planner import HOMOGENEOUS, SCENARIOS, WIDTH, draw_lengths

GPUS = 32
GAMMA = 0.42
STEPS, QUICK_STEPS = 50, 4
SCREENED = 40  # mixtures of bags that are balanced by our rule, of all that there are
BLOCKS, PASSES = 57, 4  # 19 double and 38 single blocks; forward, twice backward, and forward again
PEAK = 989e12  # FLOP/s of an H100 in bf16


@cache
def drawn(scenario: str, steps: int) -> list[list[int]]:
    return [draw_lengths(scenario, seed) for seed in range(steps)]


@cache
def unbalanced(scenario: str, steps: int) -> list[list[float]]:
    """Work of each GPU when it keeps the samples of its own loader, in TFLOP of a block."""
    found = []
    for lengths in drawn(scenario, steps):
        left, work = iter(lengths), []
        for ranks, batch, _ in SCENARIOS[scenario]:
            work += [sum(workload(next(left), WIDTH, GAMMA) for _ in range(batch)) for _ in range(ranks)]
        found.append(work)
    return found


@cache
def balanced(scenario: str, topology: str, steps: int) -> tuple[list[Balance], list[Balance]]:
    """(ours, by their rule) on the same draws."""
    sizes = parse_topology(topology, GPUS)
    ours = [balance(lengths, sizes, gamma=GAMMA) for lengths in drawn(scenario, steps)]
    theirs = [
        occupancy_rule([workload(length, WIDTH, GAMMA) for length in lengths], sizes)
        for lengths in drawn(scenario, steps)
    ]
    return ours, theirs


def count(quick: bool) -> int:
    return QUICK_STEPS if quick else STEPS


def wir(quick: bool) -> Reproduction:
    steps = count(quick)
    ours: dict[str, float] = {}
    for scenario in SCENARIOS:
        kept = [max(work) / min(work) for work in unbalanced(scenario, steps)]
        ours[f"{scenario} none"] = statistics.fmean(kept)
        for topology in HOMOGENEOUS:
            found, theirs = balanced(scenario, topology, steps)
            ours[f"{scenario} {topology}"] = statistics.fmean(one.wir for one in found)
            if scenario == "video":  # nothing is printed: their rule on the same draws
                ours[f"video {topology}, their rule"] = statistics.fmean(one.wir for one in theirs)
    note = (
        "Draws of the same data codes with other seeds. The rows without a balancer, and those of their rule, replay "
        "theirs: they show that the draws are alike."
    )
    return Reproduction(way="simulation", ours=ours, note=note)


@cache
def published_s() -> dict[str, float]:
    """Their printed seconds of forward and backward, by scenario and topology."""
    return dict(next(f for f in papers()["knapformer"].figures if f.id == "table1-fbl").published)


@cache
def rates(steps: int) -> dict[int, float]:
    """TFLOP/s of a GPU (work with gamma, all blocks and passes) in a bag of each size: the mean of what their printed
    seconds say of their busiest GPU. Falls with the size, as exchanges of attention are part of the seconds."""
    found: dict[int, list[float]] = {}
    for label, taken in published_s().items():
        scenario, topology = label.split()
        size = 1 if topology == "none" else parse_topology(topology, GPUS)[0]
        found.setdefault(size, []).append(BLOCKS * PASSES * their_busiest(scenario, topology, steps) / taken)
    return {size: statistics.fmean(values) for size, values in found.items()}


def their_busiest(scenario: str, topology: str, steps: int) -> float:
    """TFLOP of a block on the busiest GPU, mean of the steps: without a balancer, or by their rule."""
    if topology == "none":
        return statistics.fmean(map(max, unbalanced(scenario, steps)))
    return statistics.fmean(max(one.load) for one in balanced(scenario, topology, steps)[1])


def costs_s(lengths: list[int], topology: str, steps: int) -> np.ndarray:
    """Seconds of each sequence in a bag of each size, [sequences, sizes]."""
    rate = rates(steps)
    speed = np.array([size * rate[size] for size in sorted(set(parse_topology(topology, GPUS)))])
    work = BLOCKS * PASSES * np.array([workload(length, WIDTH, GAMMA) for length in lengths])
    return np.asarray(work[:, None] / speed[None, :])


def our_seconds(scenario: str, topology: str, steps: int) -> float:
    """Seconds of a step that we balance by the seconds that a bag of each size takes, mean of the steps."""
    sizes = parse_topology(topology, GPUS)
    return statistics.fmean(
        max(assign(costs_s(lengths, topology, steps), sizes, np.array(lengths, dtype=float)).load)
        for lengths in drawn(scenario, steps)
    )


def topologies() -> list[str]:
    """All mixtures of bags of the printed sizes that take every GPU once."""
    counts = (
        (GPUS - 2 * two - 4 * four - 8 * eight, two, four, eight)
        for eight in range(GPUS // 8 + 1)
        for four in range((GPUS - 8 * eight) // 4 + 1)
        for two in range((GPUS - 8 * eight - 4 * four) // 2 + 1)
    )
    return ["+".join(f"g{size}n{n}" for size, n in zip((1, 2, 4, 8), many, strict=True) if n) for many in counts]


@cache
def best_topology(scenario: str, steps: int) -> str:
    """The mixture in which we are fastest on the first step: the few best by their rule, which is quick, then by ours.
    Chosen on one draw, so that its figure over all of them is not the best of many."""
    (lengths,) = drawn(scenario, 1)

    def by_their_rule(topology: str) -> float:
        return max(by_occupancy(costs_s(lengths, topology, steps), parse_topology(topology, GPUS)).load)

    def by_ours(topology: str) -> float:
        sizes = parse_topology(topology, GPUS)
        return max(assign(costs_s(lengths, topology, steps), sizes, np.array(lengths, dtype=float)).load)

    return min(sorted(topologies(), key=by_their_rule)[:SCREENED], key=by_ours)


@cache
def seconds(quick: bool) -> dict[str, float]:
    """Seconds of a step, by scenario and topology: ours, and "their rule" by the same rates."""
    steps, found = count(quick), dict[str, float]()
    for scenario in SCENARIOS:
        rate = rates(steps)[1]
        found[f"{scenario} none"] = BLOCKS * PASSES * their_busiest(scenario, "none", steps) / rate
        for topology in HOMOGENEOUS:
            found[f"{scenario} {topology}"] = our_seconds(scenario, topology, steps)
        found[f"{scenario} mixed bags"] = our_seconds(scenario, best_topology(scenario, steps), steps)
        for topology in HOMOGENEOUS:
            rate = rates(steps)[parse_topology(topology, GPUS)[0]]
            theirs = BLOCKS * PASSES * their_busiest(scenario, topology, steps) / rate
            found[f"{scenario} {topology}, their rule"] = theirs
    return found


def note_of(quick: bool) -> str:
    """How the seconds came about, with how far the same arithmetic is from what they printed."""
    found, printed = seconds(quick), published_s()
    off = max(
        abs(found[label if label.endswith("none") else f"{label}, their rule"] / taken - 1)
        for label, taken in printed.items()
    )
    speeds = ", ".join(f"{rate:.0f} (g{size})" for size, rate in rates(count(quick)).items())
    mixed = ", ".join(f"{scenario} {best_topology(scenario, count(quick))}" for scenario in SCENARIOS)
    return (
        f"No GPU has run it: the busiest GPU's work over TFLOP/s of a GPU by the size of its bag, {speeds}, which are "
        f"means over both printed scenarios. By these rates their own rule misses its printed seconds by up to "
        f'{off:.0%}; "their rule" beside ours is what balancing alone is worth. Without a balancer both sides are '
        f"the same loop. Mixed bags: {mixed}."
    )


def fbl(quick: bool) -> Reproduction:
    return Reproduction(way="simulation", ours=seconds(quick), note=note_of(quick))


def tps(quick: bool) -> Reproduction:
    ours = {}
    for label, taken in seconds(quick).items():
        tokens = statistics.fmean(sum(lengths) for lengths in drawn(label.split()[0], count(quick)))
        ours[label] = tokens / taken / 1e3
    return Reproduction(way="simulation", ours=ours, note=note_of(quick))


def hfu(quick: bool) -> Reproduction:
    ours = {}
    for label, taken in seconds(quick).items():
        flops = statistics.fmean(sum(flops_of(lengths)) for lengths in drawn(label.split()[0], count(quick)))
        ours[label] = utilisation(flops, taken)
    return Reproduction(way="simulation", ours=ours, note=note_of(quick))


def flops_of(lengths: list[int]) -> list[float]:
    """FLOPs of one block, forward: Eq. 1 for each sequence."""
    return [1e12 * workload(length, WIDTH, 1.0) for length in lengths]


def utilisation(flops: float, seconds: float) -> float:
    """Percent of the peak of all GPUs, for a step whose sequences take `flops` in one block."""
    return 100 * BLOCKS * PASSES * flops / (PEAK * GPUS * seconds)


def sensitivity(quick: bool) -> Reproduction:
    """Bags chosen with one gamma, loads counted with another: what a wrong fit costs."""
    sizes = parse_topology("g4n8", GPUS)
    gammas = (0.3, 0.42, 0.6, 0.8, 1.0)
    worst = []
    for used in gammas:
        ratios = []
        for lengths in drawn("mixed-res", count(quick)):
            found = balance(lengths, sizes, gamma=used)
            load = np.zeros(len(sizes))
            for length, bag in zip(lengths, found.bag_of, strict=True):
                load[bag] += workload(length, WIDTH, GAMMA)
            ratios.append(float(load.max() / load.mean()))
        worst.append(statistics.fmean(ratios))
    return Reproduction(
        way="simulation",
        ours={f"planned with gamma {used}": value for used, value in zip(gammas, worst, strict=True)},
        note=f"The true gamma is {GAMMA}.",
        series={"largest / mean": (gammas, tuple(worst))},
        x_name="gamma of the plan",
    )


LENGTHS, QUICK_LENGTHS = (64, 256, 512, 1024, 1536, 2048, 3072), (64, 256, 512, 1024)
BLOCK_WIDTH, BLOCK_HEADS = 256, 4


def fig2(quick: bool) -> Reproduction:
    """One block of the Wan transformer, forward, one sequence at a time: fit of k and gamma, and of k alone."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    taken = [block_s([length], BLOCK_WIDTH, BLOCK_HEADS, backward=False, repeats=5) for length in lengths]
    columns = np.array([[24.0 * n * BLOCK_WIDTH**2, 4.0 * n**2 * BLOCK_WIDTH] for n in lengths])
    (linear, square), *_ = np.linalg.lstsq(columns, np.array(taken), rcond=None)
    (alone,), *_ = np.linalg.lstsq(columns.sum(axis=1, keepdims=True), np.array(taken), rcond=None)
    flops = tuple(float(row.sum()) / 1e9 for row in columns)
    return Reproduction(
        way="this machine's CPU",
        ours={
            "this machine": float(square / linear),
            "largest error of a length with gamma": _error(columns @ [linear, square], taken),
            "largest error of a length by FLOPs alone": _error(columns.sum(axis=1) * alone, taken),
        },
        series={
            "measured, ms": (flops, tuple(1e3 * one for one in taken)),
            "with gamma": (flops, tuple(float(v) * 1e3 for v in columns @ [linear, square])),
            "FLOPs alone": (flops, tuple(float(v) * 1e3 for v in columns.sum(axis=1) * alone)),
        },
        x_name="GFLOP of the block",
        note="A block of width 256 on one core, CPU seconds; the relation depends on the device and its kernels.",
    )


def _error(fitted: np.ndarray, taken: list[float]) -> float:
    """Relative to the longest time, as least squares weighs them."""
    return float(np.max(np.abs(fitted - np.array(taken))) / max(taken))


FIGURES: dict[str, Reproduce] = {
    "fig2": fig2,
    "table1-wir": wir,
    "table1-fbl": fbl,
    "table1-tps": tps,
    "table1-hfu": hfu,
    "gamma": sensitivity,
}
