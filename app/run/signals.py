"""Signals: a run that is asked to end finishes its running steps first; other commands give back what they hold."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from app.run.apart import SIGNALS
from app.run.operator import monitor_of

STOP = "stopped by a signal"


@contextmanager
def stops_on_signal(folder: Path) -> Iterator[None]:
    """Inside it, SIGTERM, SIGHUP (the terminal is gone) and Ctrl-C end the run after its running steps, with a
    checkpoint; a second Ctrl-C ends it at once. A signal that was ignored before, as SIGHUP under nohup, still is."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _write_nowhere()
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # not `print`: a write to the same stream may be what the signal has interrupted
            os.write(2, b"stopping after the running steps; Ctrl-C again stops at once\n")
        _ask_to_stop(folder)

    with _handled(SIGNALS, on_signal):
        yield


@contextmanager
def unwinds_on_signal() -> Iterator[None]:
    """Inside it, SIGTERM and SIGHUP end the command as Ctrl-C does: what it holds is given back; exit code 128 + N.
    Once Ray is connected its own handler would abort the process instead: to be entered after that."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _write_nowhere()
        raise SystemExit(128 + number)

    with _handled((signal.SIGTERM, signal.SIGHUP), on_signal):
        yield


@contextmanager
def _handled(numbers: Iterable[signal.Signals], on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """These signals go to a handler; those that were ignored before still are."""
    earlier = {number: signal.getsignal(number) for number in numbers}

    for number, handler in earlier.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _write_nowhere() -> None:
    """Send output nowhere: the terminal is gone, and writing to it would fail in the middle of ending the run."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream is captured or closed
            if os.isatty(stream.fileno()):
                os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _ask_to_stop(folder: Path) -> None:
    try:
        monitor = monitor_of(folder)
    except (LookupError, OSError) as error:  # the controller is still starting: nothing is lost by ending now
        raise KeyboardInterrupt from error
    monitor.stop.remote(STOP)
