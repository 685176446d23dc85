"""Numbers of a step are sums over the pieces of its cascades, packed or not, and the planner learns what is true."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.messages import Piece, Span, StepReport
from actors.plan.costs.flops import DiTWork
from actors.plan.types import Item, Part, StepPlan
from actors.records.metrics_line import StepMetrics
from actors.records.span_record import SpanRecord, span_of
from actors.run.step_metrics import (
    LoadHistory,
    StepAccount,
    StepFacts,
    begin_of,
    loss_by_bucket,
    step_metrics,
    timeline_records,
)
from app.records.metrics import scalars
from app.records.progress import figures
from app.records.timeline import final_times, windows
from app.report.totals import SpanTotals
from ops.geometry import Geometry
from ops.models.base.flops import joint_flops
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


def collected(planned: list[Item], reports: tuple[StepReport, ...], at: float) -> Any:
    running = SimpleNamespace(
        step=0, generation=1, assignment=SimpleNamespace(step=facts().plan), planning_s=0, dispatch_s=0, num_calls=2,
        data=SimpleNamespace(items=SimpleNamespace(planned=planned), epoch=2.25),
    )  # fmt: skip
    return SimpleNamespace(running=running, reports=reports, snapshots=(), collected_at=at, finished_at=1e9)


def recorded(names: tuple[str, ...], items: dict[str, int], *reports: StepReport) -> StepMetrics:
    """The line of a committed step of these items, each with the number of its expert."""
    planned = [Item(id=id, batch=1, frames=1, height=64, width=96, expert=expert) for id, expert in items.items()]
    account = StepAccount(geometry=GEOMETRY, node_of=lambda name: "", experts=names)
    return account.records(collected(planned, reports, 1.0))[0]


def test_the_loss_of_each_of_two_experts_is_that_of_its_items() -> None:
    """Shares of the ranks of a bag are summed; an expert without samples in a step is not told, nor is the only one."""
    reports = report("w0", losses=(("a", 0.2, 0.25), ("b", 0.1, 0.5))), report("w1", losses=(("a", 0.1, 0.25),))
    both = recorded(("high", "low"), {"a": 0, "b": 1}, *reports)
    assert both.loss_by_expert == both.line()["loss_by_expert"] == {"high": 0.6, "low": 0.2}
    assert recorded(("high", "low"), {"a": 0, "b": 0}, *reports).loss_by_expert == {"high": 0.4}
    for only in ("", "high"):
        assert "loss_by_expert" not in recorded((only,), {"a": 0, "b": 0}, *reports).line()


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


def test_spans_are_as_long_as_they_were_whoever_sets_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here somebody sets it back by an hour at every look."""
    back = itertools.count(2e9, -3600.0)
    monkeypatch.setattr(time, "time", lambda: next(back))
    items = [Item(id="s0.0", batch=2, frames=1, height=32, width=32, text_tokens=12)]
    (host,) = make_hosts(1, *SETTINGS)
    run_step([host], items, one_worker(items))
    seconds = {span.module: span.end - span.start for span in host.done.spans}
    assert seconds.keys() == {"text", "vae", "dit", "finish"} and all(0 <= one < 600 for one in seconds.values())


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


# The words of the papers, against numbers worked out by hand. GEOMETRY makes 24 tokens of IMAGE.


def ran(start: float, end: float, wait_s: float = 0.0, exposed_s: float = 0.0, **fields: object) -> Span:
    """An image on one worker, unless `fields` say otherwise."""
    known = {"module": "dit", "cascade": f"c{start}", "pieces": (Piece(item="a", bucket=IMAGE, batch=1),)} | fields
    return Span(name="", step=0, start=start, end=end, wait_s=wait_s, exposed_s=exposed_s, **known)  # type: ignore[arg-type]


def finish(start: float, end: float, exposed_s: float = 0.0) -> Span:
    return ran(start, end, exposed_s=exposed_s, module="finish", cascade="", pieces=())


