"""Shows a run's growing files in another process than the one that writes them."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

from actors.records.events import event_of
from actors.records.metrics_line import metrics_of
from app.records.tails import backwards, end_of_whole_lines, last_line

log = logging.getLogger(__name__)

_ANCHOR = 256  # bytes before the place read up to, by which a file that was cut and written again is known
_MOST = 10_000  # lines looked back for what is new after that


class Follower:
    """Shows the growing metrics.jsonl and events.jsonl in this process while the controller runs in another."""

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        from app.records.metrics import ProgressLine

        self._files = {name: Tail(run_dir / name) for name in ("events.jsonl", "metrics.jsonl")}
        self._progress = ProgressLine(total_steps)
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
            except Exception as error:  # one line that cannot be shown must not be the last
                log.warning("progress could not be shown: %s: %s", type(error).__name__, error)

    def _say(self, line: dict[str, Any]) -> None:
        if text := event_of(line).describe():
            self._progress.say(text)

    def _step(self, line: dict[str, Any]) -> None:
        self._progress.show(metrics_of(line))


class Tail:
    """Complete new lines of a JSON-lines file that somebody else writes.

    The writer takes lines of recomputed steps back by cutting the file: when what was read last is no longer there,
    the lines that are newer than the newest one shown are looked for from the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at, self._anchor, self._newest = 0, b"", 0.0
        if path.exists():
            self._newest = float((last_line(path) or {}).get("time", 0.0))
            with path.open("rb") as file:
                self._stand(file, end_of_whole_lines(file))

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if not self._is_where_it_was(file):
                lines = self._newer()
                self._stand(file, end_of_whole_lines(file))
            else:
                file.seek(self._at)
                data = file.read()
                lines = _records(data[: data.rfind(b"\n") + 1])
                self._stand(file, self._at + data.rfind(b"\n") + 1)
        self._newest = max((line.get("time", 0.0) for line in lines), default=self._newest)
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

    def _newer(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for _, record in backwards(self._path):
            if record.get("time", 0.0) <= self._newest or len(found) >= _MOST:
                break
            found.append(record)
        return found[::-1]


def _records(data: bytes) -> list[dict[str, Any]]:
    """What is no JSON object is left out: a killed writer's half line may have got an end since."""
    found = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
