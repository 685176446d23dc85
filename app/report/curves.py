"""Curves of a run over its steps: loss, gradient norm, learning rate, seconds, balance."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from actors.records.events import HeldOutMeasured
from app.drawing.svg import EventMark, Series, line_chart
from app.report.figures import Curve
from app.report.totals import StepTotals
from app.report.words import percent, short
from ops.counted import by_numbers, counted, loss_in_words

HELD_OUT_ROWS = 12  # of the newest checkpoints, beside the first


def loss_html(steps: StepTotals, held_out: Mapping[int, HeldOutMeasured]) -> str:
    """`held_out`: by step."""
    measured = sorted(held_out)
    losses = [held_out[step].loss for step in measured]
    chart = line_chart(
        [
            _series("loss", steps.curves["loss"], css="faint", hover=True, ranges=True),
            _series("smoothed", steps.smoothed),
            Series(name="held out", xs=measured, ys=losses, css="c2 dashed", hover=True),
        ],
        marks=_generation_marks(steps),
    )
    grey, curve = "each step", steps.curves["loss"]
    if curve.ranges and steps.highest is not None:
        grey = (
            f"means of some {steps.count / len(curve.xs):,.0f} steps, and from the least of them to the most; the "
            f"highest is {short(steps.highest.loss)} at step {steps.highest.step:,}"
        )
    orange = " Orange, dashed: held-out clips." if held_out else ""
    note = (
        f"<p class='soft'>Grey: {grey}. Line: exponential mean over about 10 steps.{orange} "
        f"Dashed upright: a new generation.</p>"
    )
    if by_expert := sorted(steps.smoothed_by_expert.items()):
        lines = [_series(name, curve, css=f"c{place} dashed") for place, (name, curve) in enumerate(by_expert, 1)]
        names = ", ".join(escape(name) for name, _ in by_expert)
        note += f"<h3>Loss of each expert, smoothed: {names} (orange, dashed)</h3>{line_chart(lines, height=180)}"
    note += update_html(steps) + held_out_html(held_out)
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


def update_html(steps: StepTotals) -> str:
    """Gradient norm, learning rate and Prodigy's d of each step; nothing of records without them."""
    parts = []
    norm = _series("grad_norm", steps.curves["grad_norm"], hover=True, ranges=True)
    if chart := line_chart([norm], marks=_generation_marks(steps), height=140, zero=True):
        median = short(steps.values["grad_norm"].median)
        parts.append(f"<h3>Gradient norm before clipping, median {median}</h3>{chart}")
    rate = _series("lr", steps.curves["lr"], css="c2", hover=True)
    if chart := line_chart([rate], height=120, zero=True):
        parts.append(f"<h3>Learning rate</h3>{chart}")
    found = _series("d", steps.curves["d"], css="c3", hover=True)
    if chart := line_chart([found], height=120, zero=True):
        parts.append(f"<h3>d, which Prodigy has found</h3>{chart}")
    return "".join(parts)


def held_out_html(held_out: Mapping[int, HeldOutMeasured]) -> str:
    """The first and the newest losses of held-out clips, by noise level and by bucket; empty where a run has none."""
    if not held_out:
        return ""
    first, *others = sorted(held_out)
    steps = [first, *others[-HELD_OUT_ROWS:]]
    last = held_out[steps[-1]]
    newest_first = [held_out[step] for step in reversed(steps)]  # a bucket may be left out from a checkpoint on
    by_noise = dict.fromkeys(name for one in newest_first for name in one.by_noise)
    by_bucket = sorted({name for one in newest_first for name in one.by_bucket}, key=by_numbers)
    columns = [("noise", name) for name in by_noise] + [("", name) for name in by_bucket]
    head = "".join(f"<th>{escape(f'{kind} {name}'.strip())}</th>" for kind, name in columns)
    left_out = any(held_out[step].no_room for step in steps)
    head += "<th>left out for want of memory</th>" if left_out else ""
    rows = []
    for step in steps:
        one = held_out[step]
        parts = [(one.by_noise if kind else one.by_bucket).get(name) for kind, name in columns]
        cells = "".join(f"<td>{'-' if value is None else loss_in_words(value)}</td>" for value in (one.loss, *parts))
        if left_out:
            cells += f"<td>{escape(one.left_out) or '-'}</td>"
        rows.append(f"<tr><td>{step + 1:,}</td>{cells}</tr>")
    return (
        f"<h3>Loss of {counted(last.clips, 'held-out clip')} (orange, dashed), by noise level and by bucket</h3>"
        f"<div class='wide'><table><tr><th>after step</th><th>all</th>{head}</tr>{''.join(rows)}</table></div>"
    )