def test_lengths_of_a_step_count_the_text() -> None:
    found = step_metrics(
        replace(facts(), text_tokens={"a": 6}),
        [report("w0", ran(0, 1), ran(1, 2)), report("w1", ran(0, 1))],
        GEOMETRY,
    )
    assert found.tokens == 90 and found.tokens_per_s_with_text == 90.0  # three images of 24 + 6 in a step of 1 s
    assert found.cv_step == 0.5  # 60 and 30 tokens
    assert found.cv_compute == pytest.approx(1 / 3, abs=1e-4)  # 1800 and 900: mean 1350, deviation 450


def test_a_step_of_two_workers_in_figures_worked_out_by_hand() -> None:
    """Two seconds, of which w0 is one in a cascade, of an image of 48 tokens; w1 encodes for half a second and trains
    another one, of 24, for as long. w1 ends the step in half a second, w0 in a quarter, and w2 has no work."""
    wide = (Piece(item="b", bucket=(1, 64, 192), batch=1),)
    reports = [
        replace(
            report("w0", ran(100, 101, pieces=wide), finish(101.5, 101.75)),
            snapshot_s=0.25, peak_memory_gib=3.0, rss_gib=2.0, room_gib=5.0,
        ),
        replace(
            report("w1", ran(99.5, 100, module="text"), ran(100.5, 101), finish(101.5, 102)),
            snapshot_s=0.5, peak_memory_gib=1.0, rss_gib=4.0, room_gib=7.0,
        ),
        replace(report("w2"), room_gib=None),
    ]  # fmt: skip
    work = DiTWork(forward=joint_flops(2, 100, 400), recomputes=True)
    told = replace(facts(), step_s=2.0, num_tokens=100, num_samples=6)
    found = step_metrics(told, reports, GEOMETRY, work)
    assert found.idle_ratio == pytest.approx(1 - 2 / (3 * 2), abs=1e-4)
    assert (found.tokens_per_s, found.videos_per_s) == (50.0, 3.0)
    assert (found.tokens, found.tokens_per_s_with_text) == (72, 36.0), "what is encoded is not counted"
    assert found.wir is None, "w2 has no work of the DiT"
    assert (found.fbl_s, found.sync_s, found.snapshot_s) == (1.0, 0.5, 0.5)
    assert (found.peak_memory_gib, found.rss_gib, found.room_gib) == (3.0, 4.0, 5.0)
    assert found.tflops == pytest.approx(sum(found.tflops_by_worker.values()) / 3, abs=1e-6)
    two = step_metrics(replace(told, step_s=0.5), reports[:2], GEOMETRY)
    assert two.idle_ratio == 0.0, "what outlasts a step is no less than nothing idle"
    assert two.wir == 2.0, "an encode is no work of the DiT"
    assert (two.cv_step, two.cv_compute) == (0.5, 0.6)  # of 48 and 24; of 2304 and 576: mean 1440, deviation 864
    assert two.tflops_by_worker == {} and math.isnan(two.tflops) and math.isnan(two.cv_tflops), "nobody counts"


def test_ranks_of_a_bag_share_its_samples_and_its_handoff_lasts_as_long_as_that_of_the_quickest() -> None:
    """Both get 10 B; w1 waits for w0 meanwhile. A cascade that gets nothing has no handoff, however long it looked."""
    bag = {"degree": 2, "cascade": "c", "handoff_bytes": 10}
    reports = [
        report("w0", ran(0, 1, handoff_s=0.25, **bag), ran(1, 2, handoff_s=0.125)),
        report("w1", ran(0, 1, handoff_s=0.75, **bag), ran(1, 2, handoff_bytes=5, handoff_s=0.5, cascade="d")),
    ]
    found = step_metrics(facts(), reports, GEOMETRY)
    assert (found.handoff_bytes, found.handoff_s) == (25, 0.75)
    assert found.tokens == 24 + 24 + 24 and found.cv_step == 0.0


def test_a_bucket_of_bad_samples_alone_has_no_loss() -> None:
    image, clip = Piece(item="a", bucket=IMAGE, batch=1), Piece(item="b", bucket=CLIP, batch=1)
    losses = (("b", 0.2, 0.5), ("a", 0.0, 0.0))
    assert loss_by_bucket([report("w0", span(image, clip), losses=losses)]) == {"81x480x832": 0.4}


