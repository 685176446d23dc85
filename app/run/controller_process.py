"""The controller's process, which `app/run/ray_train.py` has Ray Train run, and start again when it dies.

It holds the lock of the run's folder, writes the folder through `Recorder`, and leaves `outcome.json` for the driver.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from actors.config import RuntimeConfig
from actors.outcome import Exit, Outcome, Superseded, continues
from actors.plan.types import Cluster
from actors.ray_calls import end_when_terminated
from actors.state.checkpoint_files import newest_step
from app.export.live import LiveLora
from app.records.metrics import newest_line
from app.records.rundir import METRICS
from app.records.tails import last_line
from app.run.asides import RunAsides
from app.run.lock import FolderHeld, FolderLock, holder, lock_path
from app.run.outcomes import OUTCOME, EndedRun, ended_run, tell_failure, told_so_far, write_outcome
from app.run.recorder import Recorder
from app.run.succession import Succession
from app.sampling.live import LiveSamples
from app.settings.config import RunConfig
from app.settings.errors import exit_code, is_ours, one_line, unwrap
from app.validation.live import LiveHeldOut

if TYPE_CHECKING:
    from actors.run.controller import Controller

log = logging.getLogger(__name__)

DRIVER, CONTROLLER = "driver", "controller"  # who holds a lock of a run's folder
CONTROLLER_S = 60.0  # the controller of a driver that was killed ends within this, on whichever node
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class ControllerStart(TypedDict):
    """What the process that starts a run hands to its controller, through Ray Train."""

    yaml: str  # the resolved config
    run_dir: str
    token: str  # of this start; "": of whoever holds the folder
    changes: list[str]  # settings that differ from those of the start before
    cluster: Cluster | None  # what `workers.cluster` names, which may lie where the driver alone sees it


def controller_loop(settings: ControllerStart) -> EndedRun | None:
    """Runs in Ray Train's worker process. Returns normally if the run failed for a reason that a retry would repeat:
    then Ray Train must not retry. The outcome is returned as well as written, since the disk may be full."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_when_terminated()  # Ray Train starts another one, which goes on from the keepers
    folder, token = Path(settings["run_dir"]), settings["token"]
    with FolderLock(lock_path(folder, CONTROLLER)) as lock, closing(Succession(folder, token)) as succession:
        try:
            lock.take(0.0, log.warning)
        except FolderHeld:
            succession.ask()
            lock.take(CONTROLLER_S, log.warning)
        succession.heed(_end_at_once)
        try:
            outcome = _controlled(settings, _guard(folder, token, lock))
        except Superseded as error:
            log.error("%s", error)
            return None
    ended = ended_run(outcome)
    try:
        write_outcome(folder, ended, token)
    except OSError as error:
        log.error("%s was not written: %s", folder / OUTCOME, error)
    return ended


def _end_at_once() -> None:
    """Whatever this process waits for may never come."""
    os._exit(Exit.FAILURE)


def _guard(folder: Path, token: str, lock: FolderLock) -> Callable[[], None]:
    """A check that raises Superseded once another start writes in this folder."""

    def check() -> None:
        driver = holder(lock_path(folder, DRIVER))
        if lock.lost or (token and driver is not None and driver.token != token):
            raise Superseded(f"another start has taken over {folder}")

    return check


def _controlled(settings: ControllerStart, guard: Callable[[], None]) -> Outcome:
    """Run the controller, with its files. Raises Superseded, and those errors of Ray after which another controller can
    go on."""
    from actors.run.assemble import start_controller

    folder, config = Path(settings["run_dir"]), RunConfig.from_yaml(settings["yaml"])
    begin = told_so_far(folder)
    controller: Controller | None = None
    try:
        guard()
        with suppress(OSError):  # an earlier controller of this start wrote it, and was lost before Ray Train knew
            (folder / OUTCOME).unlink()
        samples, held_out = LiveSamples(config, folder), LiveHeldOut(config, folder)
        samples.note_what_waits()
        begins = last_line(folder / METRICS) is None
        missing = [*held_out.open(begins), *samples.open(begins)]
        asides = RunAsides([held_out, samples], config.sample.share, newest_step(folder))
        lora = LiveLora(config, folder)
        missing += lora.open()
        with Recorder(folder, asides, guard, config, settings["changes"], lora=lora) as recorder:
            for event in missing:
                recorder.on_event(replace(event, time=time.time()))
            runtime = replace(runtime_config(config, folder), cluster=settings["cluster"])
            try:
                controller = start_controller(runtime, recorder, asides=asides)
                outcome = controller.train()
            except Exception as error:
                if not continues(error) and not isinstance(error, Superseded):
                    recorder.ended(_outcome_of(error, folder))
                raise
            recorder.ended(outcome)
            left = controller.left
    except Exception as error:  # the process boundary: what a retry would repeat ends the run, with its reason
        if continues(error) or isinstance(error, Superseded):
            raise  # the cluster's fault: Ray Train starts this function again, and it goes on from the keepers
        log.exception("the controller failed")
        left = controller.left if controller is not None else _left_in_keepers(config, folder)
        outcome = _outcome_of(error, folder)
        guard()
        tell_failure(folder, outcome, begin)  # where the recorder could not be opened
    return replace(outcome, reason=f"{outcome.reason}. {left}") if left else outcome


def _left_in_keepers(config: RunConfig, folder: Path) -> str:
    """What is not on disk where no controller could be started; "": all is."""
    from actors.run.rescue import rescue
    from actors.state.keeper_fleet import OtherKeepers

    try:
        recorded = newest_line(folder)
    except OSError as error:  # without it what keepers hold of later steps would be dropped
        return f"What keepers hold stays in memory ({one_line(error)}): continue with --resume on this cluster"
    try:
        return rescue(runtime_config(config, folder), recorded)
    except OtherKeepers:  # the caller's error says so
        return ""
    except Exception as error:  # the caller's error ends the run; its reason has both
        log.exception("what keepers hold was not written")
        return f"What keepers hold could not be written ({one_line(error)}): continue with --resume on this cluster"


def _outcome_of(error: Exception, folder: Path) -> Outcome:
    return Outcome(code=code_of(error, folder), reason=_reason_of(error, folder), last_step=-1)


def code_of(error: Exception, folder: Path) -> int:
    """The exit code of a run that ended with this error. A run folder that can no longer be written is a failure of
    storage; other paths that cannot be opened are mistakes of the person who gave them."""
    cause = unwrap(error)
    if isinstance(cause, OSError) and cause.errno is not None:
        path = _path_of(cause)
        if path is None or path.is_relative_to(folder):
            return Exit.FAILURE
    return exit_code(error) or Exit.FAILURE


def _path_of(error: OSError) -> Path | None:
    """What could not be opened; None where an open file could not be read or written, which has no name any more."""
    named = error.filename  # a str or bytes, or a number of an open file
    return Path(os.fsdecode(named)) if isinstance(named, str | bytes) else None


def _reason_of(error: Exception, folder: Path) -> str:
    """The error as a sentence for the terminal. The traceback of an unexpected error goes to error.txt in the run's
    folder."""
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}. Make room for {folder}, "
            f"then continue with --resume"
        )
    if isinstance(error, OSError) and error.errno is not None and _path_of(error) is None:
        return f"an open file of {folder} can no longer be used: {error.strerror or error}"
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
