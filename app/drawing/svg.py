"""Inline SVG for the report: line charts and timelines. Colours are CSS classes of the page, so both themes work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 24
MAX_POINTS = 800  # longer curves are averaged into this many bins


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve. `css` has the classes of its line: c1 ... c4, faint, broad. `ranges`: the least and most of what each
    point is the mean of, drawn as a band."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    css: str = "c1"
    hover: bool = False
    ranges: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EventMark:
    """A vertical line at x with a hover title."""

    x: float
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One slice of a timeline lane, in seconds from the start of the picture."""

    start_s: float
    end_s: float
    css: str
    title: str
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One row of a timeline."""

    name: str
    bars: Sequence[Bar]
    thin: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BarRow:
    """One row of a bar chart: a label and one or two bars, each (class of its fill, value, its text)."""

    label: str
    bars: Sequence[tuple[str, float, str]]


ROW, LABEL, LONGEST = 34, 300, 520  # of bar charts: height of a row, width of its label and of the longest bar


def bars(rows: Sequence[BarRow]) -> str:
    """Lying bars from zero, those of a row under each other; negative values lie left of a line at zero."""
    values = [value for row in rows for _, value, _ in row.bars]
    low, top = min([0.0, *values]), max([0.0, *values])
    scale = LONGEST / ((top - low) or 1.0)
    zero, height = LABEL - low * scale, ROW * len(rows) + 6
    parts = [_open(height)]
    if low < 0:
        parts.append(f'<line class="grid" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{height}"/>')
    for number, row in enumerate(rows):
        y = number * ROW
        parts.append(f'<text class="lane" x="{LABEL - 10}" y="{y + 20}" text-anchor="end">{escape(row.label)}</text>')
        for line, (css, value, text) in enumerate(row.bars):
            thick = 12 if len(row.bars) == 2 else 16
            at = y + 4 + line * 13 if len(row.bars) == 2 else y + 8
            length = max(1.0, abs(value) * scale)
            left = zero if value >= 0 else zero - length
            parts.append(
                f'<rect class="{css}" x="{left:.1f}" y="{at}" width="{length:.1f}" height="{thick}" rx="2"/>'
                f'<text class="value" x="{max(zero, left + length) + 6:.1f}" y="{at + thick - 2}">{escape(text)}</text>'
            )
    return "".join([*parts, "</svg>"])


def line_chart(
    series: Sequence[Series],
    marks: Sequence[EventMark] = (),
    height: int = 220,
    zero: bool = False,
    x_name: str = "step",
) -> str:
    """Curves over a common x axis; an empty string when there is nothing to draw."""
    drawn = [thin_out(s) for s in series]
    points = [(x, y) for s in drawn for x, y in zip(s.xs, s.ys, strict=True) if math.isfinite(y)]
    if not points:
        return ""
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = _room_for_ranges(drawn, min(y for _, y in points), max(y for _, y in points))
    y_low = min(0.0, y_low) if zero else y_low
    y_ticks = ticks(y_low, y_high)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def to_x(x: float) -> float:
        return LEFT + (x - x_low) / ((x_high - x_low) or 1) * (WIDTH - LEFT - RIGHT)

    def to_y(y: float) -> float:
        return TOP + (y_high - y) / ((y_high - y_low) or 1) * (height - TOP - BOTTOM)

    parts = [_open(height)]
    for tick in y_ticks:
        y = to_y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        )
    for tick in ticks(x_low, x_high, whole=x_name == "step"):
        if x_low <= tick <= x_high:
            parts.append(
                f'<text class="tick" x="{to_x(tick):.1f}" y="{height - 6}" text-anchor="middle">{number(tick)}</text>'
            )
    for mark in marks:
        if x_low <= mark.x <= x_high:
            parts.append(
                f'<g class="mark"><line x1="{to_x(mark.x):.1f}" x2="{to_x(mark.x):.1f}" y1="{TOP}" '
                f'y2="{height - BOTTOM}"/><title>{escape(mark.title)}</title></g>'
            )
    for s in drawn:
        if s.ranges:
            within = [
                (to_x(x), *(to_y(min(max(y, y_low), y_high)) for y in ends))
                for x, ends in zip(s.xs, s.ranges, strict=True)
                if ends[0] <= ends[1]
            ]
            edge = [(x, top) for x, _, top in within] + [(x, bottom) for x, bottom, _ in reversed(within)]
            parts.append(f'<path class="band {s.css}" d="{_path(edge)}Z"/>')
        path = _path([(to_x(x), to_y(y)) if math.isfinite(y) else None for x, y in zip(s.xs, s.ys, strict=True)])
        parts.append(f'<path class="line {s.css}" d="{path}"><title>{escape(s.name)}</title></path>')
        if s.hover and len(s.xs) <= 400:
            parts += [
                f'<circle class="hover {s.css}" cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="5">'
                f"<title>{escape(x_name)} {number(x)}: {escape(s.name)} {number(y)}</title></circle>"
                for x, y in zip(s.xs, s.ys, strict=True)
                if math.isfinite(y)
            ]
    parts.append("</svg>")
    return "".join(parts)


def _room_for_ranges(drawn: Sequence[Series], low: float, high: float) -> tuple[float, float]:
    """Where a chart of curves from low to high ends: it shows as much again of what their points are means of, so that
    a step that is far off does not press the curves flat."""
    ends = [y for s in drawn for pair in s.ranges for y in pair if math.isfinite(y)]
    more = high - low or abs(high) or 1.0
    return max(min([low, *ends]), low - more), min(max([high, *ends]), high + more)


def _open(height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'preserveAspectRatio="xMinYMin meet">'
    )


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    commands, pen_down = [], False
    for point in points:
        if point is None:
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{point[0]:.1f} {point[1]:.1f}")
        pen_down = True
    return "".join(commands)


def thin_out(series: Series) -> Series:
    """At most MAX_POINTS points, each the mean of its bin."""
    count = len(series.xs)
    if count <= MAX_POINTS:
        return series
    bounds = [round(i * count / MAX_POINTS) for i in range(MAX_POINTS + 1)]
    xs = [mean(series.xs[a:b]) for a, b in pairwise(bounds)]
    ys = [mean([y for y in series.ys[a:b] if math.isfinite(y)] or [math.nan]) for a, b in pairwise(bounds)]
    return Series(name=series.name, xs=xs, ys=ys, css=series.css)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers that cover low..high."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    if whole:
        step = max(1.0, round(step))
    first = math.floor(low / step)
    return [i * step for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def number(value: float) -> str:
    """Short decimal for axes and titles."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def timeline(lanes: Sequence[Lane], lines: Sequence[EventMark] = ()) -> str:
    """Lanes of bars over seconds, planned ones (thin) under the measured ones they belong to."""
    end = max((bar.end_s for lane in lanes for bar in lane.bars), default=0.0)
    if end <= 0:
        return ""
    left, tops, y = 90, [], 6.0
    for lane in lanes:
        tops.append(y)
        y += 16 if lane.thin else 26
    height = y + 26

    def to_x(seconds: float) -> float:
        return left + max(seconds, 0) / end * (WIDTH - left - RIGHT)

    parts = [_open(height)]
    for tick in ticks(0, end, count=8):
        if tick <= end:
            parts.append(
                f'<line class="grid" x1="{to_x(tick):.1f}" x2="{to_x(tick):.1f}" y1="0" y2="{y:.0f}"/>'
                f'<text class="tick" x="{to_x(tick):.1f}" y="{height - 8:.0f}" text-anchor="middle">'
                f"{number(tick)} s</text>"
            )
    for lane, top in zip(lanes, tops, strict=True):
        depth = 10 if lane.thin else 22
        parts.append(
            f'<text class="{"tick" if lane.thin else "lane"}" x="{left - 8}" y="{top + depth / 2 + 4:.1f}" '
            f'text-anchor="end">{escape(lane.name)}</text>'
        )
        parts += [_bar(bar, to_x, top, depth) for bar in lane.bars]
    for line in lines:
        parts.append(
            f'<g class="mark"><line x1="{to_x(line.x):.1f}" x2="{to_x(line.x):.1f}" y1="0" y2="{y:.0f}"/>'
            f"<title>{escape(line.title)}</title></g>"
        )
    parts.append("</svg>")
    return "".join(parts)


def _bar(bar: Bar, to_x: Callable[[float], float], top: float, depth: float) -> str:
    x, width = to_x(bar.start_s), max(to_x(bar.end_s) - to_x(bar.start_s), 0.8)
    label = ""
    room = int(width / 6.2)
    if bar.label and depth > 12 and room >= 3:
        text = bar.label if len(bar.label) <= room else bar.label[: room - 1] + "…"
        label = f'<text class="in" x="{x + 4:.1f}" y="{top + depth / 2 + 4:.1f}">{escape(text)}</text>'
    return (
        f'<g class="bar"><rect class="{bar.css}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{depth}" '
        f'rx="2"/>{label}<title>{escape(bar.title)}</title></g>'
    )
