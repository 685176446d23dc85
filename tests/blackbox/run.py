"""One run as a person has it: a command that is started, a folder that grows, an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

from tests.blackbox.place import ROOT, Place
from tests.blackbox.processes import MARK, Processes, wait_for

START_S = 300.0  # of Ray and the workers, on a busy machine
STEP_S = 240.0  # the longest time without a committed step while nothing keeps a run from it
GONE_S = 60.0  # what a driver has started must be gone so soon after it


class Deviation(AssertionError):
    """The run did something that it must not do."""


class Run:
    """The run in one folder through all its starts. Everything about it is read from files and processes."""

    def __init__(
        self, place: Place, name: str, settings: dict[str, object] | None = None, folder: Path | None = None
    ) -> None:
        """`folder`: another parent than the place's runs."""
        self.place, self.name = place, name
        self.settings = dict(settings or {})
        if folder is not None:
            self.settings["run.dir"] = str(folder)
        self.folder = (folder or place.runs) / name
        self.output = place.folder / f"{name}.out"
        self.starts = 0
        self._driver: subprocess.Popen[bytes] | None = None
        self.processes: Processes | None = None
        self._said = 0  # bytes of output before this start

    # -- start and end -------------------------------------------------------------------------------------------------

    def start(self, *more: str) -> None:
        """`python -m app.train` in a session of its own. Does not wait."""
        assert self._driver is None or self._driver.poll() is not None, "the earlier start has not ended"
        if self.processes is not None:
            self.processes.close()
        mark = uuid.uuid4().hex
        self.processes = Processes(mark)
        self._said = self.output.stat().st_size if self.output.exists() else 0
        with self.output.open("ab") as file:
            self._driver = subprocess.Popen(
                self.place.command(self.name, *more, settings=self.settings),
                cwd=ROOT,
                start_new_session=True,
                env=self.place.environment(**{MARK: mark}),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.starts += 1

    @property
    def pid(self) -> int:
        assert self._driver is not None
        return self._driver.pid

    @property
    def alive(self) -> bool:
        return self._driver is not None and self._driver.poll() is None

    def code(self, timeout_s: float) -> int | None:
        """The exit code, or None if the driver still runs after this time."""
        assert self._driver is not None
        try:
            return self._driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Nothing of the run lives after this."""
        if self.processes is not None:
            self.processes.end_all()
            self.processes.close()
            self.processes = None
        if self._driver is not None:
            self._driver.wait()

    def said(self) -> str:
        """Standard output and error of the last start."""
        data = self.output.read_bytes() if self.output.exists() else b""
        return data[self._said :].decode(errors="replace")

    # -- what it has done ----------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.folder / "metrics.jsonl")

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        return [e for e in lines(self.folder / "events.jsonl") if not kind or e["event"] == kind]

    def step(self) -> int:
        """Last committed step, -1 before the first."""
        found = self.metrics()
        return found[-1]["step"] if found else -1

    def beginning(self) -> dict[str, Any] | None:
        """The `start` event of the last start that came so far."""
        found = self.events("start")
        return found[-1] if found else None

    def wait_for_step(self, step: int, timeout_s: float, since: float = 0.0) -> bool:
        """Whether step `step` or a later one was committed, after `since` (unix seconds), while the driver lived.
        The time counts from the last step: a run that goes on is waited for."""
        deadline, last = time.monotonic() + timeout_s, self.step()

        def reached() -> bool:
            found = self.metrics()
            return bool(found) and found[-1]["step"] >= step and found[-1]["time"] > since

        while not reached():
            if (now := self.step()) != last:
                deadline, last = time.monotonic() + timeout_s, now
            if not self.alive or time.monotonic() > deadline:
                return reached()
            time.sleep(0.1)
        return True

    def wait_for_start(self, number: int, timeout_s: float = START_S) -> bool:
        """Whether `number` `start` events stand in events.jsonl while the driver lives."""
        wait_for(lambda: len(self.events("start")) >= number or not self.alive, timeout_s)
        return len(self.events("start")) >= number

    def checkpoints(self) -> list[int]:
        """Steps of folders that say that they are complete, oldest first."""
        return sorted(int(p.parent.name.removeprefix("step-")) for p in self.folder.glob("checkpoints/step-*/COMPLETE"))

    # -- hands on it ---------------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def address(self) -> str:
        """The address of the run's own Ray cluster, from the command line of its raylet."""
        assert self.processes is not None
        for pid in self.processes.of("raylet"):
            for word in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0"):
                if word.startswith("--gcs-address="):
                    return word.partition("=")[2]
        return ""

    def heddle(self, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """A `heddle` command on the run's cluster."""
        environment = {**self.place.environment(), "RAY_ADDRESS": self.address(), "RAY_AUTH_MODE": _authentication()}
        command = [self.place.command("")[0], "-m", "app.cli", *words]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file that may be growing; what is no JSON is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def _authentication() -> str:
    """What a cluster that a run starts has chosen: Ray makes a token for it unless told otherwise."""
    return os.environ.get("RAY_AUTH_MODE", "token")
