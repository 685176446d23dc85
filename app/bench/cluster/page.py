"""The page of `heddle bench cluster`: samples per second, seconds of steps, losses and joins, the controller."""

from __future__ import annotations

from collections.abc import Sequence

from app.bench.cluster.ddp import COMMON
from app.bench.cluster.figures import ClusterFigures
from app.bench.cluster.tables import GrowthCurve, WayRow, change_rows, way_rows
from app.bench.page import BLUE, GREY, document, folded, legend, number_of, section, single_bars, tiles
from app.drawing.svg import BarRow, bars
from ops.counted import counted

SHARE = 0.05  # of a step of ten seconds that the controller may take
CHANGES = {"worker": "a worker lost", "node": "a node lost", "join": "a node joined"}
LEAD = (
    "The real controller, with its planner, membership, heartbeats, commits and recovery, on workers that wait as long "
    "as latencies published for HunyuanVideo on H100s say, with noise and stragglers. Virtual seconds are theirs; "
    "real seconds are what this machine took."
)


def html(
    ways: Sequence[WayRow], found: Sequence[ClusterFigures], curves: Sequence[GrowthCurve], command: str, facts: str
) -> str:
    """One file, no external assets. Sections of which nothing was seen are left out."""
    parts = [tiles(_first(ways, found))]
    if ways:
        parts.append(_beside_ddp(ways, command))
    if found:
        parts.append(_steps(ways, found, command))
    if any(one.recovered for one in found):
        parts.append(_changes(found, command))
    if found:
        parts.append(_controller(found, curves, command))
    return document("Heddle on virtual clusters", facts, LEAD, parts)


def _first(ways: Sequence[WayRow], found: Sequence[ClusterFigures]) -> list[tuple[str, str]]:
    """What a reader takes away: the best way beside DDP on each size, what was run, and the controller's share."""
    figures = []
    for workers in dict.fromkeys(way.workers for way in ways):
        executed = [way for way in ways if way.workers == workers and way.executed]
        if executed:
            best = max(executed, key=lambda way: way.ratio)
            figures.append((f"{best.ratio:.2f}", f"of DDP's samples per second: {best.name} on {workers} GPUs"))
    if found:
        last = max(found, key=lambda one: one.workers)
        figures.append((f"{last.share:.1%}", f"of a 10 s step: the controller with {counted(last.workers, 'worker')}"))
        figures.append((f"{sum(one.steps for one in found):,}", "steps, each committed once and whole"))
    return figures


def _beside_ddp(ways: Sequence[WayRow], command: str) -> str:
    colours = legend([(GREY, "DDP, evaluated with the same seconds"), (BLUE, "Heddle, executed")])
    pictures = []
    for workers in dict.fromkeys(way.workers for way in ways):
        own = [way for way in ways if way.workers == workers]
        texts = [f"{number_of(round(way.samples_per_s, 4))} ({way.ratio:.2f} of ddp)" for way in own]
        picture = single_bars(
            (way.name, "ours" if way.executed else "theirs", way.samples_per_s, text) for way, text in zip(own, texts)
        )
        pictures.append((f"{workers} GPUs, samples per virtual second, more is better", colours + picture))
    numbers = folded(*_labelled(*way_rows(ways)))
    note = (
        f"SP is the degree of sequence parallelism. '{COMMON}' draws one bucket for all groups of a step, so nobody "
        "waits, and no step has clips of different lengths: it is another training, not another way to the same one."
    )
    return section("Beside DistributedDataParallel", pictures, command, numbers, [note])


def _steps(ways: Sequence[WayRow], found: Sequence[ClusterFigures], command: str) -> str:
    rows = []
    for workers in dict.fromkeys(one.workers for one in found):
        rows += [
            BarRow(
                label=f"{counted(workers, 'worker')}, {way.name}",
                bars=[("theirs", way.mean_step_s, f"{way.mean_step_s:.1f} evaluated")],
            )
            for way in ways
            if way.workers == workers and not way.executed and way.same_steps
        ]
        rows += [
            BarRow(
                label=_label(one),
                bars=[
                    ("theirs", one.planned_s, f"{one.planned_s:.1f} planned"),
                    ("ours", one.executed_s, f"{one.executed_s:.1f}, idle {one.idle:.0%}"),
                ],
            )
            for one in found
            if one.workers == workers
        ]
    grey = "planned, or DDP on the same items" if ways else "planned"
    picture = legend([(GREY, grey), (BLUE, "executed")]) + bars(rows)
    numbers = folded(
        ["workers, strategy", "steps per hour, executed", "planned", "s per step, median", "planned", "idle"],
        [
            [
                _label(one),
                f"{one.steps_per_hour:.1f}",
                f"{one.planned_steps_per_hour:.1f}",
                f"{one.executed_s:.2f}",
                f"{one.planned_s:.2f}",
                f"{one.idle:.1%}",
            ]
            for one in found
        ],
    )
    note = "A larger cluster has more items in a step. At a speed that this machine cannot follow steps look longer."
    return section("Seconds per step", [("virtual seconds, less is better", picture)], command, numbers, [note])


def _changes(found: Sequence[ClusterFigures], command: str) -> str:
    seen = [(f"{_label(one)}: {CHANGES[change.what]}", change) for one in found for change in one.recovered]
    formed = [(label, "ours", change.form_s, f"{change.form_s:.2f}") for label, change in seen]
    again = [(label, "ours", change.step_s, f"{change.step_s:.1f}, then {change.workers:,}") for label, change in seen]
    pictures = [
        ("until the next generation forms, real seconds; of a join since its workers are loaded", single_bars(formed)),
        ("until the step is there that was broken, or the next one, virtual seconds; workers then", single_bars(again)),
    ]
    numbers = folded(*_labelled(*change_rows(found)))
    return section("A worker lost, a node lost, a node joined", pictures, command, numbers)


def _controller(found: Sequence[ClusterFigures], curves: Sequence[GrowthCurve], command: str) -> str:
    share = [(_label(one), "ours", one.share, f"{one.share:.2%}") for one in found]
    dispatch = [
        (_label(one), "ours", one.dispatch_ms, f"{one.dispatch_ms:.1f}, {one.calls:,.0f} calls") for one in found
    ]
    memory = [(_label(one), "ours", one.rss_mib, f"{one.rss_mib:,.0f}") for one in found]
    pictures = [
        (f"CPU seconds as a share of a step of 10 s; it may take {SHARE:.0%}", single_bars(share)),
        ("milliseconds to dispatch a step", single_bars(dispatch)),
        ("MiB of its process", single_bars(memory)),
    ]
    numbers = folded(
        ["workers, strategy", "CPU s a step, thread", "process", "plan waited for, s", "MiB more after step 10"],
        [
            [
                _label(one),
                f"{one.controller_s:.3f}",
                f"{one.process_s:.3f}",
                f"{one.planning_s:.3f}",
                f"{one.rss_growth_mib:+.0f}",
            ]
            for one in found
        ],
    )
    return section("The controller", pictures, command, numbers, [curve.line() for curve in curves])


def _label(one: ClusterFigures) -> str:
    return f"{counted(one.workers, 'worker')}, {one.strategy}"


def _labelled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The table with its first two columns as one, which holds words."""
    return [", ".join(head[:2]), *head[2:]], [[", ".join(row[:2]), *row[2:]] for row in rows]
