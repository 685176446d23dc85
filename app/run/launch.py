"""A run from its config to its exit code: the process that starts it, follows it and tells how it ended.

Ray Train owns the run: its single worker is the controller (`app/run/controller_process.py`), which it starts again
when it dies. The controller starts the GPU workers (`actors/run/controller.py`) and writes the run directory; this
process follows the files and shows the progress.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from actors.outcome import Exit, Outcome
from app.inputs.synthetic import make_missing
from app.records.follow import Follower
from app.records.trackers import check_installed
from app.run.apart import is_inner, run_apart
from app.run.controller_process import CONTROLLER, CONTROLLER_S, DRIVER, controller_loop, runtime_config
from app.run.live_runs import (
    OUTCOME,
    ClusterAddress,
    RayGone,
    came_to_anything,
    end_leftovers,
    must_answer,
    read_outcome,
    shut_down_ray,
    stops_on_signal,
    wait_while_ray_lives,
)
from app.run.lock import FolderLock, lock_path
from app.run.resume import Change, check_resume
from app.settings.config import RunConfig, check_run_dir, from_here, notes, prepare_run_dir, run_dir
from app.settings.errors import one_line
from ops.typed import ConfigError

log = logging.getLogger(__name__)

RAY_TRAIN = "ray_train"  # Ray Train's own files, of the last start
_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
_DRIVER_S = 3.0  # a run that was killed frees its folder within this
UPLOADED = "/runtime_resources/working_dir_files/"  # in paths below the working directory of a submitted job


def train(
    config_path: str | Path, overrides: Sequence[str] = (), *, resume: bool = False, overwrite: bool = False
) -> int:
    """Run to the end. Returns the exit code; raises our own errors for what can be said before the start."""
    config = from_here(RunConfig.load(config_path, overrides))
    check_installed(config.track)
    check_run_dir(config, resume=resume, overwrite=overwrite)
    if is_inner() or _is_on_a_cluster():
        return _run(config, resume=resume, overwrite=overwrite)
    if logging.getLogger("app").level == logging.DEBUG:
        os.environ["HEDDLE_DEBUG"] = "1"
    options = [word for override in overrides for word in ("--set", override)]
    options += ["--resume"] * resume + ["--overwrite"] * overwrite
    return run_apart(["-m", "app.train", "--config", str(config_path), *options])


def _run(config: RunConfig, *, resume: bool, overwrite: bool) -> int:
    """A run's whole life in this process: alone in its folder, with a Ray to run on."""
    folder = run_dir(config)
    with FolderLock(lock_path(folder, DRIVER)) as lock, FolderLock(lock_path(folder, CONTROLLER)) as predecessor:
        lock.take(_DRIVER_S, _note)
        check_run_dir(config, resume=resume, overwrite=overwrite)
        changes = check_resume(config) if resume else []
        predecessor.take(CONTROLLER_S, _note)  # of a driver that was killed: it ends soon after
        fresh = not folder.exists()
        _say_before(config, resume=resume)
        make_missing(config.data.sources)
        try:
            _connect(config)
            end_leftovers(config, overwrite=overwrite)
            prepare_run_dir(config, resume=resume, overwrite=overwrite)
            (folder / OUTCOME).unlink(missing_ok=True)
            _joined().write(folder)
            predecessor.release()
            _check_capacity(config)
            outcome = _trained(config, folder, lock.token, changes)
        finally:
            shut_down_ray()
            if fresh and not came_to_anything(folder):
                shutil.rmtree(folder, ignore_errors=True)
    if outcome.code:
        print(f"error: {outcome.reason}", file=sys.stderr)
    else:
        print(
            f"done: {config.train.steps} steps. Next: heddle report {folder}   heddle sample --checkpoint "
            f"{folder}/checkpoints"
        )
    return outcome.code


def _say_before(config: RunConfig, *, resume: bool) -> None:
    if UPLOADED in config.run.dir:
        _note(
            f"this run lies in the upload of its job, which Ray deletes in time: {config.run.dir}. Give a "
            f"folder that stays and that all nodes see: --set run.dir=/shared/runs"
        )
    if resume and not (run_dir(config) / "config.yaml").is_file():
        _note(f"there is no run {run_dir(config)} to resume; it starts anew, at step 0")
    for note in notes(config):
        _note(note)


def _note(text: str) -> None:
    print(f"note: {text}", flush=True)


def _trained(config: RunConfig, folder: Path, token: str, changes: Sequence[Change]) -> Outcome:
    """Follow the run until it has ended, however it ends. Raises KeyboardInterrupt when it was ended at once."""
    with Follower(folder, config.train.steps), stops_on_signal(folder):
        try:
            returned = _fit(config, folder, token, changes)
        except RayGone as error:
            return Outcome(
                code=Exit.FAILURE, reason=f"{error}; --resume continues from the last checkpoint", last_step=-1
            )
        except Exception as error:  # of Ray Train's many kinds: it has given up
            log.debug("Ray Train has given up", exc_info=True)
            return _rescued(config, folder, error)
    return (
        read_outcome(folder, token)
        or returned
        or _rescued(
            config,
            folder,
            RuntimeError("another start has taken over the folder, or its controller ended without a word"),
        )
    )


