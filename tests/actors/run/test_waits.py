"""How long workers wait for each other follows the plan: what is healthy goes on, what hangs is given up, and why."""

from __future__ import annotations

import pytest

from actors.config import WorkersConfig
from actors.messages import CascadeShape, Piece, Span, StepReport, shapes_of
from actors.plan.types import Cascade, Part
from actors.run.waits import StepWaits

FIRST_S = 900.0


def cascade(end_s: float, start_s: float = 0.0) -> Cascade:
    part = Part(item="i", first=0, count=1)
    return Cascade(id="c", module="dit", step=3, parts=(part,), degree=1, workers=(0,), start_s=start_s, end_s=end_s)


def shapes(frames: int = 81, module: str = "dit", batch: int = 1) -> set[CascadeShape]:
    return shapes_of(module, (Piece(item="i", bucket=(frames, 480, 832), batch=batch),), 1)


def report(finish_s: float, snapshot_s: float) -> StepReport:
    dit = Span(name="dit", module="dit", cascade="c", step=3, start=0.0, end=100.0)
    span = Span(name="finish s3", module="finish", cascade="", step=3, start=100.0, end=100.0 + finish_s)
    return StepReport(worker="w0", step=3, loss=0.0, weight=1.0, grad_norm=0.0, lr=0.0, applied=True, spans=(dit, span),
                      peak_memory_gib=0.0, rss_gib=0.0, snapshot_s=snapshot_s)  # fmt: skip


def waits(measured: bool = True, **settings: float) -> StepWaits:
    return StepWaits(config=WorkersConfig(first_step_s=FIRST_S, **settings), measured=measured)  # type: ignore[arg-type]


def after_the_first(of: StepWaits, end_s: float) -> float:
    """The limit of a step whose shapes have all run."""
    of.of(2, [cascade(end_s)], [((0,), shapes())])
    return of.of(3, [cascade(end_s)], [((0,), shapes())]).limit_s


def test_a_short_step_has_the_least_limit_and_a_long_one_several_times_its_plan() -> None:
    assert after_the_first(waits(), 0.4) == WorkersConfig().collective_timeout_s
    assert after_the_first(waits(), 60.0) == 300.0 > 60.0
    assert after_the_first(waits(patience_factor=2.0, collective_timeout_s=10.0), 60.0) == 120.0


def test_what_is_dispatched_later_in_a_step_is_waited_for_as_long_as_it_takes_itself() -> None:
    late = [cascade(1060.0, start_s=1000.0), cascade(1040.0, start_s=1010.0)]
    assert waits().of(3, late, []).limit_s == 5 * 60.0
    assert waits().of(3, [], [], update_s=60.0).limit_s == 5 * 60.0, "the end of a step alone"


def test_the_end_of_a_step_counts_as_long_as_the_last_one_took() -> None:
    of = waits()
    of.finished([report(20.0, 5.0), report(30.0, 1.0)])
    assert after_the_first(of, 60.0) == 5 * (60.0 + 31.0)
    assert of.of(4, [cascade(60.0)], [((0,), shapes())], aside_s=2.0).limit_s == 5 * (60.0 + 31.0 + 2.0)


def test_what_a_worker_runs_for_the_first_time_may_be_compiled_before() -> None:
    of = waits()
    first = of.of(3, [cascade(1.0)], [((0,), shapes()), ((1,), shapes())])
    assert first.limit_s == 120.0 + FIRST_S and "first_step_s" in first.why
    several = of.of(4, [cascade(1.0)], [((0,), shapes(batch=2)), ((1,), shapes())])
    assert several.limit_s == 120.0 + FIRST_S, "compiled blocks have code for one clip and for several"
    assert of.of(4, [cascade(1.0)], [((0,), shapes(batch=3)), ((1,), shapes())]).limit_s == 120.0
    assert of.of(5, [cascade(1.0)], [((2,), shapes())]).limit_s == 120.0 + FIRST_S, "new to that worker"
    assert of.of(6, [cascade(1.0)], [((0,), shapes(module="vae"))]).limit_s == 120.0 + FIRST_S
    assert of.of(7, [cascade(1.0)], [((0,), shapes(module="vae", batch=2))]).limit_s == 120.0 + FIRST_S
    assert of.of(8, [cascade(1.0)], [((0,), shapes())], aside_s=None).limit_s == 120.0 + FIRST_S, "the first aside"
    of.begin()
    assert of.of(8, [cascade(1.0)], [((0,), shapes())]).limit_s == 120.0 + FIRST_S, "its process may be new"


def test_costs_that_nobody_has_measured_on_a_gpu_make_no_limit_of_days() -> None:
    of = waits(measured=False)
    assert of.of(0, [cascade(208_000.0)], [((0,), shapes())]).limit_s == 120.0 + FIRST_S
    of.finished([report(1.0, 0.0)])
    assert after_the_first(of, 60.0) == 5 * 61.0


@pytest.mark.parametrize(("end_s", "named"), [(0.4, "collective_timeout_s"), (60.0, "patience_factor 5 x 60.0 s")])
def test_the_limit_says_where_it_comes_from(end_s: float, named: str) -> None:
    found = waits().of(3, [cascade(end_s)], [])
    assert named in found.why and "step 3" in found.why and str(found).startswith(f"{found.limit_s:g} s (")