def test_a_cascade_that_kept_its_attention_computes_it_once() -> None:
    """Peaks are those at which the model's FLOPs, three forwards, are 0.3 of what a worker can do."""
    work = DiTWork(forward=joint_flops(2, 100, 400), recomputes=True)
    scores = 2 * 4 * 24**2 * 100 / 1e12
    forward = 2 * 24 * (8 * 100**2 + 4 * 100 * 400) / 1e12 + scores
    peak = 3 * forward / 0.3
    reports = [replace(report("w0", ran(0, 1, kept_attention=kept)), peak_tflops=peak) for kept in (False, True)]
    again, kept = (step_metrics(facts(), [one], GEOMETRY, work) for one in reports)
    assert again.mfu == kept.mfu == 0.3 and again.hfu == 0.4
    assert kept.hfu == round((4 * forward - scores) / peak, 4) < 0.4


def test_idle_fetches_are_exposed_as_collectives_are() -> None:
    (found,) = step_metrics(
        facts(), [report("w0", ran(0, 5, exposed_s=0.25, fetch_s=0.5))], GEOMETRY
    ).exposed_by_worker.values()
    assert found == 0.75


def test_a_step_is_counted_from_the_end_of_the_one_before_and_from_the_begin_of_its_generation() -> None:
    account = StepAccount(geometry=GEOMETRY, node_of=str.upper)

    def committed(at: float, frames: int = 1) -> tuple[StepMetrics, list[SpanRecord]]:
        items = [Item(id=id, batch=2, frames=frames, height=64, width=96) for id in "ab"]
        piece = Piece(item="a", bucket=(frames, 64, 96), batch=2)
        one = report("w0", finish(1.0, at), ran(at - 0.5, at, pieces=(piece,)), ran(at - 0.75, at, pieces=(piece,)))
        return account.records(collected(items, (one,), at))

    account.begin(10.0)
    account.waited_for_data(0.5)
    account.waited_for_data(0.25)
    line, spans = committed(13.0)
    assert (line.step_s, line.data_wait_s) == (3.0, 0.75)
    assert line.epoch == line.line()["epoch"] == 2.25 and "epoch" not in replace(line, epoch=None).line()
    assert ("train/epoch", 2.25) in scalars(line) and "  epoch 2.25  " in figures(line)
    found = replace(line, d=2.5e-4)
    assert found.line()["d"] == 2.5e-4 and "d" not in line.line()
    assert ("train/d", 2.5e-4) in scalars(found) and "  d 0.00025  " in figures(found)
    assert (line.tokens_per_s, line.videos_per_s) == (32.0, pytest.approx(4 / 3, abs=1e-3))  # 4 samples of 24 tokens
    assert [(span.step_start, span.node) for span in spans] == [(12.25, "W0")] * 3, "where its first cascade began"
    assert line.corr_tokens is line.corr_load is line.load_exponent is None, "of one step there is none"
    line, _ = committed(15.0, frames=33)
    assert (line.step_s, line.data_wait_s) == (2.0, 0.0)
    line, _ = committed(19.0, frames=17)
    assert line.step_s == 4.0 and line.corr_tokens is not None and line.corr_load is not None
    account.begin(20.0)
    line, _ = committed(21.0, frames=17)
    assert line.step_s == 1.0 and line.corr_tokens is line.corr_load is None, "steps of another generation"


def test_flops_are_told_per_step_and_per_worker() -> None:
    work = DiTWork(forward=joint_flops(2, 100, 400), recomputes=True)
    forward = 2 * (24 * (8 * 100**2 + 4 * 100 * 400) + 4 * 24**2 * 100) / 1e12
    reports = [report("w0", ran(0, 1), ran(1, 2)), report("w1", ran(0.5, 1))]
    peaked = [replace(one, peak_tflops=1e-3) for one in reports]
    found = step_metrics(replace(facts(), step_s=4.0), peaked, GEOMETRY, work)
    assert found.tflops_by_worker == {
        "w0": pytest.approx(2 * forward, abs=1e-6),
        "w1": pytest.approx(forward, abs=1e-6),
    }
    assert found.cv_tflops == pytest.approx(1 / 3, abs=1e-4)
    assert found.fbl_s == 2.0
    assert found.mfu == pytest.approx(9 * forward / (4.0 * 2e-3), abs=1e-4)
    assert found.hfu == pytest.approx(12 * forward / (2.0 * 2e-3), abs=1e-4)
    plain = step_metrics(facts(), reports, GEOMETRY, work)
    assert plain.mfu is None and plain.mfu_by_worker == plain.hfu_by_worker == {}, "nobody knows the peaks"


