"""Tables of a run: deviations from the plan, buckets, data, generations with their events, slow steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from html import escape

from actors.records.events import EnvironmentSeen, RunEvent, short_fact
from app.records.progress import clock
from app.records.rundir import RunDir
from app.report.facts import UsualStep, why_slow
from app.report.gathered import RunFacts
from app.report.totals import DataAccount, SourceAccount, SpanTotals
from app.settings.config import RunConfig
from ops.counted import counted, first_of
from ops.geometry import PixelShape
from ops.models.folders import resolve

log = logging.getLogger(__name__)


def slow_html(facts: RunFacts) -> str:
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


def deviations_html(spans: SpanTotals) -> str:
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


def buckets_html(run: RunDir, spans: SpanTotals) -> str:
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
            f"<tr><td>{counted(frames, 'frame')}, {height}x{width}</td><td>{row.items}</td><td>{row.samples}</td>"
            f"<td>{row.batch:.1f}</td><td>{row.tokens if row.tokens is not None else '-'}</td>"
            f"<td>{row.text_s:.1f} s</td><td>{row.vae_s:.1f} s</td><td>{row.dit_s:.1f} s</td>"
            f"<td>{row.worker_seconds:.1f} s</td><td class='words'><span class='share' "
            f"style='width:{max(160 * row.share, 1):.0f}px'></span> {100 * row.share:.0f}%</td></tr>"
        )
    note = "<p class='soft'>batch: mean samples of a cascade. tokens: video tokens of one sample.</p>"
    return f"<div class='wide'><table>{head}{''.join(body)}</table></div>{note}"


def _tokens_of(run: RunDir, shapes: Iterable[PixelShape]) -> dict[PixelShape, int]:
    """Tokens of one sample per bucket; empty when the model's folders are not on this machine, or not to be read."""
    try:
        _, geometry = resolve(RunConfig.load(run.path / "config.yaml").model)
    except (ValueError, OSError) as error:
        log.warning("bucket table without tokens: %s", error)
        return {}
    return {shape: geometry.tokens(*shape) for shape in shapes}


def data_html(data: DataAccount | None) -> str:
    """Rows and draws of every source; of records of version 0.1 only the totals."""
    if data is None or not data.indexed:
        return ""
    head = "".join(
        f"<th>{name}</th>"
        for name in ("source", "indexed", "usable", "draws", "epochs", "good", "bad", "rejected and bad")
    )
    body = "".join(_source_row(counts) for counts in data.rows)
    note = (
        "<p class='soft'>draws: samples of the steps, as counted at the last start or at the end. epochs: draws of a "
        "usable sample, on average.</p>"
    )
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>{note}"


def _source_row(counts: SourceAccount) -> str:
    reasons = Counter(counts.rejected) + Counter(counts.skipped)
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    bad = sum(counts.skipped.values())
    epochs = f"{counts.scheduled / counts.planned:.2f}" if counts.planned else "-"
    cells = (counts.name, counts.indexed, counts.planned, counts.scheduled, epochs, counts.delivered, bad)
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}<td class='words'>{escape(why)}</td></tr>"


def environment_html(environments: Iterable[EnvironmentSeen]) -> str:
    """What the workers computed with, from which step on; nothing of a version that does not say."""
    rows = []
    for seen in environments:
        software = ", ".join(f"{name} {short_fact(value)}" for name, value in seen.software.items())
        gpus = ", ".join(f"{count} x {name}" for name, count in seen.gpus.items()) or "none"
        rows.append(
            f"<tr><td>{seen.from_step:,}</td><td class='words'>{escape(software)}</td>"
            f"<td class='words'>{escape(gpus)}</td><td class='words'>{escape(first_of(seen.hosts))}</td></tr>"
        )
    if not rows:
        return ""
    head = "<tr><th>from step</th><th>software</th><th>GPUs</th><th>hosts</th></tr>"
    return f"<div class='wide'><table>{head}{''.join(rows)}</table></div>"


def elastic_html(facts: RunFacts) -> str:
    generations, events = facts.steps.generations, facts.events
    rows = "".join(
        f"<tr><td>{found.number}</td><td>{found.first} - {found.last}</td><td>{found.workers}</td></tr>"
        for found in generations.listed
    )
    head = "<tr><th>generation</th><th>steps</th><th>workers</th></tr>"
    table = f"<div class='wide'><table class='narrow'>{head}{rows}</table></div>"
    if (hidden := generations.count - len(generations.listed)) > 0:
        table += f"<p class='soft'>Without {counted(hidden, 'generation')} in the middle.</p>"
    first, last = (
        "".join(
            f"<li><span class='soft'>{_offset(event, facts.steps.began)}</span> {escape(text)}</li>"
            for event, text in told
        )
        for told in (events.first, events.last)
    )
    left = events.num_told - len(events.first) - len(events.last)
    more = f"<li class='soft'>{left:,} more, in events.jsonl</li>" if left > 0 else ""
    return table + (f"<h3>Events</h3><ul>{first}{more}{last}</ul>" if first else "")


def _offset(event: RunEvent, start: float) -> str:
    seconds = event.time - start
    return f"{'-' if seconds < 0 else '+'}{clock(abs(seconds))}"
