"""A step counts when all its shards are held and its metrics are written, in order, and never before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.held_state import Origin, Snapshot
from actors.letters import Failures
from actors.outcome import Events, NotRecorded
from actors.records.events import CommitSlow, FeederLost, StorageAwaited, StorageBack
from actors.run.committer import Committer
from actors.state.recovery import CommitLog, Recovery
from actors.state.run_state import StuckCommit
from actors.step import GenerationLost
from tests.actors.fakes import Listening, collected, snapshot

LOST = ray.exceptions.ActorDiedError()


class Told:
    """State, data and metrics of a run; `heard` is what they were called with, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.avoid: tuple[str, ...] = ()
        self.held_again: list[int] = []  # steps of the shards that others were given in a repair
        self.repaired: Sequence[Any] | None = None  # answers to come, once others were given the shards
        self.gone: StuckCommit | None = None
        self.keepers = SimpleNamespace(hold=lambda snapshots, relays: [name for one in snapshots for name in one.names])

    def lost_keepers(self) -> StuckCommit | None:
        return self.gone

    def records(self, done: Any) -> tuple[Any, list[Any]]:
        return SimpleNamespace(step=done.running.step), []

    def after_commit(self, done: Any, position: object, relays: object) -> None:
        self.heard.append(("committed", done.running.step, position))

    def forget_first(self) -> None:
        self.heard.append(("forget_first",))

    def release(self, step: int) -> str:
        return f"after {step}"

    def data_token(self, committed: int) -> str:
        return f"token of {committed}"

    def open(self, first_step: int, token: object) -> None:
        self.heard.append(("open", first_step, token))

    def repair_keepers(
        self, stuck: StuckCommit, world: object, quiet: bool, commits: CommitLog, shards: Sequence[Snapshot]
    ) -> Sequence[Any] | None:
        self.held_again += [one.step for one in shards]
        self.heard.append(("repair", stuck, quiet, commits.newest))
        return self.repaired


class Full(Listening):
    """No line of metrics can be written."""

    def on_step(self, metrics: Any, timeline: Any, plan: Any) -> None:
        raise OSError("No space left on device")


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


def committer_of(*finished: int, committed: int, listener: Listening | None = None) -> tuple[Committer, Any]:
    """One with these finished steps, which nobody has to hold, and the calls that its parts get."""
    told: Any = Told()
    listener = listener or Listening()
    made = Committer(
        state=told, account=told, listener=listener, events=Events(listener), source=told, committed=committed
    )
    for step in finished:
        made.add(collected(step, 1))
    return made, told


def waiting(*answers: str, patience_s: float = 60.0, listener: Listening | None = None) -> tuple[Any, Any]:
    """A committer whose step 7 waits for these, and the calls that its parts get."""
    committer, told = committer_of(committed=6, listener=listener)
    committer.patience_s = patience_s
    committer.add(collected(7, 1, held_as(7, *answers)))
    return committer, told


def held_as(step: int, *answers: str, **more: Any) -> Snapshot:
    """A shard whose keepers give these answers."""
    return snapshot(step, names=answers, **more)


def settle(committer: Committer) -> None:
    """With workers that could give their shards to other keepers."""
    world: Any = ("a seat",)
    committer.settle(world, quiet=False)


def repairs(told: Told) -> list[StuckCommit]:
    return [heard[1] for heard in told.heard if heard[0] == "repair"]


def test_steps_are_committed_in_order_each_with_the_position_of_the_data_after_it() -> None:
    listener = Listening()
    committer, told = committer_of(5, 6, committed=4, listener=listener)
    committer.settle((), quiet=False)
    assert listener.steps == [5, 6] and committer.committed == 6 and committer.num_open == 0
    assert told.heard == [("committed", 5, "after 5"), ("committed", 6, "after 6")]


def test_a_step_waits_for_all_its_shards_and_those_after_it_wait_for_it(ray_answers: dict[str, Any]) -> None:
    committer, told = waiting("a", "b")
    committer.add(collected(8, 1, held_as(8, "c")))
    ray_answers |= {"a": True, "c": True}
    settle(committer)
    assert committer.committed == 6
    ray_answers["b"] = True
    settle(committer)
    assert committer.committed == 8 and committer.num_open == 0 and repairs(told) == []


