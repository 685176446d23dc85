"""`heddle report RUN`: one self-contained HTML page of a run, alive or finished. No script, no external asset."""

from __future__ import annotations

import math
import time
from html import escape
from pathlib import Path

from app.drawing.style import document
from app.records.progress import clock
from app.records.rundir import RunDir
from app.report.curves import balance_html, loss_html
from app.report.gathered import RunFacts, read_facts
from app.report.lanes import timelines_html
from app.report.media import samples_html
from app.report.tables import buckets_html, data_html, deviations_html, elastic_html, environment_html, slow_html
from app.report.totals import SpanTotals, StepTotals
from app.report.words import percent, short
from app.settings.out_files import check_page, put_text
from ops.counted import counted, noun_of


def write_report(run: RunDir, out: Path | None = None) -> Path:
    """Write the page and return its path. Raises ConfigError for a run without a single finished step, and for an
    `out` that cannot be written."""
    check_page(out)
    facts = read_facts(run)
    path = out or run.path / "report.html"
    put_text(path, page(run, facts))
    return path


def page(run: RunDir, facts: RunFacts) -> str:
    """The whole document."""
    name = run.name()
    parts = [
        f"<h1>{escape(name)}</h1><p class='soft'>{escape(_when(facts.steps))}</p>",
        _totals(facts.steps, facts.spans),
        _section("Loss", loss_html(facts.steps, facts.events.held_out)),
        _section("Samples", samples_html(run)),
        _section("Slow steps explained", slow_html(facts)),
        _section("Planned against measured", timelines_html(facts)),
        _section("Largest deviations from the plan", deviations_html(facts.spans)),
        _section("Buckets", buckets_html(run, facts.spans)),
        _section("Data", data_html(facts.events.data)),
        _section("Balance and speed", balance_html(facts.steps)),
        _section("Workers, generations and events", elastic_html(facts)),
        _section("Settings", environment_html(facts.events.environments) + _settings(run)),
    ]
    return document(f"{name} - Heddle", "".join(parts))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _settings(run: RunDir) -> str:
    text = (run.path / "config.yaml").read_text(encoding="utf-8")
    return f"<details><summary>config.yaml</summary><pre>{escape(text)}</pre></details>"


def _when(steps: StepTotals) -> str:
    assert steps.last is not None
    finished = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(steps.last.time))
    took = clock(steps.last.time - steps.began)
    return f"{counted(steps.count, 'step')}, {took} from the first step to the last, which ended {finished}"


def _totals(steps: StepTotals, spans: SpanTotals) -> str:
    medians = {name: values.median for name, values in steps.values.items()}
    workers = sorted(steps.workers)
    least, most = (workers[0], workers[-1]) if workers else (0, 0)
    generations = steps.generations.count
    rows = [
        (short(steps.last_losses.median), "loss, last tenth"),
        (short(steps.last.epoch) if steps.last is not None and steps.last.epoch is not None else "-", "epochs"),
        (f"{short(medians['step_s'])} s", "per step, median"),
        (short(medians["tokens_per_s"]), "tokens per second"),
        (percent(medians["mfu"]), "MFU, median"),
        (percent(medians["idle_ratio"]), "idle, median"),
        (short(medians["wir"]), "WIR, median"),
        (percent(spans.plan_error), "plan error per cascade"),
        (percent(steps.data_wait_s / steps.seconds if steps.seconds else math.nan), "waiting for data"),
        (f"{least}-{most}" if least < most else str(most or "-"), noun_of(most, "worker")),
        (str(generations), noun_of(generations, "generation")),
        (str(steps.recomputed), f"{noun_of(steps.recomputed, 'step')} recomputed"),
    ]
    cards = [f"<div class='figure'><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in rows]
    return f"<div class='figures'>{''.join(cards)}</div>"
