"""ScaleFusion's figures by the event simulator of its schedules, on A100s and the network of the paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from app.bench.papers.figure import Reproduce, Reproduction
from app.bench.scalefusion_published import (
    GPUS,
    HEADS,
    PAIRS,
    REFERENCE,
    WIDTH,
    WORKLOADS,
    ClipSize,
    chosen,
    gains,
    seconds,
    sensitivity,
)
from ops.counted import counted
from ops.models.stdit3.config import STDiT3Config
from ops.packed.packing import Sequence
from ops.spatial_temporal.schedule import DSP, Schedule, intra

SLICES = 4  # the paper's default, with L_T 1 and L_S 3
NOTE = (
    "Simulated; one figure is taken from the paper to set the ratio of network to computation: the 34 % of DSP's time "
    "that all-to-all takes for 1080p, 8 s on two machines (Section 3)."
)


def workloads(quick: bool) -> Seq[ClipSize]:
    return WORKLOADS[::3] if quick else WORKLOADS


def fig9(quick: bool) -> Reproduction:
    clips = workloads(quick)
    ours = {f"{count} machines": statistics.fmean(gains(clips, (count,), DSP, Schedule())) for count in (2, 4)}
    ours["slices inside layers alone"] = statistics.fmean(gains(clips, (2, 4), DSP, intra(SLICES)))
    ours["parts under the layer before"] = statistics.fmean(gains(clips, (2, 4), intra(SLICES), Schedule()))
    if not quick:
        for machines in (2, 4):
            ratios = [seconds(clip, machines, DSP) / seconds(clip, machines, chosen(clip, machines)) for clip in clips]
            ours[f"{machines} machines, schedule chosen for each video"] = statistics.fmean(ratios)
    return Reproduction(way="simulation", ours=ours, note=NOTE)


def scaling(quick: bool) -> Reproduction:
    ours = {
        f"{machines} machines": statistics.fmean(
            seconds(clip, 1, Schedule()) / seconds(clip, machines, Schedule()) for clip in workloads(quick)
        )
        for machines in (2, 4)
    }
    return Reproduction(way="simulation", ours=ours, note=NOTE)


def fig10(quick: bool) -> Reproduction:
    """All-to-all left over by N, as a share of what DSP has; slicing costs some computation, too."""
    points = [point for point in sensitivity() if point.lead is None]
    whole = points[0].exposed_s
    counts, left = [point.slices for point in points], [point.exposed_s / whole for point in points]
    return Reproduction(
        way="simulation",
        ours={counted(count, "slice"): value for count, value in zip(counts, left, strict=True)},
        series={
            "not hidden, share of DSP's": (tuple(map(float, counts)), tuple(left)),
            "total, share of DSP's": (
                tuple(map(float, counts)),
                tuple(point.total_s / points[0].total_s for point in points),
            ),
        },
        x_name="slices",
        note=f"{REFERENCE.name} on two machines. {NOTE}",
    )


def fig11(quick: bool) -> Reproduction:
    points = [point for point in sensitivity() if point.slices == SLICES and point.lead is not None]
    whole = seconds(REFERENCE, 2, DSP)
    return Reproduction(
        way="simulation",
        ours={f"L_S {point.lead}": whole / point.total_s for point in points},
        note=f"{REFERENCE.name} on two machines. {NOTE}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPeaks:
    """GiB at the peak of a forward of STDiT3-XL/2 on one rank, beside its weights, and its weights."""

    dsp: float
    inter: float
    ulysses: float | None  # None: the degree does not divide the heads
    weights: float


def peaks_of(clip: ClipSize, ranks: int, pairs: int = 2) -> RankPeaks:
    """Peaks by the model's own code in bf16 on tensors without data, attention as FlashAttention allocates. A forward
    without gradients takes as much of a deep model as of `pairs` pairs of layers; all weights are counted."""
    import torch

    from ops.models.forecast import Precision, forward_bytes
    from ops.units import GIB

    whole = {"temporal_slices": 1, "spatial_slices": 1, "temporal_lead": 0, "spatial_lead": 0}
    inter = {"temporal_slices": SLICES, "spatial_slices": SLICES, "temporal_lead": 1, "spatial_lead": 3}
    model = STDiT3Config(
        num_layers=pairs,
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
        ffn_dim=4 * WIDTH,
        text_dim=4096,
        in_channels=4,
        out_channels=4,
    )
    sequences = [Sequence((clip.frames, clip.height, clip.width), model.caption_rows)]
    precision = Precision(parameters=torch.bfloat16, cuda=True)

    def gib(ranks: int, **changes: Any) -> tuple[float, float]:  # fields of the model, as `replace` takes them
        peak, weights = forward_bytes(replace(model, **changes), sequences, ranks, precision)
        return peak / GIB, weights / GIB

    (dsp, held), (across, _) = gib(ranks, **whole), gib(ranks, **inter)
    shallow = Sequence((1, 1, 1), 1)
    _, one = forward_bytes(replace(model, num_layers=1), [shallow], 1, precision)
    _, two = forward_bytes(replace(model, num_layers=2), [shallow], 1, precision)
    return RankPeaks(
        dsp=dsp,
        inter=across,
        ulysses=None if HEADS % ranks else gib(ranks, bag_mode="ulysses")[0],
        weights=held + (PAIRS - pairs) * (two - one) / GIB,
    )


def memory(quick: bool) -> Reproduction:
    """Peaks on two machines, as Ulysses has 16 heads, and DSP's on four, too."""
    clips = WORKLOADS[:1] if quick else WORKLOADS
    two = [peaks_of(clip, 2 * GPUS, 1 if quick else 2) for clip in clips]
    four = [] if quick else [peaks_of(clip, 4 * GPUS) for clip in clips]

    def ratio(found: Seq[RankPeaks], name: str, weights: bool) -> float:
        return statistics.fmean(
            (getattr(one, name) + weights * one.weights) / (one.inter + weights * one.weights) for one in found
        )

    ours = {
        "of Ulysses": ratio(two, "ulysses", True),
        "of DSP": ratio(two, "dsp", True),
        "of Ulysses, without weights": ratio(two, "ulysses", False),
        "of DSP, without weights": ratio(two, "dsp", False),
    }
    if four:
        ours["of DSP, 4 machines, without weights"] = ratio(four, "dsp", False)
    return Reproduction(
        way="simulation",
        ours=ours,
        note=(
            "What the transformer of one rank allocates, counted on tensors without data: no text encoder, no VAE, no "
            "fragments, which the published figure (torch.cuda.max_memory_reserved) has. Ulysses here keeps its "
            "attention to the text local. On 32 ranks clips of 4 s have a frame for each, which no slices divide."
        ),
    )


FIGURES: dict[str, Reproduce] = {"fig9": fig9, "scaling": scaling, "fig10": fig10, "fig11": fig11, "memory": memory}
