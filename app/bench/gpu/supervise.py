"""The process that measures, started again when it has died, its device has, or a measurement found no end.

What there is stands in the folder of the results, so that the next process goes on after the one that was lost.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

AGAIN = 75  # exit code of a process that asks for a fresh one
GAVE_UP = 1
MOST_RESTARTS = 5
_ENDS_S = 30.0


def supervised(command: Sequence[str], say: Callable[[str], None]) -> int:
    """Run `command` until it ends by itself; its exit code, or 1 after six that did not. SIGTERM ends it, too."""
    for _ in range(1 + MOST_RESTARTS):
        code = _code_of(command)
        if code >= 0 and code != AGAIN:
            return code
        why = "has asked for another" if code == AGAIN else f"was ended by {signal.Signals(-code).name}"
        say(f"the process that measures {why}; a fresh one goes on.")
    say(f"{1 + MOST_RESTARTS} processes have ended so; this gives up. The same call goes on where the last one ended.")
    return GAVE_UP


def _code_of(command: Sequence[str]) -> int:
    process = subprocess.Popen(command)

    def end(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGINT)  # which Python unwinds from
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        return process.wait()
    finally:
        _free(process)
        signal.signal(signal.SIGTERM, before)


def _free(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is interrupted as well: once it has seen that, what it measures is no failure. It may be
    in a call of the device or of a compiler."""
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDS_S)
    finally:  # whoever asks a second time does not wait
        if process.poll() is None:
            process.kill()


def leave_for_another() -> None:
    """End this process at once, whatever its main thread waits for, and the processes that a measurement started."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(AGAIN)


def interrupted_once() -> None:
    """The first SIGINT or SIGTERM interrupts this process, also where a shell has its jobs in the background ignore the
    former. Others do not: who ends a whole group ends the one above, too, which interrupts this one again, and what is
    measured would count as what died where it has not been unwound from."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, frame: None)
        raise KeyboardInterrupt

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupt)
