"""Inline SVG for the report: line charts and timelines. Colours are CSS classes of the page, so both themes work.

A picture is as wide as its column and as high as it says, in pixels of the page: places across are shares of the width,
and only curves are stretched. So words have the same size on a phone as on a screen. Words of the axes lie left of the
picture, in the padding of its frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from ops.counted import counted

ACROSS = 1000  # units of a curve from left to right
TOP, BOTTOM = 10, 24  # pixels above and below curves
MAX_POINTS = 800  # longer curves are averaged into this many bins


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve. `css` has the classes of its line: c1 ... c4, faint, broad, and dashed, by which c2 ... c4 differ
    from c1 and each other in more than colour. `ranges`: the least and most of what each point is the mean of, drawn as
    a band."""

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


LINE, LONGEST = 18, 55.0  # of bar charts: height of a label; percent of the width that the longest bar takes


def bars(rows: Sequence[BarRow]) -> str:
    """Lying bars from zero, those of a row under its label; negative values lie left of a line at zero."""
    values = [value for row in rows for _, value, _ in row.bars]
    low, top = min([0.0, *values]), max([0.0, *values])
    scale = LONGEST / ((top - low) or 1.0)
    zero, y, parts = -low * scale, 0, []
    for row in rows:
        parts.append(f'<text class="lane" x="0" y="{y + 13}">{escape(row.label)}</text>')
        y += LINE
        thick = 12 if len(row.bars) == 2 else 16
        for css, value, text in row.bars:
            length = max(0.1, abs(value) * scale)
            left = zero if value >= 0 else zero - length
            parts.append(
                f'<rect class="{css}" x="{left:.2f}%" y="{y}" width="{length:.2f}%" height="{thick}" rx="2"/>'
                f'<text class="value" x="{max(zero, left + length):.2f}%" dx="6" y="{y + thick - 2}">'
                f"{escape(text)}</text>"
            )
            y += thick + 1
        y += 6
    if low < 0:
        parts.insert(0, f'<line class="grid" x1="{zero:.2f}%" x2="{zero:.2f}%" y1="0" y2="{y}"/>')
    told = "; ".join(f"{row.label}: {', '.join(text for _, _, text in row.bars)}" for row in rows)
    return _picture("bars", y, parts, f"bars of {told}")


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

    def share(x: float) -> float:
        return (x - x_low) / ((x_high - x_low) or 1)

    def to_y(y: float) -> float:
        return TOP + (y_high - y) / ((y_high - y_low) or 1) * (height - TOP - BOTTOM)

    def at(x: float) -> str:
        return f"{100 * share(x):.2f}%"

    parts, curves, hovers = [], [], []
    for tick in y_ticks:
        y = to_y(tick)
        parts.append(
            f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="-6" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        )
    for tick in ticks(x_low, x_high, whole=x_name == "step"):
        if x_low <= tick <= x_high:
            parts.append(
                f'<text class="tick" x="{at(tick)}" y="{height - 6}" text-anchor="middle">{number(tick)}</text>'
            )
    for mark in marks:
        if x_low <= mark.x <= x_high:
            parts.append(_mark(at(mark.x), TOP, height - BOTTOM, mark.title))
    for s in drawn:
        if s.ranges:
            within = [
                (ACROSS * share(x), *(to_y(min(max(y, y_low), y_high)) for y in ends))
                for x, ends in zip(s.xs, s.ranges, strict=True)
                if ends[0] <= ends[1]
            ]
            edge = [(x, top) for x, _, top in within] + [(x, bottom) for x, bottom, _ in reversed(within)]
            curves.append(f'<path class="band {s.css}" d="{_path(edge)}Z"/>')
        path = _path(
            [(ACROSS * share(x), to_y(y)) if math.isfinite(y) else None for x, y in zip(s.xs, s.ys, strict=True)]
        )
        curves.append(f'<path class="line {s.css}" d="{path}"><title>{escape(s.name)}</title></path>')
        if s.hover and len(s.xs) <= 400:
            hovers += [
                f'<circle class="hover {s.css}" cx="{at(x)}" cy="{to_y(y):.1f}" r="5">'
                f"<title>{escape(x_name)} {number(x)}: {escape(s.name)} {number(y)}</title></circle>"
                for x, y in zip(s.xs, s.ys, strict=True)
                if math.isfinite(y)
            ]
    stretched = (
        f'<svg viewBox="0 0 {ACROSS} {height}" width="100%" height="{height}" preserveAspectRatio="none">'
        f"{''.join(curves)}</svg>"
    )
    told = "; ".join(filter(None, map(_in_words, series)))
    name = f"curves over {x_name} {number(x_low)} to {number(x_high)}: {told}"
    return _picture("curves", height, [*parts, stretched, *hovers], name)


