"""A step counts once its metrics are written, in order, and never when another state than its own goes on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.messages import Origin
from actors.outcome import Events
from actors.records.events import FeederLost
from actors.run.committer import Committer
from actors.state.commit_log import CommitLog, Stuck
from actors.state.recovery import Recovery
from tests.actors.fakes import Listening, collected, snapshot


class Told:
    """State, data and metrics of a run; `heard` is what they were told, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.repaired: Sequence[Any] | None = None  # what new keepers were given

    def records(self, done: Any) -> tuple[Any, list[Any]]:
        return SimpleNamespace(step=done.running.step), []

    def committed(self, done: Any, position: object) -> None:
        self.heard.append(("committed", done.running.step, position))

    def begin(self, recovery: Recovery) -> None:
        self.heard.append(("begin", recovery.step))

    def release(self, step: int) -> str:
        return f"after {step}"

    def data_token(self) -> str:
        return "token"

    def open(self, first_step: int, token: object) -> None:
        self.heard.append(("open", first_step, token))

    def repair_keepers(self, stuck: Stuck, world: object, quiet: bool) -> Sequence[Any] | None:
        self.heard.append(("repair", stuck.why, quiet))
        return self.repaired


class Full(Listening):
    """No line of metrics can be written."""

    def on_step(self, metrics: Any, timeline: Any, plan: Any) -> None:
        raise OSError("No space left on device")


def committer_of(*finished: int, committed: int, listener: Listening | None = None) -> tuple[Committer, Any]:
    """One with these finished steps, and what its parts are told."""
    told: Any = Told()
    listener = listener or Listening()
    log = CommitLog(committed=committed)
    for step in finished:
        done = collected(step, 1)
        done.running.assignment = None
        log.add(done)
    events = Events(listener)
    made = Committer(log=log, state=told, account=told, listener=listener, events=events, source=told)
    return made, told


def test_steps_are_committed_in_order_each_with_the_position_of_the_data_after_it() -> None:
    listener = Listening()
    committer, told = committer_of(5, 6, committed=4, listener=listener)
    committer.settle((), quiet=False)
    assert listener.steps == [5, 6] and committer.committed == 6 and committer.num_open == 0
    assert told.heard == [("committed", 5, "after 5"), ("committed", 6, "after 6")]


def test_a_step_whose_line_cannot_be_written_does_not_count() -> None:
    committer, told = committer_of(5, 6, committed=4, listener=Full())
    with pytest.raises(OSError, match="No space left"):
        committer.settle((), quiet=False)
    assert committer.committed == 4 and committer.num_open == 0 and told.heard == []


def test_what_a_recovery_makes_safe_is_committed_before_training_goes_on_from_it() -> None:
    committer, told = committer_of(5, 6, committed=4)
    finished = committer.log.finished
    committer.go_on_from(Recovery(generation=2, origin=Origin(step=5), newly_safe=(finished[0],)))
    assert told.heard == [("committed", 5, "after 5"), ("begin", 5)], "the data stands where it should"
    assert committer.committed == 5 and committer.num_open == 0, "step 6 is computed again"


def test_the_data_is_opened_again_where_committed_steps_are_lost() -> None:
    committer, told = committer_of(committed=4)
    committer.go_on_from(Recovery(generation=2, origin=Origin(step=2), lost_steps=2))
    assert told.heard == [("begin", 2), ("open", 3, "token")] and committer.committed == 2


def test_a_state_on_disk_makes_the_steps_up_to_it_count_also_those_nobody_reported() -> None:
    committer, _ = committer_of(5, 6, committed=4)
    committer.commit_until(5)
    assert committer.committed == 5 and committer.num_open == 1
    committer.commit_until(-1)
    assert committer.committed == 5
    committer, _ = committer_of(committed=4)
    committer.commit_until(7)
    assert committer.committed == 7


def test_shards_that_a_keeper_has_lost_are_awaited_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    committer, told = committer_of(committed=4)
    committer.log.add(collected(5, 1, "lost"))
    answers: dict[str, Any] = {"lost": RuntimeError("gone"), "given": True}
    monkeypatch.setattr("actors.state.commit_log._all_held", lambda asked: "lost" not in asked)
    monkeypatch.setattr("actors.state.commit_log._failure", lambda asked: "gone" if asked == "lost" else "")
    monkeypatch.setattr("ray.wait", lambda asked, num_returns, timeout: ([a for a in asked if a in answers], []))
    committer.settle((), quiet=False)
    assert told.heard == [], "without workers nobody can give it"
    told.repaired = [snapshot(5, acknowledgements=("given",))]
    world: Any = ("a seat",)
    committer.settle(world, quiet=True)
    assert told.heard == [("repair", "gone", True)] and committer.committed == 4
    committer.log._queue[0].collected.running.assignment = None  # type: ignore[assignment]
    committer.settle(world, quiet=True)
    assert committer.committed == 5


def test_a_new_feeder_starts_at_the_first_step_that_is_not_committed() -> None:
    listener = Listening()
    committer, told = committer_of(5, committed=4, listener=listener)
    committer.reopen_data("the feeder died")
    assert told.heard == [("open", 5, "token")] and listener.kinds == [FeederLost]
