"""The controller's process: what Ray Train runs, and starts again when its process dies. See `app/run/launch.py`.

It holds the lock of the run's folder, writes the folder through `Recorder`, and leaves `outcome.json` for the driver.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.config import RuntimeConfig
from actors.outcome import Exit, Outcome, Superseded, continues
from actors.records.events import SettingsChanged
from app.run.live_runs import OUTCOME
from app.run.lock import FolderLock, holder, lock_path
from app.run.recorder import Recorder
from app.sampling.live import LiveSamples
from app.settings.config import RunConfig
from app.settings.errors import exit_code, is_ours, unwrap

log = logging.getLogger(__name__)

DRIVER, CONTROLLER = "driver", "controller"  # who holds a lock of a run's folder
CONTROLLER_S = 60.0  # the controller of a driver that was killed ends within this, on whichever node
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def controller_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Runs in Ray Train's worker process. Ends normally also when the run failed for a reason that a retry repeats;
    returns the outcome, also for a disk that takes no file any more."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    folder, token = Path(settings["run_dir"]), settings.get("token", "")
    with FolderLock(lock_path(folder, CONTROLLER)) as lock:
        lock.take(CONTROLLER_S, log.warning)
        try:
            outcome = _controlled(settings, _guard(folder, token, lock))
        except Superseded as error:
            log.error("%s", error)
            return None
    ended = {"code": outcome.code, "reason": outcome.reason, "last_step": outcome.last_step}
    try:
        aside = folder / f".{OUTCOME}.part"
        aside.write_text(json.dumps({**ended, "token": token}), encoding="utf-8")
        os.replace(aside, folder / OUTCOME)
    except OSError as error:
        log.error("%s was not written: %s", folder / OUTCOME, error)
    return ended


def _guard(folder: Path, token: str, lock: FolderLock) -> Callable[[], None]:
    """Raises Superseded once another start writes in this folder."""

    def check() -> None:
        driver = holder(lock_path(folder, DRIVER))
        if lock.lost or (token and driver is not None and driver.token != token):
            raise Superseded(f"another start has taken over {folder}")

    return check


def _controlled(settings: dict[str, Any], guard: Callable[[], None]) -> Outcome:
    """The controller's life with its files. Raises Superseded, and Ray's errors that another controller answers."""
    from actors.run.assemble import start_controller
    from actors.run.rescue import rescue

    folder, config = Path(settings["run_dir"]), RunConfig.from_yaml(settings["yaml"])
    controller: Any = None
    try:
        guard()
        with Recorder(folder, LiveSamples(config, folder), guard, config) as recorder:
            if changes := settings.get("changes"):
                recorder.on_event(SettingsChanged(time=time.time(), settings=tuple(changes)))
            controller = start_controller(runtime_config(config, folder), recorder)
            outcome: Outcome = controller.train()
            left = controller.left
    except Exception as error:  # the process boundary: what a retry would repeat ends the run, with its reason
        if continues(error) or isinstance(error, Superseded):
            raise  # the cluster's fault: Ray Train starts this function again, and it goes on from the keepers
        log.exception("the controller failed")
        left = controller.left if controller is not None else rescue(runtime_config(config, folder))
        outcome = Outcome(code=code_of(error, folder), reason=_told(error, folder), last_step=-1)
    return replace(outcome, reason=f"{outcome.reason}. {left}") if left else outcome


def code_of(error: Exception, folder: Path) -> int:
    """The exit code of a run that this error ended. A run folder that can no longer be written is a failure of its
    storage, although a path that cannot be opened at a start is a mistake."""
    cause = unwrap(error)
    named = cause.filename if isinstance(cause, OSError) else None  # a str or bytes, or a number of an open file
    if isinstance(named, str | bytes) and Path(os.fsdecode(named)).is_relative_to(folder):
        return Exit.FAILURE
    return exit_code(error) or Exit.FAILURE


def _told(error: Exception, folder: Path) -> str:
    """A sentence for the person at the terminal; the traceback of what is not ours stays in the folder."""
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}. Make room for {folder}, "
            f"then continue with --resume"
        )
    if is_ours(error):
        return str(error)
    try:
        (folder / "error.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error} (see {folder / 'error.txt'})"


def runtime_config(config: RunConfig, run_dir: Path) -> RuntimeConfig:
    """The part of the settings that the controller needs."""
    return RuntimeConfig(
        run_dir=str(run_dir),
        model=config.model,
        data=config.data,
        train=config.train,
        workers=config.workers,
        planner=config.planner,
        snapshot=config.snapshot,
        checkpoint=config.checkpoint,
        config_yaml=config.to_yaml(),
    )
