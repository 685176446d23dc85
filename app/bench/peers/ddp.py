"""Peer 1: a loop of DistributedDataParallel over a bucketed DataLoader, as most trainers are.

    torchrun --standalone --nproc-per-node 2 -m app.bench.peers.ddp CONFIG STEPS LINES

Each rank takes every n-th bucket batch of a step and accumulates its gradients; DDP sums them inside the last backward.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from app.bench.recipe import Average, Clips, Recipe, line_writer


def train(config: Path, steps: int, lines: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    recipe = Recipe(config)
    mine = [step[rank::world] for step in recipe.steps(steps)]
    jobs = [micro.job for step in mine for micro in step]
    batches = iter(DataLoader(Clips(jobs), batch_size=None, num_workers=1, prefetch_factor=4))
    model = DDP(recipe.dit, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer, average = recipe.optimizer(), Average(recipe)
    pids = [0] * world
    dist.all_gather_object(pids, os.getpid())
    write = line_writer(lines, pids) if rank == 0 else None
    for number, micros in enumerate(mine):
        total = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for micro in micros:
            batch = next(batches)
            latents, words = recipe.latents(batch.video), recipe.words(batch.captions)
            with nullcontext() if micro is micros[-1] else model.no_sync():
                loss = recipe.loss(model, micro, latents, words)
                (loss * world).backward()  # DDP divides by the ranks, the weights of the samples are of all ranks
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.optimizer.max_grad_norm, foreach=True)
        optimizer.step()
        average.update()
        dist.all_reduce(total)
        if write is not None:
            write(number, total.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
