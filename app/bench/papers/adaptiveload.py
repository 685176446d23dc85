"""AdaptiveLoad's figures: batches of Open-Sora's stage-2 buckets, sized by tokens alone or by tokens and work.

A step gives every GPU one batch of a bucket drawn evenly, and lasts as long as the slowest. Work of a batch is
B S (1 + S / 6h), the FLOPs of a block but for a factor; the paper's own mix of buckets is not public.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from functools import cache

from actors.plan.schedule.balance import balance
from actors.run.step_metrics import LoadHistory
from app.bench.gpu.longest import LongestSequence
from app.bench.gpu.measurement import Figure, Place
from app.bench.papers.block import block_s
from app.bench.papers.figure import Reproduce, Reproduction
from app.bench.papers.losses import losses_by_batches
from app.bench.planner import STAGE_2, WIDTH, dual_batch, stage2_limits, stage2_tokens, work

STEPS, QUICK_STEPS = 150, 20
LENGTHS = {"8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536}
HIDDEN = 5120  # of a 40-layer transformer of 14 B


@cache
def buckets() -> list[int]:
    """Tokens of one sample of every bucket."""
    return [stage2_tokens(frames, pixels) for pixels, table in STAGE_2.items() for frames, _ in table]


def batch(tokens: int, dual: bool) -> int:
    """Samples of a bucket: as many as memory holds; with `dual` not more work than the longest sample has, either."""
    return dual_batch(tokens) if dual else max(1, stage2_limits()[0] // tokens)


@cache
def steps_of(gpus: int, dual: bool, steps: int) -> list[list[tuple[int, int]]]:
    """(batch, tokens of a sample) of every GPU of every step; the same buckets whatever sizes the batches."""
    source = random.Random(gpus)
    return [[(batch(s, dual), s) for s in source.choices(buckets(), k=gpus)] for _ in range(steps)]


def count(quick: bool) -> int:
    return QUICK_STEPS if quick else STEPS


def rate(gpus: int, dual: bool, quick: bool) -> float:
    """Tokens per unit of work of the slowest GPU."""
    steps = steps_of(gpus, dual, count(quick))
    return sum(b * s for step in steps for b, s in step) / sum(max(b * work(s) for b, s in step) for step in steps)


def balanced_rate(gpus: int, quick: bool) -> float:
    """The same with the samples of a step dealt to the GPUs anew."""
    steps = steps_of(gpus, True, count(quick))
    busiest = []
    for step in steps:
        lengths = [s for b, s in step for _ in range(b)]
        found = balance(lengths, [1] * gpus, width=WIDTH, gamma=1.0)
        busiest.append(max(_loads(lengths, found.bag_of, gpus)))
    return sum(b * s for step in steps for b, s in step) / sum(busiest)


def _loads(lengths: list[int], bags: tuple[int, ...], gpus: int) -> list[float]:
    loads = [0.0] * gpus
    for length, bag in zip(lengths, bags, strict=True):
        loads[bag] += work(length)
    return loads


def fig5(quick: bool) -> Reproduction:
    ours = {}
    for gpus in (8, 16):
        equal = rate(gpus, False, quick)
        ours[f"{gpus} GPUs"] = rate(gpus, True, quick) / equal
        ours[f"{gpus} GPUs, and samples balanced over GPUs"] = balanced_rate(gpus, quick) / equal
    note = "Work alone; the published gain is measured, and both its sides have the fused kernels."
    return Reproduction(way="simulation", ours=ours, note=note)


def fig6(quick: bool) -> Reproduction:
    ours = {}
    for gpus in (8, 16):
        for name, dual in (("equal tokens", False), ("dual constraint", True)):
            taken = [[b * work(s) for b, s in step] for step in steps_of(gpus, dual, count(quick))]
            ours[f"{gpus} GPUs, {name}"] = statistics.fmean((max(t) - min(t)) / max(t) for t in taken)
        ours[f"{gpus} GPUs, dual / equal"] = ours[f"{gpus} GPUs, dual constraint"] / ours[f"{gpus} GPUs, equal tokens"]
    note = "Buckets drawn evenly are a more uneven mix than the paper's, which is not public: compare the ratios alone."
    return Reproduction(way="simulation", ours=ours, note=note)


def fig7(quick: bool) -> Reproduction:
    spreads = {
        name: [_spread([b * s * s for b, s in step]) for step in steps_of(16, dual, count(quick))]
        for name, dual in (("equal tokens", False), ("dual constraint", True))
    }
    means = {name: statistics.fmean(values) for name, values in spreads.items()}
    return Reproduction(
        way="simulation",
        ours={"dual / equal": means["dual constraint"] / means["equal tokens"], **means},
        series={name: (tuple(map(float, range(len(values)))), tuple(values)) for name, values in spreads.items()},
        x_name="step",
        note="The same mix of buckets as in Fig. 6.",
    )


def _spread(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.fmean(values)


LOSS_STEPS, QUICK_LOSS_STEPS = 200, 6
SMOOTH = 0.1  # share of the last step in the mean that is drawn


def fig8(quick: bool) -> Reproduction:
    """A small model trained twice."""
    found = losses_by_batches(QUICK_LOSS_STEPS if quick else LOSS_STEPS)
    last = {name: statistics.fmean(losses[-max(1, len(losses) // 10) :]) for name, losses in found.items()}
    smooth = {name: _smoothed(losses) for name, losses in found.items()}
    apart = [abs(one / other - 1) for one, other in zip(smooth["dual constraint"], smooth["equal tokens"], strict=True)]
    return Reproduction(
        way="this machine's CPU",
        ours={
            **{f"last tenth, {name}": value for name, value in last.items()},
            "last tenth, dual / equal": last["dual constraint"] / last["equal tokens"],
            "largest distance of the smoothed curves": max(apart),
        },
        series={name: (tuple(map(float, range(len(losses)))), tuple(losses)) for name, losses in smooth.items()},
        x_name="step",
        note=(
            "A transformer of 2 layers, drawn as a mean over about 10 steps; the same items in every step, of which "
            "long ones have fewer clips under the dual constraint. The CPU runs library calls, so the kernels are no "
            "part of it: python -m app.bench.gpu compares theirs with plain PyTorch."
        ),
    )


def _smoothed(losses: list[float]) -> list[float]:
    means = losses[:1]
    for loss in losses[1:]:
        means.append((1 - SMOOTH) * means[-1] + SMOOTH * loss)
    return means


SMALLER = 32  # width and lengths are a 32nd of the model's and the buckets', so attention keeps its share of the work


def correlation(quick: bool) -> Reproduction:
    """Batches of equal tokens, one of each bucket, through a block of this machine: what do their seconds follow?"""
    history, lengths = LoadHistory(), sorted(set(buckets()))[:: 10 if quick else 1]
    for tokens in lengths:
        many, length = batch(tokens, False), tokens // SMALLER
        taken = block_s([length] * many, WIDTH // SMALLER, 3, backward=True, repeats=1 if quick else 3)
        history.add(taken, [(many, length)])
    with_tokens, with_load = history.with_tokens, history.with_load
    assert with_tokens is not None and with_load is not None  # lengths differ
    return Reproduction(
        way="this machine's CPU",
        ours={"with tokens": with_tokens, "with B S^p": with_load[0]},
        note=(
            f"Forward and backward of one block of width {WIDTH // SMALLER}, a batch of each of {len(lengths)} buckets "
            f"with as many samples as its tokens allow; lengths are a {SMALLER}nd of the buckets' own, CPU seconds. "
            f"The best p from 1 to 2.4 is {with_load[1]:g}. A run shows both figures of its own steps in its report."
        ),
    )


def table1(quick: bool) -> Reproduction | None:
    """A step with and without the fused ops, and the longest sequence that it holds; on a GPU only."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = with_and_without_fusion(Place(device=torch.device("cuda", 0), rehearse=False))
    name = torch.cuda.get_device_name()
    return Reproduction(
        way="GPU",
        ours={label: value for label, value in found.items() if label not in ("blocks", "clips")},
        note=f"{name}: {found['blocks']:.0f} of 40 blocks of Wan2.1-14B, {found['clips']:.0f} clips, all checkpointed; "
        "the paper trains all 40 over several GPUs, so compare the ratios. python -m app.bench.gpu --only longest.",
    )


