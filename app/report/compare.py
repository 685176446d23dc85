"""The page of `heddle compare`: loss, step time, idle share and model FLOPs of several runs over each other.

The page is one file without scripts, like a run's report. Losses are compared where runs have the same steps: two runs
that must agree (another plan, another number of workers) are shown by one number, their largest relative difference.
"""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path

from actors.records.events import EnvironmentSeen, HeldOutMeasured
from actors.records.metrics_line import StepMetrics
from app.drawing.style import document
from app.drawing.svg import BarRow, Series, bars, curve_key, line_chart
from app.records.progress import clock
from app.records.rundir import RunDir
from app.report.facts import pieces
from app.report.figures import Curve, RunningMean, Values
from app.report.words import percent, short
from app.settings.config import RunConfig
from app.settings.out_files import check_page, put_text
from ops.counted import counted, loss_in_words
from ops.geometry import PixelShape
from ops.models.folders import resolve
from ops.relative import relative
from ops.typed import ConfigError

MOST = 4  # curves have the classes c1 ... c4
CLOSEST = 1e-9  # relative; losses that are closer are drawn as this far apart, far below the rounding of fp32
UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))  # of time; a chart takes the first that gives two


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """What is shown of one run. Curves are over steps; `by_time` over seconds from its start."""

    name: str
    path: Path
    steps: int
    seconds: float  # of all steps together
    last_loss: float  # median of the last tenth
    held_out: HeldOutMeasured | None  # of the newest checkpoint that has one
    environment: EnvironmentSeen | None  # the newest
    loss: Curve
    by_time: Curve
    step_s: Curve
    idle: Curve
    tflops: Curve  # of the model's FLOPs, per second and worker; NaN where the timeline is gone
    medians: Mapping[str, float]
    losses: StepLosses


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLosses:
    """Loss and tokens of every step, in the order of the steps: 24 bytes for each, so that a month of steps is read
    once."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("q"))

    def add(self, line: StepMetrics) -> None:
        self.steps.append(line.step)
        self.losses.append(line.loss)
        self.tokens.append(line.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossDifference:
    """One run's losses beside those of the first, on the steps that both have."""

    common: int
    largest: float  # relative; infinite where one run alone has a loss that is a number
    at: int  # the step of the largest, the first of several
    curve: Curve
    lone: int = 0  # steps of `common` at which one run alone has such a loss
    other_clips: int = 0  # steps of `common` with another number of tokens: their losses are of other clips


def write_comparison(folders: Sequence[Path], out: Path, peak_tflops: float = 0.0, command: str = "") -> list[str]:
    """Write the page; returns a line per run for the terminal. `peak_tflops` of a worker turns FLOPs into MFU; the page
    shows the `command` that makes it.

    Raises ConfigError for a folder that is no run, for runs without steps, or without common steps, and for an `out`
    that cannot be written.
    """
    if not 2 <= len(folders) <= MOST:
        raise ConfigError(f"heddle compare takes 2 to {MOST} run folders, not {len(folders)}.")
    opened = [RunDir.open(folder) for folder in folders]
    runs = [read_run(run, name) for run, name in zip(opened, labels(folders), strict=True)]
    differences = {run.name: loss_difference(runs[0], run) for run in runs[1:]}
    check_page(out)
    put_text(out, page(runs, differences, peak_tflops, command))
    return [line_of(run, differences.get(run.name)) for run in runs] + environments(runs)