@pytest.mark.parametrize("answer", [LOST, False])
def test_a_shard_that_is_not_held_is_not_forgotten_until_others_hold_it(
    ray_answers: dict[str, Any], answer: object
) -> None:
    committer, told = waiting("a", "b")
    ray_answers |= {"a": answer, "b": True}
    committer.settle((), quiet=False)
    assert told.heard == [], "without workers nobody can give it"
    for _ in range(3):  # such as while workers are too busy to be given new keepers
        settle(committer)
    assert committer.committed == 6 and len(repairs(told)) == 3
    told.repaired = ["c"]
    settle(committer)
    settle(committer)
    assert committer.committed == 6 and len(repairs(told)) == 4
    ray_answers["c"] = True
    settle(committer)
    assert committer.committed == 7 and len(repairs(told)) == 4


def test_a_refused_shard_says_why(ray_answers: dict[str, Any]) -> None:
    committer, told = waiting("a")
    ray_answers["a"] = ray.exceptions.RayTaskError("put", "traceback", MemoryError("the node can spare 1 MiB"))
    settle(committer)
    assert told.heard == [("repair", StuckCommit(why="MemoryError: the node can spare 1 MiB"), False, 7)]


def test_a_keeper_that_is_silent_for_too_long_counts_as_gone(ray_answers: dict[str, Any]) -> None:
    for patience_s, counts in ((60.0, False), (-1.0, True)):
        committer, told = waiting("a", patience_s=patience_s)
        settle(committer)
        assert bool(repairs(told)) == counts


def test_a_lost_keeper_is_replaced_also_when_nobody_waits_for_it(ray_answers: dict[str, Any]) -> None:
    """Workers wait for its word of the last commit before they write over the version before it."""
    committer, told = committer_of(committed=6)
    told.gone = StuckCommit(why="k is gone")
    settle(committer)
    assert repairs(told) == [StuckCommit(why="k is gone")]


def test_shards_that_devices_still_copy_are_given_to_keepers_when_they_are_there(ray_answers: dict[str, Any]) -> None:
    """A keeper that waited for one would answer nobody else."""
    committer, told = committer_of(committed=6)
    done = collected(7, 1, held_as(7, "a", copied="copy"))
    done.reports = (SimpleNamespace(worker="w3"),)
    committer.add(done)
    ray_answers["a"] = True
    settle(committer)
    assert committer.committed == 6, "the copy has not ended"
    told.repaired = []
    told.gone = StuckCommit(why="k is gone")
    settle(committer)
    assert committer.committed == 6, "nor is it there because another keeper was lost"
    assert told.held_again == [], "no keeper takes it for whole"
    told.gone = None
    ray_answers["copy"] = None
    settle(committer)
    assert committer.committed == 7


def test_a_repair_gives_others_the_shards_of_all_uncommitted_steps(ray_answers: dict[str, Any]) -> None:
    committer, told = committer_of(committed=6)
    for step in (7, 8):
        committer.add(collected(step, 1, held_as(step, "late")))
    told.gone = StuckCommit(why="k is gone")
    settle(committer)
    assert told.held_again == [7, 8]


@pytest.mark.parametrize(
    ("error", "failures"),
    [
        (LOST, Failures(dead=["w3"])),
        (
            ray.exceptions.RayTaskError("copied", "traceback", RuntimeError("a sticky error")),
            Failures(failed={"w3": "its state was not copied: a sticky error"}),
        ),
    ],
    ids=["its worker died", "it failed"],
)
def test_a_copy_that_never_ends_breaks_the_generation(
    ray_answers: dict[str, Any], error: Exception, failures: Failures
) -> None:
    committer, _ = committer_of(committed=6)
    done = collected(7, 1, held_as(7, "a", copied="copy"))
    done.reports = (SimpleNamespace(worker="w3"),)
    committer.add(done)
    ray_answers["copy"] = error
    with pytest.raises(GenerationLost) as lost:
        settle(committer)
    assert lost.value.failures == failures


