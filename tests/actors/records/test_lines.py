"""Lines of metrics.jsonl and timeline.jsonl are those of one record each, also when an earlier version wrote them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from actors.plan.types import Cascade, Part, StepPlan
from actors.records.lines import RecordError, line_of, record_of
from actors.records.metrics_line import StepMetrics, metrics_of
from actors.records.plan_record import PlanRecord, plan_of
from actors.records.span_record import SpanRecord, span_of

OLD = Path(__file__).parent / "old"


def lines(name: str) -> list[str]:
    return (OLD / name).read_text().splitlines()


def metrics(name: str) -> list[StepMetrics]:
    return [metrics_of(json.loads(line)) for line in lines(name)]


def spans(name: str) -> list[SpanRecord]:
    return [span_of(json.loads(line)) for line in lines(name)]


def test_a_line_of_0_2_is_written_again_as_it_was_but_for_its_two_new_names() -> None:
    for line, record in zip(lines("metrics-0.2.jsonl"), metrics("metrics-0.2.jsonl"), strict=True):
        now = line.replace('"planned_s"', '"predicted_s"').replace('"plan_s"', '"planning_s"')
        assert json.dumps(record.line()) == now
    for line, span in zip(lines("timeline-0.2.jsonl"), spans("timeline-0.2.jsonl"), strict=True):
        assert json.dumps(span.line()) == line


def test_planning_time_and_predicted_time_have_their_old_names_in_old_files() -> None:
    first = metrics("metrics-0.1.jsonl")[0]
    assert (first.predicted_s, first.planning_s) == (0.012713, 0.192851)
    assert metrics_of(first.line()).predicted_s == first.predicted_s


def test_what_0_1_did_not_write_or_could_not_is_not_a_number() -> None:
    first, second = metrics("metrics-0.1.jsonl")
    assert first.loss == 1.7316634058952332 and not first.recomputed and first.loss_by_bucket == {"17x64x96": 1.731663}
    assert math.isnan(first.good_weight) and first.calls == 0
    assert math.isnan(second.loss) and second.wir is None and second.recomputed
    assert second.line()["loss"] is None


def test_a_timeline_of_0_1_has_no_pieces() -> None:
    text, _, finish, dit = spans("timeline-0.1.jsonl")
    assert text.pieces == () and text.bucket == (5, 32, 48) and text.planned == (0.0, 0.0008434176)
    assert finish.planned is None and finish.bucket is None
    assert dit.seconds == dit.end - dit.start and dit.phases["backward"] == 0.012361


def test_a_plan_of_0_2_is_read_and_has_all_but_parts_and_the_end_of_the_step() -> None:
    old = json.loads((OLD / "plan-0.2.json").read_text())
    plan = plan_of(old)
    assert {cascade.module for cascade in plan.cascades} == {"text", "dit"}
    now = plan.line()
    assert [cascade.pop("parts") for cascade in now["cascades"]] == [[]] * len(plan.cascades)
    assert now.pop("update_s") == now.pop("remainder_s") == 0.0
    assert json.dumps(now) == json.dumps(old)


def test_a_plan_names_the_samples_of_every_cascade() -> None:
    parts = (Part(item="s0.0", first=0, count=2), Part(item="s0.1", first=1, count=1))
    cascade = Cascade(id="c", module="dit", step=0, parts=parts, degree=1, workers=(1,), start_s=0.0, end_s=0.5)
    step = StepPlan(step=0, cascades=(cascade,), makespan_s=1, lower_bound_s=1, planning_s=0.1, idle_ratio=0)
    record = PlanRecord.of(step, step.cascades, 0.2)
    assert plan_of(json.loads(json.dumps(record.line()))) == record
    assert (record.cascades[0].item, record.cascades[0].batch, record.plan_s) == ("s0.0+s0.1", 3, 0.2)
    assert [(part.item, part.first, part.count) for part in record.cascades[0].parts] == [
        ("s0.0", 0, 2),
        ("s0.1", 1, 1),
    ]


def test_numbers_that_are_not_finite_are_null_in_a_line() -> None:
    record = replace(metrics("metrics-0.2.jsonl")[0], loss=math.inf, loss_by_bucket={"1x64x96": math.nan, "b": 0.5})
    line = json.loads(json.dumps(record.line(), allow_nan=False))
    assert line["loss"] is None and line["loss_by_bucket"] == {"1x64x96": None, "b": 0.5}
    assert math.isnan(metrics_of(line).loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class One:
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Later:
    """What a later version writes, of whose fields an earlier one knew none."""

    seconds: float
    count: int
    name: str
    limit_s: float | None
    bucket: tuple[int, ...]
    by_name: Mapping[str, float]
    inner: One
    kept: float = 1.5
    shares: Mapping[str, float] = field(default_factory=lambda: {"a": 1.0})


def test_what_is_missing_is_the_default_or_empty() -> None:
    found = record_of(Later, {})
    assert math.isnan(found.seconds)
    assert replace(found, seconds=0.0) == Later(
        seconds=0.0, count=0, name="", limit_s=None, bucket=(), by_name={}, inner=One(name="")
    )
    assert (found.kept, found.shares) == (1.5, {"a": 1.0})


def test_a_record_of_one_field_and_one_inside_another_are_objects() -> None:
    assert line_of(One(name="ab")) == {"name": "ab"}
    line = line_of(replace(record_of(Later, {}), inner=One(name="ab"), limit_s=2.0))
    assert line["inner"] == {"name": "ab"}
    assert record_of(Later, json.loads(json.dumps(line))).inner == One(name="ab")


def test_a_key_of_a_later_version_is_ignored() -> None:
    line = json.loads(lines("metrics-0.2.jsonl")[0])
    assert repr(metrics_of({**line, "weather": "fine"})) == repr(metrics_of(line))  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("loss", "low", "loss is 'low'; expected a number"),
        ("step", 1.5, "step is 1.5; expected a whole number"),
        ("applied", 1, "applied is 1; expected true or false"),
        ("loss_by_bucket", {"1x64x96": "low"}, "loss_by_bucket.1x64x96 is 'low'; expected a number"),
        ("loss_by_bucket", 3, "loss_by_bucket is 3; expected an object"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(key: str, value: Any, said: str) -> None:
    with pytest.raises(RecordError, match=said):
        metrics_of({**json.loads(lines("metrics-0.2.jsonl")[0]), key: value})


def test_a_bucket_has_three_numbers_and_a_piece_is_an_object() -> None:
    line = json.loads(lines("timeline-0.2.jsonl")[0])
    with pytest.raises(RecordError, match=r"bucket is .* expected a list of 3"):
        span_of({**line, "bucket": [1, 2]})
    with pytest.raises(RecordError, match="pieces is 'a'; expected an object"):
        span_of({**line, "pieces": ["a"]})
    with pytest.raises(RecordError, match="worker is 3; expected text"):
        span_of({**line, "worker": 3})


def test_a_misspelt_figure_is_an_error_where_the_record_is_made() -> None:
    with pytest.raises(TypeError, match="los"):
        replace(metrics("metrics-0.2.jsonl")[0], los=1.0)  # type: ignore[call-arg]
