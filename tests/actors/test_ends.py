"""Whatever ends a run leaves its last committed step on disk and no actor behind."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.feed.step_source import feeder_of
from actors.held_state import HeldShard
from actors.names import run_id
from actors.outcome import Events, Exit, Outcome, StopRun, Superseded, continues, only_in_memory
from actors.records.events import FeederLost, RunFinished
from actors.run.controller import Controller
from actors.run.ending import Ending
from actors.run.rescue import rescue
from actors.state.checkpoint_files import load
from actors.state.keeper import Standing
from actors.step import DataLost
from app.bench.lab import OPEN_END, Lab, LabRun
from data.errors import DataError, DataIOError
from tests.actors.fakes import (
    Handle,
    KeepersHere,
    Listening,
    SourceHere,
    StateHere,
    Writing,
    config_of,
    controller_of,
    pool_here,
    state_of,
)
from tests.actors.state.test_run_state import write_checkpoint
from tests.families.kit import MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as made:
        made.add_node(workers=1)
        yield made


def left_behind(run: LabRun) -> list[str]:
    """Named actors of a run, once those that are ending have had time to."""
    prefix, deadline = f"{run_id(run.run_dir)}/", time.monotonic() + 180
    while True:
        named = ray.util.list_named_actors(all_namespaces=True)
        found = [entry["name"] for entry in named if entry["name"].startswith(prefix)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def checkpoints(run: LabRun) -> list[str]:
    return sorted(path.parent.name for path in (run.run_dir / "checkpoints").glob("step-*/COMPLETE"))


@pytest.mark.long
def test_a_full_disk_under_the_listener_ends_with_the_step_before_on_disk(lab: Lab) -> None:
    """Step 5 is held by keepers, but its line of metrics is not written: step 4 is the last one that counts."""
    run = lab.start(lab.config("full", train={"steps": OPEN_END}, workers={"max": 1}))
    write, event = run.on_step, run.on_event

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def until_five(metrics: Any, timeline: Any, plan: Any) -> None:
        if metrics.step == 5:
            run.on_event = full  # type: ignore[method-assign]
            full()
        write(metrics, timeline, plan)

    run.on_step, run.on_event = until_five, event  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left"):
        run.join()
    lab.runs.remove(run)
    assert run.steps() == list(range(5)) and checkpoints(run) == ["step-4"]
    assert left_behind(run) == [] and run.controller.left == ""


class Rejecting:
    """A feeder that rejects the data from step 6 on, and cannot tell its last positions any more."""

    def __init__(self, feeder: Any) -> None:
        self._feeder = feeder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feeder, name)


@ray.remote(num_cpus=0)
def reject() -> None:
    raise DataError("00001.tar does not exist")


class Call:
    """`handle.method` whose `remote` fails from this step on."""

    def __init__(self, method: Any, until: int) -> None:
        self._method, self._until = method, until

    def remote(self, step: int) -> Any:
        return self._method.remote(step) if step < self._until else reject.remote()


@pytest.mark.long
def test_rejected_data_ends_with_the_last_committed_step_on_disk(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lab.config("rejected", train={"steps": OPEN_END}, workers={"max": 1})

    def feeder() -> Any:
        found = Rejecting(made()())
        for name, until in (("items", 9), ("batches", 9), ("token", 3)):
            setattr(found, name, Call(getattr(found._feeder, name), until))
        return found

    def made() -> Any:
        from app.run.controller_process import runtime_config
        from ops.models.folders import resolve

        model, geometry = resolve(config.model)
        return feeder_of(runtime_config(config, Path(config.run.dir) / config.run.name), model, geometry)

    monkeypatch.setattr(ray, "kill", _kill_wrapped(ray.kill))
    run = lab.start(config, feeder=feeder)
    with pytest.raises(DataError, match=r"00001\.tar does not exist"):
        run.join()
    lab.runs.remove(run)
    last = run.steps()[-1]
    assert last >= 3 and checkpoints(run) == [f"step-{last}"]
    meta, _ = load(run.run_dir / "checkpoints" / f"step-{last}")
    position = meta["data_token"]  # an earlier one serves, or none: the next feeder walks on from there
    assert position is None or position["step"] <= last + 1
    assert left_behind(run) == []


def _kill_wrapped(kill: Any) -> Any:
    def unwrapped(actor: Any, **options: Any) -> None:
        kill(actor._feeder if isinstance(actor, Rejecting) else actor, **options)

    return unwrapped


def test_a_last_checkpoint_that_lost_its_workers_is_written_from_keepers_before_the_run_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "kill", lambda monitor, no_restart: None)
    state, listener = StateHere(-1, 5), Listening()
    outcome = controller_of(state, events=Events(listener)).train()
    assert state.asked == ["keep_last", "seal_last", "free_memory"]
    assert outcome.code == 0 and listener.kinds[-1] is RunFinished


class SourceDead(SourceHere):
    """A feeder that has died; another one tells the account where no `error` keeps it from its data."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.opened: list[int] = []
        self._late = error  # from the second time on

    def open(self, first_step: int, token: Any) -> dict[str, Any]:
        self.opened.append(first_step)
        self.error = self._late if len(self.opened) > 1 else None
        return super().open(first_step, token)

    def ledger(self) -> dict[str, Any]:
        if len(self.opened) == 1:
            raise DataLost("the feeder died")
        return {"delivered": 12}


