"""A run's processes and those who signal it: nothing below is hit, nothing outlives, no signal is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.run.apart import run_apart

ROOT = Path(__file__).resolve().parents[2]
# The inner process starts a child, as Ray is started, and prints what it reads.
INNER = """
import os, signal, subprocess, sys, time
from app.run.apart import join_lifeline
join_lifeline()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def told(number, frame):
    os.write(1, f"told {number} {child.poll()}\\n".encode())  # print may be what the signal has interrupted
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, told)
print("ready", child.pid, flush=True)
while True:
    time.sleep(0.1)
"""
# As if not under nohup, which has every child ignore SIGHUP, nor in the background of a script, where it is SIGINT.
OUTER = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from app.run.apart import run_apart
sys.exit(run_apart(["-c", sys.argv[1]]))
"""


@pytest.fixture
def outer() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A run and the number of its innermost process."""
    process = subprocess.Popen(
        [sys.executable, "-c", OUTER, INNER], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    ready, child = process.stdout.readline().split()
    assert ready == "ready"
    yield process, int(child)
    process.kill()
    process.wait()
    assert_gone(int(child))


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while _alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is left"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_whole_group_reaches_the_run_and_not_what_it_has_started(
    outer: tuple[subprocess.Popen[str], int], number: signal.Signals
) -> None:
    process, child = outer
    os.killpg(process.pid, number)
    assert process.wait(timeout=120) == 75
    assert process.stdout is not None and process.stdout.read().split() == ["told", str(int(number)), "None"]
    assert_gone(child)


def test_nothing_outlives_a_killed_run(outer: tuple[subprocess.Popen[str], int]) -> None:
    process, child = outer
    process.kill()
    process.wait()
    assert_gone(child)


def test_the_exit_code_is_the_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_apart(["-c", "import sys; sys.exit(4)"]) == 4
    assert run_apart(["-c", "import os; os.kill(os.getpid(), 9)"]) == 137
    assert "ended by signal 9 (SIGKILL); --resume continues it" in capfd.readouterr().err


def test_a_signal_that_comes_while_the_inner_process_starts_is_handed_on() -> None:
    code = """
import os, signal, subprocess, sys
from app.run import apart
start = subprocess.Popen
def started(*call, **named):
    process = start(*call, **named)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
apart.subprocess.Popen = started
sys.exit(apart.run_apart(["-c", "import time; time.sleep(600)"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


def test_a_signal_that_comes_when_the_inner_process_has_ended_changes_no_exit_code() -> None:
    code = """
import signal, sys
from time import sleep
from types import SimpleNamespace
from app.run import apart
def pause(seconds):
    sleep(0.5)  # the inner process ends in it
    if not came:
        came.append(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
came = []
apart.time = SimpleNamespace(sleep=pause)
sys.exit(apart.run_apart(["-c", "import sys; sys.exit(75)"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (75, "")


def test_a_run_under_nohup_ignores_the_end_of_its_terminal() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "from app.run.apart import run_apart; run_apart(['-c', sys.argv[1]])"
    )
    inner = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", code, inner], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True"
