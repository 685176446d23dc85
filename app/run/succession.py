"""How a controller that Ray Train has given up lets go of the run's folder.

Where its host was cut off, such a controller lives on until Ray notices there, minutes later, and holds the lock that
the next one waits for. The next one asks it to end, by a file beside the folder: the only thing that both still see.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from app.run.lock import beside

log = logging.getLogger(__name__)

LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the next controller writes into the file."""

    token: str  # of the start of the run that both belong to
    host: str
    pid: int


class Succession:
    """One controller's part in it: it may `ask` its predecessor to end; then it ends itself when its successor asks
    (`heed`)."""

    def __init__(self, folder: Path, token: str) -> None:
        self._path = beside(folder, "successor")
        self._mine = Asked(token=token, host=socket.gethostname(), pid=os.getpid())
        self._asked = False
        self._end = threading.Event()

    def ask(self) -> None:
        """Ask the predecessor, a controller of the same start of the run, to end."""
        part = self._path.with_name(f"{self._path.name}.{self._mine.host}.{self._mine.pid}")
        try:
            part.write_text(json.dumps(asdict(self._mine)), encoding="utf-8")
            part.replace(self._path)
            self._asked = True
        except OSError as error:  # a full disk: the other one ends when Ray notices
            log.warning("the controller before this one cannot be asked to end: %s", error)

    def heed(self, end: Callable[[], None], look_s: float = LOOK_S) -> None:
        """Call `end` from a thread when a successor asks; also when it has asked while this controller waited."""
        if not self._asked or self._read() == self._mine:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)  # what this one, or one that was killed since, has asked
        threading.Thread(target=self._look, args=(end, look_s), name="succession", daemon=True).start()

    def close(self) -> None:
        self._end.set()

    def _look(self, end: Callable[[], None], look_s: float) -> None:
        while not self._end.wait(look_s):
            asked = self._read()
            if asked is not None and asked.token == self._mine.token and asked != self._mine:
                log.error("Ray has started another controller of this run, on %s: this one ends", asked.host)
                return end()

    def _read(self) -> Asked | None:
        try:
            return Asked(**json.loads(self._path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
