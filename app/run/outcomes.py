"""How a run ended, as its folder says, and whether the folder is worth keeping."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import closing
from pathlib import Path
from typing import TypedDict

from actors.outcome import Exit, Outcome
from actors.records.events import RunFailed
from app.records.rundir import METRICS
from app.records.tails import backwards, last_line, number_in
from app.settings.run_folder import CONFIG
from ops.line_file import LineFile, end_of_whole_lines
from ops.whole_file import write_whole

log = logging.getLogger(__name__)

OUTCOME = "outcome.json"
_EVENTS = "events.jsonl"
ALL_HAPPENED = "all that was to happen to it has"  # why `heddle prove` ends its first run, which nobody continues
FAILED = (Exit.FAILURE, Exit.USAGE, Exit.PLAN, Exit.DATA)  # exit codes of runs that somebody has to look at
START_NOTE = "HEDDLE_START_NOTE"  # environment: a file for scripts that start a run again; see `note_start`


class EndedRun(TypedDict):
    """An `Outcome` as it leaves the controller's process: its fields under their names."""

    code: int
    reason: str
    last_step: int


def ended_run(outcome: Outcome) -> EndedRun:
    return EndedRun(code=outcome.code, reason=outcome.reason, last_step=outcome.last_step)


def write_outcome(folder: Path, ended: EndedRun, token: str) -> None:
    """Leave it in the run's folder for the process of this start, which `token` names. Raises OSError."""
    write_whole(folder / OUTCOME, json.dumps({**ended, "token": token}))


def read_outcome(folder: Path, token: str | None = None) -> Outcome | None:
    """What the controller wrote at its end; with a token only if it belongs to that start. None if there is nothing,
    or the folder cannot be read."""
    try:
        told = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
        found = Outcome(code=int(told["code"]), reason=str(told["reason"]), last_step=int(told["last_step"]))
        return found if token in (None, told.get("token", token)) else None
    except FileNotFoundError:  # the run goes on, and is asked again and again
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.debug("no outcome in %s: %s", folder, error)
    return None


def told_so_far(folder: Path) -> int:
    """Bytes of the whole lines of the run's events.jsonl; 0 without one."""
    try:
        with (folder / _EVENTS).open("rb") as file:
            return end_of_whole_lines(file)
    except OSError:
        return 0


def tell_failure(folder: Path, outcome: Outcome, since: int) -> None:
    """Write a failure into events.jsonl, unless a recorder has written one after byte `since` (from `told_so_far`; not
    a time, as clocks of two machines may differ). Without this, a failure before a recorder is open, or after it was
    lost, would not be seen in that file. Does nothing if the folder is not that of a run yet."""
    if outcome.code not in FAILED or not (folder / CONFIG).is_file():
        return
    path = folder / _EVENTS
    try:
        for at, line in backwards(path):
            if at < since:
                break
            if line.get("event") == RunFailed.event:
                return
        with closing(LineFile(path)) as file:
            file.add([json.dumps(RunFailed(time=time.time(), why=outcome.reason, code=outcome.code).line())])
    except OSError as error:
        log.warning("the end is not in %s: %s", path, error)


def note_start(folder: Path) -> None:
    """Into the file that the environment names, if it does: the newest step of the run as it begins, -1 before the
    first, and its folder, a line each. A script that starts runs again sees by it whether this start got further."""
    if path := os.environ.get(START_NOTE):
        newest = last_line(folder / METRICS) or {}
        write_whole(Path(path), f"{number_in(newest, 'step', -1):.0f}\n{folder.absolute()}\n")


def worth_keeping(folder: Path) -> bool:
    """Whether a run has left something worth keeping: a step, a checkpoint, a list of faults, a traceback, or an end
    that --resume continues. A folder that cannot be read counts as one that has."""
    metrics, outcome = folder / METRICS, read_outcome(folder)
    try:
        return (
            (metrics.is_file() and metrics.stat().st_size > 0)
            or (folder / "checkpoints").is_dir()
            or any((folder / name).is_file() for name in ("bad.jsonl", "error.txt"))
            or (outcome is not None and outcome.code == Exit.RESUMABLE)
        )
    except OSError as error:
        log.warning("%s: %s", folder, error)
        return True
