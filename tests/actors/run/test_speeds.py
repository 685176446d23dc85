"""A slow worker is noticed, noise is not."""

from __future__ import annotations

import pytest

from actors.messages import Span, StepReport
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
