"""What the process that starts a run says while it hears nothing of the controller: that Ray has not started it, or has
lost its node, of which Ray itself says neither, and waits for minutes; or that the run's files take nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from actors.refs import RayNode
from app.run.controller_process import CONTROLLER
from app.run.lock import Stamp, holder, lock_path

_QUIET_S = 30.0
_LOOK_S = 2.0


class ControllerWatch:
    """Says, each thing once, why no controller has begun, or why the one that was seen does not go on. `nodes` are
    those of the cluster; `trouble` asks the controller's monitor for what goes wrong, "" for nothing."""

    def __init__(
        self,
        folder: Path,
        nodes: Callable[[], Sequence[RayNode]],
        trouble: Callable[[], str],
        tell: Callable[[str], None],
    ) -> None:
        self._lock, self._nodes, self._tell = lock_path(folder, CONTROLLER), nodes, tell
        self._trouble = trouble
        self.since = time.monotonic()
        self._seen: Stamp | None = None
        self._told: set[str] = set()

    def start(self, ended: Callable[[], bool]) -> None:
        """Look in a thread, since Ray may not answer, until the run has `ended`."""

        def look() -> None:
            while not ended():
                with suppress(Exception):  # no answer from Ray, of whatever kind
                    self.look(time.monotonic())
                time.sleep(_LOOK_S)

        threading.Thread(target=look, name="watch-controller", daemon=True).start()

    def look(self, now: float) -> None:
        self._seen = holder(self._lock) or self._seen
        if self._seen is None:
            if now - self.since >= _QUIET_S:
                self._once("start", lambda: _not_started(now - self.since, self._nodes()))
            return
        there = [node["Alive"] for node in self._nodes() if node["NodeManagerHostname"] == self._seen.host]
        if there and not any(there):
            self._once(f"{self._seen.host} {self._seen.pid}", partial(_lost, self._seen.host))
        elif trouble := self._trouble():
            self._once(trouble, lambda: trouble)

    def _once(self, what: str, words: Callable[[], str]) -> None:
        if what not in self._told:
            self._tell(words())
            self._told.add(what)


def _not_started(seconds: float, nodes: Sequence[RayNode]) -> str:
    places = ", ".join(f"{n['NodeManagerHostname']} ({n['NodeManagerAddress']})" for n in nodes if n["Alive"])
    if sum(n["Alive"] for n in nodes) == 1:  # the driver runs on it, too: no address is in doubt
        return (
            f"the controller has not begun in {seconds:.0f} s. Ray is still starting it here, which takes longer on a "
            f"machine that is busy; `ray status` says whether CPUs are free."
        )
    return (
        f"the controller has not begun in {seconds:.0f} s. Ray has to start it on a node and reach it there; the nodes "
        f"are {places}. Where others do not reach one of these addresses, end Ray on that host and start it with "
        f"--node-ip-address=ADDRESS that they do; `ray status` says whether CPUs are free."
    )


def _lost(host: str) -> str:
    return (
        f"{host}, where the controller runs, does not answer Ray any more. Another controller goes on elsewhere, once "
        f"that one has let go of the run's folder."
    )
