"""Snapshots are as frequent as their measured cost allows."""

from __future__ import annotations

import pytest

from actors.config import SnapshotConfig
from actors.state.snapshot_interval import SHARE, SnapshotInterval


def run(interval: SnapshotInterval, steps: int, step_s: float, copy_s: float, held_s: float = 0.0) -> list[int]:
    """The steps with a snapshot, where keepers take `held_s` and a first step compiles for ten minutes."""
    now, taken = 0.0, []
    for step in range(steps):
        due = interval.is_due(step)
        now += step_s + due * copy_s + 600.0 * (step == 0)
        interval.after_commit((1, step), now, due * copy_s, held_s if due else None)
        taken += [step] * due
    return taken


@pytest.mark.parametrize(
    ("step_s", "copy_s", "held_s", "every"),
    [
        (30.0, 0.5, 0.0, 1),  # below the share anyhow
        (1.0, 1.0, 0.0, 50),
        (10.0, 60.0, 0.0, 300),  # 14B without host memory
        (10.0, 0.0, 60.0, 200),  # 60 s until keepers have it, of which two steps hide 20
    ],
)
def test_the_interval_follows_what_a_snapshot_and_a_step_take(
    step_s: float, copy_s: float, held_s: float, every: int
) -> None:
    interval = SnapshotInterval(setting="auto", most=1000)
    taken = run(interval, 4000, step_s, copy_s, held_s)
    assert interval.every == every
    later = [step for step in taken if step > 100]
    cost = len(later) * (copy_s + max(0.0, held_s - 2 * step_s))
    assert cost <= 1.1 * SHARE * (4000 - 100) * step_s
    assert every == 1 or (f"{step_s:.2f} s" in interval.why and "2%" in interval.why)


def test_waiting_for_a_copy_that_outlasts_a_step_is_a_cost_of_the_snapshot() -> None:
    """The copy begins at once and takes 5 s; the next update, 3 s later, waits for the rest."""
    interval, now, before, chosen = SnapshotInterval(setting="auto", most=1000), 0.0, False, []
    for step in range(1000):
        due = interval.is_due(step)
        waited_s = 2.0 * before
        now += 3.0 + waited_s
        interval.after_commit((1, step), now, waited_s, 0.0 if due else None)
        before = due
        chosen.append(interval.every)
    assert set(chosen[100:]) == {34}, "2 s in 34 steps of 3 s, and it stays so"


def test_what_a_recovery_takes_is_no_step_s_time() -> None:
    """Every second step is the last of its generation, and the next one begins ten minutes later."""
    interval, now, chosen = SnapshotInterval(setting="auto", most=1000), 0.0, []
    for step in range(300):
        now += 1.0 + 1.0 + 600.0 * (step % 2 == 0)
        interval.after_commit((step // 2, step), now, 1.0, 0.0)
        chosen.append(interval.every)
    assert set(chosen[100:]) == {50}, "1 s in 50 steps of 1 s"


def test_no_more_steps_may_be_lost_than_between_two_checkpoints() -> None:
    interval = SnapshotInterval(setting="auto", most=40)
    run(interval, 400, 1.0, 10.0)
    assert interval.every == 40 and "no more than 40 steps" in interval.why


def test_a_little_noise_changes_nothing_and_a_given_number_stays() -> None:
    interval = SnapshotInterval(setting="auto", most=1000)
    run(interval, 500, 1.0, 0.2)
    assert interval.every == 10
    run(interval, 500, 1.0, 0.22)
    assert interval.every == 10
    run(interval, 500, 1.0, 0.4)
    assert interval.every == 20
    given = SnapshotInterval(setting=7, most=1000)
    assert run(given, 50, 1.0, 60.0) == list(range(0, 50, 7))
    given = SnapshotInterval(setting=7, most=1000)
    assert not given.after_commit((1, 0), 1.0, 60.0, 0.0), "a number that a person gave is no news"


def test_an_interval_that_wanders_is_told_when_it_has_doubled_or_halved() -> None:
    """Copies that take 0.06 to 0.12 s of steps of 1 s, as on a busy machine."""
    interval, now, told = SnapshotInterval(setting="auto", most=1000), 0.0, []
    for step in range(2000):
        due = interval.is_due(step)
        copy_s = (0.06 + 0.06 * ((step // 200) % 2)) * due
        now += 1.0 + copy_s
        if interval.after_commit((1, step), now, copy_s, 0.0 if due else None):
            told.append(interval.every)
    assert told == [3, 6, 3, 6, 3, 6, 3, 6, 3, 6], "once for each of ten times that it doubles or halves"
    told.clear()
    for step in range(2000, 4000):
        due = interval.is_due(step)
        copy_s = (0.09 + 0.03 * ((step // 50) % 2)) * due
        now += 1.0 + copy_s
        if interval.after_commit((1, step), now, copy_s, 0.0 if due else None):
            told.append(interval.every)
    assert told == []


def test_auto_is_a_setting_and_another_word_is_none() -> None:
    assert SnapshotConfig(every="auto").every == "auto"
    with pytest.raises(ValueError, match=r"snapshot\.every 0"):
        SnapshotConfig(every=0)