def balance_html(steps: StepTotals) -> str:
    parts = [
        "<h3>Seconds per step: measured, planned (orange, dashed), waiting for data (green, dotted)</h3>",
        line_chart(
            [
                _series("step_s", steps.curves["step_s"], hover=True, ranges=True),
                _series("predicted_s", steps.curves["predicted_s"], css="c2 dashed"),
                _series("data_wait_s", steps.curves["data_wait_s"], css="c3 dashed"),
            ],
            marks=_generation_marks(steps),
            zero=True,
            height=180,
        ),
    ]
    if utilization := _chart(steps, {"mfu": "c1", "hfu": "c2 dashed"}):
        medians = f"medians {percent(steps.values['mfu'].median)} and {percent(steps.values['hfu'].median)}"
        parts.append(f"<h3>MFU of the step, HFU of forward and backward (orange, dashed), {medians}</h3>{utilization}")
    if waits := _chart(steps, {"wait_sync_s": "c1", "exposed_s": "c2 dashed"}):
        parts.append(
            f"<h3>Seconds a worker waits for others, and for exposed communication (orange, dashed)</h3>{waits}"
        )
    for title, name in [
        ("Idle share of all workers", "idle_ratio"),
        ("WIR: most over least DiT seconds", "wir"),
        ("CV of tokens per worker", "cv_step"),
        ("CV of compute per worker", "cv_compute"),
        ("CV of TFLOP/s per worker", "cv_tflops"),
    ]:
        if chart := line_chart([_series(name, steps.curves[name], hover=True)], height=120, zero=True):
            parts.append(f"<h3>{escape(title)}, median {short(steps.values[name].median)}</h3>{chart}")
    return "".join(parts) + field_html(steps)


def field_html(steps: StepTotals) -> str:
    """Medians in the words of the papers, and what the step time follows; nothing of a version without."""
    last = steps.last
    assert last is not None
    medians = {name: values.median for name, values in steps.values.items()}
    rows = [
        ("FBL, forward-backward latency", f"{short(medians['fbl_s'])} s"),
        ("TPS, video tokens", short(medians["tokens_per_s"])),
        ("TPS with text tokens", short(medians["tokens_per_s_with_text"])),
        ("TFLOP/s of a worker, recomputation included", short(medians["tflops"])),
        ("MFU, HFU", f"{percent(medians['mfu'])}, {percent(medians['hfu'])}"),
        ("wait_sync of a worker", f"{short(medians['wait_sync_s'])} s"),
        ("exposed communication of a worker", f"{short(medians['exposed_s'])} s"),
    ]
    if last.corr_tokens is not None:
        rows.append(("correlation of step time with tokens", short(last.corr_tokens)))
    if last.corr_load is not None and last.load_exponent is not None:
        rows.append((f"with B S^p, best at p = {last.load_exponent:g}", short(last.corr_load)))
    if all(value.startswith("-") for _, value in rows[2:]):
        return ""
    cells = "".join(f"<tr><td class='words'>{escape(name)}</td><td>{value}</td></tr>" for name, value in rows)
    note = "<p class='soft'>Medians of the steps; correlations are of the last 200.</p>"
    return f"<h3>In the words of the papers</h3><div class='wide'><table class='narrow'>{cells}</table></div>{note}"


def _chart(steps: StepTotals, styles: Mapping[str, str]) -> str:
    """Curves of the same unit over each other."""
    series = [_series(name, steps.curves[name], css=css, hover=True) for name, css in styles.items()]
    return line_chart(series, height=120, zero=True)


def _series(name: str, curve: Curve, css: str = "c1", hover: bool = False, ranges: bool = False) -> Series:
    return Series(name=name, xs=curve.xs, ys=curve.ys, css=css, hover=hover, ranges=curve.ranges if ranges else ())


def _generation_marks(steps: StepTotals) -> list[EventMark]:
    return [
        EventMark(
            x=found.first,
            title=f"generation {found.number} from step {found.first}, {counted(found.workers, 'worker')}",
        )
        for found in steps.generations.listed[1:]
    ]
