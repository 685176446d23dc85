"""A step without a finite gradient is named and counted, and too many of them end the run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.messages import NOT_FINITE
from actors.outcome import StopRun
from actors.records.events import StepSkipped
from actors.run.skips import WINDOW, Skips, skipped_before

LONG, SHORT = (81, 480, 832), (1, 480, 832)


def step(
    number: int,
    applied: bool,
    *bad: str,
    at: tuple[str, ...] = ("w0",),
    of: int = 1,
    shape: tuple[int, int, int] = SHORT,
) -> Any:
    """A step of `of` workers: those of `at` have the samples that are `bad` together, of this shape, each other one a
    short clip of its own."""

    def report(worker: str) -> Any:
        samples = bad if worker in at else ()
        return SimpleNamespace(
            worker=worker, applied=applied, loss=float("nan"), grad_norm=float("inf"), bad_samples=samples
        )

    def item(name: str, bucket: tuple[int, int, int], *keys: str) -> Any:
        plan = SimpleNamespace(id=name, expert=0)
        return SimpleNamespace(plan=plan, bucket=bucket, samples=[SimpleNamespace(key=key) for key in keys])

    def dit(item: str, count: int, *workers: int) -> Any:
        return SimpleNamespace(module="dit", parts=[SimpleNamespace(item=item, count=count)], workers=workers)

    theirs = [int(worker.removeprefix("w")) for worker in at if bad]
    others = [rank for rank in range(of) if rank not in theirs]
    items = {f"own{rank}": item(f"own{rank}", SHORT, f"{number}-{rank}") for rank in others}
    items["bad"] = item("bad", shape, *(one.removeprefix(NOT_FINITE) for one in bad))
    cascades = [*(dit(f"own{rank}", 1, rank) for rank in others), dit("bad", len(bad), *theirs)]
    return SimpleNamespace(
        running=SimpleNamespace(
            step=number,
            assignment=SimpleNamespace(cascades=cascades),
            data=SimpleNamespace(items=SimpleNamespace(items=items)),
        ),
        reports=tuple(report(f"w{worker}") for worker in range(of)),
    )


def quiet(limit: int, known: tuple[int, ...] = ()) -> Skips:
    return Skips(limit, lambda event: None, known)


def test_skipped_steps_are_told_up_to_the_limit_and_then_end_the_run() -> None:
    told: list[Any] = []
    skips = Skips(2, told.append)
    for number in range(5):
        skips.check(step(number, applied=number not in (1, 3)), committed=number - 1)
    assert [(type(e), e.step) for e in told] == [(StepSkipped, 1), (StepSkipped, 3)]
    with pytest.raises(StopRun) as stopped:
        skips.check(step(9, False, "shard-1/clip-7", "shard-0/clip-2"), committed=8)
    outcome = stopped.value.outcome
    assert (outcome.code, outcome.last_step) == (1, 8)
    assert "max_skipped_steps 2" in outcome.reason and "shard-0/clip-2, shard-1/clip-7" in outcome.reason


def test_a_step_that_is_computed_again_counts_once_and_not_at_all_when_it_goes_well() -> None:
    skips = quiet(2)
    for _ in range(5):
        skips.check(step(4, False), committed=3)
    skips.check(step(5, False), committed=4)
    skips.check(step(4, True), committed=3)
    skips.check(step(5, True), committed=4)
    for number in (6, 7):
        skips.check(step(number, False), committed=number - 1)
    with pytest.raises(StopRun):
        skips.check(step(8, False), committed=7)


def test_a_worker_whose_losses_alone_are_not_finite_is_named() -> None:
    told: list[Any] = []
    skips = Skips(10, told.append)
    found = [skips.check(step(n, False, f"{NOT_FINITE}clip-{n}", at=("w5",), of=8), committed=n) for n in range(4)]
    assert found == ["", "", "", "w5"], "three may be chance among eight"
    assert told[-1].describe() == "step 3 skipped: loss nan, gradient norm inf (losses of w5)"
    skips.forget_where()
    again = [skips.check(step(n, False, f"{NOT_FINITE}clip-{n}", at=("w6",), of=8), committed=n) for n in range(4, 8)]
    assert again == ["", "", "", "w6"], "in its place, on the same GPU"


@pytest.mark.parametrize(
    ("at", "clips", "of"),
    [
        ([("w5",), ("w5",), ("w4",), ("w5",), ("w5",)], "abcde", 8),  # another one, too
        ([("w4", "w5")] * 5, "abcde", 8),  # a bag
        ([("w5",)] * 5, "aabab", 8),  # the same clips
        ([("w1",)] * 5, "abcde", 2),  # may be chance
        ([("w0",)] * 5, "abcde", 1),  # there is no other
        ([()] * 5, "abcde", 8),  # gradients alone
    ],
)
def test_no_worker_is_blamed_where_clips_may_be_at_fault(at: list[tuple[str, ...]], clips: str, of: int) -> None:
    skips = quiet(10)
    for number, (workers, clip) in enumerate(zip(at, clips, strict=True)):
        assert skips.check(step(number, False, f"{NOT_FINITE}{clip}", at=workers, of=of), committed=number) == ""


def test_what_is_bad_without_a_loss_and_good_clips_of_the_same_item_clear_nobody() -> None:
    skips, found = quiet(10), []
    for number in range(4):
        bad = step(number, False, f"{NOT_FINITE}clip-{number}", at=("w5",), of=8)
        bad.running.data.items.items["bad"].samples.append(SimpleNamespace(key="good"))
        bad.reports[2].bad_samples = ("named for its gradient",)
        found.append(skips.check(bad, committed=number))
    assert found == ["", "", "", "w5"]


def test_a_clip_that_comes_in_each_epoch_is_one_clip() -> None:
    skips = quiet(10)
    for epoch in range(5):
        bad = step(epoch, False, f"{NOT_FINITE}0/{epoch}/17", at=("w5",), of=8)
        assert skips.check(bad, committed=epoch) == ""


def test_clips_of_a_small_data_set_come_again_and_say_nothing() -> None:
    skips = quiet(10)
    clips = (f"0/{n // 4}/{n % 4}" for n in range(6))
    found = [skips.check(step(n, False, NOT_FINITE + c, at=("w5",), of=8), committed=n) for n, c in enumerate(clips)]
    assert found == ["", "", "", "w5", "w5", "w5"]


def test_a_clip_among_others_of_its_cascade_is_no_other_clip() -> None:
    skips = quiet(10)
    for n in range(5):
        bad = step(n, False, f"{NOT_FINITE}bad", f"{NOT_FINITE}good-{n}", at=("w5",), of=8)
        assert skips.check(bad, committed=n) == ""


def test_no_worker_is_blamed_for_shapes_that_it_alone_has() -> None:
    """The strategy longest_first gives the one long clip of each step to the same worker."""
    skips = quiet(10)
    for n in range(5):
        bad = step(n, False, f"{NOT_FINITE}clip-{n}", at=("w5",), of=8, shape=LONG)
        assert skips.check(bad, committed=n) == ""


def test_the_end_of_the_run_names_the_worker_when_it_could_not_leave() -> None:
    skips = quiet(10)
    found = [skips.check(step(n, False, f"{NOT_FINITE}{n}", at=("w5",), of=8), committed=n) for n in range(10)]
    assert found == ["", "", "", *["w5"] * 7], "it may leave as soon as the run has more workers"
    with pytest.raises(StopRun, match=r"In 11 of them losses were not finite on w5 alone: its device may be faulty"):
        skips.check(step(10, False, f"{NOT_FINITE}10", at=("w5",), of=8), committed=10)


def test_a_skip_now_and_then_never_ends_a_long_run() -> None:
    skips = quiet(2)
    for number in range(0, 100 * WINDOW, WINDOW // 2):
        skips.check(step(number, False), committed=number - 1)


def test_the_next_controller_of_a_run_goes_on_counting(tmp_path: Path) -> None:
    assert skipped_before(tmp_path) == []
    events = [{"event": "start", "step": 0}, {"event": "skipped", "step": 3}, {"event": "skipped", "step": 5},
              {"event": "fail", "why": 'a word like "skipped"', "step": 6}]  # fmt: skip
    lines = "".join(json.dumps(e) + "\n" for e in events) + '{"event": "skipped", "st'
    (tmp_path / "events.jsonl").write_text(lines)
    assert skipped_before(tmp_path) == [3, 5]
    with pytest.raises(StopRun):
        quiet(2, tuple(skipped_before(tmp_path))).check(step(7, False), committed=6)
