"""Numbers of a step are sums over the pieces of its cascades, packed or not, and the planner learns what is true."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.messages import Piece, Span, StepReport
from actors.plan.types import Item, Part, StepPlan
from actors.run.step_metrics import StepFacts, loss_by_bucket, step_metrics, timeline_records
from app.records.timeline import final_times, windows
from app.report.totals import SpanTotals
from ops.geometry import Geometry
from tests.actors.exactness import make_hosts, one_worker, run_step, train_config

GEOMETRY = Geometry()
SETTINGS = (torch.float32, train_config())
IMAGE, CLIP = (1, 64, 96), (81, 480, 832)


def span(*pieces: Piece, end: float = 1.0, degree: int = 1, module: str = "dit") -> Span:
    batch = sum(p.batch for p in pieces)
    return Span(
        name="", module=module, cascade="c", step=0, start=0, end=end, batch=batch, degree=degree, pieces=pieces
    )


def report(worker: str, *spans: Span, losses: tuple[tuple[str, float, float], ...] = ()) -> StepReport:
    return StepReport(
        worker=worker, step=0, loss=1, weight=1, grad_norm=1, lr=1, applied=True, spans=spans, peak_memory_gib=0,
        rss_gib=0, item_losses=losses,
    )  # fmt: skip


def facts() -> StepFacts:
    plan = StepPlan(step=0, cascades=(), makespan_s=1.0, lower_bound_s=1.0, planning_s=0.0, idle_ratio=0.0)
    return StepFacts(
        step=0, generation=1, plan=plan, planning_s=0, step_s=1, data_wait_s=0, finished_at=0, num_samples=2,
        num_tokens=2, dispatch_s=0, num_calls=2,
    )  # fmt: skip


def test_a_packed_cascade_counts_like_its_pieces_one_by_one() -> None:
    image, clip = Piece(item="a", bucket=IMAGE, batch=1), Piece(item="b", bucket=CLIP, batch=1)
    packed = step_metrics(facts(), [report("w0", span(image, clip)), report("w1", span(image))], GEOMETRY)
    apart = step_metrics(facts(), [report("w0", span(image), span(clip)), report("w1", span(image))], GEOMETRY)
    assert packed.cv_step == apart.cv_step > 0.9, "a clip beside an image is not balanced"
    assert packed.cv_compute == apart.cv_compute > 0.9


def test_the_loss_of_a_packed_cascade_is_told_by_bucket() -> None:
    image, clip = Piece(item="a", bucket=IMAGE, batch=1), Piece(item="b", bucket=CLIP, batch=1)
    losses = (("a", 0.2, 0.5), ("b", 0.1, 0.5))
    assert loss_by_bucket([report("w0", span(image, clip), losses=losses)]) == {"1x64x96": 0.4, "81x480x832": 0.2}


def test_an_executor_tells_the_loss_of_every_item_it_packed() -> None:
    items = [Item(id=f"s0.{n}", batch=2, frames=f, height=32, width=32, text_tokens=12) for n, f in enumerate((1, 5))]
    apart, packed = make_hosts(1, *SETTINGS), make_hosts(2, *SETTINGS)
    plan = one_worker(items)
    run_step(apart, items, plan)
    (first, second) = [c for c in plan if c.module == "dit"]
    whole = replace(first, parts=tuple(Part(item=i.id, first=0, count=2) for i in items), workers=(0, 1), degree=2)
    run_step(packed, items, [c for c in plan if c is not first and c is not second] + [whole])
    expected = {item: (loss, weight) for item, loss, weight in apart[0].done.item_losses}
    found: dict[str, tuple[float, float]] = {}
    for item, loss, weight in (one for host in packed for one in host.done.item_losses):
        before = found.get(item, (0.0, 0.0))
        found[item] = (before[0] + loss, before[1] + weight)
    assert found.keys() == expected.keys() == {"s0.0", "s0.1"}
    for item in expected:
        assert found[item] == pytest.approx(expected[item], rel=1e-4)
    (dit,) = [s for s in packed[0].done.spans if s.module == "dit"]
    assert [(p.item, p.bucket, p.batch) for p in dit.pieces] == [("s0.0", (1, 32, 32), 2), ("s0.1", (5, 32, 32), 2)]
    assert dit.bucket is None and dit.batch == 4


def test_the_report_s_table_of_buckets_divides_a_packed_cascade() -> None:
    image, clip = Piece(item="a", bucket=IMAGE, batch=2), Piece(item="b", bucket=CLIP, batch=1)
    records = timeline_records(facts(), report("w0", span(image, clip, end=4.0)), "n0", 0.0)
    totals = SpanTotals(final_times(records), wanted=())
    for window in windows(records):
        totals.add(window)
    rows = {row.bucket: row for row in totals.buckets({})}
    assert {bucket: (row.samples, row.items) for bucket, row in rows.items()} == {IMAGE: (2, 1), CLIP: (1, 1)}
    assert sum(row.worker_seconds for row in rows.values()) == pytest.approx(4.0)
    assert rows[CLIP].worker_seconds > 3.9 > 0.1 > rows[IMAGE].worker_seconds > 0