def labels(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with as much of their paths as tells them apart."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        doubled = next(folder for folder in folders if resolved.count(folder.resolve()) > 1)
        raise ConfigError(f"{doubled} is given twice; heddle compare takes different runs.")
    for depth in itertools.count(1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths differ at some depth")


def read_run(run: RunDir, name: str) -> ComparedRun:
    """Go through a run's records. Raises ConfigError where there is no step."""
    count = run.metrics().count()
    loss, by_time, step_s, idle, tflops = (Curve(count) for _ in range(5))
    smooth, last = RunningMean(), Values()
    values = {key: Values() for key in ("step_s", "idle_ratio", "tokens_per_s", "tflops")}
    flops = flops_by_step(run)
    seconds, number, losses = 0.0, 0, StepLosses()
    for number, line in enumerate(run.metrics(), start=1):
        losses.add(line)
        seconds += line.step_s if math.isfinite(line.step_s) else 0.0
        rate = (
            flops.get(line.step, math.nan) / (line.step_s * line.workers)
            if line.step_s > 0 and line.workers
            else math.nan
        )
        value = smooth.add(line.loss)
        loss.add(line.step, value)
        by_time.add(seconds, value)
        step_s.add(line.step, line.step_s)
        idle.add(line.step, line.idle_ratio)
        tflops.add(line.step, rate)
        for key, own in values.items():
            own.add(rate if key == "tflops" else getattr(line, key))
        if number > 0.9 * count:
            last.add(line.loss)
    if not number:
        raise ConfigError(f"run {run.path} has no finished step yet: its metrics.jsonl is missing or empty.")
    return ComparedRun(
        name=name,
        path=run.path,
        steps=number,
        seconds=seconds,
        last_loss=last.median,
        held_out=_newest_held_out(run),
        environment=_newest_environment(run),
        loss=loss,
        by_time=by_time,
        step_s=step_s,
        idle=idle,
        tflops=tflops,
        medians={key: own.median for key, own in values.items()},
        losses=losses,
    )


def _newest_held_out(run: RunDir) -> HeldOutMeasured | None:
    found = {event.step: event for event in run.events() if isinstance(event, HeldOutMeasured)}
    return found[max(found)] if found else None


def _newest_environment(run: RunDir) -> EnvironmentSeen | None:
    found = None
    for event in run.events():
        found = event if isinstance(event, EnvironmentSeen) else found
    return found


def environments(runs: Sequence[ComparedRun]) -> list[str]:
    """A sentence for each run whose workers computed last with something else than the first one's."""
    first, sentences = runs[0], []
    for run in runs[1:]:
        if first.environment is None or run.environment is None:
            continue
        if changed := run.environment.after(first.environment).changed:
            sentences.append(f"{run.name}: another environment than {first.name}: {', '.join(changed)}.")
    return sentences


def flops_by_step(run: RunDir) -> dict[int, float]:
    """TFLOP of the transformer in each step that the timeline still has: forward and twice that backward, without what
    checkpointing computes again and without the tokens of captions, which spans do not say."""
    try:
        config = RunConfig.from_yaml((run.path / "config.yaml").read_text(encoding="utf-8"))
        model, geometry = resolve(config.model)
    except (OSError, ValueError):  # another version's settings, or a model folder that is gone
        return {}

    @cache
    def of_sample(bucket: PixelShape) -> float:
        tokens, frames = geometry.tokens(*bucket), geometry.token_grid(*bucket)[0]
        return 3 * (model.dit.flops.linear(tokens, 0) + model.dit.flops.attention(tokens, 0, frames)) / 1e12

    found: dict[int, dict[str, float]] = {}
    for span in run.spans():
        if span.module == "dit":  # every worker of a bag reports it, and every attempt
            held = sum(batch * of_sample(bucket) for bucket, _, batch, _ in pieces(span))
            found.setdefault(span.step, {})[span.cascade] = held
    return {step: sum(cascades.values()) for step, cascades in found.items()}


def loss_difference(first: ComparedRun, other: ComparedRun) -> LossDifference:
    """Raises ConfigError when the runs have no step in common."""
    mine, theirs = first.losses, other.losses
    curve, largest, at = Curve(max(1, min(first.steps, other.steps))), 0.0, -1
    common = lone = other_clips = 0
    for a, b in _together(mine.steps, theirs.steps):
        common += 1
        other_clips += bool(mine.tokens[a] and theirs.tokens[b] and mine.tokens[a] != theirs.tokens[b])
        apart, step = relative(theirs.losses[b], mine.losses[a]), mine.steps[a]
        lone += math.isinf(apart)
        curve.add(step, math.log10(max(apart, CLOSEST)))
        if apart > largest or at < 0:
            largest, at = apart, step
    if not common:
        raise ConfigError(
            f"{first.name} and {other.name} have no step in common; compare runs that trained the same steps."
        )
    return LossDifference(common=common, largest=largest, at=at, curve=curve, lone=lone, other_clips=other_clips)


def _together(ones: Sequence[int], others: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of places that hold the same step; both are in order."""
    one = other = 0
    while one < len(ones) and other < len(others):
        if ones[one] == others[other]:
            yield one, other
            one, other = one + 1, other + 1
        elif ones[one] < others[other]:
            one += 1
        else:
            other += 1


def line_of(run: ComparedRun, difference: LossDifference | None) -> str:
    text = f"{run.name}: {counted(run.steps, 'step')} in {clock(run.seconds)}, loss {loss_in_words(run.last_loss)}"
    if difference is None:
        return text
    clips = f", {difference.other_clips} of them of other clips" if difference.other_clips else ""
    losses = f"largest difference of a loss {difference.largest:.1e} at step {difference.at} of {difference.common}"
    if difference.largest == 0:
        losses = f"the same losses on {counted(difference.common, 'common step')}"
    return f"{text}; {_lone(difference) or losses}{clips}"


def _lone(difference: LossDifference) -> str:
    """That one run alone has losses which are numbers; "" where none has."""
    if not difference.lone:
        return ""
    return (
        f"one run alone has a loss that is a number at {difference.lone:,} of {counted(difference.common, 'step')}, "
        f"the first is step {difference.at}"
    )


def page(
    runs: Sequence[ComparedRun], differences: Mapping[str, LossDifference], peak_tflops: float, command: str = ""
) -> str:
    """The whole document: what it comes to, pictures, numbers."""
    entries = [f"<span>{curve_key(_css(number))}{escape(run.name)}</span>" for number, run in enumerate(runs, start=1)]
    legend, others = "".join(entries), "".join(entries[1:])
    unit, length_s = _unit(max(run.seconds for run in runs))
    compute = "MFU" if peak_tflops else "Model TFLOP/s of a worker"
    charts = [
        ("Loss", legend, _chart([run.loss for run in runs], runs)),
        (f"Loss over {unit}", legend, _chart([run.by_time for run in runs], runs, x_name=unit, x_scale=1 / length_s)),
        ("Seconds per step", legend, _chart([run.step_s for run in runs], runs, zero=True)),
        ("Idle share", legend, _chart([run.idle for run in runs], runs, zero=True)),
        (compute, legend, _chart([run.tflops for run in runs], runs, zero=True, scale=1 / (peak_tflops or 1.0))),
        ("Difference of the loss from the first run's, powers of ten", others, _differences(runs, differences)),
    ]
    sections = "".join(
        f"<section><h2>{escape(title)}</h2><div class=legend>{named}</div>{chart}</section>"
        for title, named, chart in charts
        if chart
    )
    made, title = time.strftime("%Y-%m-%d %H:%M"), " / ".join(run.name for run in runs)
    return document(
        title,
        f"<h1>{escape(title)}</h1><p class=soft>{counted(len(runs), 'run')}, {made}</p>"
        f"{f'<code class=command>{escape(command)}</code>' if command else ''}"
        f"<section><h2>Median step</h2>{_medians(runs)}{_in_words(runs, differences)}</section>{sections}"
        f"<section><h2>Numbers</h2>{_table(runs, differences, peak_tflops)}</section>",
    )


def _medians(runs: Sequence[ComparedRun]) -> str:
    """Bars of the medians, each run in its colour."""
    return "".join(
        f"<h3>{escape(title)}</h3>"
        + bars(
            [
                BarRow(label=run.name, bars=((f"f{number}", run.medians[key], show(run.medians[key])),))
                for number, run in enumerate(runs, start=1)
                if math.isfinite(run.medians[key])
            ]
        )
        for title, key, show in (("Seconds per step", "step_s", short), ("Idle share", "idle_ratio", percent))
        if any(math.isfinite(run.medians[key]) for run in runs)
    )


def _in_words(runs: Sequence[ComparedRun], differences: Mapping[str, LossDifference]) -> str:
    """A sentence for each run beside the first."""
    first, sentences = runs[0], []
    for run in runs[1:]:
        found, ratio = differences[run.name], first.medians["step_s"] / (run.medians["step_s"] or math.nan)
        losses = "the same losses" if found.largest == 0 else f"losses that differ by at most {found.largest:.1e}"
        if found.lone:
            losses = "other losses"
        speed = f"{ratio:.2f} times as many steps per second as" if math.isfinite(ratio) else "no step times beside"
        sentences.append(f"{run.name}: {speed} {first.name}, {losses} on {counted(found.common, 'common step')}.")
        if found.lone:
            sentences.append(f"{_lone(found).capitalize()}.")
        if found.other_clips:
            sentences.append(f"{found.other_clips:,} of them were trained on other clips, as their tokens differ.")
    sentences += environments(runs)
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _unit(seconds: float) -> tuple[str, float]:
    """The unit of time for a chart of this length, and its seconds."""
    return next((unit for unit in UNITS if seconds >= 2 * unit[1]), UNITS[-1])


def _chart(
    curves: Sequence[Curve],
    runs: Sequence[ComparedRun],
    zero: bool = False,
    x_name: str = "step",
    scale: float = 1.0,
    x_scale: float = 1.0,
) -> str:
    """The first run's line is broad, so that one that lies on it does not hide it."""
    return line_chart(
        [
            Series(
                name=run.name,
                xs=[x_scale * x for x in curve.xs],
                ys=[scale * y for y in curve.ys],
                css=_css(number),
                hover=True,
            )
            for number, (run, curve) in enumerate(zip(runs, curves, strict=True), start=1)
        ],
        zero=zero,
        x_name=x_name,
    )


def _css(number: int) -> str:
    """The classes of the curves of a run; the first's are broad, and those of others have dashes of their own."""
    return "c1 broad" if number == 1 else f"c{number} dashed"


def _differences(runs: Sequence[ComparedRun], differences: Mapping[str, LossDifference]) -> str:
    return line_chart(
        [
            Series(name=run.name, xs=found.curve.xs, ys=found.curve.ys, css=_css(number), hover=True)
            for number, run in enumerate(runs, start=1)
            if (found := differences.get(run.name)) is not None
        ]
    )


def _table(runs: Sequence[ComparedRun], differences: Mapping[str, LossDifference], peak_tflops: float) -> str:
    compute = "MFU" if peak_tflops else "TFLOP/s of a worker"
    measured = any(run.held_out for run in runs)
    head = (
        "",
        "steps",
        "time",
        "loss, last tenth",
        *(["held-out loss"] if measured else []),
        "s / step",
        "tokens / s",
        "idle",
        compute,
        "loss differs by",
        "report",
    )
    rows = []
    for run in runs:
        medians, found = run.medians, differences.get(run.name)
        rate = medians["tflops"] / peak_tflops if peak_tflops else medians["tflops"]
        report = run.path.resolve() / "report.html"
        cells = (
            escape(run.name),
            f"{run.steps:,}",
            clock(run.seconds),
            loss_in_words(run.last_loss),
            *([_held_out(run)] if measured else []),
            short(medians["step_s"]),
            short(medians["tokens_per_s"]),
            percent(medians["idle_ratio"]),
            percent(rate) if peak_tflops else short(rate),
            "-" if found is None else _differs(found),
            f"<a href='{escape(report.as_uri())}'>report.html</a>" if report.is_file() else "-",
        )
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    heads = "".join(f"<th>{escape(word)}</th>" for word in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{heads}</tr>{body}</table></div>"


def _differs(found: LossDifference) -> str:
    if found.largest == 0:
        return "nothing"
    return f"{'no number' if found.lone else f'{found.largest:.1e}'} (step {found.at})"


def _held_out(run: ComparedRun) -> str:
    if (newest := run.held_out) is None:
        return "-"
    without = f", without {', '.join(map(escape, newest.no_room))}" if newest.no_room else ""
    return f"{loss_in_words(newest.loss)} (after {counted(newest.step + 1, 'step')}{without})"
