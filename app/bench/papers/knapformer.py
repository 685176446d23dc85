"""KnapFormer's figures: its scenarios drawn again from its data codes, balanced by its rule and by ours.

WIR follows from the drawn lengths alone. Seconds are theirs, scaled: a step lasts as long as its busiest GPU, so ours
takes their printed time times (our busiest GPU's work) / (theirs). That keeps what a topology costs in communication.
"""

from __future__ import annotations

import statistics
import time
from functools import cache

import numpy as np

from actors.plan.schedule.balance import Balance, balance, occupancy_rule, parse_topology, workload
from app.bench.papers.figure import Reproduce, Reproduction, papers
from app.bench.planner import HOMOGENEOUS, SCENARIOS, WIDTH, draw_lengths

GPUS = 32
GAMMA = 0.42
STEPS, QUICK_STEPS = 50, 8
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
def seconds(quick: bool) -> dict[str, float]:
    printed = next(f for f in papers()["knapformer"].figures if f.id == "table1-fbl").published
    found = {}
    for label, theirs_s in printed.items():
        scenario, topology = label.split()
        if topology == "none":
            continue
        ours, theirs = balanced(scenario, topology, count(quick))
        share = statistics.fmean(max(a.load) / max(b.load) for a, b in zip(ours, theirs, strict=True))
        found[label] = theirs_s * share
    return found


SCALED = "Their seconds times (our busiest GPU's work) / (their busiest GPU's), on the same draws; no GPU has run it."


def fbl(quick: bool) -> Reproduction:
    return Reproduction(way="simulation", ours=seconds(quick), note=SCALED)


def tps(quick: bool) -> Reproduction:
    ours = {}
    for label, taken in seconds(quick).items():
        tokens = statistics.fmean(sum(lengths) for lengths in drawn(label.split()[0], count(quick)))
        ours[label] = tokens / taken / 1e3
    return Reproduction(way="simulation", ours=ours, note=SCALED)


def hfu(quick: bool) -> Reproduction:
    ours = {}
    for label, taken in seconds(quick).items():
        flops = statistics.fmean(sum(flops_of(lengths)) for lengths in drawn(label.split()[0], count(quick)))
        ours[label] = utilisation(flops, taken)
    return Reproduction(way="simulation", ours=ours, note=SCALED)


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
    taken = [_block_s(length) for length in lengths]
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


def _block_s(length: int) -> float:
    """Least CPU seconds of five forward passes of a packed sequence through one block."""
    import torch

    from ops.comm import Group
    from ops.models.load import build_dit
    from ops.models.wan.config import WanConfig
    from ops.packing import Layout, Sequence

    torch.set_num_threads(1)
    settings = WanConfig(
        num_layers=1, num_heads=BLOCK_HEADS, head_dim=BLOCK_WIDTH // BLOCK_HEADS, ffn_dim=4 * BLOCK_WIDTH, text_dim=32
    )
    dit = build_dit(settings, 0)
    layout = Layout([Sequence(grid=(1, 1, length), text_tokens=8)])
    rows = torch.randn(length, settings.in_channels * 4)
    words, times = torch.randn(8, 32), torch.full((1,), 500.0)
    taken = []
    with torch.no_grad():
        for _ in range(6):
            started = time.process_time()
            dit(rows, times, words, layout, Group.solo())
            taken.append(time.process_time() - started)
    return min(taken[1:])


FIGURES: dict[str, Reproduce] = {
    "fig2": fig2,
    "table1-wir": wir,
    "table1-fbl": fbl,
    "table1-tps": tps,
    "table1-hfu": hfu,
    "gamma": sensitivity,
}
