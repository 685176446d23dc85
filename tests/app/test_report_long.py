"""The report of a very long run holds no more records than that of a short one, and its totals are exact."""

from __future__ import annotations

import gc
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from actors.records.events import event_of
from actors.records.metrics_line import StepMetrics, metrics_of
from actors.records.span_record import SpanRecord, span_of
from app.drawing.svg import MAX_POINTS, Series, line_chart, thin_out
from app.records.rundir import TIMELINE, Records, RunDir
from app.report.curves import loss_html
from app.report.figures import Curve, Values
from app.report.gathered import read_facts
from app.report.media import samples_html
from app.report.page import page
from app.report.totals import MAX_GENERATIONS, EventTotals, Generations, StepTotals

STEPS = 300_000
TIMED = 2_000  # steps in the timeline, which the recorder bounds
AT_ONCE = 20  # records held at any time: the slowest steps, the first, the last, the one that is read


def metrics_line(step: int) -> dict[str, Any]:
    slow = step % 100_000 == 77
    return {
        "step": step,
        "time": 1000.0 + step,
        "loss": 1.0 + (step % 7) / 8,
        "workers": 2 + step // 200_000,
        "generation": step // 1000,
        "step_s": 9.0 + step / STEPS if slow else 1.0,
        "data_wait_s": 0.25,
        "recomputed": step % 1000 == 0,
        "loss_by_bucket": {"1x64x96": 0.5 if step < STEPS // 2 else 0.25},
    }


def span_line(step: int, worker: str) -> dict[str, Any]:
    seconds = 5.0 if step == 1234 else 1.0
    return {
        "step": step,
        "worker": worker,
        "name": f"dit s{step}",
        "module": "dit",
        "cascade": f"s{step}.0/dit/0",
        "item": f"s{step}.0",
        "bucket": [1, 64, 96],
        "batch": 2,
        "degree": 2,
        "start": 1000.0 + step,
        "end": 1000.0 + step + seconds,
        "planned_start_s": 0.0,
        "planned_end_s": 1.0,
        "step_start": 1000.0 + step,
    }


def held(kind: type) -> int:
    return sum(type(found) is kind for found in gc.get_objects())


def watched(read: Callable[[Mapping[str, Any]], Any], kind: type, every: int) -> Callable[[Mapping[str, Any]], Any]:
    """`read`, which looks around now and then how many records there are, besides those that other tests left."""
    seen, before = 0, held(kind)

    def record_of(line: Mapping[str, Any]) -> Any:
        nonlocal seen
        seen += 1
        assert seen % every or held(kind) - before <= AT_ONCE
        return read(line)

    return record_of


class Watched(RunDir):
    """A run folder whose records are counted while they are read."""

    def metrics(self) -> Records[StepMetrics]:
        return Records((self.path / "metrics.jsonl",), watched(metrics_of, StepMetrics, 30_000))

    def spans(self) -> Records[SpanRecord]:
        return Records((self.path / TIMELINE,), watched(span_of, SpanRecord, 500))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("long")
    (folder / "config.yaml").write_text("run: {name: long}\n")
    _write(folder / "metrics.jsonl", (metrics_line(step) for step in range(STEPS)))
    _write(folder / TIMELINE, (span_line(step, worker) for step in range(TIMED) for worker in ("w0", "w1")))
    died = ({"time": 1000.0 + 10 * n, "event": "dead", "generation": n, "worker": "w1"} for n in range(10_000))
    _write(folder / "events.jsonl", died)
    return Watched(folder)


def _write(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.mark.long
def test_the_report_of_300_000_steps_holds_a_few_records_and_adds_up(long_run: RunDir) -> None:
    facts = read_facts(long_run)
    steps = facts.steps
    assert (steps.count, steps.recomputed, steps.workers) == (STEPS, STEPS // 1000, {2, 3})
    assert steps.data_wait_s == STEPS * 0.25
    assert steps.seconds == pytest.approx(STEPS - 3 + sum(9.0 + s / STEPS for s in (77, 100_077, 200_077)))
    assert [line.step for line in steps.slow()] == [77, 100_077, 200_077]
    assert steps.losses_by_bucket() == [("1x64x96", 0.5, 0.25)]
    assert steps.values["step_s"].median == 1.0
    assert steps.generations.count == STEPS // 1000 and len(steps.generations.listed) == 2 * MAX_GENERATIONS
    assert facts.events.num_told == 10_000 and (len(facts.events.first), len(facts.events.last)) == (20, 60)
    (row,) = facts.spans.buckets({})
    assert (row.items, row.samples, row.worker_seconds) == (TIMED, 2 * TIMED, 2 * TIMED + 8)
    assert facts.spans.deviations[0].step == 1234 and facts.spans.plan_error == 0
    text = page(long_run, facts)
    assert f"{STEPS:,} steps, " in text and "Without 100 generations in the middle" in text
    assert "Step 77 took 9.00 s, 9.0x the median: worker w1 died" in text and len(text) < 2**20


def test_a_curve_is_binned_like_one_that_is_held_whole() -> None:
    for count in (1, 799, 800, 801, 4321):
        xs, ys = list(range(count)), [math.nan if i % 5 == 0 else i**0.5 for i in range(count)]
        whole = thin_out(Series(name="s", xs=xs, ys=ys))
        curve = Curve(count)
        for x, y in zip(xs, ys, strict=True):
            curve.add(x, y)
        assert curve.xs == pytest.approx(list(whole.xs)) and len(curve.xs) <= MAX_POINTS
        assert curve.ys == pytest.approx(list(whole.ys), nan_ok=True)


def test_one_step_of_a_long_run_is_seen_in_its_curve_and_named() -> None:
    steps = StepTotals(60_000)
    for step in range(60_000):
        loss = 9.5 if step == 43_333 else 1.0 + step % 2 / 10
        steps.add(metrics_of({"step": step, "time": float(step), "loss": loss, "step_s": 1.0}))
    curve = steps.curves["loss"]
    assert len(curve.ranges) == len(curve.ys) == MAX_POINTS and max(curve.ys) < 1.2
    assert sorted(set(curve.ranges)) == [(1.0, 1.1), (1.0, 9.5)]
    text = loss_html(steps, {})
    assert text.count('class="band') == 1 and "the highest is 9.5 at step 43,333" in text
    flat = re.findall(r'd="M[\d.]+ ([\d.]+)', text.split("band")[1])
    assert flat and all(float(y) > 20 for y in flat), "it does not press the curve flat"


def test_a_curve_of_single_steps_has_no_band() -> None:
    curve = Curve(5)
    for x in range(5):
        curve.add(x, math.nan if x == 2 else 1.0 * x)
    assert curve.ranges == []
    curve = Curve(1600)
    for x in range(1600):
        curve.add(x, math.nan if x < 2 else 1.0)
    chart = line_chart([Series(name="s", xs=curve.xs, ys=curve.ys, ranges=curve.ranges)])
    assert "nan" not in chart and "inf" not in chart and chart.count("band") == 1


def test_of_many_events_the_first_and_the_last_are_told() -> None:
    events = EventTotals([])
    for n in range(1000):
        events.add(event_of({"time": float(n), "event": "dead", "worker": f"w{n}", "why": ""}))
    named = [text for _, text in (*events.first, *events.last)]
    assert named == [f"worker w{n} died" for n in (*range(20), *range(940, 1000))] and events.num_told == 1000


def test_a_month_of_samples_is_not_named_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: long}\nsample: {prompts: [a dog, a cat]}\n")
    (tmp_path / "samples").mkdir()
    for step in range(300):
        (tmp_path / "samples" / f"step-{step}-00.mp4").write_bytes(b"1234")
    text = samples_html(RunDir.open(tmp_path), most_bytes=10)
    assert "aria-label='step-299-00' src='data:video" in text
    assert text.count("<video") == 2 and text.count("too large to embed") == 20 and len(text) < 10_000
    assert "step-299: a dog<" in text and "278 more files in samples/" in text


def test_a_curve_takes_more_or_fewer_values_than_were_announced() -> None:
    for told, given in ((1000, 1200), (1000, 900), (0, 3)):
        curve = Curve(told)
        for x in range(given):
            curve.add(x, 1.0)
        assert set(curve.ys) == {1.0} and 0 < len(curve.xs) <= MAX_POINTS


def test_a_median_is_exact_up_to_its_limit_and_close_beyond() -> None:
    for count in (99, 100):
        values = Values(limit=100)
        for value in range(count):
            values.add(value)
        assert values.median == statistics.median(range(count))
    values = Values(limit=100)
    for value in range(100_000):
        values.add(value)
        values.add(math.nan)
    assert 50 <= len(values.kept) <= 100 and values.median == pytest.approx(50_000, rel=0.03)


def test_of_many_generations_the_first_and_the_last_are_listed() -> None:
    found = Generations()
    for step in range(3 * MAX_GENERATIONS):
        for part in range(2):
            found.add(metrics_of({"step": 2 * step + part, "generation": step, "workers": 2}))
    listed = found.listed
    assert found.count == 3 * MAX_GENERATIONS and len(listed) == 2 * MAX_GENERATIONS
    assert (listed[0].first, listed[0].last, listed[0].workers) == (0, 1, 2)
    assert (listed[-1].number, listed[-1].first, listed[-1].last) == (299, 598, 599)
    assert listed[MAX_GENERATIONS].number == 2 * MAX_GENERATIONS