def test_a_worker_that_has_not_copied_its_state_for_long_is_named(
    ray_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step no other step's limit ends it."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    committer, _ = committer_of(committed=6)
    committer.patience_s = 600.0
    done = collected(7, 1, held_as(7, "a", copied="copy"))
    done.reports = (SimpleNamespace(worker="w3"),)
    committer.add(done)
    monkeypatch.setattr(time, "monotonic", lambda: now + 590)
    settle(committer)
    monkeypatch.setattr(time, "monotonic", lambda: now + 610)
    with pytest.raises(GenerationLost) as lost:
        settle(committer)
    assert lost.value.failures == Failures(failed={"w3": "its state has not been copied in 610 s"})


def test_a_step_that_waits_for_slow_keepers_is_told_once(
    ray_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, now = Listening(), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    committer, told = waiting("a", patience_s=600.0, listener=listener)
    for later in (10, 40, 50):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        settle(committer)
    assert [(type(e), e.step) for e in listener.told] == [(CommitSlow, 7)] and told.heard == [], "slow is not lost"
    monkeypatch.setattr(time, "monotonic", lambda: now + 700)
    settle(committer)
    assert repairs(told) == [StuckCommit(why="no answer in 700 s", overdue=True)]


def test_a_step_whose_line_cannot_be_written_does_not_count() -> None:
    committer, told = committer_of(5, 6, committed=4, listener=Full())
    with pytest.raises(OSError, match="No space left"):
        committer.settle((), quiet=False)
    assert committer.committed == 4 and committer.num_open == 0 and told.heard == []


def test_a_step_counts_when_it_is_committed_and_what_fails_after_it_is_computed_again() -> None:
    """Two steps are held; the line of the second cannot be written."""

    class FullAtEight(Listening):
        def on_step(self, metrics: Any, timeline: Any, plan: Any) -> None:
            if metrics.step == 8:
                raise OSError("No space left on device")
            super().on_step(metrics, timeline, plan)

    committer, told = committer_of(7, 8, committed=6, listener=FullAtEight())
    with pytest.raises(OSError, match="No space left"):
        committer.settle((), quiet=False)
    assert committer.committed == 7 and committer.num_open == 0 and told.heard == [("committed", 7, "after 7")]


class Storage(Listening):
    """Takes no step from `first` on while `full`."""

    full, first = True, 0

    def __init__(self) -> None:
        super().__init__()
        self.tries: list[int] = []

    def on_step(self, metrics: Any, timeline: Any, plan: Any) -> None:
        self.tries.append(metrics.step)
        if self.full and metrics.step >= self.first:
            raise NotRecorded("No space left on device: runs/x") from OSError(28, "No space left on device")
        super().on_step(metrics, timeline, plan)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Monotonic seconds, of which sleeping takes none."""
    now = [1000.0]
    monkeypatch.setattr("actors.run.committer.time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: None))
    return now


def test_steps_that_cannot_be_recorded_wait_and_are_recorded_in_order_when_they_can_be(clock: list[float]) -> None:
    storage = Storage()
    said: list[str] = []
    committer, told = committer_of(7, 8, committed=6, listener=storage)
    committer.say = said.append
    for _ in range(700):
        committer.settle((), quiet=False)
        clock[0] += 1.0
    assert committer.committed == 6 and committer.num_open == 2 and told.heard == [], "keepers hear of nothing"
    assert set(storage.tries) == {7} and committer.log == CommitLog(committed=6)
    assert [event.seconds for event in storage.told] == [0.0, 600.0] and storage.kinds == [StorageAwaited] * 2
    assert said[0] == (
        "step 7 waits to be recorded: No space left on device: runs/x. Training goes on by itself as soon as it can "
        "be; after 12 h the run ends"
    )
    storage.full = False
    committer.settle((), quiet=False)
    assert storage.steps == [7, 8] and committer.committed == 8 and not committer.awaits_storage
    assert told.heard == [("committed", 7, "after 7"), ("committed", 8, "after 8")]
    assert storage.kinds[2:] == [StorageBack] and storage.told[2].seconds == 700.0 and said[2:] == [""]


def test_a_step_is_tried_once_a_second(clock: list[float]) -> None:
    storage = Storage()
    committer, _ = committer_of(7, committed=6, listener=storage)
    for _ in range(20):
        committer.settle((), quiet=False, timeout_s=0.05)
        clock[0] += 0.25
    assert len(storage.tries) == 5


def test_a_generation_that_forms_meanwhile_goes_on_from_the_last_step_that_counts(clock: list[float]) -> None:
    """Also where the first that notices is that generation."""
    storage = Storage()
    committer, told = committer_of(7, 8, committed=6, listener=storage)
    told.recover = lambda commits: Recovery(origin=Origin(step=commits.newest))
    found = committer.go_on_from(Recovery(origin=Origin(step=8), newly_safe=committer.log.finished))
    assert found.step == 6 and committer.committed == 6 and committer.num_open == 0
    committer.add(collected(7, 2))
    storage.full = False
    clock[0] += 1.0
    committer.settle((), quiet=False)
    assert storage.steps == [7] and committer.committed == 7


def test_data_is_opened_again_for_a_step_that_was_recorded_just_before_the_disk_was_full(clock: list[float]) -> None:
    """Step 7 counts, so its data is gone; with a snapshot of step 6 alone it is computed again."""
    storage = Storage()
    storage.first = 8
    committer, told = committer_of(7, 8, committed=6, listener=storage)
    told.recover = lambda commits: Recovery(origin=Origin(step=6), lost_steps=1)
    committer.go_on_from(Recovery(origin=Origin(step=8), newly_safe=committer.log.finished))
    assert storage.steps == [7] and committer.committed == 6 and ("open", 7, "token of 6") in told.heard


def test_a_run_whose_storage_does_not_come_back_ends_with_its_error(clock: list[float]) -> None:
    committer, _ = committer_of(7, committed=6, listener=Storage())
    committer.settle((), quiet=False)
    clock[0] += 12 * 3600.0 + 1.0
    with pytest.raises(OSError, match="No space left"):
        committer.settle((), quiet=False)
    assert committer.committed == 6 and committer.num_open == 0


def test_the_records_of_a_step_are_made_once_however_often_they_are_tried(clock: list[float]) -> None:
    """Its seconds are those since the end of the step before it: made again, they would be those since its own."""
    storage, made = Storage(), list[int]()
    committer, told = committer_of(7, committed=6, listener=storage)
    records = told.records
    told.records = lambda done: (made.append(done.running.step), records(done))[1]
    committer.settle((), quiet=False)
    clock[0] += 2.0
    storage.full = False
    committer.settle((), quiet=False)
    assert storage.tries == [7, 7] and storage.steps == [7] and made == [7]


def test_keepers_that_were_given_the_shards_have_as_long_as_those_before_them(
    ray_answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each look would repair them once more, and eight repairs end the run."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    committer, told = waiting("a", patience_s=60.0)
    told.repaired = ["c"]
    for later, found in ((61, 1), (62, 1), (120, 1), (122, 2)):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        settle(committer)
        assert len(repairs(told)) == found, later


def test_where_the_newest_line_cannot_be_read_any_later_state_may_count() -> None:
    class Unreadable(Listening):
        def newest_line(self) -> tuple[int, int] | None:
            raise OSError("Stale file handle")

    committer, told = committer_of(committed=-1, listener=Unreadable())
    told.standing = SimpleNamespace(committed=4)
    with pytest.raises(OSError, match="Stale"):
        committer.first()
    assert committer.log == CommitLog(committed=4, unread=True)


def test_what_a_recovery_makes_safe_is_committed_before_training_goes_on_from_it() -> None:
    committer, told = committer_of(5, 6, committed=4)
    finished = committer.log.finished
    committer.go_on_from(Recovery(origin=Origin(step=5), newly_safe=(finished[0],)))
    assert told.heard == [("committed", 5, "after 5"), ("forget_first",)], "the data stands where it should"
    assert committer.committed == 5 and committer.num_open == 0, "step 6 is computed again"


def test_the_data_is_opened_again_where_committed_steps_are_lost() -> None:
    committer, told = committer_of(committed=4)
    committer.go_on_from(Recovery(origin=Origin(step=2), lost_steps=2))
    assert told.heard == [("forget_first",), ("open", 3, "token of 2")] and committer.committed == 2


def test_training_never_goes_on_past_a_finished_step_that_is_not_committed() -> None:
    committer, told = committer_of(7, 8, committed=6)
    with pytest.raises(AssertionError, match=r"\[7\] are finished but not committed"):
        committer.restart(7)
    with pytest.raises(AssertionError, match="step 8 is committed before step 7"):
        committer.go_on_from(Recovery(origin=Origin(step=8), newly_safe=(committer.log.finished[1],)))
    assert told.heard == []


def test_a_state_on_disk_makes_the_steps_up_to_it_count_also_those_nobody_reported() -> None:
    committer, _ = committer_of(5, 6, committed=4)
    committer.commit_until(5)
    assert committer.committed == 5 and committer.num_open == 1
    committer.commit_until(-1)
    assert committer.committed == 5
    committer, _ = committer_of(committed=4)
    committer.commit_until(7)
    assert committer.committed == 7


def test_a_new_feeder_starts_at_the_first_step_that_is_not_committed() -> None:
    listener = Listening()
    committer, told = committer_of(5, committed=4, listener=listener)
    committer.reopen_data("the feeder died")
    assert told.heard == [("open", 5, "token of 4")] and listener.kinds == [FeederLost]


def test_keepers_hear_of_a_commit_by_relays_only_while_a_step_runs_after_it() -> None:
    """When none runs the generation may end, and the start of the next one, sent directly, would overtake it."""
    made, told = committer_of(7, committed=6)
    by: list[object] = []
    made.relays = "relays"  # type: ignore[assignment]
    told.after_commit = lambda done, position, relays: by.append(relays)
    made.settle((), quiet=False)
    made.add(collected(8, 1))
    made.settle((), quiet=True)
    made.add(collected(9, 1))
    made.go_on_from(Recovery(origin=Origin(step=9), newly_safe=(collected(9, 1),)))
    assert by == ["relays", None, None]
