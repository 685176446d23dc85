"""AdaptiveLoad's figures: batches of Open-Sora's stage-2 buckets, sized by tokens alone or by tokens and work.

A step gives every GPU one batch of a bucket drawn evenly, and lasts as long as the slowest. Work of a batch is
B S (1 + S / 6h), the FLOPs of a block but for a factor; the paper's own mix of buckets is not public.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from functools import cache, partial

from actors.plan.schedule.balance import balance
from app.bench.papers.figure import Reproduce, Reproduction
from app.bench.planner import STAGE_2, WIDTH
from ops.geometry import Geometry

TEXT = 512
STEPS, QUICK_STEPS = 150, 20
LENGTHS = {"8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536}
HIDDEN = 5120  # of a 40-layer transformer of 14 B


@cache
def buckets() -> list[int]:
    """Tokens of one sample of every bucket."""
    geometry = Geometry()
    return [TEXT + geometry.tokens(frames, pixels, pixels) for pixels, table in STAGE_2.items() for frames, _ in table]


def work(tokens: int) -> float:
    return tokens * (1 + tokens / (6 * WIDTH))


@cache
def limits() -> tuple[int, float]:
    """Tokens that Open-Sora's own largest batch has, and the work of the longest sample alone."""
    geometry = Geometry()
    own = [
        size * (TEXT + geometry.tokens(frames, pixels, pixels))
        for pixels, table in STAGE_2.items()
        for frames, size in table
    ]
    return max(own), work(max(buckets()))


def batch(tokens: int, dual: bool) -> int:
    """Samples of a bucket: as many as memory holds; with `dual` not more work than the longest sample has, either."""
    memory, compute = limits()
    by_memory = memory // tokens
    return max(1, min(by_memory, int(compute / work(tokens))) if dual else by_memory)


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

    from app.bench.timing import measure

    found = {}
    for name, tokens in lengths.items():
        for side in ("forward", "backward"):
            taken = [
                measure(
                    partial(_call, fused, side, tokens, width, device),
                    (2 if side == "forward" else 3) * 2 * tokens * width,
                    torch.device(device),
                    repeats,
                ).seconds
                for fused in (False, True)
            ]
            found[f"{name} {side}"] = taken[0] / taken[1]
    return found


def _call(fused: bool, side: str, tokens: int, width: int, device: str, _: int = 0) -> Callable[[], object]:
    """A call on buffers of its own: forward, or backward of a forward that is done."""
    import torch

    from ops.kernels.base.segments import Segments
    from ops.kernels.norm_modulate.op import ln_modulate

    x, scale, shift = (
        torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True) for rows in (tokens, 1, 1)
    )
    segments = Segments.packed([tokens], device=torch.device(device))

    def forward() -> torch.Tensor:
        if fused:
            return ln_modulate(x, scale, shift, segments)
        return torch.nn.functional.layer_norm(x, (width,), eps=1e-6) * (1 + scale) + shift

    if side == "forward":
        return forward
    made, gradient = forward(), torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(made, [x, scale, shift], gradient, retain_graph=True)


FIGURES: dict[str, Reproduce] = {"fig5": fig5, "fig6": fig6, "fig7": fig7, "table2": table2}
