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


def bags(seconds: dict[str, float]) -> list[StepReport]:
    """Reports of a step in which each of these pairs of workers ran the same four cascades."""
    return [
        replace(one, spans=tuple(replace(s, cascade=f"{pair}{n}") for n, s in enumerate(one.spans)))
        for pair, took in seconds.items()
        for worker in pair
        for one in [report(worker, took, degree=2)]
    ]


def test_a_slow_bag_slows_its_members_down_until_one_of_them_is_seen_elsewhere() -> None:
    speeds, names = Speeds(), tuple("abcdefgh")
    for _ in range(20):
        speeds.observe(bags({"ab": 1.0, "cd": 2.0, "ef": 1.0, "gh": 1.0}), {})
    assert speeds.factors(names) == (1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0), "either may be the slow one"
    for _ in range(20):
        speeds.observe(bags({"ad": 1.0, "cb": 2.0, "ef": 1.0, "gh": 1.0}), {})
    assert speeds.factors(names) == (1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0), "d is not, nor is b"


def test_a_worker_that_is_known_alone_is_not_judged_by_its_bag() -> None:
    speeds, names = Speeds(), tuple("abcdefgh")
    for _ in range(20):
        speeds.observe(bags({"ab": 1.0, "cd": 2.0, "ef": 1.0, "gh": 1.0}), {})
        speeds.observe([report(name, 2.0 if name == "c" else 1.0) for name in names], {})
    assert speeds.factors(names) == (1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
    seen = Speeds()
    seen.observe([report(name, 1.0) for name in names], {})
    for _ in range(20):
        seen.observe(bags({"ab": 1.0, "cd": 2.0, "ef": 1.0, "gh": 1.0}), {})
    assert seen.factors(names) == (), "alone for too short a time to be judged: it stays as it is"


def test_bags_over_nodes_are_not_compared_with_those_inside_one() -> None:
    speeds, names = Speeds(), tuple("abcdefgh")
    for _ in range(20):
        speeds.observe(bags({"ab": 1.0, "cd": 2.0, "ef": 1.0, "gh": 1.0}), {}, dict.fromkeys("abc", "x"))
    assert speeds.factors(names) == (), "d is on another node than c"


def test_a_member_that_says_nothing_leaves_its_bag_out() -> None:
    speeds = Speeds()
    for _ in range(20):
        speeds.observe(bags({"ab": 1.0, "cd": 2.0, "ef": 1.0, "gh": 1.0})[1:], {})
    assert all("a" not in bag for bag in speeds._known)


def test_bags_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.run.speeds._MOST", 4)
    speeds = Speeds()
    for pair in ("ab", "cd", "ef", "gh", "ab", "ag"):
        speeds.observe(bags({pair: 1.0}), {})
    assert list(speeds._known) == [("e", "f"), ("g", "h"), ("a", "b"), ("a", "g")]


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
