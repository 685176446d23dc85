"""What every process at a terminal does alike: its logging, and its answer to an error."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from actors.outcome import Exit
from app.settings.errors import PACKAGES, exit_code, is_ours, one_line


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


def answer(error: Exception | KeyboardInterrupt, debug: bool) -> int:
    """Tell a person what went wrong: in a sentence or, of a defect, with its traceback. Returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    if debug or not is_ours(error):
        traceback.print_exception(error)
    else:
        print(f"error: {one_line(error)}", file=sys.stderr)
    return exit_code(error)
