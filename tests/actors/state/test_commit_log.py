"""A step is committed when every shard of it is held, and not before, whatever its keepers answer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from actors.outcome import Tell, silent
from actors.records.events import CommitSlow
from actors.state.commit_log import CommitLog, Stuck
from tests.actors.fakes import Listening, collected, snapshot

LOST = ray.exceptions.ActorDiedError()


class Acknowledgements:
    """Stands for Ray: references are names, answers are given by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Any] = {}
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)

    def _wait(self, references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [r for r in references if r in self.answers], [r for r in references if r not in self.answers]

    def _get(self, reference: str | list[str], timeout: float) -> Any:
        if isinstance(reference, list):
            return [self._get(one, timeout) for one in reference]
        answer = self.answers[reference]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def ray_answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return Acknowledgements(monkeypatch).answers


def log_of(step: int, *acknowledgements: str, patience_s: float = 60.0, tell: Tell = silent) -> CommitLog:
    log = CommitLog(committed=step - 1, patience_s=patience_s, tell=tell)
    log.add(collected(step, 1, *acknowledgements))
    return log


def settled(log: CommitLog) -> bool:
    """As the controller does it: what is held is committed. False: others must hold what is left."""
    for done in log.settle():
        log.commit(done.running.step)
    return log.stuck is None


def test_a_step_waits_for_all_its_shards(ray_answers: dict[str, Any]) -> None:
    log = log_of(7, "a", "b")
    ray_answers["a"] = True
    assert settled(log) and log.committed == 6
    ray_answers["b"] = True
    assert settled(log) and log.committed == 7 and len(log) == 0


@pytest.mark.parametrize("answer", [LOST, False])
def test_a_shard_that_is_not_held_is_not_forgotten_until_others_hold_it(
    ray_answers: dict[str, Any], answer: object
) -> None:
    log = log_of(7, "a", "b")
    ray_answers |= {"a": answer, "b": True}
    for _ in range(3):  # such as while workers are too busy to be given new keepers
        assert not settled(log)
    assert log.committed == 6
    log.replace_acknowledgements([snapshot(7, acknowledgements=("c",))])
    assert settled(log) and log.committed == 6
    ray_answers["c"] = True
    assert settled(log) and log.committed == 7


def test_a_keeper_that_is_silent_for_too_long_counts_as_gone(ray_answers: dict[str, Any]) -> None:
    assert settled(log_of(7, "a", patience_s=60.0))
    assert not settled(log_of(7, "a", patience_s=-1.0))


def test_a_step_that_waits_for_slow_keepers_is_told_once(
    ray_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, now = Listening(), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = log_of(7, "a", patience_s=600.0, tell=listener.on_event)
    for later in (10, 40, 50):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert settled(log), "slow is not lost"
    assert [(type(e), e.step) for e in listener.told] == [(CommitSlow, 7)]
    monkeypatch.setattr(time, "monotonic", lambda: now + 700)
    assert not settled(log) and log.stuck == Stuck(why="no answer in 700 s", overdue=True)


def test_a_refused_shard_says_why(ray_answers: dict[str, Any]) -> None:
    log = log_of(7, "a")
    ray_answers["a"] = ray.exceptions.RayTaskError("put", "traceback", MemoryError("the node can spare 1 MiB"))
    assert not settled(log) and log.stuck == Stuck(why="MemoryError: the node can spare 1 MiB", overdue=False)


def test_finished_steps_count_only_as_far_as_their_reports_have_no_hole() -> None:
    log = log_of(7)
    assert log.newest == 7
    log.committed = 5  # the line of step 6 could not be written
    assert log.newest == 5


def test_a_step_counts_when_it_is_committed_and_what_failed_before_is_computed_again(
    ray_answers: dict[str, Any],
) -> None:
    """Two steps are held; the line of the second cannot be written."""
    log = log_of(7, "a")
    log.add(collected(8, 1, "b"))
    ray_answers |= {"a": True, "b": True}
    assert [done.running.step for done in log.settle()] == [7, 8] and log.committed == 6
    log.commit(7)
    assert [done.running.step for done in log.settle()] == [8], "it is asked for again until it counts"
    log.restart(7)
    assert log.committed == 7 and len(log) == 0


def test_training_never_goes_on_past_a_finished_step_that_is_not_committed() -> None:
    log = log_of(7)
    with pytest.raises(AssertionError, match=r"\[7\] are finished but not committed"):
        log.restart(7)
    with pytest.raises(AssertionError, match="before step 7"):
        log.commit(8)
