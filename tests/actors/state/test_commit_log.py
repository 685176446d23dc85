"""A step is committed when every shard of it is held, and not before, whatever its keepers answer."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from actors.messages import Snapshot
from actors.state.commit_log import CommitLog
from actors.step import CollectedStep

LOST = ray.exceptions.ActorDiedError()


class Acknowledgements:
    """Stands for Ray: references are names, answers are given by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Any] = {}
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)

    def _wait(self, references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [r for r in references if r in self.answers], [r for r in references if r not in self.answers]

    def _get(self, reference: str, timeout: float) -> Any:
        answer = self.answers[reference]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def ray_answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return Acknowledgements(monkeypatch).answers


def snapshot(step: int, *acknowledgements: str) -> Snapshot:
    return Mock(spec=Snapshot, step=step, acknowledgements=acknowledgements)


def log_of(step: int, *acknowledgements: str, patience_s: float = 60.0) -> CommitLog:
    log = CommitLog(commit=Mock(), committed=step - 1, patience_s=patience_s)
    collected = Mock(spec=CollectedStep, snapshots=(snapshot(step, *acknowledgements),))
    collected.running.step = step
    log.add(collected)
    return log


def test_a_step_waits_for_all_its_shards(ray_answers: dict[str, Any]) -> None:
    log = log_of(7, "a", "b")
    ray_answers["a"] = True
    assert log.settle() and log.committed == 6
    ray_answers["b"] = True
    assert log.settle() and log.committed == 7 and len(log) == 0


@pytest.mark.parametrize("answer", [LOST, False])
def test_a_shard_that_is_not_held_is_not_forgotten_until_others_hold_it(
    ray_answers: dict[str, Any], answer: object
) -> None:
    log = log_of(7, "a", "b")
    ray_answers |= {"a": answer, "b": True}
    for _ in range(3):  # such as while workers are too busy to be given new keepers
        assert not log.settle()
    assert log.committed == 6
    log.replace_acknowledgements([snapshot(7, "c")])
    assert log.settle() and log.committed == 6
    ray_answers["c"] = True
    assert log.settle() and log.committed == 7


def test_a_keeper_that_is_silent_for_too_long_counts_as_gone(ray_answers: dict[str, Any]) -> None:
    assert log_of(7, "a", patience_s=60.0).settle()
    assert not log_of(7, "a", patience_s=-1.0).settle()


def test_a_step_that_waits_for_slow_keepers_is_told_once(
    ray_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, now = log_of(7, "a", patience_s=600.0), time.monotonic()
    log.slow = Mock()
    for later in (10, 40, 50):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert log.settle(), "slow is not lost"
    assert [call.args[0] for call in log.slow.call_args_list] == [7]
    monkeypatch.setattr(time, "monotonic", lambda: now + 700)
    assert not log.settle() and log.overdue and "700 s" in log.failure


def test_a_refused_shard_says_why(ray_answers: dict[str, Any]) -> None:
    log = log_of(7, "a")
    ray_answers["a"] = ray.exceptions.RayTaskError("put", "traceback", MemoryError("the node can spare 1 MiB"))
    assert not log.settle() and log.failure == "MemoryError: the node can spare 1 MiB" and not log.overdue


def test_finished_steps_count_only_as_far_as_their_reports_have_no_hole() -> None:
    log = log_of(7)
    assert log.newest == 7
    log.committed = 5  # the line of step 6 could not be written
    assert log.newest == 5
