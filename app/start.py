"""The first moments of `heddle` and of `python -m app.train`, whose own modules take seconds to import: Ctrl-C ends
them as quietly as it does later. Imports next to nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # `actors.outcome.Exit`, whose module is one of those


def heddle() -> None:
    """Console script. Ends the process with the documented exit code."""
    try:
        with ended_by_ctrl_c():
            from app.cli import main
        main()
    except KeyboardInterrupt:  # between the two
        sys.exit(INTERRUPTED)


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
