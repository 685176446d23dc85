"""What commands say beside what they print."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from actors.outcome import Exit
from actors.pool.device import WorkersDevice
from app.inputs.synthetic import synth
from app.proof.disturbance import _ALL, _DONE, Disturber
from app.records.progress import ProgressBar, ProgressLine
from app.run import strategies
from app.run.cluster import check_capacity, on_usable
from app.run.launch import _check_cache
from app.settings.config import RunConfig
from app.settings.terminal import answer, leave_unsaid, say
from ops.typed import ConfigError

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"
TRAINS = """
import logging, sys
import app.run.launch
def train(*given, **named):
    print("a line that waits for the next one", end="")
    logging.getLogger("app").warning("a line")
    return 75
app.run.launch.train = train
from app.cli import main
sys.argv = ["heddle", "train", "--config", sys.argv[1]]
main()
"""
LINES = """
import logging
from app.settings.terminal import set_up_logging
set_up_logging(debug={})
logging.getLogger("data.dataset").info("%s to read", 3)
logging.getLogger("data.dataset").warning("%s is gone", "a")
logging.getLogger("others").info("unheard")
"""


@pytest.mark.parametrize(
    ("debug", "told"),
    [
        (False, ["3 to read", "WARNING data.dataset: a is gone"]),
        (True, ["INFO data.dataset: 3 to read", "WARNING data.dataset: a is gone"]),
    ],
)
def test_what_is_told_is_a_sentence_and_a_warning_says_whose_it_is(debug: bool, told: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LINES.format(debug)], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == told


def test_a_run_whose_output_nobody_reads_any_more_does_not_fail_at_its_end() -> None:
    """`heddle train ... | head` ended in a traceback and exit code 1, with all steps committed."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        say("done: 3 steps", stream)
        say("and nothing more", stream)  # and closing it has nothing left to write


def test_a_log_on_a_full_disk_fails_no_run_and_goes_on_when_there_is_space() -> None:
    with open("/dev/full", "w") as stream:
        say("done: 3 steps", stream)
        ours, theirs = os.pipe()
        os.dup2(theirs, stream.fileno())
        os.close(theirs)
        say("there is space again", stream)  # and closing it has nothing left to write
    with open(ours) as written:
        assert written.read() == "there is space again\n"


def test_a_log_whose_disk_gave_an_error_once_goes_on(tmp_path: Path) -> None:
    with open(log := tmp_path / "log", "w") as stream:
        stream.write("lost")
        leave_unsaid(stream, OSError(errno.EIO, ""))
        say("step 2/3", stream)
    assert log.read_text() == "step 2/3\n"


def test_two_threads_whose_lines_fail_at_once_leave_the_log_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, second_drops, first_is_done = os.dup2, threading.Event(), threading.Event()
    ran: list[str] = []

    def dup2(file: int, onto: int) -> None:
        ran.append(name := threading.current_thread().name)
        if name == "second" and ran.count(name) == 2:  # puts back what it has found, after the first
            first_is_done.wait(10)
        usual(file, onto)
        if name == "second":
            second_drops.set()
        elif ran.count(name) == 1:
            second.start()
            second_drops.wait(0.5)

    with open("/dev/full", "w") as stream, monkeypatch.context() as patched:
        first, second = (
            threading.Thread(target=leave_unsaid, args=(stream, OSError(errno.ENOSPC, "")), name=name)
            for name in ("first", "second")
        )
        patched.setattr(os, "dup2", dup2)
        first.start()
        first.join()
        first_is_done.set()
        second.join()
        assert Path(f"/proc/self/fd/{stream.fileno()}").resolve() == Path("/dev/full")
    assert ran.count("first") == ran.count("second") == 2


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_the_exit_code_of_a_run_stands_also_where_its_last_lines_have_no_place(full: str) -> None:
    """Python's own end made it 120."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as disk:
        stdout, stderr = (disk if name == full else subprocess.DEVNULL for name in ("stdout", "stderr"))
        command = [sys.executable, "-c", TRAINS, str(DEMO)]
        done = subprocess.run(command, stdout=stdout, stderr=stderr, env=buffered)
    assert done.returncode == Exit.RESUMABLE


def test_an_error_is_its_exit_code_also_where_it_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        assert answer(ConfigError("a is missing; give it."), debug=False) == Exit.USAGE
        assert answer(ConfigError("a is missing; give it."), debug=True) == Exit.USAGE
        assert answer(KeyboardInterrupt(), debug=False) == Exit.INTERRUPTED


def test_a_terminal_that_is_gone_fails_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SIGHUP is ignored, as under nohup, the first write says so: EIO."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal, open(os.dup(theirs), "w") as other, open(os.dup(theirs), "w") as err:
        progress = ProgressLine(3, terminal)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", err)
            with ProgressBar("encoding") as told:
                os.close(ours)
                told(1, 4)
                print("a warning", file=sys.stderr)
        progress.say("worker w1: dead")
        progress.close()
        say("done: 3 steps", terminal)
        with pytest.raises(OSError, match="Input/output error"):
            print("no line", file=other, flush=True)
        say("done: 3 steps", other)


def _on_cpus(config: RunConfig) -> None:
    assert on_usable(config, WorkersDevice(name="cpu", unusable="an old driver")).workers.device == "cpu"


@pytest.mark.parametrize("step", [check_capacity, _check_cache, _on_cpus])
def test_a_run_begins_also_where_nobody_reads_what_it_says(
    step: Callable[[RunConfig], None], unread: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`heddle train ... | head -1` ended before Ray was asked for a worker."""
    config = RunConfig.load(DEMO, ["data.cache.path=cache", "data.cache.only=true", "workers.device=auto"])
    monkeypatch.setattr(sys, "stdout", unread)
    monkeypatch.setattr("actors.ray_calls.resources", lambda free: {})
    monkeypatch.setattr("actors.plan.spared.from_cache", lambda cache: True)
    monkeypatch.setattr("actors.pool.workers.uses_gpu", lambda workers: False)
    monkeypatch.setattr("app.kept.wanted.check_only", lambda config, cuda: "all is there")
    step(config)
    assert Path(f"/proc/self/fd/{unread.fileno()}").resolve() == Path(os.devnull), "it has said something"


def test_a_run_makes_its_data_also_where_nobody_reads_what_it_says(
    unread: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    assert synth(tmp_path, clips=1, images=0, shards=1, sizes=[(32, 32)], frames=[1], koala=True)["clips"] == 1


def test_the_second_run_of_a_comparison_starts_also_where_nobody_reads_what_it_says(
    unread: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(sys, "stdout", unread)
    monkeypatch.setattr(strategies, "train", lambda config, settings, **given: started.append(settings) or 0)
    _, code = strategies.train_each(DEMO, ["static", "cascade"], [f"run.dir={tmp_path}"])
    assert code == 0 and len(started) == 2


def test_all_that_disturbs_a_run_is_heard_of_also_where_nobody_reads_what_is_said(
    unread: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    acting = Disturber(tmp_path, 6, 1)
    acting._read(io.StringIO(f"{_DONE}after 6 steps: killed w2\n{_DONE}after 9 steps: scaled to 1\n{_ALL}\n"))
    assert acting.all_done and not acting.failed and len(acting.done) == 2
