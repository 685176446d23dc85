"""Curves of a run over its steps: loss, seconds, balance."""

from __future__ import annotations

from html import escape

from app.drawing.svg import EventMark, Series, line_chart
from app.report.figures import Curve
from app.report.totals import StepTotals
from app.report.words import short


def loss_html(steps: StepTotals) -> str:
    chart = line_chart(
        [
            _series("loss", steps.curves["loss"], css="faint", hover=True),
            _series("smoothed", steps.smoothed),
        ],
        marks=_generation_marks(steps),
    )
    note = "<p class='soft'>Grey: each step. Line: exponential mean over about 10 steps. Dashed: a new generation.</p>"
    cells = [
        f"<tr><td>{escape(name)}</td><td>{short(first)}</td><td>{short(second)}</td></tr>"
        for name, first, second in steps.losses_by_bucket()
    ]
    if not cells:
        return chart + note
    table = (
        "<details><summary>loss by bucket</summary><div class='wide'><table><tr><th>bucket</th>"
        "<th>first half</th><th>second half</th></tr>" + "".join(cells) + "</table></div></details>"
    )
    return chart + note + table


def balance_html(steps: StepTotals) -> str:
    parts = [
        "<h3>Seconds per step: measured, planned (orange), waiting for data (green)</h3>",
        line_chart(
            [
                _series("step_s", steps.curves["step_s"], hover=True),
                _series("predicted_s", steps.curves["predicted_s"], css="c2"),
                _series("data_wait_s", steps.curves["data_wait_s"], css="c3"),
            ],
            marks=_generation_marks(steps),
            zero=True,
            height=180,
        ),
    ]
    for title, name in [
        ("Idle share of all workers", "idle_ratio"),
        ("WIR: most over least DiT seconds", "wir"),
        ("CV of tokens per worker", "cv_step"),
        ("CV of compute per worker", "cv_compute"),
    ]:
        if chart := line_chart([_series(name, steps.curves[name], hover=True)], height=120, zero=True):
            parts.append(f"<h3>{escape(title)}, median {short(steps.values[name].median)}</h3>{chart}")
    return "".join(parts)


def _series(name: str, curve: Curve, css: str = "c1", hover: bool = False) -> Series:
    return Series(name=name, xs=curve.xs, ys=curve.ys, css=css, hover=hover)


def _generation_marks(steps: StepTotals) -> list[EventMark]:
    return [
        EventMark(x=found.first, title=f"generation {found.number} from step {found.first}, {found.workers} workers")
        for found in steps.generations.listed[1:]
    ]
