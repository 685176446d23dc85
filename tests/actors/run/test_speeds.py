"""A slow worker is noticed, noise is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.messages import Piece, Span, StepReport
from actors.run.speeds import Speeds


def report(worker: str, seconds: float, planned: float = 1.0, degree: int = 1) -> StepReport:
    spans = tuple(
        Span(
            name="dit",
            module="dit",
            cascade="c",
            step=0,
            start=0.0,
            end=seconds,
            degree=degree,
            planned_start_s=0.0,
            planned_end_s=planned,
        )
        for _ in range(4)
    )
    return StepReport(
        worker=worker,
        step=0,
        loss=0,
        weight=1,
        grad_norm=0,
        lr=0,
        applied=True,
        spans=spans,
        peak_memory_gib=0,
        rss_gib=0,
    )


def test_a_worker_of_half_the_speed_is_planned_as_such_and_stays_so() -> None:
    speeds, names = Speeds(), ("a", "b", "c")
    factors: tuple[float, ...] = ()
    for _ in range(200):
        planned_with = dict(zip(names, factors, strict=False))
        slow = report("c", 2.0, planned=1.0 / planned_with.get("c", 1.0))
        speeds.observe([report("a", 1.0), report("b", 1.0), slow], planned_with)
        factors = speeds.factors(names)
    assert factors == (1.0, 1.0, 0.5)


def test_noise_and_a_common_misprediction_change_nothing() -> None:
    speeds = Speeds()
    for step in range(20):
        speeds.observe([report("a", 3.0 + 0.1 * (step % 2)), report("b", 3.0)], {})
    assert speeds.factors(("a", "b")) == ()


@pytest.mark.parametrize("degree", [2, 4])
def test_cascades_of_a_bag_say_nothing_about_one_worker(degree: int) -> None:
    speeds = Speeds()
    for _ in range(20):
        speeds.observe([report("a", 9.0, degree=degree), report("b", 1.0, degree=degree)], {})
    assert speeds.factors(("a", "b")) == ()


def test_a_new_worker_is_not_judged_by_its_first_cascades() -> None:
    speeds = Speeds()
    speeds.observe([report("a", 1.0), report("b", 5.0)], {})
    assert speeds.factors(("a", "b")) == ()


def test_a_shape_that_is_mispredicted_does_not_make_its_worker_slow() -> None:
    """Each worker mostly gets a shape of its own, of which plans expect half of what it takes, or twice; c is slow."""
    speeds, names = Speeds(), ("a", "b", "c")
    takes = {(1, 64, 96): 1.0, (17, 64, 96): 8.0, (33, 64, 96): 20.0}
    planned = dict(zip(takes, (2.0, 4.0, 20.0), strict=True))
    for step in range(60):
        reports = []
        for number, worker in enumerate(names):
            bucket = list(takes)[(number + (step % 5 == 0)) % 3]  # every fifth step they change places
            seconds = takes[bucket] * (2.0 if worker == "c" else 1.0)
            one = report(worker, seconds, planned[bucket])
            pieces = (Piece(item="i", bucket=bucket, batch=1),)
            reports.append(replace(one, spans=tuple(replace(span, pieces=pieces) for span in one.spans)))
        speeds.observe(reports, {})
    assert speeds.factors(names) == (1.0, 1.0, 0.5)


def test_workers_that_never_run_the_same_are_not_compared() -> None:
    speeds = Speeds()
    for _ in range(60):
        for worker, frames in (("a", 1), ("b", 17)):
            pieces = (Piece(item="i", bucket=(frames, 64, 96), batch=1),)
            one = report(worker, 1.0 * frames)
            speeds.observe([replace(one, spans=tuple(replace(s, pieces=pieces) for s in one.spans))], {})
    assert speeds.factors(("a", "b")) == ()