def with_and_without_fusion(place: Place) -> dict[str, float]:
    """Seconds and tokens of the paper's Table 1, from the two measurements of app/bench/gpu."""
    found: dict[str, float] = {}
    for fused, name in ((False, "unfused"), (True, "fused")):
        figures = LongestSequence(fused=fused).run(place, {})
        found |= {"blocks": _number(figures["blocks"]), "clips": _number(figures["clips"])}
        found[f"longest sequence, {name}"] = _number(figures["longest tokens"])
        if figures["seconds"] is not None:  # a device may not hold the published length
            found[f"step, {name}"] = _number(figures["seconds"])
    if {"step, unfused", "step, fused"} <= set(found):
        found["step, unfused / fused"] = found["step, unfused"] / found["step, fused"]
    found["longest, fused / unfused"] = found["longest sequence, fused"] / found["longest sequence, unfused"]
    return found


def _number(figure: Figure) -> float:
    assert isinstance(figure, float | int)
    return float(figure)


def table2(quick: bool) -> Reproduction | None:
    """LayerNorm and modulation, eager against ours, bf16; on a GPU only."""
    import torch

    if not torch.cuda.is_available():
        return None
    return Reproduction(
        way="GPU",
        ours=fused_speed("cuda", dict(list(LENGTHS.items())[:2]) if quick else LENGTHS, HIDDEN),
        note=f"{torch.cuda.get_device_name()}, bf16, width {HIDDEN}, medians of 20; the paper's device is not named.",
    )


def fused_speed(device: str, lengths: Mapping[str, int], width: int, repeats: int = 20) -> dict[str, float]:
    """Seconds of eager PyTorch / ours, forward and backward, by number of tokens."""
    import torch

    from app.bench.ops_measure import BenchCase, measure_case
    from ops.kernels.base.measured import RowLayout
    from ops.kernels.folders import contests

    op, found = next(one for one in contests(liger=False) if one.name == "ln_modulate"), {}
    variants = {name: op.variants[name] for name in ("eager", "fused")}
    for name, tokens in lengths.items():
        case = BenchCase(op=op, layout=RowLayout(name="B=1", lengths=(tokens,)), width=width, variants=variants)
        rows = measure_case(case, torch.device(device), repeats)
        seconds = {(row.direction, row.variant): row.timing.seconds for row in rows}
        for side in ("forward", "backward"):
            found[f"{name} {side}"] = seconds[side, "eager"] / seconds[side, "fused"]
    return found


FIGURES: dict[str, Reproduce] = {
    "fig5": fig5,
    "fig6": fig6,
    "fig7": fig7,
    "fig8": fig8,
    "correlation": correlation,
    "table1": table1,
    "table2": table2,
}