@pytest.mark.parametrize(
    ("error", "account"), [(None, {"delivered": 12}), (DataIOError("00001.tar does not exist"), {})]
)
def test_a_feeder_that_dies_after_the_last_step_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, account: dict[str, int]
) -> None:
    monkeypatch.setattr(ray, "kill", lambda monitor, no_restart: None)
    source, listener = SourceDead(error), Listening()
    outcome = controller_of(StateHere(5), source=source, events=Events(listener)).train()
    assert outcome.code == 0 and source.opened == [6, 6], "no step is left, and the account is that of all"
    assert [type(event) for event in listener.told[-2:]] == [FeederLost, RunFinished]
    assert listener.told[-1].ledger == account


@pytest.mark.long
def test_the_account_of_a_feeder_that_dies_after_the_last_step_is_that_of_any(lab: Lab) -> None:
    calm = lab.start(lab.config("calm", train={"steps": 6}, workers={"max": 1}))
    calm.join()
    run = lab.start(lab.config("fed", train={"steps": 6}, workers={"max": 1}))
    write = run.on_step

    def last(metrics: Any, timeline: Any, plan: Any) -> None:
        write(metrics, timeline, plan)
        if metrics.step == 5:
            ray.kill(run.controller.source._feeder)

    run.on_step = last  # type: ignore[method-assign]
    run.join()
    accounts = [event.ledger for one in (calm, run) for event in one.events if isinstance(event, RunFinished)]
    assert len(accounts) == 2 and accounts[0] == accounts[1] and accounts[0]["delivered"]


def test_a_last_checkpoint_that_cannot_be_written_fails_the_run() -> None:
    outcome = controller_of(StateHere(3)).train()
    assert outcome.code == 1 and "checkpoint of step 5 was not written" in outcome.reason


def test_a_run_that_is_asked_to_end_while_its_last_checkpoint_hangs_does_not_begin_it_twice() -> None:
    listener = Listening()
    controller = controller_of(state := StateHere(3), events=Events(listener))
    controller.lookout.stop = "stopped by a signal"
    controller._looked_at = time.monotonic() + 1000
    with pytest.raises(StopRun) as stopped:
        controller.ending.finish((), controller._is_stopped)
    assert stopped.value.outcome.code == Exit.RESUMABLE and "checkpoint of step 5" in stopped.value.outcome.reason
    assert state.writer.hurries and state.asked == []


def test_what_no_disk_has_taken_stays_in_memory_and_is_named() -> None:
    state = StateHere(3, frees=False, full=OSError(errno.ENOSPC, "No space left on device"))
    monitor = Handle()
    made = controller_of(state, monitor=monitor, source=SourceHere(ZeroDivisionError("a defect")))
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert monitor.stopped.asked == [()]
    assert made.left == only_in_memory(5, 3, Path("runs/fake"))
    assert "6 steps are committed" in made.left and "checkpoint after 4 steps" in made.left and "--resume" in made.left


