"""Signals: a run that is asked to end finishes its running steps first; other commands give back what they hold."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from app.run.apart import SIGNALS, signal_came
from app.run.operator import ask_to_leave_lora_files, monitor_of

STOP = "stopped by a signal"


class RunSignals:
    """What SIGTERM, SIGHUP (the terminal is gone) and Ctrl-C do to a run, from its first check to its exit code. One
    that was ignored before, as SIGHUP under nohup, still is.

    with RunSignals() as signals:                      # end the process: exit code 128 + N, of Ctrl-C 130
        with signals.while_ray_starts():               # the same, although Ray puts a handler of its own in the place
            connect(config)
        with signals.stopping(folder, has_begun):      # end the run after its running steps, with a checkpoint
            ...
        ...                                            # it has ended, and they change nothing any more

    A second Ctrl-C ends it at once, also while it ends by itself.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], bool] | None = None  # while the run goes on; False where there is nothing to wait for
        self._is_over = False
        self._interrupted = False  # by Ctrl-C, whose second one is Python's own

    def __enter__(self) -> RunSignals:
        self._earlier = _earlier(SIGNALS)
        _put(self._earlier, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        _restore(self._earlier)

    @contextmanager
    def while_ray_starts(self) -> Iterator[None]:
        """Around the connection to Ray."""
        with while_ray_starts(self._put_back):
            yield

    def _put_back(self) -> None:
        _put(self._earlier, self._on_signal)
        if self._interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def stopping(self, folder: Path, has_begun: Callable[[], bool]) -> Iterator[None]:
        """Around the run. `has_begun` says whether its controller has: a run that has, and whose monitor is gone, is at
        its end."""

        def stop() -> bool:
            _say(b"stopping after the running steps; Ctrl-C again stops at once\n")
            ask_to_leave_lora_files(folder)
            return _ask_to_stop(folder) or has_begun()

        self._stop = stop
        try:
            yield
        finally:
            self.over()

    def over(self) -> None:
        """The run has ended, and its exit code stands."""
        self._is_over = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signal_came(number)
        if number == signal.SIGHUP:
            _write_nowhere()
        if number == signal.SIGINT:
            self._interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_over:
            _say(b"the run has ended already; its process ends, too (Ctrl-C again: at once)\n")
        elif self._stop is None or not self._stop():
            _end(number)


def heed_no_more() -> None:
    """What is left of this process is its end, and its exit code is known: signals do not change that."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def unwinds_on_signal() -> Iterator[Callable[[], None]]:
    """Inside it, SIGTERM and SIGHUP end the command as Ctrl-C does: what it holds is given back; exit code 128 + N.
    Yields a function that puts its handlers back after others, such as Ray's, have replaced them."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _write_nowhere()
        _end(number)

    earlier = _earlier((signal.SIGTERM, signal.SIGHUP))
    _put(earlier, on_signal)
    try:
        yield lambda: _put(earlier, on_signal)
    finally:
        _restore(earlier)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Hold signals back while a process is started, until its id is known: before that nobody could end it. They are
    raised again at the end."""
    came: list[int] = []
    earlier = _earlier(SIGNALS)
    _put(earlier, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        _restore(earlier)
    for number in came:
        signal.raise_signal(number)


@contextmanager
def while_ray_starts(put_back: Callable[[], None]) -> Iterator[None]:
    """Around a connection to Ray, whose own handler of SIGTERM is `sys.exit(15)` until it is connected, and aborts the
    process from then on. `put_back` puts the handlers back that were there before."""
    try:
        yield
    except SystemExit as ended:
        if ended.code == signal.SIGTERM:
            _end(signal.SIGTERM)
        raise
    finally:
        put_back()


_Handlers = dict[signal.Signals, Any]  # as `signal.getsignal` returns them


def _earlier(numbers: Iterable[signal.Signals]) -> _Handlers:
    return {number: signal.getsignal(number) for number in numbers}


def _put(earlier: _Handlers, on_signal: Callable[[int, FrameType | None], None]) -> None:
    """These signals go to a handler; those that were ignored before still are."""
    for number, handler in earlier.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)


def _restore(earlier: _Handlers) -> None:
    for number, handler in earlier.items():
        signal.signal(number, handler)


def _end(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    _say(f"ended by {signal.Signals(number).name}\n".encode())
    raise SystemExit(128 + number)


def _say(text: bytes) -> None:
    with suppress(OSError):  # not `print`: a write to the same stream may be what the signal has interrupted
        os.write(2, text)


def _write_nowhere() -> None:
    """Send output nowhere: the terminal is gone, and writing to it would fail in the middle of ending the run."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream is captured or closed
            if os.isatty(stream.fileno()):
                os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _ask_to_stop(folder: Path) -> bool:
    """False where the run has no monitor: its controller is still starting, or has ended."""
    try:
        monitor = monitor_of(folder)
    except (LookupError, OSError):
        return False
    monitor.stop.remote(STOP)
    return True
