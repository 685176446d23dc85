"""Shows the files of a run as they grow, in another process than the one that writes them."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

from actors.records.events import RunStarted, event_of
from actors.records.metrics_line import metrics_of
from app.records.progress import ProgressLine
from app.records.tails import JsonObject, backwards, json_object, last_line, number_in
from ops.line_file import end_of_whole_lines

log = logging.getLogger(__name__)

_ANCHOR = 256  # bytes kept from before the reading position: if they have changed, the file was cut and written again
_MOST = 10_000  # lines searched from the end for new ones after a cut


class Follower:
    """Shows the growing metrics.jsonl and events.jsonl in this process while the controller runs in another."""

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self._files = {name: Tail(run_dir / name) for name in ("events.jsonl", "metrics.jsonl")}
        self._progress = ProgressLine(total_steps)
        self.has_begun = False  # the controller has opened the run
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._progress.close()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            self._show()
        self._show()

    def _show(self) -> None:
        for name, show in (("events.jsonl", self._say), ("metrics.jsonl", self._step)):
            try:
                for line in self._files[name].read():
                    show(line)
            except Exception as error:  # a line that cannot be shown must not hide those after it
                log.warning("progress could not be shown: %s: %s", type(error).__name__, error)

    def _say(self, line: JsonObject) -> None:
        event = event_of(line)
        self.has_begun |= isinstance(event, RunStarted)
        if text := event.describe():
            self._progress.say(text)

    def _step(self, line: JsonObject) -> None:
        self._progress.show(metrics_of(line))


class Tail:
    """Complete new lines of a JSON-lines file that somebody else writes.

    When steps are computed again, the writer cuts their lines off the file. If the text before the reading position has
    changed, lines newer than the newest one shown are searched from the end of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at, self._anchor, self._newest = 0, b"", 0.0
        if path.exists():
            self._newest = number_in(last_line(path) or {}, "time", 0.0)
            with path.open("rb") as file:
                self._stand(file, end_of_whole_lines(file))

    def read(self) -> list[JsonObject]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if not self._is_where_it_was(file):
                lines = self._newer()
                self._stand(file, end_of_whole_lines(file))
            else:
                file.seek(self._at)
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1].splitlines()
                lines = [record for line in whole if (record := json_object(line)) is not None]
                self._stand(file, self._at + data.rfind(b"\n") + 1)
        self._newest = max((number_in(line, "time", 0.0) for line in lines), default=self._newest)
        return lines

    def _stand(self, file: BinaryIO, at: int) -> None:
        self._at = at
        file.seek(max(0, at - _ANCHOR))
        self._anchor = file.read(at - max(0, at - _ANCHOR))

    def _is_where_it_was(self, file: BinaryIO) -> bool:
        if os.fstat(file.fileno()).st_size < self._at:
            return False
        file.seek(self._at - len(self._anchor))
        return file.read(len(self._anchor)) == self._anchor

    def _newer(self) -> list[JsonObject]:
        found: list[JsonObject] = []
        for _, record in backwards(self._path):
            if number_in(record, "time", 0.0) <= self._newest or len(found) >= _MOST:
                break
            found.append(record)
        return found[::-1]
