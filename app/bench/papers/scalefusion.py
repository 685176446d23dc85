"""ScaleFusion's figures by the event simulator of its schedules, on A100s and the network of the paper."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from app.bench.papers.figure import Reproduce, Reproduction
from app.bench.scalefusion_published import REFERENCE, WORKLOADS, ClipSize, chosen, seconds, sensitivity
from ops.spatial_temporal.schedule import DSP, Schedule, intra

SLICES = 4  # the paper's default, with L_T 1 and L_S 3
NOTE = (
    "Simulated; one figure is taken from the paper to set the ratio of network to computation: the 34 % of DSP's time "
    "that all-to-all takes for 1080p, 8 s on two machines (Section 3)."
)


def workloads(quick: bool) -> Sequence[ClipSize]:
    return WORKLOADS[::3] if quick else WORKLOADS


def fig9(quick: bool) -> Reproduction:
    clips = workloads(quick)
    cases = [(clip, machines) for clip in clips for machines in (2, 4)]
    ours = {
        f"{machines} machines": statistics.fmean(
            seconds(clip, machines, DSP) / seconds(clip, machines, Schedule()) for clip in clips
        )
        for machines in (2, 4)
    }
    within = [seconds(*case, DSP) / seconds(*case, intra(SLICES)) for case in cases]
    across = [seconds(*case, intra(SLICES)) / seconds(*case, Schedule()) for case in cases]
    ours["slices inside layers alone"] = statistics.fmean(within)
    ours["parts under the layer before"] = statistics.fmean(across)
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
        ours={f"{count} slice{'s' * (count > 1)}": value for count, value in zip(counts, left, strict=True)},
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


FIGURES: dict[str, Reproduce] = {"fig9": fig9, "scaling": scaling, "fig10": fig10, "fig11": fig11}
