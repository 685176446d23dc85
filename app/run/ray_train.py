"""The run under Ray Train, which owns it: its single worker is the controller, which it starts again when it dies.

The controller (`app/run/controller_process.py`) starts the GPU workers (`actors/run/controller.py`) and writes the run
directory; this process follows the files, shows the progress, and says how the run ended.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from actors.memory_kills import in_short
from actors.names import RUN_ID, label_of
from actors.outcome import Exit, Outcome
from app.inputs.cluster import given_cluster
from app.records.follow import Follower
from app.records.metrics import newest_line
from app.records.rundir import METRICS
from app.records.tails import last_line
from app.run.cluster import RayGone, wait_while_ray_lives
from app.run.controller_process import ControllerStart, controller_loop, runtime_config
from app.run.controller_watch import ControllerWatch
from app.run.operator import monitor_of
from app.run.outcomes import EndedRun, read_outcome
from app.run.signals import RunSignals
from app.run.tracker_environment import in_environment, tracker_environment
from app.settings.config import RunConfig
from app.settings.errors import one_line
from app.settings.resume import Change

if TYPE_CHECKING:
    from ray.train import Result
    from ray.train.torch import TorchTrainer

log = logging.getLogger(__name__)

RAY_TRAIN = "ray_train"  # Ray Train's own files, of the last start
_ANSWER_S = 10.0  # of the run's monitor
_STATE_API = "RAY_API_SERVER_ADDRESS"  # the cluster that the state API of Ray asks; RAY_ADDRESS is for more than that
CONTROLLERS = 10  # that Ray Train starts in the place of others
R = TypeVar("R")


def follow_run(
    config: RunConfig,
    folder: Path,
    token: str,
    changes: Sequence[Change],
    note: Callable[[str], None],
    signals: RunSignals,
) -> Outcome:
    """Follow the run until it ends, and return how. `token` is that of the lock on its folder, `changes` what a resume
    has changed in its settings; `note` shows a person a sentence. Raises KeyboardInterrupt or SystemExit if it was
    interrupted at once."""
    with Follower(folder, config.train.steps) as follower, signals.stopping(folder, lambda: follower.has_begun):
        try:
            returned = _run_controller(config, folder, token, changes, note)
        except RayGone as error:
            return Outcome(
                code=Exit.FAILURE, reason=f"{error}; --resume continues from the last checkpoint", last_step=-1
            )
        except Exception as error:  # Ray Train has given up; it raises many kinds
            log.debug("Ray Train has given up", exc_info=True)
            return _rescue_outcome(config, folder, error)
    return (
        read_outcome(folder, token)
        or returned
        or _rescue_outcome(
            config,
            folder,
            RuntimeError("another start has taken over the folder, or its controller ended without a word"),
        )
    )


def _rescue_outcome(config: RunConfig, folder: Path, error: Exception) -> Outcome:
    """The outcome for a controller that has left none: write to disk, from this process, what the keepers hold."""
    from actors.run.rescue import rescue

    reason = f"Ray Train gave the run up: {in_short(one_line(error)).removesuffix('.')}"
    try:
        left = rescue(runtime_config(config, folder), newest_line(folder))
    except Exception as second:  # the state is where it was; the message has both errors
        left = f"its last steps could not be saved from the keepers ({one_line(second)})"
    left = left or _on_disk(folder)
    return Outcome(code=Exit.FAILURE, reason=f"{reason}. {left}", last_step=-1)


def _on_disk(folder: Path) -> str:
    """How to go on with a run of which nothing is left in memory."""
    from actors.state.checkpoint_files import LaterFormat, latest

    try:
        saved = latest(folder / "checkpoints") is not None
    except (OSError, LaterFormat) as error:
        return f"Its checkpoints cannot be read now ({one_line(error)}); go on with --resume when they can"
    if saved:
        return "Its last committed step is on disk; go on with --resume"
    return "No step of it is on disk; start it again"


def _run_controller(
    config: RunConfig, folder: Path, token: str, changes: Sequence[Change], note: Callable[[str], None]
) -> Outcome | None:
    """Let Ray Train run the controller, and start it again if its process dies. Returns what the controller returned;
    None if that is nothing, or if the folder says how the run ended while Ray Train does not end. Raises RayGone if Ray
    itself has ended.

    Ray Train gets a folder of its own for every start: what it remembers of an earlier one (checkpoints that are pruned
    since, another version of Ray) must not refuse this one.
    """
    from actors.ray_calls import nodes

    ask_own_cluster()
    shutil.rmtree(folder / RAY_TRAIN, ignore_errors=True)
    (folder / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)  # of earlier versions of this program
    # Ray hands on what the loop returns; its types say that a loop returns nothing
    loop: Any = in_environment(controller_loop, tracker_environment(config.track))

    def fit(number: int) -> Result:
        return _trainer(loop, config, folder, token, changes, number).fit()

    # In a thread Ray Train leaves Ctrl-C alone, so that `RunSignals` can let the controller write a checkpoint.
    result: Future[Result] = Future()

    def fit_in_thread() -> None:
        try:
            result.set_result(fit_while_progressing(fit, folder, note))
        except BaseException as error:  # a thread boundary: raised again by result()
            with suppress(InvalidStateError):  # nobody waits any more
                result.set_exception(error)

    threading.Thread(target=fit_in_thread, name="ray-train", daemon=True).start()
    ControllerWatch(folder, nodes, lambda: _trouble(folder), note).start(result.done)
    wait_while_ray_lives(result, lambda: read_outcome(folder, token) is not None)
    if result.cancel():  # whoever asks Ray until it is there ends as well
        log.warning("the run has ended, and Ray Train is not waited for any longer")
        return None
    returned: EndedRun | None = getattr(result.result(), "return_value", None)
    return Outcome(**returned) if returned else None


def _trainer(
    loop: Any,  # it returns something, which Ray's types do not know of
    config: RunConfig,
    folder: Path,
    token: str,
    changes: Sequence[Change],
    number: int,
) -> TorchTrainer:
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as TrainRun
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        loop,
        train_loop_config=dict(
            ControllerStart(
                yaml=config.to_yaml(),
                run_dir=str(folder),
                token=token,
                changes=[str(change) for change in changes],
                cluster=given_cluster(config),
            )
        ),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False, resources_per_worker={"CPU": 0.1}),
        run_config=TrainRun(
            name=label_of(folder.name),
            storage_path=str(folder / RAY_TRAIN / f"{token[:12]}-{number}"),
            failure_config=FailureConfig(max_failures=CONTROLLERS),
        ),
    )


def ask_own_cluster() -> None:
    """Have Ray Train ask this cluster whether its controller lives. Its PlacementGroupCleaner asks Ray's state API
    without an address, which means the cluster started last on this host. If that is another one, which knows no such
    actor, the cleaner ends the run that it should clean up after. So does the one that RAY_API_SERVER_ADDRESS names in
    a shell from which jobs are submitted elsewhere. Call it with Ray connected."""
    import ray
    from ray.train.v2._internal import constants

    os.environ[_STATE_API] = ray.get_runtime_context().gcs_address
    constants.ENV_VARS_TO_PROPAGATE.add(_STATE_API)


def _trouble(folder: Path) -> str:
    """What the controller's monitor says of files that cannot be written, since no event can say it; "" if all is well.
    Raises LookupError, and what Ray raises."""
    from actors.ray_calls import get

    if not (folder / RUN_ID).is_file():  # which the controller makes
        return ""
    return get(monitor_of(folder).trouble.remote(), timeout=_ANSWER_S)


def fit_while_progressing(fit: Callable[[int], R], folder: Path, note: Callable[[str], None]) -> R:
    """Call `fit` with 0, and again with the next number if Ray Train gives up although steps were committed since it
    began: its failure limit is for the whole run, so a month-long run would reach it. If none were, raises its error.
    """
    from ray.train import TrainingFailedError

    number = 0
    while True:
        before = last_line(folder / METRICS)
        try:
            return fit(number)
        except TrainingFailedError:
            if last_line(folder / METRICS) == before:
                raise
            log.debug("Ray Train has given up", exc_info=True)
            note("Ray Train has given up, as too many controllers have died; with steps between, it begins anew")
            number += 1
