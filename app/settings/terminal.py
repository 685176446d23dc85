"""What every process at a terminal does alike: its logging, its lines, and its answer to an error."""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import threading
import traceback
from contextlib import suppress
from typing import IO

from actors.outcome import Exit
from app.settings.errors import PACKAGES, exit_code, is_ours, one_line

_READS_NO_MORE = frozenset((errno.EPIPE, errno.EIO))  # `heddle train ... | head`, a terminal that is gone
# Else a second thread would put back, as the log, the null device of the first. No handler of a signal takes it.
_dropping = threading.Lock()


def debug_wanted() -> bool:
    """Whether HEDDLE_DEBUG asks for details and tracebacks."""
    return os.environ.get("HEDDLE_DEBUG", "") not in ("", "0")


def set_up_logging(debug: bool) -> None:
    """Warnings of everybody, and what our own packages have to say; bars of weights that load on terminals alone."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(debug))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.DEBUG if debug else logging.INFO)


class _Lines(logging.Formatter):
    """What our packages tell stands among what commands print, as a sentence; warnings, and all that `debug` shows, say
    whose they are."""

    def __init__(self, debug: bool) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")
        self._debug = debug

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno == logging.INFO and not self._debug:
            return logging.Formatter().format(record)
        return super().format(record)


def say(text: str, stream: IO[str]) -> None:
    """Print a line. What cannot be shown, as its reader has gone or a log's disk is full, is left out: a run does not
    fail for that."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        leave_unsaid(stream, error)


def leave_unsaid(stream: IO[str], error: OSError) -> None:
    """Drop what a stream still holds, which its next line or its end would fail to write once more. One that nobody
    reads shows nothing from then on; a disk may have space again, and give its next line no EIO."""
    with _dropping, suppress(OSError, ValueError):  # a stream that is no file, or is closed
        file, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        is_gone = error.errno in _READS_NO_MORE and not stat.S_ISREG(os.fstat(file).st_mode)
        kept = None if is_gone else os.dup(file)
        os.dup2(nowhere, file)
        os.close(nowhere)
        if kept is not None:
            stream.flush()
            os.dup2(kept, file)
            os.close(kept)


def flush_or_drop() -> None:
    """Before the end of a process whose exit code stands: Python's own end makes it 120 where a standard stream still
    holds what cannot be written, such as a line of the logging."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            leave_unsaid(stream, error)


def answer(error: Exception | KeyboardInterrupt, debug: bool) -> int:
    """Tell a person what went wrong: in a sentence or, of a defect, with its traceback. Returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        say("interrupted", sys.stderr)
        return Exit.INTERRUPTED
    if debug or not is_ours(error):
        say("".join(traceback.format_exception(error)).rstrip("\n"), sys.stderr)
    else:
        say(f"error: {one_line(error)}", sys.stderr)
    return exit_code(error)
