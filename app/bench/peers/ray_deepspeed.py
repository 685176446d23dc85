"""Peer 2: Ray Train's TorchTrainer with DeepSpeed's ZeRO-1, fed by Ray Data.

    python -m app.bench.peers.ray_deepspeed CONFIG STEPS LINES WORKERS

Ray Data decodes each rank's bucket batches ahead of it, DeepSpeed accumulates them, shards the optimizer and clips.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.types import DecodeJob

LEAST_CPUS = 2  # beside the workers: decoding, and Ray's own tasks


def main(config: Path, steps: int, lines: Path, workers: int) -> None:
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    import ray
    from ray.data import DataContext, ExecutionOptions
    from ray.train import DataConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from app.bench.recipe import Recipe

    ray.init(
        address="local",
        num_cpus=workers + LEAST_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    DataContext.get_current().enable_progress_bars = False
    plan = Recipe(config).steps(steps)
    decoded = {
        f"rank{rank}": ray.data.range(count, override_num_blocks=count).map(partial(decode, jobs), num_cpus=0.5)
        for rank in range(workers)
        for jobs in [[micro.job for step in plan for micro in step[rank::workers]]]
        for count in [len(jobs)]
    }
    trainer = TorchTrainer(
        loop,
        train_loop_config={"config": str(config), "steps": steps, "lines": str(lines)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        datasets=decoded,  # type: ignore[arg-type]  # typed as what Ray itself makes
        dataset_config=DataConfig(datasets_to_split=[], execution_options=ExecutionOptions(preserve_order=True)),
        run_config=RunConfig(name="peer", storage_path=str(lines.parent / "ray_train")),
    )
    trainer.fit()
    ray.shutdown()


def decode(jobs: Sequence[DecodeJob], row: Mapping[str, int]) -> dict[str, object]:
    """Row of Ray Data "id" -> the frames and captions of that job."""
    from data.decode import decode_job

    batch = decode_job(jobs[row["id"]])
    return {"video": batch.video, "captions": batch.captions}


def loop(settings: dict[str, Any]) -> None:  # as Ray Train hands it over: the values of `train_loop_config`
    """Runs in each of Ray Train's workers."""
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch
    import torch.distributed as dist
    from ray import train

    from app.bench.recipe import Average, Recipe, line_writer

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute, for inference only
    rank, world = dist.get_rank(), dist.get_world_size()
    recipe = Recipe(Path(settings["config"]))
    mine = [step[rank::world] for step in recipe.steps(settings["steps"])]
    engine, *_ = deepspeed.initialize(
        model=recipe.dit,
        optimizer=recipe.optimizer(),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(mine[0]),
            "gradient_clipping": recipe.train.optimizer.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1 << 24, "allgather_bucket_size": 1 << 24},
        },
    )
    average = Average(recipe)
    pids = [0] * world
    dist.all_gather_object(pids, os.getpid())
    write = line_writer(Path(settings["lines"]), pids) if rank == 0 else None
    batches = iter(train.get_dataset_shard(f"rank{rank}").iter_rows())
    for number, micros in enumerate(mine):
        total = torch.zeros((), dtype=torch.float64)
        for micro in micros:
            batch = next(batches)
            latents, words = recipe.latents(batch["video"].copy()), recipe.words(batch["captions"])
            loss = recipe.loss(engine, micro, latents, words)
            engine.backward(loss * (world * len(micros)))  # it divides by the ranks and by the accumulated batches
            engine.step()
            total += loss.detach()
        average.update()
        dist.all_reduce(total)
        if write is not None:
            write(number, total.item())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
