"""`heddle report RUN`: one self-contained HTML page of a run, alive or finished. No script, no external asset."""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from actors.records.events import RunEvent
from actors.records.span_record import SpanRecord
from app.drawing.style import CSS
from app.drawing.svg import Bar, EventMark, Lane, Series, line_chart, timeline
from app.records.metrics import clock
from app.records.rundir import RunDir
from app.records.timeline import StepWindow, WindowTimes, final_times, lane, windows
from app.report.facts import Shape, UsualStep, why_slow
from app.report.totals import Curve, EventTotals, SpanTotals, StepTotals
from app.settings.config import RunConfig
from ops.models.folders import resolve
from ops.typed import ConfigError

log = logging.getLogger(__name__)

MAX_MEDIA_BYTES = 24 << 20  # clips beyond this are named, not embedded
MAX_LANES = 32


def write_report(run: RunDir, out: Path | None = None) -> Path:
    """Write the page and return its path. Raises ConfigError for a run without a single finished step."""
    facts = read_facts(run)
    path = out or run.path / "report.html"
    path.write_text(page(run, facts), encoding="utf-8")
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """All that the page says of a run's records."""

    steps: StepTotals
    events: EventTotals
    spans: SpanTotals
    shown: Sequence[tuple[str, int]]  # (label, step) of the windows that are drawn


def read_facts(run: RunDir) -> RunFacts:
    """Go through the records of a run, one at a time. Raises ConfigError where there is no step."""
    steps = StepTotals(run.metrics().count())
    for line in run.metrics():
        steps.add(line)
    if steps.first is None:
        raise ConfigError(f"run {run.path} has no finished step yet: its metrics.jsonl is missing or empty.")
    slow = steps.slow()
    events = EventTotals(slow)
    for event in run.events():
        events.add(event)
    final = final_times(run.spans())
    shown = _telling(final)
    spans = SpanTotals(final, wanted=[*(line.step for line in slow), *(step for _, step in shown)])
    for window in windows(run.spans()):
        spans.add(window)
    return RunFacts(steps=steps, events=events, spans=spans, shown=shown)


def page(run: RunDir, facts: RunFacts) -> str:
    """The whole document."""
    name = run.config().get("run", {}).get("name") or run.path.name
    parts = [
        f"<h1>{escape(str(name))}</h1><p class='soft'>{escape(_when(facts.steps))}</p>",
        _totals(facts.steps, facts.spans),
        _section("Loss", _loss(facts.steps)),
        _section("Samples", _samples(run)),
        _section("Slow steps explained", _slow(facts)),
        _section("Planned against measured", _timelines(facts)),
        _section("Largest deviations from the plan", _deviations(facts.spans)),
        _section("Buckets", _buckets(run, facts.spans)),
        _section("Data", _data(facts.events.ledger)),
        _section("Balance and speed", _balance(facts.steps)),
        _section("Workers, generations and events", _elastic(facts)),
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


def _when(steps: StepTotals) -> str:
    assert steps.last is not None
    finished = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(steps.last.time))
    took = clock(steps.last.time - _start(steps))
    return f"{steps.count} steps, {took} from the first step to the last, which ended {finished}"


def _start(steps: StepTotals) -> float:
    """Unix seconds when the first step began."""
    assert steps.first is not None
    return steps.first.time - (steps.first.step_s if math.isfinite(steps.first.step_s) else 0.0)