def _rescued(config: RunConfig, folder: Path, error: Exception) -> Outcome:
    """The controller has left no outcome. What the keepers hold goes to disk from here."""
    from actors.run.rescue import rescue

    reason = f"Ray Train gave the run up: {one_line(error)}"
    try:
        left = rescue(runtime_config(config, folder))
    except Exception as second:  # the state is where it was; both errors are told
        left = f"its last steps could not be saved from the keepers ({one_line(second)})"
    left = left or "Its last committed step is on disk; go on with --resume"
    return Outcome(code=Exit.FAILURE, reason=f"{reason}. {left}", last_step=-1)


def _connect(config: RunConfig) -> None:
    """Join the cluster that this process runs on, or start one here that fits the run."""
    import ray

    quiet: dict[str, Any] = {
        "log_to_driver": os.environ.get("HEDDLE_WORKER_LOGS", "") not in ("", "0"),
        "logging_level": "warning",
        "namespace": "heddle",
        "runtime_env": {"env_vars": _worker_environment()},
    }
    if _is_on_a_cluster():
        must_answer(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            raise ConfigError(
                f"no Ray cluster answers at RAY_ADDRESS={os.environ.get('RAY_ADDRESS', 'auto')}. Start it, or unset "
                f"RAY_ADDRESS to train on this machine."
            ) from None
        return
    workers = config.workers
    spare = 2.0  # the controller, decoding, and Ray's own tasks
    cpus = max(os.cpu_count() or 1, int(workers.max * workers.cpus_per_worker + spare + 0.999))
    # Many small actors start at once here; Ray would warn about each batch of processes.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "32")
    start_ray_here({"num_cpus": cpus, "dashboard_host": "127.0.0.1", **quiet})


def start_ray_here(options: dict[str, Any]) -> None:
    """A Ray of this machine, for this process."""
    import ray

    logging.getLogger(_TOKEN_LOGGER).addFilter(is_news_of_tokens)
    try:
        ray.init(address="local", **options)
    except Exception as error:  # of Ray's many kinds: on a busy machine one of its processes may come up too late
        log.warning("Ray did not start (%s: %s); trying once more", type(error).__name__, error)
        ray.shutdown()
        ray.init(address="local", **options)


def _joined() -> ClusterAddress:
    """The cluster that this process has joined or started."""
    import ray

    auth = os.environ.get("RAY_AUTH_MODE", "" if _is_on_a_cluster() else "token")  # Ray's default for its own clusters
    return ClusterAddress(address=ray.get_runtime_context().gcs_address, auth=auth)


def is_news_of_tokens(record: logging.LogRecord) -> bool:
    """Ray says at each local start that its token is used, as it is unless somebody asks otherwise. That it is not used
    must be seen."""
    return "Token authentication is enabled" not in record.getMessage()


def _is_on_a_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_JOB_ID"))


def _worker_environment() -> dict[str, str]:
    return {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }


def _check_capacity(config: RunConfig) -> None:
    """Say before the wait begins that the cluster is too small now."""
    import ray

    workers, have = config.workers, ray.cluster_resources()
    need = workers.min * workers.cpus_per_worker
    if have.get("CPU", 0) < need or (workers.device == "cuda" and have.get("GPU", 0) < workers.min):
        print(
            f"waiting up to {workers.wait_s:g} s: workers.min {workers.min} need {need:g} CPUs"
            f"{f' and {workers.min} GPUs' if workers.device == 'cuda' else ''}; the cluster has "
            f"{have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs.",
            flush=True,
        )


def _fit(config: RunConfig, folder: Path, token: str, changes: Sequence[Change]) -> Outcome | None:
    """Let Ray Train run the controller, and start it again if its process dies. Returns what the controller returned.

    Ray Train gets a folder of its own for every start: what it remembers of an earlier one (checkpoints that are pruned
    since, another version of Ray) must not refuse this one. Raises RayGone when Ray itself has ended.
    """
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as TrainRun
    from ray.train.torch import TorchConfig, TorchTrainer

    own = folder / RAY_TRAIN
    shutil.rmtree(own, ignore_errors=True)
    (folder / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)  # of earlier versions of this program
    loop: Any = controller_loop  # Ray hands on what it returns, its types do not say so
    trainer = TorchTrainer(
        loop,
        train_loop_config={
            "yaml": config.to_yaml(),
            "run_dir": str(folder),
            "token": token,
            "changes": [str(change) for change in changes],
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False, resources_per_worker={"CPU": 0.1}),
        run_config=TrainRun(
            name=folder.name, storage_path=str(own / token[:12]), failure_config=FailureConfig(max_failures=10)
        ),
    )
    # In a thread Ray Train leaves Ctrl-C alone, so that `stops_on_signal` can let the controller write a checkpoint.
    result: Future[Any] = Future()

    def fit() -> None:
        try:
            result.set_result(trainer.fit())
        except BaseException as error:  # a thread boundary: raised again by result()
            result.set_exception(error)

    threading.Thread(target=fit, name="ray-train", daemon=True).start()
    wait_while_ray_lives(result)
    returned = getattr(result.result(), "return_value", None)
    return Outcome(**returned) if returned else None
