"""`heddle report RUN`: one self-contained HTML page of a run, alive or finished. No script, no external asset."""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from actors.records.events import RunEvent
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord
from app import report_facts as facts
from app.config import RunConfig
from app.metrics import clock
from app.report_style import CSS
from app.report_svg import Bar, EventMark, Lane, Series, line_chart, timeline
from app.rundir import RunDir
from app.settings import ConfigError
from app.timeline import StepWindow, final_windows, lane
from ops.models.folders import resolve

log = logging.getLogger(__name__)

MAX_MEDIA_BYTES = 24 << 20  # clips beyond this are named, not embedded
MAX_LANES = 32
MAX_EVENTS = 60


def write_report(run: RunDir, out: Path | None = None) -> Path:
    """Write the page and return its path. Raises ConfigError for a run without a single finished step."""
    metrics = run.metrics()
    if not metrics:
        raise ConfigError(f"run {run.path} has no finished step yet: its metrics.jsonl is missing or empty.")
    path = out or run.path / "report.html"
    path.write_text(page(run, metrics), encoding="utf-8")
    return path


def page(run: RunDir, metrics: Sequence[StepMetrics]) -> str:
    """The whole document."""
    config, events = run.config(), run.events()
    executed = final_windows(run.spans())
    spans = [span for window in executed for span in window.spans]
    name = config.get("run", {}).get("name") or run.path.name
    parts = [
        f"<h1>{escape(str(name))}</h1><p class='soft'>{escape(_when(metrics))}</p>",
        _totals(metrics, spans),
        _section("Loss", _loss(metrics, events)),
        _section("Samples", _samples(run)),
        _section("Slow steps explained", _slow(metrics, executed, events)),
        _section("Planned against measured", _timelines(executed, metrics)),
        _section("Largest deviations from the plan", _deviations(spans)),
        _section("Buckets", _buckets(run, spans)),
        _section("Balance and speed", _balance(metrics)),
        _section("Workers, generations and events", _elastic(metrics, events)),
        _section("Settings", _settings(run)),
    ]
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(str(name))} - Heddle</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _settings(run: RunDir) -> str:
    text = (run.path / "config.yaml").read_text(encoding="utf-8")
    return f"<details><summary>config.yaml</summary><pre>{escape(text)}</pre></details>"


def _when(metrics: Sequence[StepMetrics]) -> str:
    last, started = metrics[-1].time, _start(metrics[0])
    finished = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last))
    return f"{len(metrics)} steps, {clock(last - started)} from the first step to the last, which ended {finished}"


def _start(first: StepMetrics) -> float:
    """Unix seconds when the first step began."""
    return first.time - (first.step_s if math.isfinite(first.step_s) else 0.0)


