"""`heddle bench scalefusion`: all-to-all hidden behind spatial-temporal layers, simulated as published and on ranks.

(a) The event simulator with A100s and the network of the paper, beside the figures that the paper gives: speed-ups over
DSP and Ulysses, strong scaling from 1 to 4 machines, the choice of N and L (Figs. 9 to 11).
(b) Real ranks over Gloo on this machine with a throttled link: seconds, exposed communication, distance to the
simulator, peak memory. The link takes half the computation's time.
(c) The schedules that `auto` takes by its cost model beside the simulator's best of a sweep, on small grids.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from app.bench import scalefusion_published as published
from app.bench.scalefusion_choice import GridChoice, small_grids
from app.bench.scalefusion_ranks import RanksCase, VariantSeconds, measure_ranks
from app.settings.out_files import check_writable
from ops.counted import counted
from ops.spatial_temporal.schedule import Schedule
from ops.spatial_temporal.simulate import LayerCosts

# of a paced device and its link; a spatial layer is half as long again as a temporal one, as at 1080p for 8 s
PACED = LayerCosts(spatial_s=0.96, temporal_s=0.64, exchange_s=0.2, slice_s=0.002, part_s=0.001)
# layers long enough to be measured without pacing
LARGER = {"frames": 16, "height": 16, "positions": 256, "width": 256}


class BenchPart(StrEnum):
    """What is run."""

    all = "all"
    published = "published"
    choice = "choice"
    ranks = "ranks"


def run(
    part: Annotated[BenchPart, typer.Option(help="Of the benchmark.")] = BenchPart.all,
    ranks: Annotated[int, typer.Option(help="Processes of the bag.", min=2)] = 2,
    rounds: Annotated[int, typer.Option(help="Measured turns of every way.", min=1)] = 3,
    paced: Annotated[bool, typer.Option(help="By a device and a link of given speeds.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Spatial-temporal layers with communication hidden: simulated beside the paper, and measured on ranks."""
    check_writable([out])
    found: dict[str, object] = {}
    if part in (BenchPart.all, BenchPart.published):
        comparisons, scaling = list(published.comparisons()), list(published.scaling_rows())
        points = list(published.sensitivity())
        print(published_table(comparisons, scaling, points))
        found |= {"published": [asdict(one) for one in comparisons], "scaling": [asdict(one) for one in scaling]}
        found["sensitivity"] = [asdict(one) for one in points]
    if part in (BenchPart.all, BenchPart.choice):
        grids = list(small_grids())
        print(f"\n{choice_table(grids)}")
        found["choice"] = [asdict(one) for one in grids]
    if part in (BenchPart.all, BenchPart.ranks):
        for backward in (False, True):
            sizes = {} if paced else LARGER
            costs = _for_ranks(ranks) if paced else None
            results = measure_ranks(RanksCase(ranks=ranks, rounds=rounds, backward=backward, costs=costs, **sizes))
            what = "forward and backward" if backward else "forward"
            print(f"\n{counted(ranks, 'rank')}, {what}, {'paced' if paced else 'not paced'}:\n\n{ranks_table(results)}")
            found[what] = [asdict(one) for one in results]
    if out is not None:
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _for_ranks(ranks: int) -> LayerCosts:
    """Layers as long on every rank whatever the number of ranks, so that the link takes half of them."""
    return replace(PACED, spatial_s=PACED.spatial_s / 2 * ranks, temporal_s=PACED.temporal_s / 2 * ranks)


def published_table(
    comparisons: Sequence[published.Comparison],
    scaling: Sequence[published.ScalingRow],
    points: Sequence[published.SlicePoint],
) -> str:
    """Three Markdown tables."""
    lines = [
        f"Network of a machine, from the one calibrated figure: {published.machine_bandwidth() / 1e9:.0f} GB/s",
        "",
    ]
    lines += ["| what | paper | simulated |", "|---|---|---|"]
    lines += [f"| {one.what} | {one.published} | {one.simulated} |" for one in comparisons]
    lines += ["", "| workload | machines | Ulysses | DSP | intra | inter | auto | auto is | of the best |"]
    lines.append("|" + "---|" * 9)
    for row in scaling:
        ulysses = "-" if row.ulysses is None else f"{row.ulysses:.2f}"
        times = " | ".join(f"{one:.2f}" for one in (row.dsp, row.intra, row.inter, row.auto_seconds))
        lines.append(
            f"| {row.clip.name} | {row.machines} | {ulysses} | {times} | {told(row.auto)} "
            f"| {row.auto_seconds / row.best_seconds:.3f} |"
        )
    lines += ["", f"{published.REFERENCE.name} on two machines, seconds (Figs. 10 and 11):", ""]
    lines += ["| N | L_S | total | computing | exposed |", "|" + "---|" * 5]
    for point in points:
        lead = "intra" if point.lead is None else str(point.lead)
        times = " | ".join(f"{one:.3f}" for one in (point.total_s, point.compute_s, point.exposed_s))
        lines.append(f"| {point.slices} | {lead} | {times} |")
    return "\n".join(lines)


def choice_table(found: Sequence[GridChoice]) -> str:
    """Markdown: a line per grid and degree, a column per speed of the link, each with the chosen schedule and its time
    over the best one's."""
    links = sorted({one.link for one in found})
    lines = [
        f"auto, time over the simulator's best: mean {statistics.mean(one.off for one in found):.3f}, "
        f"worst {max(one.off for one in found):.3f}; DSP's is "
        f"{statistics.mean(one.dsp_s / one.best_s for one in found):.2f} on average",
        "",
        f"| T x S | degree | {' | '.join(f'link {link:g} of computing' for link in links)} |",
        "|" + "---|" * (2 + len(links)),
    ]
    lines_of: dict[tuple[int, int, int], list[GridChoice]] = {}
    for one in found:
        lines_of.setdefault((one.frames, one.positions, one.degree), []).append(one)
    for (frames, positions, degree), ones in lines_of.items():
        cells = (f"{one.off:.3f} ({told(one.auto)})" for one in sorted(ones, key=lambda one: one.link))
        lines.append(f"| {frames} x {positions} | {degree} | {' | '.join(cells)} |")
    return "\n".join(lines)


def told(schedule: Schedule) -> str:
    """N_T x N_S, L_T and L_S."""
    slices = f"{schedule.temporal_slices} x {schedule.spatial_slices}"
    return f"{slices}, L {schedule.temporal_lead} {schedule.spatial_lead}"


def ranks_table(results: Sequence[VariantSeconds]) -> str:
    """Markdown, with what DSP exposes as the measure of what is hidden."""
    whole = next(one.exposed_s for one in results if one.variant == "DSP")
    lines = ["| variant | seconds | simulated | off | exposed | of DSP's | simulated | peak MiB |", "|" + "---|" * 8]
    for one in results:
        lines.append(
            f"| {one.variant} | {one.total_s:.2f} | {one.simulated_s:.2f} | {one.off:+.1%} | {one.exposed_s:.3f} "
            f"| {one.exposed_s / whole:.2f} | {one.simulated_exposed_s:.3f} | {one.peak_mib:.2f} |"
        )
    return "\n".join(lines)
