"""Which ends of a controller Ray Train answers with another one, and which end the run."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, OutOfMemoryError, RayTaskError

from actors.outcome import Outcome
from actors.records.events import RunFailed
from app.run.controller_process import ControllerStart, code_of, controller_loop
from app.run.lock import FolderLock, lock_path
from app.run.outcomes import OUTCOME, START_NOTE, note_start, read_outcome, tell_failure, told_so_far, worth_keeping
from app.run.recorder import Recorder
from app.settings.config import RunConfig
from data.errors import DataIOError

LEFT = "7 steps are only in memory"
DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"


def failing(error: Exception) -> Callable[..., NoReturn]:
    """Stands for what raises this error whenever it is called."""

    def fail(*given: Any, **named: Any) -> NoReturn:
        raise error

    return fail


class FailingController:
    """A controller whose run ends with an error."""

    left = LEFT

    def __init__(self, error: Exception) -> None:
        self.train = failing(error)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> dict[str, object]:
    start = lambda *given, **named: FailingController(error)  # noqa: E731
    monkeypatch.setattr("actors.run.assemble.start_controller", start)
    controller_loop(settings(folder))
    outcome: dict[str, object] = json.loads((folder / OUTCOME).read_text())
    return outcome


@pytest.mark.parametrize(
    "error",
    [OutOfMemoryError("killed"), GetTimeoutError("silent"), ActorUnschedulableError("the monitor's node is gone")],
)
def test_the_clusters_faults_are_left_to_another_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(type(error)):
        run(tmp_path, monkeypatch, error)
    assert not (tmp_path / OUTCOME).exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DataIOError("s3://clips does not answer"), "s3://clips does not answer"),
        (RayTaskError("plan", "traceback", KeyError("lost")), "see .*error.txt"),
        (ZeroDivisionError("a defect"), "ZeroDivisionError: a defect"),
    ],
)
def test_what_a_retry_would_repeat_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    outcome = run(tmp_path, monkeypatch, error)
    assert outcome["code"] == 1 and re.search(reason, str(outcome["reason"]))
    assert str(outcome["reason"]).endswith(LEFT)
    (told,) = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (told["event"], told["code"]) == ("fail", 1) and re.search(reason, told["why"])


@pytest.mark.parametrize(("code", "told"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 1), (75, 0)])
@pytest.mark.parametrize("known", [False, True])
def test_a_failure_is_told_once_whoever_has_seen_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, told: int, known: bool
) -> None:
    def start(runtime: object, recorder: Recorder, **named: object) -> SimpleNamespace:
        def train() -> Outcome:
            if known and told:
                recorder.on_event(RunFailed(why="no GPUs", code=code))
            return Outcome(code=code, reason="no GPUs", last_step=3)

        return SimpleNamespace(train=train, left="")

    monkeypatch.setattr("actors.run.assemble.start_controller", start)
    controller_loop(settings(tmp_path))
    events = (tmp_path / "events.jsonl").read_text().splitlines() if (tmp_path / "events.jsonl").exists() else []
    assert [json.loads(text)["code"] for text in events if '"fail"' in text] == [code] * told


def settings(folder: Path, token: str = "") -> ControllerStart:
    return ControllerStart(
        yaml=RunConfig.load(DEMO).to_yaml(), run_dir=str(folder), token=token, changes=[], cluster=None
    )


def test_a_disk_that_takes_no_file_ends_the_run_with_a_sentence_and_what_the_keepers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a controller, and with no place for the outcome either: it is returned. The newest line of
    metrics says up to where what keepers hold counts."""
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "events"))
    monkeypatch.setattr("app.run.controller_process.Recorder", failing(full))
    counts: list[tuple[int, int] | None] = []
    monkeypatch.setattr("actors.run.rescue.rescue", lambda config, recorded: counts.append(recorded) or LEFT)
    monkeypatch.setattr("os.replace", failing(full))
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 137, "generation": 3}\n')
    outcome = controller_loop(settings(tmp_path))
    (told,) = [json.loads(text) for text in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (told["event"], told["code"]) == ("fail", 1), "there is room for a line again"
    assert outcome is not None and outcome["code"] == 1 and counts == [(137, 3)]
    assert outcome["reason"] == (
        f"No space left on device: {tmp_path}/events. Make room for {tmp_path}, then continue with --resume. {LEFT}"
    )


def test_where_the_newest_line_of_metrics_cannot_be_read_the_keepers_stay_and_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second error hid the first one: neither an outcome nor an event said how the run ended."""
    monkeypatch.setattr(
        "app.run.controller_process.Recorder", failing(OSError(errno.ENOSPC, "No space left", "events"))
    )
    monkeypatch.setattr("app.run.controller_process.newest_line", failing(OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr("actors.run.rescue.rescue", failing(AssertionError("a newer state would be dropped")))
    (tmp_path / "config.yaml").touch()
    controller_loop(settings(tmp_path))
    reason = json.loads((tmp_path / OUTCOME).read_text())["reason"]
    assert "No space left" in reason and "What keepers hold stays in memory" in reason and "Input/output" in reason
    assert '"fail"' in (tmp_path / "events.jsonl").read_text()


def test_where_nothing_can_be_rescued_the_first_error_ends_the_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "app.run.controller_process.Recorder", failing(OSError(errno.ENOSPC, "No space left", "events"))
    )
    monkeypatch.setattr("actors.run.rescue.rescue", failing(ConnectionError("the cluster is gone")))
    (tmp_path / "config.yaml").touch()
    controller_loop(settings(tmp_path))
    reason = json.loads((tmp_path / OUTCOME).read_text())["reason"]
    assert "No space left" in reason and "could not be written (" in reason and "the cluster is gone" in reason
    assert '"fail"' in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("before", "events", "code", "expected"),
    [
        ([], [], 1, ["why"]),
        (["of an earlier start, whose clock is ahead"], [], 4, ["of an earlier start, whose clock is ahead", "why"]),
        (
            ["earlier"],
            [{"time": 50.0, "event": "fail", "why": "told"}, {"event": "checkpoint"}],
            1,
            ["earlier", "told"],
        ),
        ([], [{"time": 150.0, "event": "fail", "why": "told"}], 1, ["told"]),
        ([], [], 0, []),
        ([], [], 75, []),
    ],
)
def test_a_failure_that_no_recorder_has_told_of_is_added_to_the_events_of_a_run(
    tmp_path: Path, before: list[str], events: list[dict[str, object]], code: int, expected: list[str]
) -> None:
    assert told_so_far(tmp_path) == 0, "there is no file"
    file = tmp_path / "events.jsonl"
    earlier = [{"time": 9e9, "event": "fail", "why": why} for why in before]
    file.write_text("".join(f"{json.dumps(event)}\n" for event in earlier) + f'{{"torn{" " * 99}')
    begin = told_so_far(tmp_path)
    file.write_text("".join(f"{json.dumps(event)}\n" for event in [*earlier, *events]) + '{"torn')  # the half line goes
    tell_failure(tmp_path, Outcome(code=code, reason="why", last_step=-1), begin)
    assert file.read_text().count("\n") == len([*earlier, *events]), "this is the folder of no run"
    (tmp_path / "config.yaml").touch()
    tell_failure(tmp_path, Outcome(code=code, reason="why", last_step=-1), begin)
    found = [json.loads(text) for text in file.read_text().splitlines() if not text.endswith("torn")]
    assert [event["why"] for event in found if event["event"] == "fail"] == expected


def test_a_controller_whose_folder_another_start_has_taken_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.run.assemble.start_controller", failing(AssertionError("a controller was started")))
    folder = tmp_path / "run"
    folder.mkdir()
    with FolderLock(lock_path(folder, "driver"), token="the other start") as other:
        other.take(0.0, print)
        assert controller_loop(settings(folder, token="mine")) is None
    assert list(folder.iterdir()) == []


def test_an_outcome_belongs_to_one_start(tmp_path: Path) -> None:
    (tmp_path / OUTCOME).write_text(json.dumps({"code": 0, "reason": "done", "last_step": 4, "token": "a"}))
    assert read_outcome(tmp_path, "a") == Outcome(code=0, reason="done", last_step=4)
    assert read_outcome(tmp_path, "b") is None and read_outcome(tmp_path / "gone", "a") is None


def test_a_controller_that_goes_on_takes_back_what_the_one_before_said_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost before Ray Train knew of it; whoever waits for the run would leave it."""
    (tmp_path / OUTCOME).write_text(json.dumps({"code": 1, "reason": "", "last_step": 4, "token": "a"}))
    with pytest.raises(GetTimeoutError):
        run(tmp_path, monkeypatch, GetTimeoutError("silent"))
    assert not (tmp_path / OUTCOME).exists()


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("metrics.jsonl", "", False),
        ("metrics.jsonl", '{"step": 0}\n', True),
        ("bad.jsonl", "", True),
        ("error.txt", "Traceback", True),
        (OUTCOME, '{"code": 2, "reason": "", "last_step": -1}', False),
        (OUTCOME, '{"code": 75, "reason": "", "last_step": -1}', True),
    ],
)
def test_a_start_that_came_to_nothing_leaves_no_folder(tmp_path: Path, name: str, text: str, kept: bool) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: x}")
    (tmp_path / name).write_text(text)
    assert worth_keeping(tmp_path) is kept


