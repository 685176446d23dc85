"""A run of this machine in a session of its own, so that signals meant for the run do not end the Ray below it.

    code = run_apart(["-m", "app.train", "--config", "demo.yaml"])       # the outer process; returns the exit code
    join_lifeline()                                                      # first thing in the inner one

Terminals, `timeout`, Slurm and many supervisors signal a whole process group. Ray's processes would be in it and end at
once, before a checkpoint is written. So the outer process stays in that group and hands signals on to the inner one,
which leads a session with everything Ray starts. Neither outlives the other: the inner one holds the end of a pipe and
ends its whole group when the outer one is gone, and what is left of the group when the inner one has ended is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from app.settings.terminal import say
from ops.code_path import python_environment

LIFELINE = "HEDDLE_LIFELINE"  # number of the inner process's end of the pipe
_joined = False
_came = 0
POLL_S = 0.05
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_inner() -> bool:
    """Whether this process was started by `run_apart`."""
    return _joined or LIFELINE in os.environ


def signal_came(number: int) -> None:
    """A signal has come for the run that this process has or has started."""
    global _came
    _came = number


def signal_code() -> int:
    """128 + N for the last signal N that has come for such a run; 0: none has."""
    return 128 + _came if _came else 0


def run_apart(arguments: Sequence[str]) -> int:
    """Run `python ARGUMENTS` in a session of its own. Returns its exit code, 128 + N where signal N ended it."""
    inner_end, ours = os.pipe()
    environment = {**os.environ, LIFELINE: str(inner_end), **python_environment()}
    sys.stdout.flush()
    earlier = {number: signal.getsignal(number) for number in SIGNALS}
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came before the process was there

    def hand_on(number: int, frame: FrameType | None) -> None:
        signal_came(number)
        if process is None:
            early.append(number)
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)  # not send_signal, which collects the exit code that `_wait` looks for

    for number, handler in earlier.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, hand_on)
    try:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", *arguments], env=environment, pass_fds=[inner_end], start_new_session=True
            )
        finally:
            os.close(inner_end)
        for missed in early:
            hand_on(missed, None)
        code = _wait(process)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        os.close(ours)
    if code < 0:
        say(
            f"error: the process of the run was ended by signal {-code} ({signal.Signals(-code).name}); "
            f"--resume continues it from its last checkpoint.",
            sys.stderr,
        )
        return 128 - code
    return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait until the process has ended, and end the rest of its group. Until its exit code is collected, its number
    belongs to no other process."""
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(POLL_S)  # not one blocking call: a signal that comes just before it would be handed on after it
    with suppress(ProcessLookupError, PermissionError):  # nobody left
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def join_lifeline() -> None:
    """Called in the inner process: end it with all that it has started as soon as the outer process is gone, for
    whatever reason."""
    global _joined
    file, _joined = int(os.environ.pop(LIFELINE)), True  # popped: what Ray starts below is not the inner process
    os.set_inheritable(file, False)

    def watch() -> None:
        with suppress(OSError):
            os.read(file, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() == os.getpid():
        threading.Thread(target=watch, name="lifeline", daemon=True).start()