def test_steps_are_counted_before_the_last_checkpoint_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two, a run would go on from a step of which it has no metrics."""
    monkeypatch.setattr(ray, "kill", lambda monitor, no_restart: None)
    heard: list[object] = []
    state: Any = SimpleNamespace(
        keep_last=lambda world, commits: heard.append("written") or 7,
        seal_last=lambda: heard.append("whole"),
        free_memory=lambda committed: True,
    )
    committer: Any = SimpleNamespace(
        state=state, log=None, committed=7, commit_until=lambda step: heard.append(("counted", step))
    )
    ends = Ending(config=config_of(), events=Events(Listening()), committer=committer, monitor=Handle(), parts=())  # type: ignore[arg-type]
    ends.keep_last(())
    assert heard == ["written", ("counted", 7), "whole"]


def test_a_checkpoint_that_nobody_could_be_told_of_does_not_keep_the_last_state_from_the_disk() -> None:
    class Deaf(Listening):
        def on_checkpoint(self, folder: Path, step: int) -> None:
            raise RuntimeError("Ray Train has ended")

    events = Events(Deaf())
    with pytest.raises(RuntimeError):
        events.checkpoint(Path("step-3"), 3)
    events.end()
    events.checkpoint(Path("step-3"), 3)


def no_pool() -> None:
    raise ValueError("Ray is gone")


def ending(error: Exception) -> Controller:
    """A controller whose run ends with this error as soon as its data is opened."""
    return controller_of(StateHere(-1, frees=False), pool=pool_here(close=no_pool), source=SourceHere(error))


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ZeroDivisionError("a defect"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (RuntimeError("the planner died three times"), True),
        (ray.exceptions.RayTaskError("plan", "traceback", KeyError("lost")), True),
        (ray.exceptions.OutOfMemoryError("killed"), False),
        (Superseded("taken over"), False),
    ],
)
def test_every_error_but_those_that_another_controller_answers_keeps_the_last_step(
    error: Exception, kept: bool
) -> None:
    made = ending(error)
    with pytest.raises(type(error)):
        made.train()
    state: Any = made.state
    assert state.asked == (["keep_last", "seal_last", "free_memory"] if kept else [])
    source, planner = made.source, made.planner
    assert source.closed and planner.closed, "what cannot be ended does not keep the others"  # type: ignore[attr-defined]


class Unread(Listening):
    def newest_line(self) -> tuple[int, int] | None:
        raise OSError(errno.EIO, "Input/output error", "metrics.jsonl")


def shard_of(step: int) -> HeldShard:
    return HeldShard(step=step, generation=3, lo=0, hi=10, total=10, num_bytes=160)


def test_an_error_before_a_controller_knows_how_far_the_run_is_keeps_what_its_keepers_hold(tmp_path: Path) -> None:
    """The file server did not answer when the newest line of metrics was read, and the keepers were ended."""

    keepers = KeepersHere(Standing(committed=450, generation=3), a=[shard_of(450)])
    state = state_of(tmp_path, keepers=keepers, model=MODEL)
    made = controller_of(state, events=Events(Unread()))
    with pytest.raises(OSError, match="Input/output error"):
        made.train()
    assert state.writer.saved == [450] and ("close",) not in keepers.told  # type: ignore[attr-defined]
    assert "451 steps are committed, no checkpoint is on disk" in made.left, "the writer here writes nothing"


class Until137(Listening):
    def newest_line(self) -> tuple[int, int] | None:
        return 137, 3


@pytest.mark.parametrize("writes", [True, False])
def test_an_error_before_the_first_state_is_chosen_does_not_drop_a_step_that_counts_and_was_not_told_to_keepers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """With snapshot.every: 50 workers handed over step 137 at a clean end. Storage had no answer for the next start and
    had one a moment later: the run was 37 steps shorter."""
    write_checkpoint(tmp_path, 100, {})
    keepers = KeepersHere(Standing(committed=100, generation=3), a=[shard_of(100), shard_of(137)])
    writer = Writing(lambda step: writes and write_checkpoint(tmp_path, step, {}), writes=writes)
    state = state_of(tmp_path, keepers=keepers, writer=writer, model=MODEL)
    monkeypatch.setattr(state, "first", unanswered)
    made = controller_of(state, config=config_of(tmp_path), events=Events(Until137()))
    with pytest.raises(OSError, match="Transport endpoint"):
        made.train()
    assert writer.saved == [137] and (("close",) in keepers.told) == writes
    assert ("138 steps are committed, on disk is the checkpoint after 101 steps" in made.left) == (not writes)


def unanswered(recorded: tuple[int, int] | None) -> None:
    raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", "checkpoints")


def test_without_the_newest_line_of_metrics_keepers_stay_as_long_as_they_hold_more_than_the_disk(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path, 100, {})
    for steps, stays in (((100, 137), True), ((100,), False)):
        keepers = KeepersHere(Standing(committed=100, generation=3), a=[shard_of(step) for step in steps])
        state = state_of(tmp_path, keepers=keepers, model=MODEL)
        made = controller_of(state, config=config_of(tmp_path), events=Events(Unread()))
        with pytest.raises(OSError, match="Input/output error"):
            made.train()
        assert state.writer.saved == [100] and (("close",) in keepers.told) == (not stays)  # type: ignore[attr-defined]
        assert made.left.startswith("up to 138 steps are committed") == stays


@pytest.mark.parametrize(
    ("told", "on_disk", "newest"), [(399, 399, 499), (-1, None, 99), (399, 399, 400), (-1, None, 0)]
)
def test_a_newest_step_that_could_not_be_written_without_a_controller_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: int, on_disk: int | None, newest: int
) -> None:
    """Keepers had heard of the step before, which is on disk, and were ended: "its last committed step is on disk"."""
    if on_disk is not None:
        write_checkpoint(tmp_path, on_disk, {})
    keepers = KeepersHere(
        Standing(committed=told, generation=3), a=[shard_of(step) for step in (told, newest) if step >= 0]
    )
    state = state_of(tmp_path, keepers=keepers, writer=Writing(writes=False), model=MODEL)
    monkeypatch.setattr("actors.run.rescue.assemble_state", lambda *parts: state)
    left = rescue(config_of(tmp_path, model=MODEL), (newest, 3))
    assert ("close",) not in keepers.told and left.startswith(f"{newest + 1} steps are committed")


def test_what_keepers_hold_stays_where_storage_does_not_answer_without_a_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers = KeepersHere(a=[shard_of(99)])
    state = state_of(tmp_path, keepers=keepers, model=MODEL)
    monkeypatch.setattr("actors.run.rescue.assemble_state", lambda *parts: state)
    monkeypatch.setattr(state.disk, "newest", lambda *until: unanswered(None))
    left = rescue(config_of(tmp_path, model=MODEL), (99, 3))
    assert ("close",) not in keepers.told and left.startswith("100 steps are committed")


@pytest.mark.parametrize(("recorded", "saved"), [(None, 100), ((137, 3), 137), ((137, 4), 100)])
def test_what_is_left_of_a_run_without_a_controller_goes_on_from_its_newest_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: tuple[int, int] | None, saved: int
) -> None:
    """With snapshot.every: 50 step 100 was the last snapshot, and at a clean end workers handed over that of step 137,
    of which keepers have heard no commit."""
    keepers = KeepersHere(Standing(committed=100, generation=3), a=[shard_of(100), shard_of(137)])
    state = state_of(tmp_path, keepers=keepers, model=MODEL)
    monkeypatch.setattr("actors.run.rescue.assemble_state", lambda *parts: state)
    left = rescue(config_of(tmp_path, model=MODEL), recorded)
    assert state.writer.saved == [saved] and left.startswith(f"{saved + 1} steps are committed")  # type: ignore[attr-defined]


def test_an_outcome_keeps_the_last_step_too() -> None:
    made = ending(StopRun(Outcome(code=75, reason="Ctrl-C", last_step=5)))
    assert made.train().code == 75 and made.state.asked == ["keep_last", "seal_last", "free_memory"]  # type: ignore[attr-defined]


def test_the_clusters_faults_are_told_from_those_of_what_ran_on_it() -> None:
    assert continues(ray.exceptions.GetTimeoutError("silent"))
    assert not continues(ray.exceptions.RayTaskError("plan", "traceback", KeyError("lost")))
    assert not continues(OSError("full"))
