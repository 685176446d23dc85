"""The page of `heddle bench papers`: pictures first, the command beneath each, then numbers; HTML and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.bench.markdown import markdown_table
from app.bench.page import BLUE, GREY, document, folded, legend, number_of
from app.bench.papers.figure import PublishedPaper, Row, ShownFigure
from app.drawing.svg import BarRow, Series, bars, curve_key, line_chart


def html(papers: Sequence[PublishedPaper], shown: Sequence[ShownFigure], facts: str) -> str:
    """One file, no external assets. `facts`: where and when it was made."""
    lead = (
        "Grey is what a paper prints, blue what Heddle gets on the same input. Every section says how: by a "
        "<b>simulation</b> (planned, and timed by published latencies or counted work), or <b>measured</b> on this "
        "machine. The ratio is ours / published."
    )
    parts = [_overview(shown)]
    for paper in papers:
        own = [figure for figure in shown if figure.paper == paper.name]
        if not own:
            continue
        links = "".join(f"<a href='#{anchor(f)}'>{escape(f.figure.id)}</a>" for f in own)
        parts.append(f"<h1 style='margin-top:32px'>{escape(paper.paper)}</h1><nav>{links}</nav>")
        parts += [_section(figure) for figure in own]
    return document("Heddle beside four papers", facts, lead, parts)


def _overview(shown: Sequence[ShownFigure]) -> str:
    """One number of every figure that has one on both sides."""
    words = ("published", "Heddle", "ratio", "")
    head = f"<tr><th></th><th class=words>one number of each</th>{''.join(f'<th>{word}</th>' for word in words)}</tr>"
    lines = []
    for one in shown:
        if (row := one.headline()) is not None:
            label, published, ours = row
            link = f"<a href='#{anchor(one)}'>{escape(one.paper)} {escape(one.figure.id)}</a>"
            numbers = (number_of(published), number_of(ours), ratio_of(published, ours), _wanted(one.figure.better))
            lines.append(
                f"<tr><td>{link}</td><td class=words>{escape(one.figure.title)}: {escape(label)}</td>"
                f"{''.join(f'<td>{number}</td>' for number in numbers)}</tr>"
            )
    return f"<section><div class=wide><table>{head}{''.join(lines)}</table></div></section>" if lines else ""


def _wanted(better: str) -> str:
    return f"{better} is better" if better else ""


def anchor(shown: ShownFigure) -> str:
    return f"{shown.paper}-{shown.figure.id}"


def _section(shown: ShownFigure) -> str:
    figure, found = shown.figure, shown.found
    way = f"<span class=way>{escape(found.way)}</span>" if found else "<span class='way none'>not run here</span>"
    parts = [
        f"<section id='{anchor(shown)}'>",
        f"<h2>{escape(figure.id)}: {escape(figure.title)}{way}</h2>",
    ]
    rows = shown.rows()
    for unit, together in shown.rows_by_unit().items():
        words = ", ".join(filter(None, (unit, _wanted(figure.better))))
        parts += [legend([(GREY, shown.paper), (BLUE, "Heddle"), ("", words)]), pairs(together)]
    if found and found.series:
        parts.append(_curves(shown))
    parts.append(f"<code class=command>{escape(shown.command)}</code>")
    if rows and found:
        parts.append(_table(shown))
    notes = [figure.open if found is None else found.note, f"Published: {figure.source}."]
    parts += [f"<p class=soft>{escape(note)}</p>" for note in notes if note]
    return "\n".join([*parts, "</section>"])


def pairs(rows: Sequence[Row]) -> str:
    """Published above ours, one pair for each row."""
    return bars(
        [
            BarRow(
                label=label,
                bars=[
                    (css, value, number_of(value))
                    for css, value in (("theirs", published), ("ours", ours))
                    if value is not None
                ],
            )
            for label, published, ours in rows
        ]
    )


def _curves(shown: ShownFigure) -> str:
    assert shown.found is not None
    named = list(shown.found.series.items())
    series = [
        Series(name=name, xs=xs, ys=ys, css=f"c{number} dashed")
        for number, (name, (xs, ys)) in enumerate(named, start=1)
    ]
    keys = "".join(f"<span>{curve_key(one.css)}{escape(one.name)}</span>" for one in series)
    colours = f"<div class=legend>{keys}</div>"
    chart = line_chart(series, zero=True, x_name=shown.found.x_name)
    return f"<h3>{escape(shown.found.x_name)}</h3>{colours}{chart}"


def _table(shown: ShownFigure) -> str:
    return folded(
        ["", "published", "Heddle", "ratio", "unit"],
        [
            [label, number_of(published), number_of(ours), ratio_of(published, ours), shown.figure.unit_of(label)]
            for label, published, ours in shown.rows()
        ],
    )


def markdown(papers: Sequence[PublishedPaper], shown: Sequence[ShownFigure], facts: str) -> str:
    lines = ["# Heddle beside four papers", "", facts, ""]
    for paper in papers:
        own = [figure for figure in shown if figure.paper == paper.name]
        lines += [f"## {paper.paper}", ""] if own else []
        for one in own:
            figure = one.figure
            lines += [f"### {figure.id}: {figure.title}", ""]
            if one.found is not None:
                rows = [
                    (label, number_of(published), number_of(ours), ratio_of(published, ours))
                    for label, published, ours in one.rows()
                ]
                lines.append(markdown_table((f"{one.found.way}, {one.units}", "published", "Heddle", "ratio"), rows))
            else:
                lines += [f"Not run here. {figure.open}"]
                lines += [
                    f"- {label}: {number_of(value)} {figure.unit_of(label)}"
                    for label, value in figure.published.items()
                ]
            lines += ["", f"`{one.command}`. Published: {figure.source}."]
            if one.found is not None and one.found.note:
                lines += [one.found.note]
            lines += [""]
    return "\n".join(lines)


def ratio_of(published: float | None, ours: float | None) -> str:
    return "-" if published is None or ours is None or not published else f"{ours / published:.2f}"