def _in_words(series: Series) -> str:
    """Where a curve begins and ends, and whether that is its last point; "" of one without a number."""
    known = [y for y in series.ys if math.isfinite(y)]
    if not known:
        return ""
    end = "" if math.isfinite(series.ys[-1]) else ", the last not known"
    return f"{series.name} from {number(known[0])} to {number(known[-1])}{end}"


def legend(kinds: Mapping[str, str], *words: str) -> str:
    """What the colours of bars are, by their classes; `words` beside them."""
    shown = [f"<i style='background:var(--{css})'></i>{escape(name)}" for css, name in kinds.items()]
    return f"<div class='legend'>{''.join(f'<span>{one}</span>' for one in [*shown, *map(escape, words)])}</div>"


def curve_key(css: str) -> str:
    """A piece of a curve of these classes, for a legend."""
    line = f'<path class="line {css}" d="M0 5H26"/>'
    return f'<svg class="key" width="26" height="10" aria-hidden="true">{line}</svg>'


def _room_for_ranges(drawn: Sequence[Series], low: float, high: float) -> tuple[float, float]:
    """Where a chart of curves from low to high ends: it shows as much again of what their points are means of, so that
    a step that is far off does not press the curves flat."""
    ends = [y for s in drawn for pair in s.ranges for y in pair if math.isfinite(y)]
    more = high - low or abs(high) or 1.0
    return max(min([low, *ends]), low - more), min(max([high, *ends]), high + more)


def _picture(kind: str, height: float, parts: Sequence[str], name: str) -> str:
    """`kind` is the class of its frame, whose padding has room for the words left of it; `name` is all that is read out
    of the picture."""
    return (
        f'<div class="{kind}"><svg width="100%" height="{height:.0f}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(name)}">{"".join(parts)}</svg></div>'
    )


def _mark(x: str, top: float, bottom: float, title: str) -> str:
    return f'<g class="mark"><line x1="{x}" x2="{x}" y1="{top}" y2="{bottom:.0f}"/><title>{escape(title)}</title></g>'


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
    tops, y = [], 6.0
    for lane in lanes:
        tops.append(y)
        y += 16 if lane.thin else 26
    height = y + 26

    def at(seconds: float) -> str:
        return f"{100 * max(seconds, 0) / end:.2f}%"

    parts = []
    for place, tick in enumerate(ticks(0, end, count=8)):
        if tick <= end:
            parts.append(
                f'<line class="grid" x1="{at(tick)}" x2="{at(tick)}" y1="0" y2="{y:.0f}"/>'
                f'<text class="tick{" odd" if place % 2 else ""}" x="{at(tick)}" y="{height - 8:.0f}" '
                f'text-anchor="middle">{number(tick)} s</text>'
            )
    for lane, top in zip(lanes, tops, strict=True):
        depth = 10 if lane.thin else 22
        parts.append(
            f'<text class="{"tick" if lane.thin else "lane"}" x="-8" y="{top + depth / 2 + 4:.1f}" '
            f'text-anchor="end">{escape(lane.name)}</text>'
        )
        parts += [_bar(bar, end, top, depth) for bar in lane.bars]
    parts += [_mark(at(line.x), 0, y, line.title) for line in lines]
    drawn = [lane.name for lane in lanes if not lane.thin]
    places = ", ".join(dict.fromkeys((drawn[0], drawn[-1]))) if len(drawn) < 3 else f"{drawn[0]} to {drawn[-1]}"
    count = sum(len(lane.bars) for lane in lanes if not lane.thin)
    return _picture("lanes", height, parts, f"timeline of {number(end)} s, {places}: {counted(count, 'bar')}")


def _bar(bar: Bar, end: float, top: float, depth: float) -> str:
    """A picture of its own, at whose edge its label ends."""
    start = max(bar.start_s, 0) / end
    width = max(bar.end_s / end - start, 0.0008)  # less is not seen
    label = f'<text class="in" x="4" y="{depth / 2 + 4:.1f}">{escape(bar.label)}</text>' if bar.label else ""
    return (
        f'<svg class="bar" x="{100 * start:.2f}%" y="{top:.1f}" width="{100 * width:.2f}%" height="{depth}">'
        f'<rect class="{bar.css}" width="100%" height="100%" rx="2"/>{label}<title>{escape(bar.title)}</title></svg>'
    )
