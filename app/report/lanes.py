"""Draws a few steps of a run: what each worker did, above what the plan foresaw."""

from __future__ import annotations

from actors.records.span_record import SpanRecord
from app.drawing.svg import Bar, Lane, legend, timeline
from app.records.timeline import StepWindow, lane
from app.report.gathered import RunFacts

MAX_LANES = 32


def timelines_html(facts: RunFacts) -> str:
    if not facts.shown:
        return ""
    kinds = {"text": "text encode", "vae": "VAE encode", "dit": "DiT", "finish": "gradient sum and update"}
    parts = [legend(kinds, "thin, pale: as planned")]
    parts += [
        f"<h3>Step {step}, {label}: {window.times.seconds:.2f} s</h3>{step_timeline(window)}"
        for label, step in facts.shown
        if (window := facts.spans.windows.get(step)) is not None
    ]
    return "".join(parts)


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