def test_utilization_of_a_worker_is_against_its_own_peak() -> None:
    """w0 trains two images and w1 one, on a device of half its speed."""
    work = DiTWork(forward=joint_flops(2, 100, 400), recomputes=True)
    forward = 2 * (24 * (8 * 100**2 + 4 * 100 * 400) + 4 * 24**2 * 100) / 1e12
    reports = [
        replace(report("w0", ran(0, 1), ran(1, 2)), peak_tflops=2e-3),
        replace(report("w1", ran(0.5, 1)), peak_tflops=1e-3),
        replace(report("w2", ran(0.5, 1)), peak_tflops=0.0),
    ]
    found = step_metrics(replace(facts(), step_s=4.0), reports, GEOMETRY, work)
    each = pytest.approx(3 * forward / (4.0 * 1e-3), abs=1e-4)
    assert found.mfu_by_worker == {"w0": each, "w1": each}, "that of w2 is not known"
    assert found.hfu_by_worker["w1"] == pytest.approx(4 * forward / (2.0 * 1e-3), abs=1e-4)


def test_imbalance_is_of_work_and_not_of_waiting_for_the_bag() -> None:
    """Both are in the bag for 5 s, of which w0 has waited 3 s for w1."""
    bag = {"degree": 2, "cascade": "c"}
    reports = [
        report("w0", ran(0, 5, wait_s=3.0, work_s=2.0, **bag), ran(5, 6, work_s=1.0)),
        report("w1", ran(3, 5, work_s=2.0, **bag)),
    ]
    assert step_metrics(facts(), reports, GEOMETRY).wir == 1.5


def test_waiting_for_others_is_told_apart_from_communication() -> None:
    """w0 waits 1 s in a bag and 3 s at the sum for w1, and then both communicate for 0.5 s; 0.25 s in the bag."""
    reports = [
        report("w0", ran(0, 5, wait_s=1.0, exposed_s=0.25, degree=2), finish(5, 9, exposed_s=3.5)),
        report("w1", ran(1, 5, exposed_s=0.25, degree=2), finish(8, 9, exposed_s=0.5)),
    ]
    found = step_metrics(facts(), reports, GEOMETRY)
    assert found.wait_sync_by_worker == {"w0": 4.0, "w1": 0.0} and found.wait_sync_s == 2.0
    assert found.exposed_s == pytest.approx(0.75)
    assert found.exposed_by_worker == {"w0": 0.75, "w1": 0.75}


def test_step_time_follows_the_load_rather_than_the_tokens() -> None:
    """Steps whose time is B S^2: one long clip or many short ones of about as many tokens."""
    history = LoadHistory()
    for count, length in ((1, 1000), (10, 100), (4, 300), (2, 450), (20, 60), (1, 900)):
        history.add(count * length**2.0, [(count, length)])
    assert history.with_load == (pytest.approx(1.0), 2.0)
    assert history.with_tokens is not None and abs(history.with_tokens) < 0.5
    history.clear()
    assert history.with_load is None


def test_a_timeline_says_what_was_work_and_what_was_waiting() -> None:
    (record,) = timeline_records(facts(), report("w0", ran(0, 5, wait_s=1.0, exposed_s=0.5, work_s=4.0)), "n0", 0.0)
    assert (record.line()["work_s"], record.line()["wait_s"], record.line()["exposed_s"]) == (4.0, 1.0, 0.5)
    old = {k: v for k, v in record.line().items() if k not in ("work_s", "wait_s", "exposed_s")}
    assert (span_of(old).work_s, span_of(old).wait_s) == (None, 0.0), "files of earlier versions are read"


def test_an_encode_that_outlasted_the_step_before_does_not_move_the_begin_of_a_step() -> None:
    late, own = ran(7.0, 12.0, planned_start_s=-3.0, planned_end_s=2.0), ran(10.1, 12.0)
    assert begin_of([report("w0", late), report("w1", own)], 9.0) == 10.1
    assert begin_of([report("w0", late)], 9.0) == 9.0
