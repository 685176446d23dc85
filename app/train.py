"""Trains one run. On a cluster:  ray job submit --working-dir . -- python -m app.train --config configs/runs/demo.yaml

Ray Train owns the run: its single worker is the controller, which it starts again when it dies. The controller starts
the GPU workers (`actors/controller.py`) and writes the run directory through `Recorder`; this process follows the
files and shows the progress.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from app.config import RunConfig, check_run_dir, from_here, notes, prepare_run_dir
from app.data_synth import make_missing
from app.errors import FAILURE, exit_code, is_ours
from app.events import describe
from app.live_runs import end_leftovers, stops_on_signal
from app.live_samples import LiveSamples
from app.recorder import Recorder
from app.rundir import read_jsonl
from app.settings import ConfigError

log = logging.getLogger(__name__)

OUTCOME = "outcome.json"
UPLOADED = "/runtime_resources/working_dir_files/"  # in paths below the working directory of a submitted job


def main(
    config_path: str | Path, overrides: Sequence[str] = (), *, resume: bool = False, overwrite: bool = False
) -> int:
    """Run to the end. Returns the exit code; raises our own errors for what can be said before the start."""
    config = from_here(RunConfig.load(config_path, overrides))
    check_run_dir(config, resume=resume, overwrite=overwrite)
    if UPLOADED in config.run.dir:
        print(f"note: this run lies in the upload of its job, which Ray deletes in time: {config.run.dir}. Give a "
              f"folder that stays and that all nodes see: --set run.dir=/shared/runs", flush=True)
    for note in notes(config):
        print(f"note: {note}", flush=True)
    make_missing(config.data.sources)
    _connect(config)
    try:
        end_leftovers(config, overwrite=overwrite)
        run_dir = prepare_run_dir(config, resume=resume, overwrite=overwrite)
        (run_dir / OUTCOME).unlink(missing_ok=True)
        _check_capacity(config)
        with Follower(run_dir, config.train.steps), stops_on_signal(run_dir):
            _fit(config, run_dir)
        outcome = json.loads((run_dir / OUTCOME).read_text(encoding="utf-8"))
    finally:
        import ray

        ray.shutdown()
    if outcome["code"]:
        print(f"error: {outcome['reason']}", file=sys.stderr)
    else:
        print(
            f"done: {config.train.steps} steps. Next: heddle report {run_dir}   heddle sample --checkpoint "
            f"{run_dir}/checkpoints"
        )
    return int(outcome["code"])


def _connect(config: RunConfig) -> None:
    """Join the cluster that this process runs on, or start one here that fits the run."""
    import ray

    quiet: dict[str, Any] = {
        "log_to_driver": os.environ.get("HEDDLE_WORKER_LOGS", "") not in ("", "0"),
        "logging_level": "warning",
        "namespace": "heddle",
        "runtime_env": {"env_vars": _worker_environment()},
    }
    if os.environ.get("RAY_ADDRESS") or os.environ.get("RAY_JOB_ID"):
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
    os.environ.setdefault("RAY_maximum_startup_concurrency", "32")
    local: dict[str, Any] = {"address": "local", "num_cpus": cpus, "dashboard_host": "127.0.0.1", **quiet}
    try:
        ray.init(**local)
    except Exception as error:  # of Ray's many kinds: on a busy machine one of its processes may come up too late
        log.warning("Ray did not start (%s: %s); trying once more", type(error).__name__, error)
        ray.shutdown()
        ray.init(**local)


def _worker_environment() -> dict[str, str]:
    return {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
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


def _fit(config: RunConfig, run_dir: Path) -> None:
    """Let Ray Train run the controller, and start it again if its process dies."""
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as TrainRun
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        controller_loop,
        train_loop_config={"yaml": config.to_yaml(), "run_dir": str(run_dir)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False, resources_per_worker={"CPU": 0.1}),
        run_config=TrainRun(
            name=run_dir.name, storage_path=str(run_dir.parent), failure_config=FailureConfig(max_failures=10)
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
    result.result()


def controller_loop(settings: dict[str, str]) -> None:
    """Runs in Ray Train's worker process. Ends normally also when the run failed for a reason that a retry repeats."""
    from ray.exceptions import RayError, RayTaskError

    from actors.controller import Controller
    from actors.outcome import Outcome

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_dir = Path(settings["run_dir"])
    config = RunConfig.from_yaml(settings["yaml"])
    with Recorder(run_dir, samples=LiveSamples(config, run_dir)) as recorder:
        try:
            outcome = Controller(runtime_config(config, run_dir), recorder).train()
        except Exception as error:  # the process boundary: what a retry would repeat ends the run, with its reason
            if isinstance(error, RayError) and not isinstance(error, RayTaskError):
                raise  # the cluster's fault: Ray Train starts this function again, and it goes on from the keepers
            if not is_ours(error):
                (run_dir / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
                log.exception("the controller failed")
            reason = str(error) if is_ours(error) else f"{type(error).__name__}: {error} (see {run_dir / 'error.txt'})"
            outcome = Outcome(code=exit_code(error) or FAILURE, reason=reason, last_step=-1)
    (run_dir / OUTCOME).write_text(
        json.dumps({"code": outcome.code, "reason": outcome.reason, "last_step": outcome.last_step}), encoding="utf-8"
    )


def runtime_config(config: RunConfig, run_dir: Path) -> Any:
    """The part of the settings that the controller needs."""
    from actors.config import RuntimeConfig

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


class Follower:
    """Shows the growing metrics.jsonl and events.jsonl in this process while the controller runs in another."""

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        from app.metrics import Progress

        self._files = {name: _Tail(run_dir / name) for name in ("events.jsonl", "metrics.jsonl")}
        self._progress = Progress(total_steps)
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
        while not self._stop.is_set():
            self._show()
            time.sleep(0.2)
        self._show()

    def _show(self) -> None:
        for event in self._files["events.jsonl"].read():
            if text := describe(event):
                self._progress.say(text)
        for line in self._files["metrics.jsonl"].read():
            self._progress.show(line)


class _Tail:
    """Complete new lines of a JSON-lines file that somebody else writes.

    Lines of recomputed steps are taken back by putting another file in its place: that one is read from its start, and
    lines that are older than the newest one shown are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = path.stat().st_ino if path.exists() else None
        self._at = path.stat().st_size if path.exists() else 0
        self._newest = _last_time(path)

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            replaced = number != self._file
            if replaced:
                self._file, self._at = number, 0
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        lines = [json.loads(line) for line in whole.splitlines()]
        if replaced:
            lines = [line for line in lines if line["time"] > self._newest]
        self._newest = max((line["time"] for line in lines), default=self._newest)
        return lines


def _last_time(path: Path) -> float:
    """When the last line of a file of metrics or events was written; 0 without one."""
    return max((line["time"] for line in read_jsonl(path)), default=0.0)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", "-c", required=True, help="YAML of the run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="start again in an existing folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        sys.exit(main(given.config, given.overrides, resume=given.resume, overwrite=given.overwrite))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
