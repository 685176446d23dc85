"""Plans as pictures: a Gantt chart per strategy as PNG (matplotlib) and as a page with hover titles (inline SVG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from actors.plan.types import Cascade, Cluster, Item, Plan
from app.drawing.style import document
from app.drawing.svg import Bar, EventMark, Lane, legend, timeline
from app.settings.out_files import put_text

if TYPE_CHECKING:
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

COLOURS = {"text": "#d9962b", "vae": "#1f9e8b", "dit": "#4c63d2"}
LABEL_COLOURS = {"text": "#1d2025", "vae": "#1d2025", "dit": "white"}  # white on the first two is hard to read
NAMES = {"text": "text encode", "vae": "VAE encode", "dit": "DiT"}
ROW_INCHES, MAX_INCHES = 0.22, 40.0
LABEL_SHARE = 0.02  # a bar that takes a smaller share of the time axis has room for no label
LABEL_MARGIN = 4.0  # pixels

Items = Mapping[tuple[int, str], Item]  # items by step and id


def write_gantt(path: Path, plans: Sequence[Plan], cluster: Cluster, items: Items) -> None:
    """One chart per plan, one row per GPU, all on the same time axis; red lines end the steps, grey ones the nodes.
    A bar has a label where that fits into it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    workers = cluster.num_workers
    height = min(max(workers * ROW_INCHES, 1.2) + 0.7, MAX_INCHES / len(plans))
    figure = Figure(figsize=(14, height * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    end = max((cascade.end_s for plan in plans for cascade in _cascades(plan)), default=1.0)
    labels: list[tuple[Text, Rectangle]] = []
    for axes, plan in zip(figure.subplots(len(plans), 1, squeeze=False, sharex=True)[:, 0], plans, strict=True):
        for cascade in _cascades(plan):
            for first, count in _runs(cascade.workers):
                (bar,) = axes.barh(
                    first + (count - 1) / 2,
                    cascade.seconds,
                    left=cascade.start_s,
                    height=count - 0.14,
                    color=COLOURS[cascade.module],
                    edgecolor="white",
                    linewidth=0.6,
                )
                if cascade.seconds > LABEL_SHARE * end:
                    text = axes.text(
                        cascade.start_s + cascade.seconds / 2,
                        first + (count - 1) / 2,
                        label(cascade, items),
                        ha="center",
                        va="center",
                        fontsize=6 if count < 3 else 7,
                        color=LABEL_COLOURS[cascade.module],
                        clip_on=True,
                    )
                    labels.append((text, bar))
        for node in range(1, len(cluster.nodes)):
            axes.axhline(sum(cluster.nodes[:node]) - 0.5, color="#9aa0a6", linewidth=0.6)
        for mark in _ends(plan):
            axes.axvline(mark.x, color="#c8433a", linestyle="--", linewidth=0.8)
        idle = sum(step.idle_ratio for step in plan.steps) / max(len(plan.steps), 1)
        axes.set_title(f"{plan.strategy}: {_total(plan):.3f} s, idle {100 * idle:.1f}%", loc="left", fontsize=9)
        axes.set(ylim=(workers - 0.5, -0.5), xlim=(0, end), ylabel="GPU")
        axes.tick_params(labelsize=7)
    figure.axes[-1].set_xlabel("seconds")
    figure.axes[0].legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        ncols=3,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize=8,
    )
    figure.set_dpi(110)
    figure.draw_without_rendering()  # bars have their places
    for text, bar in labels:
        _fit(text, bar)
    figure.savefig(path, dpi=110)


def _fit(text: Text, bar: Rectangle) -> None:
    """Show the label in one line, in several, or not at all."""
    room = bar.get_window_extent()
    for shown in (text.get_text(), text.get_text().replace(" ", "\n")):
        text.set_text(shown)
        taken = text.get_window_extent()
        if taken.width + LABEL_MARGIN <= room.width and taken.height <= room.height:
            return
    text.remove()


def write_page(path: Path, plans: Sequence[Plan], cluster: Cluster, items: Items, text: str) -> None:
    """The same as one self-contained HTML page."""
    parts = [f"<h1>Plan</h1><section><pre>{escape(text)}</pre></section>"]
    for plan in plans:
        lanes = [
            Lane(name=f"GPU {worker}", bars=[_bar(c, items) for c in _cascades(plan) if worker in c.workers])
            for worker in range(cluster.num_workers)
        ]
        drawn = legend(NAMES, "dashed: the end of a step") + timeline(lanes, _ends(plan))
        parts.append(f"<section><h2>{escape(plan.strategy)}: {_total(plan):.3f} s</h2>{drawn}</section>")
    put_text(path, document("Plan - Heddle", "".join(parts)))


def _cascades(plan: Plan) -> list[Cascade]:
    return [cascade for step in plan.steps for cascade in step.cascades]


def _total(plan: Plan) -> float:
    return sum(step.makespan_s for step in plan.steps)


def _ends(plan: Plan) -> list[EventMark]:
    marks, total = [], 0.0
    for step in plan.steps:
        total += step.makespan_s
        marks.append(EventMark(x=total, title=f"end of step {step.step}"))
    return marks


def _runs(workers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, how many) of neighbouring workers: drawn as one bar."""
    runs: list[tuple[int, int]] = []
    for worker in sorted(workers):
        if runs and runs[-1][0] + runs[-1][1] == worker:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((worker, 1))
    return runs


def label(cascade: Cascade, items: Items) -> str:
    """What runs: `129f b1 sp8` is 129 frames, batch 1, 8 GPUs; frames of all items where they differ."""
    frames = dict.fromkeys(items[cascade.step, part.item].frames for part in cascade.parts)
    return f"{'+'.join(map(str, frames))}f b{cascade.batch} sp{cascade.degree}"


def _bar(cascade: Cascade, items: Items) -> Bar:
    shapes = dict.fromkeys(
        (item.frames, item.height, item.width) for part in cascade.parts for item in [items[cascade.step, part.item]]
    )
    shape = ", ".join(f"{frames}f {height}x{width}" for frames, height, width in shapes)
    return Bar(
        start_s=cascade.start_s,
        end_s=cascade.end_s,
        css=cascade.module,
        label=label(cascade, items),
        title=f"{cascade.module} {cascade.item} of step {cascade.step}: {shape}, batch {cascade.batch}, degree "
        f"{cascade.degree} on GPUs {', '.join(map(str, cascade.workers))}, {cascade.start_s:.3f} to "
        f"{cascade.end_s:.3f} s ({cascade.seconds:.3f} s)",
    )
