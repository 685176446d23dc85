"""Peer 3: DistributedDataParallel with static sequence parallelism (Ulysses), one degree for all batches.

    torchrun --standalone --nproc-per-node 2 -m app.bench.peers.ddp_sequence CONFIG STEPS LINES

The ranks form groups of one node's size (all of them on one machine). A group takes a bucket batch together: each rank
decodes and encodes its share of the clips, the latents are shared, and every sequence is cut over the group.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from app.bench.recipe import Average, Clips, Recipe, line_writer
from data.types import DecodeJob
from ops.comm.collectives import Group


def train(config: Path, steps: int, lines: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    degree = int(os.environ["LOCAL_WORLD_SIZE"])
    recipe = Recipe(config)
    ranks = dist.new_subgroups(degree)[0]  # type: ignore[no-untyped-call]
    group = Group.wrap(ranks)
    mine = [step[rank // degree :: world // degree] for step in recipe.steps(steps)]
    jobs = [share(micro.job, group) for step in mine for micro in step]
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
            latents = gathered(recipe.latents(batch.video), len(micro.keys), group)
            words = recipe.words(captions_of(batch.captions, len(micro.keys), ranks))
            with nullcontext() if micro is micros[-1] else model.no_sync():
                loss = recipe.loss(model, micro, latents, words, group)
                (loss * world).backward()  # DDP divides by the ranks, whose parts add up to the loss
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.optimizer.max_grad_norm, foreach=True)
        optimizer.step()
        average.update()
        dist.all_reduce(total)
        if write is not None:
            write(number, total.item())
    dist.destroy_process_group()


def share(job: DecodeJob, group: Group) -> DecodeJob:
    """The clips of a batch that this rank of the group decodes and encodes: all where there is not one for each."""
    return job if len(job.clips) < group.size else replace(job, clips=job.clips[group.rank :: group.size])


def gathered(own: Tensor, count: int, group: Group) -> Tensor:
    """Latents [count, C, t, h, w] of the whole batch on every rank; `own` are those of clips rank, rank + size, ..."""
    if len(own) == count:
        return own
    whole = own.new_empty(count, *own.shape[1:])
    whole[group.rank :: group.size] = own
    for rank in range(group.size):
        part = whole[rank :: group.size].contiguous()
        group.broadcast(part, source_rank=rank)
        whole[rank :: group.size] = part
    return whole


def captions_of(own: list[str], count: int, ranks: dist.ProcessGroup) -> list[str]:
    """The captions of the whole batch on every rank, dealt out as the clips are."""
    if len(own) == count:
        return own
    parts: list[list[str]] = [[]] * ranks.size()
    dist.all_gather_object(parts, own, group=ranks)
    return [parts[index % len(parts)][index // len(parts)] for index in range(count)]


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