def _totals(steps: StepTotals, spans: SpanTotals) -> str:
    medians = {name: values.median for name, values in steps.values.items()}
    workers = sorted(steps.workers)
    rows = [
        (_short(steps.last_losses.median), "loss, last tenth"),
        (f"{_short(medians['step_s'])} s", "per step, median"),
        (_short(medians["tokens_per_s"]), "tokens per second"),
        (_percent(medians["idle_ratio"]), "idle, median"),
        (_short(medians["wir"]), "WIR, median"),
        (_percent(spans.plan_error), "plan error per cascade"),
        (_percent(steps.data_wait_s / steps.seconds if steps.seconds else math.nan), "waiting for data"),
        (f"{workers[0]}-{workers[-1]}" if len(workers) > 1 else str(workers[0] if workers else "-"), "workers"),
        (str(steps.generations.count), "generations"),
        (str(steps.recomputed), "steps recomputed"),
    ]
    cards = [f"<div class='figure'><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in rows]
    return f"<div class='figures'>{''.join(cards)}</div>"


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else "-"


def _series(name: str, curve: Curve, css: str = "c1", hover: bool = False) -> Series:
    return Series(name=name, xs=curve.xs, ys=curve.ys, css=css, hover=hover)


def _generation_marks(steps: StepTotals) -> list[EventMark]:
    return [
        EventMark(x=found.first, title=f"generation {found.number} from step {found.first}, {found.workers} workers")
        for found in steps.generations.listed[1:]
    ]


def _loss(steps: StepTotals) -> str:
    chart = line_chart(
        [
            _series("loss", steps.curves["loss"], css="faint", hover=True),
            _series("smoothed", steps.smoothed),
        ],
        marks=_generation_marks(steps),
    )
    note = "<p class='soft'>Grey: each step. Line: exponential mean over about 10 steps. Dashed: a new generation.</p>"
    cells = [
        f"<tr><td>{escape(name)}</td><td>{_short(first)}</td><td>{_short(second)}</td></tr>"
        for name, first, second in steps.losses_by_bucket()
    ]
    if not cells:
        return chart + note
    table = (
        "<details><summary>loss by bucket</summary><div class='wide'><table><tr><th>bucket</th>"
        "<th>first half</th><th>second half</th></tr>" + "".join(cells) + "</table></div></details>"
    )
    return chart + note + table


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


def _slow(facts: RunFacts) -> str:
    values = facts.steps.values
    usual = UsualStep(
        step_s=values["step_s"].median,
        data_wait_s=values["data_wait_s"].median,
        predicted_s=values["predicted_s"].median,
    )
    sentences = []
    for line in facts.steps.slow():
        window = facts.spans.windows.get(line.step)
        spans = window.spans if window is not None else ()
        sentences.append(why_slow(line, spans, facts.events.during[line.step], usual))
    if not sentences:
        return "<p class='soft'>No step took more than 1.3 times the median.</p>"
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _timelines(facts: RunFacts) -> str:
    if not facts.shown:
        return ""
    kinds = {"text": "text encode", "vae": "VAE encode", "dit": "DiT", "finish": "gradient sum and update"}
    legend = "".join(f"<span><i style='background:var(--{css})'></i>{name}</span>" for css, name in kinds.items())
    parts = [f"<div class='legend'>{legend}<span>thin, pale: as planned</span></div>"]
    parts += [
        f"<h3>Step {step}, {label}: {window.times.seconds:.2f} s</h3>{step_timeline(window)}"
        for label, step in facts.shown
        if (window := facts.spans.windows.get(step)) is not None
    ]
    return "".join(parts)


def _telling(final: Mapping[int, WindowTimes]) -> list[tuple[str, int]]:
    """The median step, the slowest and the last one. The first steps, which warm up, only if there are no others."""
    if not final:
        return []
    settled = list(final)[min(3, len(final) // 4) :]
    by_time = sorted(settled, key=lambda step: final[step].seconds)
    picks = [("a typical one", by_time[len(by_time) // 2]), ("the slowest", by_time[-1]), ("the last", settled[-1])]
    first_label = {step: label for label, step in reversed(picks)}
    return [(label, step) for label, step in picks if first_label[step] == label]


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
        start_s=span.start - window.times.start,
        end_s=span.end - window.times.start,
        css=_css(span),
        title="\n".join(lines),
        label=span.name,
    )


def _deviations(spans: SpanTotals) -> str:
    rows = []
    for found in spans.deviations:
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


def _buckets(run: RunDir, spans: SpanTotals) -> str:
    rows = spans.buckets(_tokens_of(run, spans.shapes))
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


def _tokens_of(run: RunDir, shapes: Iterable[Shape]) -> dict[Shape, int]:
    """Tokens of one sample per bucket; empty when the model's folders are not on this machine."""
    try:
        _, geometry = resolve(RunConfig.load(run.path / "config.yaml").model)
    except (ValueError, FileNotFoundError) as error:
        log.warning("bucket table without tokens: %s", error)
        return {}
    return {shape: geometry.tokens(*shape) for shape in shapes}


def _data(ledger: Mapping[str, Any]) -> str:
    """Rows and draws of every source; of records of version 0.1 only the totals."""
    if "indexed" not in ledger:
        return ""
    sources = list(ledger.get("sources", ()))
    rows = [(counts["name"], counts) for counts in sources]
    if len(sources) != 1:
        rows.append(("all", ledger))
    head = "".join(
        f"<th>{name}</th>" for name in ("source", "indexed", "usable", "draws", "good", "bad", "rejected and bad")
    )
    body = "".join(_source_row(name, counts) for name, counts in rows)
    note = "<p class='soft'>draws: samples of the steps, as counted at the last start or at the end.</p>"
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>{note}"


def _source_row(name: str, counts: Mapping[str, Any]) -> str:
    bad = sum(counts["skipped"].values())
    reasons = Counter(counts["rejected"]) + Counter(counts["skipped"])
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    cells = (name, counts["indexed"], counts["planned"], counts["scheduled"], counts["delivered"], bad)
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}<td class='words'>{escape(why)}</td></tr>"


def _balance(steps: StepTotals) -> str:
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
            parts.append(f"<h3>{escape(title)}, median {_short(steps.values[name].median)}</h3>{chart}")
    return "".join(parts)


def _elastic(facts: RunFacts) -> str:
    generations, events = facts.steps.generations, facts.events
    rows = "".join(
        f"<tr><td>{found.number}</td><td>{found.first} - {found.last}</td><td>{found.workers}</td></tr>"
        for found in generations.listed
    )
    head = "<tr><th>generation</th><th>steps</th><th>workers</th></tr>"
    table = f"<div class='wide'><table class='narrow'>{head}{rows}</table></div>"
    if (hidden := generations.count - len(generations.listed)) > 0:
        table += f"<p class='soft'>{hidden} generations in the middle are left out.</p>"
    start = _start(facts.steps)
    lines = "".join(
        f"<li><span class='soft'>{_offset(event, start)}</span> {escape(text)}</li>" for event, text in events.told
    )
    left = events.num_told - len(events.told)
    more = f"<p class='soft'>{left} more in events.jsonl.</p>" if left > 0 else ""
    return table + (f"<h3>Events</h3><ul>{lines}</ul>{more}" if lines else "")


def _offset(event: RunEvent, start: float) -> str:
    seconds = event.time - start
    return f"{'-' if seconds < 0 else '+'}{clock(abs(seconds))}"
