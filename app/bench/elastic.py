"""`heddle bench elastic`: seconds from SIGKILL to the next finished step, against Ray Train's own elastic trainer.

Both train the same tiny model on the same items, on three workers of the same cluster, in one run of this program. Ray
Train restarts its worker group from the last checkpoint, which it writes at every step; here survivors stay and take
the last committed step from the keepers. Besides: from a new node to its first step, and what snapshots cost.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from app.bench.lab import Lab
from app.bench.markdown import markdown_table
from app.bench.whole_lines import whole_lines
from app.settings.out_files import check_writable

if TYPE_CHECKING:
    from ray.train import Checkpoint
    from torch import nn
    from torch.optim import Optimizer

_KILL_AFTER = 8  # steps
_PATIENCE_S = 240.0  # for Ray Train to get on


def run(
    kills: Annotated[int, typer.Option(help="Workers killed in each system, one after the other.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON with all figures.")] = None,
) -> None:
    """Measure and print one table."""
    check_writable([out])
    logging.getLogger("actors").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        lab.add_node(workers=2)
        lab.add_node(workers=2)
        ours = _ours(lab, kills)
        joined = _join(lab)
        snapshots = _snapshots(lab)
        train = _ray_train(lab, kills)
    figures = ElasticFigures(recovery_s=ours, ray_train_recovery_s=train, join_s=joined, snapshots=snapshots)
    print(_table(figures))
    if out is not None:
        told = asdict(figures)
        snapshot_figures = told.pop("snapshots")
        out.write_text(json.dumps({**told, **snapshot_figures}, indent=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCost:
    """Median seconds of a step's copy of the shard, and of steps with and without snapshots."""

    snapshot_s: float
    step_with_s: float
    step_without_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticFigures:
    """All that is measured, in seconds. One recovery per kill."""

    recovery_s: list[float]
    ray_train_recovery_s: list[float]
    join_s: float
    snapshots: SnapshotCost


class BaselineStep(TypedDict):
    """A step that the baseline has finished: when, and the processes of its workers."""

    step: int
    time: float
    pids: list[int]


def _ours(lab: Lab, kills: int) -> list[float]:
    """Seconds from SIGKILL to the next finished step, while the survivors stay."""
    run = lab.start(lab.config("kills", train={"steps": 2000}, workers={"min": 1, "max": 3}))
    seconds = []
    for kill in range(kills):
        run.wait_for_workers(3)
        run.wait_for_more_steps(_KILL_AFTER)
        generation, killed = run.metrics[-1].generation, time.time()
        run.signal_worker(kill % 3)
        run.wait_for_recoveries(kill + 1)
        run.wait_for_more_steps(1)
        seconds.append(next(m.time for m in run.metrics if m.generation > generation) - killed)
    run.stop()
    return seconds


def _join(lab: Lab) -> float:
    """Seconds from the start of a new node to the first step with its worker, the worker's start included."""
    run = lab.start(lab.config("join", train={"steps": 2000}, workers={"min": 1, "max": 5}))
    run.wait_for_workers(4)
    started = time.time()
    node = lab.add_node(workers=1)
    run.wait_for_workers(5)
    seconds = time.time() - started
    run.stop()
    lab.cluster.remove_node(node, allow_graceful=True)
    lab.nodes.remove(node)
    return seconds


def _snapshots(lab: Lab) -> SnapshotCost:
    """What the copy of the shard and its way to the keeper take of a step, and the same run without them."""
    step_s: dict[bool, list[float]] = {True: [], False: []}
    phase: list[float] = []
    for enabled in (True, False, True, False):
        run = lab.start(
            lab.config(
                f"snapshots-{enabled}-{len(phase)}-{len(step_s[enabled])}",
                train={"steps": 60},
                workers={"min": 2, "max": 2},
                snapshot={"enabled": enabled},
            )
        )
        run.join(600)
        step_s[enabled] += [m.step_s for m in run.metrics[10:]]
        phase += [m.snapshot_s for m in run.metrics[10:] if enabled]
    return SnapshotCost(
        snapshot_s=statistics.median(phase),
        step_with_s=statistics.median(step_s[True]),
        step_without_s=statistics.median(step_s[False]),
    )