def _totals(metrics: Sequence[StepMetrics], spans: Sequence[SpanRecord]) -> str:
    tail = metrics[-max(len(metrics) // 10, 1) :]
    seconds = sum(value for value in facts.column(metrics, "step_s") if math.isfinite(value))
    workers = sorted({line.workers for line in metrics if line.workers})
    rows = [
        (_short(facts.median(facts.column(tail, "loss"))), "loss, last tenth"),
        (f"{_short(facts.median(facts.column(metrics, 'step_s')))} s", "per step, median"),
        (_short(facts.median(facts.column(metrics, "tokens_per_s"))), "tokens per second"),
        (_percent(facts.median(facts.column(metrics, "idle_ratio"))), "idle, median"),
        (_short(facts.median(facts.column(metrics, "wir"))), "WIR, median"),
        (_percent(facts.plan_error(spans)), "plan error per cascade"),
        (_percent(_sum(metrics, "data_wait_s") / seconds if seconds else math.nan), "waiting for data"),
        (f"{workers[0]}-{workers[-1]}" if len(workers) > 1 else str(workers[0] if workers else "-"), "workers"),
        (str(len(facts.generations(metrics))), "generations"),
        (str(sum(line.recomputed for line in metrics)), "steps recomputed"),
    ]
    cards = [f"<div class='figure'><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in rows]
    return f"<div class='figures'>{''.join(cards)}</div>"


def _sum(metrics: Sequence[StepMetrics], name: str) -> float:
    return sum(value for value in facts.column(metrics, name) if math.isfinite(value))


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else "-"


def _steps(metrics: Sequence[StepMetrics]) -> list[float]:
    return [float(line.step) for line in metrics]


def _generation_marks(metrics: Sequence[StepMetrics]) -> list[EventMark]:
    return [
        EventMark(x=first, title=f"generation {generation} from step {first}, {workers} workers")
        for generation, first, _, workers in facts.generations(metrics)[1:]
    ]


def _loss(metrics: Sequence[StepMetrics], events: Sequence[RunEvent]) -> str:
    xs, losses = _steps(metrics), facts.column(metrics, "loss")
    chart = line_chart(
        [
            Series(name="loss", xs=xs, ys=losses, css="faint", hover=True),
            Series(name="smoothed", xs=xs, ys=facts.smooth(losses), css="c1"),
        ],
        marks=_generation_marks(metrics),
    )
    buckets = sorted({name for line in metrics for name in line.loss_by_bucket})
    note = "<p class='soft'>Grey: each step. Line: exponential mean over about 10 steps. Dashed: a new generation.</p>"
    if not buckets:
        return chart + note
    cells = []
    half = metrics[len(metrics) // 2 :]
    for name in buckets:
        first = _bucket_loss(metrics[: len(metrics) // 2], name)
        last = _bucket_loss(half, name)
        cells.append(f"<tr><td>{escape(name)}</td><td>{_short(first)}</td><td>{_short(last)}</td></tr>")
    table = (
        "<details><summary>loss by bucket</summary><div class='wide'><table><tr><th>bucket</th>"
        "<th>first half</th><th>second half</th></tr>" + "".join(cells) + "</table></div></details>"
    )
    return chart + note + table


def _bucket_loss(metrics: Sequence[StepMetrics], name: str) -> float:
    values = [line.loss_by_bucket.get(name, math.nan) for line in metrics]
    numbers = [value for value in values if math.isfinite(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _samples(run: RunDir) -> str:
    """Clips play in place; a picture beside a clip of the same name is its contact sheet and shown under it."""
    figures, left = [], MAX_MEDIA_BYTES
    files = run.samples()
    clips = [path for path in files if path.suffix == ".mp4"]
    alone = [path for path in files if path.suffix != ".mp4" and path.with_suffix(".mp4") not in clips]
    for path in [*clips, *alone]:
        media = [path, *(p for p in (path.with_suffix(".png"),) if p != path and p.is_file())]
        size = sum(p.stat().st_size for p in media)
        caption = escape(_caption(run, path))
        if size > left:
            figures.append(f"<figure><figcaption>{caption} (in samples/, too large to embed)</figcaption></figure>")
            continue
        left -= size
        sheet = " class='sheet'" if path.suffix != ".mp4" else ""
        figures.append(f"<figure{sheet}>{''.join(_embed(p) for p in media)}<figcaption>{caption}</figcaption></figure>")
    return f"<div class='clips'>{''.join(figures)}</div>" if figures else ""


def _caption(run: RunDir, path: Path) -> str:
    """NAME.json lists the prompts of NAME-00.mp4, NAME-01.mp4 and so on, or the one of NAME.mp4.

    Without that file step-60-01 is taken for prompt number 1 of the config, drawn at step 60. A contact sheet has no
    caption but its name.
    """
    name, _, number = path.stem.rpartition("-")
    if not number.isdecimal() or path.with_suffix(".json").is_file():
        name, number = path.stem, ""
    if (listed := path.with_name(f"{name}.json")).is_file():
        prompts = json.loads(listed.read_text(encoding="utf-8"))
    elif match := re.fullmatch(r"(step-\d+)(?:-(\d+))?", path.stem):
        name, number, prompts = match[1], match[2] or "", run.config().get("sample", {}).get("prompts") or []
    else:
        return path.stem
    known = 1 < len(prompts) > int(number) if number else path.suffix == ".mp4" and len(prompts) == 1
    return f"{name}: {prompts[int(number or 0)]}" if known else path.stem


def _embed(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    if path.suffix == ".mp4":
        return f"<video autoplay loop muted playsinline controls src='data:video/mp4;base64,{data}'></video>"
    return f"<img alt='{escape(path.stem)}' src='data:image/{path.suffix[1:]};base64,{data}'>"


def _slow(metrics: Sequence[StepMetrics], executed: Sequence[StepWindow], events: Sequence[RunEvent]) -> str:
    sentences = facts.slow_steps(metrics, executed, events)
    if not sentences:
        return "<p class='soft'>No step took more than 1.3 times the median.</p>"
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _timelines(executed: Sequence[StepWindow], metrics: Sequence[StepMetrics]) -> str:
    if not executed:
        return ""
    chosen = _telling(executed, metrics)
    kinds = {"text": "text encode", "vae": "VAE encode", "dit": "DiT", "finish": "gradient sum and update"}
    legend = "".join(f"<span><i style='background:var(--{css})'></i>{name}</span>" for css, name in kinds.items())
    parts = [f"<div class='legend'>{legend}<span>thin, pale: as planned</span></div>"]
    parts += [
        f"<h3>Step {window.step}, {label}: {window.end - window.start:.2f} s</h3>{step_timeline(window)}"
        for label, window in chosen
    ]
    return "".join(parts)


def _telling(executed: Sequence[StepWindow], metrics: Sequence[StepMetrics]) -> list[tuple[str, StepWindow]]:
    """The median step, the slowest and the last one. The first steps, which warm up, only if there are no others."""
    settled = executed[min(3, len(executed) // 4) :]
    by_time = sorted(settled, key=lambda window: window.end - window.start)
    picks = [("a typical one", by_time[len(by_time) // 2]), ("the slowest", by_time[-1]), ("the last", executed[-1])]
    first_label = {window.step: label for label, window in reversed(picks)}
    return [(label, window) for label, window in picks if first_label[window.step] == label]


def step_timeline(window: StepWindow) -> str:
    """Measured and planned lanes of each worker."""
    lanes = []
    workers = sorted({span.worker for span in window.spans}, key=lane)
    for worker in workers[:MAX_LANES]:
        mine = sorted((span for span in window.spans if span.worker == worker), key=lambda span: span.start)
        lanes.append(
            Lane(
                name=f"worker {worker}" if worker.isdigit() else worker[-14:],
                bars=[_measured_bar(span, window) for span in mine],
            )
        )
        foreseen = [(span, times) for span in mine if (times := span.planned)]
        lanes.append(
            Lane(
                name="planned",
                thin=True,
                bars=[
                    Bar(
                        start_s=start,
                        end_s=end,
                        css=f"{_css(span)} plan",
                        title=f"planned: {span.name}, {end - start:.3f} s",
                    )
                    for span, (start, end) in foreseen
                ],
            )
        )
    hidden = len(workers) - MAX_LANES
    more = f"<p class='soft'>{hidden} more workers are in timeline.json.</p>" if hidden > 0 else ""
    return timeline(lanes) + more


def _css(span: SpanRecord) -> str:
    return span.module if span.module in ("text", "vae", "dit", "finish") else "other"


def _measured_bar(span: SpanRecord, window: StepWindow) -> Bar:
    lines = [f"{span.name}: {span.seconds:.3f} s"]
    if times := span.planned:
        lines.append(f"planned {times[1] - times[0]:.3f} s")
    lines += [f"{phase} {value:.3f} s" for phase, value in span.phases.items() if value >= 0.0005]
    return Bar(
        start_s=span.start - window.start,
        end_s=span.end - window.start,
        css=_css(span),
        title="\n".join(lines),
        label=span.name,
    )


def _deviations(spans: Sequence[SpanRecord]) -> str:
    rows = []
    for found in facts.deviations(spans):
        css = "over" if found.excess_s > 0 else "under"
        rows.append(
            f"<tr><td class='words'>{escape(found.name)}</td><td>{found.step}</td>"
            f"<td>{escape(found.worker[-14:])}</td><td>{found.planned_s:.3f} s</td>"
            f"<td>{found.measured_s:.3f} s</td><td class='{css}'>{found.excess_s:+.3f} s</td></tr>"
        )
    if not rows:
        return ""
    head = "<tr><th>cascade</th><th>step</th><th>worker</th><th>planned</th><th>measured</th><th>difference</th></tr>"
    return f"<div class='wide'><table>{head}{''.join(rows)}</table></div>"


def _buckets(run: RunDir, spans: Sequence[SpanRecord]) -> str:
    rows = facts.buckets(spans, _tokens_of(run, spans))
    if not rows:
        return ""
    head = (
        "<tr><th>bucket</th><th>items</th><th>samples</th><th>batch</th><th>tokens</th><th>text</th><th>VAE</th>"
        "<th>DiT</th><th>worker seconds</th><th class='words'>share</th></tr>"
    )
    body = []
    for row in rows:
        frames, height, width = row.bucket
        body.append(
            f"<tr><td>{frames} frames, {height}x{width}</td><td>{row.items}</td><td>{row.samples}</td>"
            f"<td>{row.batch:.1f}</td><td>{row.tokens if row.tokens is not None else '-'}</td>"
            f"<td>{row.text_s:.1f} s</td><td>{row.vae_s:.1f} s</td><td>{row.dit_s:.1f} s</td>"
            f"<td>{row.worker_seconds:.1f} s</td><td class='words'><span class='share' "
            f"style='width:{max(160 * row.share, 1):.0f}px'></span> {100 * row.share:.0f}%</td></tr>"
        )
    note = "<p class='soft'>batch: mean samples of a cascade. tokens: video tokens of one sample.</p>"
    return f"<div class='wide'><table>{head}{''.join(body)}</table></div>{note}"


def _tokens_of(run: RunDir, spans: Sequence[SpanRecord]) -> dict[tuple[int, int, int], int]:
    """Tokens of one sample per bucket; empty when the model's folders are not on this machine."""
    try:
        _, geometry = resolve(RunConfig.load(run.path / "config.yaml").model)
    except (ValueError, FileNotFoundError) as error:
        log.warning("bucket table without tokens: %s", error)
        return {}
    shapes = {bucket for span in spans for bucket, *_ in facts.pieces(span)}
    return {shape: geometry.tokens(*shape) for shape in shapes}


def _balance(metrics: Sequence[StepMetrics]) -> str:
    xs = _steps(metrics)
    parts = [
        "<h3>Seconds per step: measured, planned (orange), waiting for data (green)</h3>",
        line_chart(
            [
                Series(name="step_s", xs=xs, ys=facts.column(metrics, "step_s"), hover=True),
                Series(name="predicted_s", xs=xs, ys=facts.column(metrics, "predicted_s"), css="c2"),
                Series(name="data_wait_s", xs=xs, ys=facts.column(metrics, "data_wait_s"), css="c3"),
            ],
            marks=_generation_marks(metrics),
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
        values = facts.column(metrics, name)
        if chart := line_chart([Series(name=name, xs=xs, ys=values, hover=True)], height=120, zero=True):
            parts.append(f"<h3>{escape(title)}, median {_short(facts.median(values))}</h3>{chart}")
    return "".join(parts)


def _elastic(metrics: Sequence[StepMetrics], events: Sequence[RunEvent]) -> str:
    rows = "".join(
        f"<tr><td>{generation}</td><td>{first} - {last}</td><td>{workers}</td></tr>"
        for generation, first, last, workers in facts.generations(metrics)
    )
    head = "<tr><th>generation</th><th>steps</th><th>workers</th></tr>"
    table = f"<div class='wide'><table class='narrow'>{head}{rows}</table></div>"
    told = [(event, text) for event in events if (text := event.describe())]
    start = _start(metrics[0])
    lines = "".join(
        f"<li><span class='soft'>{_offset(event, start)}</span> {escape(text)}</li>"
        for event, text in told[:MAX_EVENTS]
    )
    more = f"<p class='soft'>{len(told) - MAX_EVENTS} more in events.jsonl.</p>" if len(told) > MAX_EVENTS else ""
    return table + (f"<h3>Events</h3><ul>{lines}</ul>{more}" if lines else "")


def _offset(event: RunEvent, start: float) -> str:
    seconds = event.time - start
    return f"{'-' if seconds < 0 else '+'}{clock(abs(seconds))}"
