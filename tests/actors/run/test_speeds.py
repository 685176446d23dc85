"""A slow worker is noticed, noise is not."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from actors.messages import Piece, Span, StepReport
from actors.run.speeds import _MOST_MEANS, _MOST_WORKS, Speeds


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


@pytest.mark.parametrize(("speed", "most"), [(0.8, 0), (0.72, 30), (0.7, 30), (0.68, 30), (0.6, 30)])
def test_a_speed_at_the_limit_of_what_is_noticed_is_told_a_few_times_and_not_ever_again(
    speed: float, most: int
) -> None:
    draw, speeds = random.Random(0), Speeds()
    names = tuple(f"w{number}" for number in range(8))
    told, changes = (), 0
    for _ in range(1500):
        own = (1 / speed, *[1.0] * 7)
        speeds.observe([report(w, s * math.exp(draw.gauss(0, 0.1))) for w, s in zip(names, own, strict=True)], {})
        changes += (found := speeds.factors(names, told)) != told
        told = found
    assert changes <= most


def test_workers_that_stay_keep_their_speeds_when_the_median_one_leaves() -> None:
    speeds, own = Speeds(), {f"fast{n}": 1.0 for n in range(5)} | {f"slow{n}": 2.0 for n in range(4)}
    for _ in range(20):
        speeds.observe([report(name, seconds) for name, seconds in own.items()], {})
    assert speeds.factors(tuple(own)) == (1.0,) * 5 + (0.5,) * 4
    left = tuple(list(own)[2:])
    for _ in range(200):
        speeds.observe([report(name, own[name]) for name in left], {})
        assert speeds.factors(left) == (1.0,) * 3 + (0.5,) * 4


def test_noise_and_a_common_misprediction_change_nothing() -> None:
    speeds = Speeds()
    for step in range(20):
        speeds.observe([report("a", 3.0 + 0.1 * (step % 2)), report("b", 3.0)], {})
    assert speeds.factors(("a", "b")) == ()


def bag_report(
    worker: str, bag: tuple[str, ...], own: Mapping[str, float], number: int, told: bool = True, module: str = "dit"
) -> Span:
    """One rank of a bag that takes as long as the slowest, and waits for it inside."""
    longest = max(own[name] for name in bag)
    return Span(
        name=module,
        module=module,
        cascade=f"{'-'.join(bag)}/{number}",
        step=0,
        start=0.0,
        end=longest + 0.1,
        degree=len(bag),
        bag=tuple(range(len(bag))),
        work_s=longest + 0.1,
        exposed_s=longest + 0.1 - own[worker] if told else 0.0,
        planned_end_s=1.0,
    )


def bags_seen(
    speeds: Speeds, own: Mapping[str, float], bags: Sequence[tuple[str, ...]], told: bool = True, module: str = "dit"
) -> tuple[float, ...]:
    """Factors after 25 steps of two cascades on every bag."""
    for _ in range(25):
        reports = [
            replace(
                report(name, 1.0),
                spans=tuple(
                    bag_report(name, bag, own, n, told, module) for n in range(2) for bag in bags if name in bag
                ),
            )
            for name in own
        ]
        speeds.observe(reports, {})
    return speeds.factors(tuple(own))


FIXED = (("a", "b"), ("c", "d"))
MIXED = (("a", "b"), ("c", "d"), ("a", "c"), ("b", "d"))
OWN = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 2.0}


@pytest.mark.parametrize("bags", [FIXED, MIXED, (("a", "b", "c", "d"),)])
def test_of_a_slow_bag_the_worker_is_known_that_the_others_wait_for(bags: tuple[tuple[str, ...], ...]) -> None:
    assert bags_seen(Speeds(), OWN, bags) == (1.0, 1.0, 1.0, 0.5)


def test_a_bag_says_nothing_where_nobody_measures_its_waits_or_its_ranks_compute_unlike() -> None:
    assert bags_seen(Speeds(), OWN, FIXED, told=False) == ()
    assert bags_seen(Speeds(), OWN, FIXED, module="vae") == ()
    assert bags_seen(Speeds(bags=False), OWN, FIXED) == ()


def test_a_bag_of_which_a_worker_is_missing_says_nothing() -> None:
    speeds = Speeds()
    for _ in range(50):
        spans = (bag_report("d", ("c", "d"), OWN, 0),)
        speeds.observe([replace(report("a", 1.0), spans=()), replace(report("d", 1.0), spans=spans)], {})
    assert speeds.factors(("a", "d")) == ()


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


def test_workers_that_come_and_go_for_a_month_leave_nothing_behind() -> None:
    speeds = Speeds()
    for generation in range(200):
        names = ("a", "b", f"w{generation}")
        for _ in range(12):
            speeds.observe([report("a", 1.0), report("b", 1.0), report(names[2], 2.0)], {})
            factors = speeds.factors(names)
        assert factors == (1.0, 1.0, 0.5), "the newest is known by its own cascades"
    known = {worker for by_worker in speeds._known.values() for worker in by_worker}
    assert known | set(speeds._told) <= {"a", "b", "w199"}


def test_packs_that_never_come_again_are_forgotten_and_workers_stay_known() -> None:
    speeds = Speeds()
    for number in range(3 * _MOST_WORKS):
        pieces = (Piece(item="", bucket=(number, 64, 64), batch=1), Piece(item="", bucket=(1, 8, 8), batch=1))
        reports = [report("a", 1.0), report("b", 1.0), report("c", 2.0)]
        for at, one in enumerate(reports):
            reports[at] = replace(one, spans=(*one.spans, replace(one.spans[0], cascade="pack", pieces=pieces)))
        speeds.observe(reports, {})
    assert len(speeds._known) == _MOST_WORKS
    assert speeds.factors(("a", "b", "c")) == (1.0, 1.0, 0.5)


def test_hundreds_of_workers_keep_no_more_than_the_newest_works_and_a_slow_one_stays_known() -> None:
    """A thousand works of 512 workers would be half a million means to fit in every step."""
    speeds, names = Speeds(), [f"w{number}" for number in range(512)]
    one, slow = report("w0", 1.0).spans[0], report("w7", 2.0).spans[0]
    for first in range(0, 160, 20):
        works = [(Piece(item="", bucket=(number, 64, 64), batch=1),) for number in range(first, first + 20)]
        normal, slower = (tuple(replace(span, pieces=work) for work in works) for span in (one, slow))
        speeds.observe(
            [replace(report(name, 1.0), spans=slower if name == "w7" else normal) for name in names], planned_with={}
        )
    assert 0.9 * _MOST_MEANS < sum(map(len, speeds._known.values())) <= _MOST_MEANS
    assert speeds.factors(names) == tuple(0.5 if name == "w7" else 1.0 for name in names)


def test_what_a_worker_runs_alone_says_nothing_and_hides_nothing() -> None:
    """c is slow in what all run, and runs much more that nobody else does."""
    speeds, names = Speeds(), ("a", "b", "c")
    alone = tuple(
        replace(report("c", 7.0).spans[0], pieces=(Piece(item="i", bucket=(n, 64, 96), batch=1),)) for n in range(9)
    )
    for _ in range(30):
        slow = report("c", 2.0)
        speeds.observe([report("a", 1.0), report("b", 1.0), replace(slow, spans=slow.spans + alone)], {})
    assert speeds.factors(names) == (1.0, 1.0, 0.5)


def test_a_worker_is_judged_by_forty_cascades_that_others_ran_too_however_many_it_ran_alone() -> None:
    speeds, names = Speeds(), ("a", "b", "c")

    def step() -> tuple[float, ...]:
        reports = []
        for n, name in enumerate(names):
            one = report(name, 2.0 if name == "c" else 1.0)  # four that all run
            alone = replace(one.spans[0], pieces=(Piece(item="i", bucket=(n, 64, 96), batch=1),))
            reports.append(replace(one, spans=one.spans + 9 * (alone,)))
        speeds.observe(reports, {})
        return speeds.factors(names)

    assert [step() for _ in range(10)] == [()] * 9 + [(1.0, 1.0, 0.5)]


def test_packs_are_compared_by_what_was_expected_of_them() -> None:
    """c gets the small packs of a bucket, and takes twice what is expected of them."""
    speeds, names = Speeds(), ("a", "b", "c")
    for _ in range(30):
        reports = []
        for worker, batch, seconds in (("a", 8, 8.0), ("b", 6, 6.0), ("c", 2, 4.0)):
            pieces = tuple(Piece(item=item, bucket=(17, 64, 96), batch=batch // 2) for item in "ij")
            one = report(worker, seconds, planned=float(batch))
            reports.append(replace(one, spans=tuple(replace(span, pieces=pieces) for span in one.spans)))
        speeds.observe(reports, {})
    assert speeds.factors(names) == (1.0, 1.0, 0.5)


@pytest.mark.parametrize("odd", [{"first_here": True}, {"work_s": 99.0}, {"module": "finish"}])
def test_what_is_compiled_or_cannot_be_or_waits_for_all_makes_nobody_slow(odd: dict[str, object]) -> None:
    speeds = Speeds()
    for _ in range(30):
        reports = [report("a", 1.0), report("b", 1.0), report("c", 1.0)]
        long = [replace(one.spans[0], end=9.0 if one.worker == "c" else 1.0, **odd) for one in reports]  # type: ignore[arg-type]
        speeds.observe([replace(one, spans=(*one.spans, span)) for one, span in zip(reports, long, strict=True)], {})
    assert speeds.factors(("a", "b", "c")) == ()
