"""What a signal does to a run, and to its exit code, in each of its phases."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from actors.outcome import Outcome
from app.run import cluster, strategies
from app.run import signals as module
from app.run.launch import last_words
from app.run.outcomes import ALL_HAPPENED
from app.run.signals import STOP, RunSignals, while_ray_starts

NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
TERMS = (signal.SIGTERM, signal.SIGHUP)
DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"


@pytest.fixture(autouse=True)
def _no_signal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.run.apart._came", 0)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As at the start of a process, also where the tests run under nohup; put back afterwards."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in TERMS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that were asked to stop, whose monitors are there."""
    found: list[Path] = []
    monkeypatch.setattr(module, "_ask_to_stop", lambda folder: found.append(folder) is None)
    return found


def rays_handler(number: int, frame: FrameType | None) -> None:
    sys.exit(number)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def begun() -> bool:
    return True


def starting() -> bool:
    return False


@pytest.mark.parametrize("number", TERMS)
def test_before_the_run_it_ends_by_the_signal(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, RunSignals():
        send(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL
    assert f"ended by {number.name}" in capfd.readouterr().err


def test_before_the_run_ctrl_c_interrupts_it() -> None:
    with pytest.raises(KeyboardInterrupt), RunSignals():
        send(signal.SIGINT)


def test_while_ray_starts_its_handler_ends_the_process_with_our_exit_code() -> None:
    with pytest.raises(SystemExit) as ended, RunSignals() as signals, signals.while_ray_starts():
        signal.signal(signal.SIGTERM, rays_handler)
        send(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_once_ray_has_started_its_handler_is_replaced() -> None:
    with pytest.raises(SystemExit) as ended, RunSignals() as signals:
        with signals.while_ray_starts():
            signal.signal(signal.SIGTERM, rays_handler)
        send(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_other_exit_codes_pass() -> None:
    def put_back() -> None:
        return None

    with pytest.raises(SystemExit) as ended, while_ray_starts(put_back):
        sys.exit(128 + signal.SIGHUP)
    assert ended.value.code == 128 + signal.SIGHUP


@pytest.mark.parametrize("number", NUMBERS)
def test_in_the_run_it_is_asked_to_stop(number: signal.Signals, asked: list[Path], tmp_path: Path) -> None:
    with RunSignals() as signals, signals.stopping(tmp_path, starting):
        send(number)
    assert asked == [tmp_path]


def test_a_second_ctrl_c_ends_the_run_at_once(asked: list[Path], tmp_path: Path) -> None:
    with RunSignals() as signals, pytest.raises(KeyboardInterrupt), signals.stopping(tmp_path, begun):
        send(signal.SIGINT)
        assert asked == [tmp_path]
        send(signal.SIGINT)


@pytest.mark.parametrize(("has_begun", "code"), [(starting, 128 + signal.SIGTERM), (begun, None)])
def test_a_run_without_a_monitor_is_starting_or_at_its_end(
    has_begun: Callable[[], bool], code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(folder: Path) -> Any:
        raise LookupError(folder)

    monkeypatch.setattr(module, "monitor_of", nobody)
    found = None
    with RunSignals() as signals:
        try:
            with signals.stopping(tmp_path, has_begun):
                send(signal.SIGTERM)
        except SystemExit as ended:
            found = ended.code
    assert found == code


@pytest.mark.parametrize("number", NUMBERS)
def test_of_a_run_that_has_ended_the_exit_code_stands(
    number: signal.Signals, asked: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RunSignals() as signals:
        with signals.while_ray_starts():
            signal.signal(signal.SIGTERM, rays_handler)
        with signals.stopping(tmp_path, begun):
            pass
        send(number)
    assert not asked
    assert "has ended already" in capfd.readouterr().err


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_a_process(asked: list[Path], tmp_path: Path) -> None:
    with RunSignals() as signals, pytest.raises(KeyboardInterrupt):
        with signals.stopping(tmp_path, begun):
            pass
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_the_second_ctrl_c_ends_it_also_where_the_first_came_while_ray_started() -> None:
    """Ray's own clean-up may take the first one in."""
    with RunSignals() as signals, pytest.raises(KeyboardInterrupt):
        with suppress(KeyboardInterrupt), signals.while_ray_starts():
            send(signal.SIGINT)
        signals.over()
        send(signal.SIGINT)


@pytest.mark.parametrize("number", NUMBERS)
def test_after_a_signal_no_other_run_of_a_comparison_starts(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the first has all its steps and ends with 0."""
    started: list[object] = []

    def signalled(config: Path, settings: object, **given: bool) -> int:
        started.append(settings)
        with RunSignals() as signals:
            signals.over()
            send(number)
        return 0

    monkeypatch.setattr(strategies, "train", signalled)
    overrides = [f"run.dir={tmp_path}"]
    _, code = strategies.train_each(DEMO, ["static", "cascade"], overrides)
    assert code == 128 + number and len(started) == 1


def test_a_process_whose_ray_does_not_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Ctrl-C ends the wait for it: exit handlers, of which one is Ray's, would wait for ever."""

    class Stuck:
        def shutdown(self) -> None:
            threading.Event().wait()

    monkeypatch.setitem(sys.modules, "ray", Stuck())
    monkeypatch.setattr(cluster, "_stuck", False)
    threading.Timer(0.3, send, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.shut_down_ray()
    left: list[int] = []
    monkeypatch.setattr(cluster.os, "_exit", left.append)
    monkeypatch.setattr(cluster.atexit, "_run_exitfuncs", lambda: left.append(-1))
    cluster.leave_if_stuck(130)
    assert left == [130]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_ignored_signal_stays_ignored(number: signal.Signals, asked: list[Path], tmp_path: Path) -> None:
    signal.signal(number, signal.SIG_IGN)
    with RunSignals() as signals:
        with signals.while_ray_starts():
            send(number)
        with signals.stopping(tmp_path, begun):
            send(number)
    assert not asked


def test_a_run_that_was_stopped_says_how_it_goes_on_and_is_no_error() -> None:
    """After Ctrl-C it said `error: stopped by a signal`."""
    stopped = last_words(Outcome(code=75, reason=STOP, last_step=61), Path("runs/a"))
    assert stopped == "stopped by a signal. It has 62 steps; the same command with --resume goes on from there."
    proven = last_words(Outcome(code=75, reason=ALL_HAPPENED, last_step=61), Path("runs/a-disturbed"))
    assert proven == "all that was to happen to it has. It has 62 steps.", "the proof goes on, not this run"
    failed = last_words(Outcome(code=1, reason="the disk is full.", last_step=3), Path("runs/a"))
    assert failed == "error: the disk is full."
    done = last_words(Outcome(code=0, reason="", last_step=3), Path("runs/my lora"))
    assert [line.strip() for line in done.splitlines()] == [
        "done: 4 steps. Next: heddle report 'runs/my lora'",
        "heddle sample --checkpoint 'runs/my lora'",
    ]