def test_a_folder_that_cannot_be_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hid the error that had ended the run."""
    monkeypatch.setattr(Path, "is_file", failing(OSError(errno.ESTALE, "Stale file handle")))
    assert worth_keeping(tmp_path)


def test_a_script_is_told_which_run_begins_and_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_start(tmp_path)  # nobody asks
    monkeypatch.setenv(START_NOTE, str(tmp_path / "note"))
    note_start(tmp_path)
    assert (tmp_path / "note").read_text() == f"-1\n{tmp_path}\n"
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n{"st')
    note_start(tmp_path)
    assert (tmp_path / "note").read_text() == f"7\n{tmp_path}\n"


def test_of_rays_words_on_tokens_only_the_warning_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    from ray._private.authentication import authentication_token_setup as ray_tokens

    from app.run.cluster import is_news_of_tokens

    ray_tokens.logger.addFilter(is_news_of_tokens)
    try:
        with caplog.at_level("WARNING", ray_tokens.logger.name):
            ray_tokens.logger.propagate = True
            ray_tokens._warn_token_auth_enabled()
            ray_tokens._warn_token_auth_disabled()
    finally:
        ray_tokens.logger.removeFilter(is_news_of_tokens)
    said = [record.getMessage() for record in caplog.records if record.name == ray_tokens.logger.name]
    assert [text[:36] for text in said] == ["Token authentication is disabled for"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_folder_that_can_no_longer_be_written_is_a_failure_and_a_wrong_path_a_mistake(
    inside: bool, tmp_path: Path
) -> None:
    path = (tmp_path / "run" / "events" / "out.tfevents") if inside else tmp_path / "weights"
    for name in (str(path), os.fsencode(path)):
        refused = PermissionError(errno.EPERM, "Operation not permitted", name)
        assert code_of(refused, tmp_path / "run") == (1 if inside else 2)


@pytest.mark.parametrize("named", [(), (7,)])
def test_a_file_that_can_no_longer_be_written_is_nobodys_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: tuple[int, ...]
) -> None:
    """`chattr +i` under a run: the error of an open file has no name."""
    refused = PermissionError(errno.EPERM, "Operation not permitted", *named)
    outcome = run(tmp_path / "run", monkeypatch, refused)
    assert outcome["code"] == 1
    assert f"an open file of {tmp_path / 'run'} can no longer be used: Operation not permitted" in str(
        outcome["reason"]
    )
