"""The first moments of `heddle` and of `python -m app.train`, whose own modules take seconds to import: Ctrl-C ends
them as quietly as it does later, names of files are UTF-8 whatever the locale, and there are three standard streams.
Imports next to nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

INTERRUPTED = 130  # `actors.outcome.Exit`, whose module is one of those
_IN_UTF8 = [b"-X", b"utf8"]  # unlike PYTHONUTF8 also heeded beside -E and -I


def heddle() -> None:
    """Console script. Ends the process with the documented exit code."""
    open_closed_streams()
    be_in_utf8()
    try:
        with ended_by_ctrl_c():
            from app.cli import main
        main()
    except KeyboardInterrupt:  # between the two
        sys.exit(INTERRUPTED)


def open_closed_streams() -> None:
    """Where a standard stream was closed (`2>&-`), it leads nowhere: Python has None in its place, and the file that is
    opened next, such as a checkpoint, would get its number and what others print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(nowhere, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115  # for good


def be_in_utf8() -> None:
    """Begin this process again in Python's UTF-8 mode where its locale is of another encoding: files with names in
    UTF-8 could not be opened, and nodes of other locales would read other samples. Called before there is anything to
    lose; what the process starts is in that mode, too."""
    if sys.getfilesystemencoding() == "utf-8":
        return
    words = _command_line()
    if words[1:3] == _IN_UTF8 or not sys.executable:
        sys.exit("error: Python reads names of files in another encoding than UTF-8; set PYTHONUTF8=1.")
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [words[0], *_IN_UTF8, *words[1:]])


def _command_line() -> list[bytes]:
    """The words that started this process, byte for byte: not each locale writes what it has read as it was."""
    with suppress(OSError), open("/proc/self/cmdline", "rb") as file:
        return file.read().split(b"\0")[:-1]
    return [os.fsencode(word) for word in sys.orig_argv]


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """While imports run, Ctrl-C exits at once (nothing needs cleaning up yet). A KeyboardInterrupt inside an import
    would print a traceback or be swallowed. If SIGINT is already ignored, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