def _ray_train(lab: Lab, kills: int) -> list[float]:
    """The baseline: an elastic TorchTrainer with a checkpoint at every step; workers log their pids and steps."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    log = lab.folder / "baseline.jsonl"
    settings = {
        "log": str(log),
        "config": str(lab.folder / "baseline.yaml"),
        "stop": str(lab.folder / "stop"),
    }
    Path(settings["config"]).write_text(lab.config("baseline", train={"steps": 10_000}).to_yaml())
    # elastic sizes are known to Ray Train's second version, not to the types of the first
    scaling = ScalingConfig(
        num_workers=(1, 3),  # type: ignore[arg-type]
        use_gpu=False,
        resources_per_worker={"CPU": 2},
        elastic_resize_monitor_interval_s=5,  # type: ignore[call-arg]
    )
    trainer = TorchTrainer(
        baseline_loop,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=scaling,
        run_config=RunConfig(
            name="baseline",
            storage_path=str(lab.folder / "baseline"),
            failure_config=FailureConfig(max_failures=kills + 2),
        ),
    )
    thread = threading.Thread(target=trainer.fit, daemon=True)
    thread.start()
    seconds = []
    for _ in range(kills):
        before = whole_lines(log)
        _await(lambda before=before: len(whole_lines(log)) >= len(before) + _KILL_AFTER)  # type: ignore[misc]
        last = whole_lines(log)[-1]
        killed = time.time()
        os.kill(last["pids"][-1], signal.SIGKILL)
        _await(lambda killed=killed: whole_lines(log)[-1]["time"] > killed + 0.5)  # type: ignore[misc]
        seconds.append(next(s["time"] for s in whole_lines(log) if s["time"] > killed + 0.5) - killed)
    Path(settings["stop"]).touch()
    thread.join(120)
    return seconds


def baseline_loop(settings: dict[str, str]) -> None:
    """Data parallel training of the same model on the same items; runs in Ray Train's workers.

    `config` is the run file. The first worker writes a `BaselineStep` to the file `log` after each step; the loop ends
    when the file `stop` exists.
    """
    import torch
    import torch.distributed as dist
    from ray import train

    from app.bench.recipe import Recipe
    from data.dataset.dataset import Dataset
    from data.engines.blocks import as_batch
    from data.engines.processes import PoolEngine

    recipe = Recipe(Path(settings["config"]))
    dit, optimizer = recipe.dit, recipe.optimizer()
    step = _restore(dit, optimizer, train.get_checkpoint())
    bad_list = Path(settings["log"]).parent / "bad.jsonl"
    dataset = Dataset.open(recipe.config.data, recipe.geometry, recipe.train.seed, bad_list=bad_list)
    engine = PoolEngine(dataset)
    engine.start(step)
    rank, world = dist.get_rank(), dist.get_world_size()
    pids = [0] * world
    dist.all_gather_object(pids, os.getpid())
    while not Path(settings["stop"]).exists():
        batches = [as_batch(b) for b in engine.batches(step)]
        for micro, batch in list(zip(recipe.step(dataset, step), batches, strict=True))[rank::world]:
            recipe.loss(dit, micro, recipe.latents(batch.video.copy()), recipe.words(batch.captions)).backward()
        for parameter in dit.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        engine.release(step)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                torch.save(
                    {"dit": dit.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                    Path(folder) / "state.pt",
                )
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"step": step}, checkpoint=checkpoint)
        if rank == 0:
            with Path(settings["log"]).open("a") as file:
                file.write(json.dumps(BaselineStep(step=step, time=time.time(), pids=pids)) + "\n")
        step += 1
    engine.stop()


def _restore(dit: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint | None) -> int:
    import torch

    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt", weights_only=True)
    dit.load_state_dict(state["dit"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]) + 1


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Ray Train did not get on within {_PATIENCE_S:g} s.")
        time.sleep(0.02)


def _table(figures: ElasticFigures) -> str:
    ours, train = statistics.median(figures.recovery_s), statistics.median(figures.ray_train_recovery_s)
    snapshots = figures.snapshots
    share = snapshots.snapshot_s
    rows = [
        (
            "SIGKILL of a worker to the next finished step, median",
            f"{ours:.2f} s",
            f"Ray Train elastic: {train:.2f} s",
            f"{ours / train:.2f}",
            "<= 0.33, aim 0.1",
        ),
        ("new node to its first step (start of the process included)", f"{figures.join_s:.1f} s", "", "", ""),
        (
            "snapshot of a step on the worker",
            f"{1e3 * share:.1f} ms",
            f"step {snapshots.step_with_s:.3f} s with, {snapshots.step_without_s:.3f} s without",
            f"{share:.1%} of a step of 1 s",
            "<= 3 %, aim 1 %",
        ),
    ]
    return markdown_table(("figure", "measured", "beside", "ratio", "must"), rows)
