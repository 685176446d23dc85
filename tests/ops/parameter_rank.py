"""One worker as a process that trains with parameters once per node, or with parameters of its own.

    python -m tests.ops.parameter_rank RANK SIZE PORT FOLDER PARAMETERS CASE

Cases: "one" node, nodes of "2+1" workers, or rank 1 "dies" by SIGKILL when it has written half of its new values, and
rubbish, in the last step; the others then form the next generation without it from the shards of the step before, which
all have put into the folder. Prints a digest of all parameters after each step.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ops.comm.groups import Groups
from ops.shards import ShardState
from ops.update.flat_vector import trainable
from ops.update.parameters import ParameterMemory
from ops.update.sync import FlatSync
from ops.waiting import Cancelled, CancelToken, GroupError
from tests.ops.exported import own_shard
from tests.ops.placed import placed
from tests.ops.test_node_parameters import OPTIMIZER, model, passes

STEPS = 3
NODES = {"2+1": (0, 0, 1)}  # else one
WAIT_S = 250.0  # some processes import faster than others


def digest(dit: torch.nn.Module) -> str:
    values = [parameter.detach().numpy().tobytes() for _, parameter in trainable(dit)]
    return hashlib.sha256(b"".join(values)).hexdigest()[:12]


def keep(folder: Path, step: int, shard: ShardState) -> None:
    np.savez(folder / f"{step}-{shard.lo}", lo=shard.lo, hi=shard.hi, updates=shard.updates, **shard.arrays)


def kept(folder: Path, step: int, total: int) -> list[ShardState]:
    found = []
    for file in folder.glob(f"{step}-*.npz"):
        held = dict(np.load(file))
        lo, hi, updates = (int(held.pop(name)) for name in ("lo", "hi", "updates"))
        found.append(ShardState(updates=updates, lo=lo, hi=hi, total=total, arrays=held))
    return found


def main(rank: int, size: int, port: int, folder: Path, parameters: ParameterMemory, case: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT_S))
    dit = model("wan", 2)
    sync = FlatSync(dit, OPTIMIZER, STEPS, places=placed(parameters=parameters))

    def dies_half_way() -> None:
        """In the place of what writes the new values."""
        half = sync.parameters.own[: (sync.hi - sync.lo) // 2]
        half.fill_(1000.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def train(generation: int, world: tuple[int, ...], first: int) -> None:
        nodes = [NODES.get(case, (0,) * size)[worker] for worker in world]
        groups = Groups(store, rank, world, "gloo", generation, WAIT_S, CancelToken(), "127.0.0.1", nodes)
        try:
            sync.form(groups.world_group(), kept(folder, first - 1, sync.total) or None)
            for step in range(first, STEPS):
                sync.begin_step()
                for number in range((rank + step) % 3):
                    passes(dit, "wan", False, 1.0 + rank + 0.1 * number)
                if case == "dies" and rank == 1 and step == STEPS - 1:
                    sync._update = lambda lr, factor: dies_half_way()  # type: ignore[method-assign]
                sync.finish_step(step, 1.0, 1.0, float(len(world)), lambda phase: None)
                print(digest(dit), flush=True)
                keep(folder, step, own_shard(sync))
                groups.world_group().barrier()
        finally:
            sync.leave()
            groups.close()

    try:
        train(1, tuple(range(size)), 0)
    except (GroupError, Cancelled, TimeoutError):
        print("broken", flush=True)
        train(2, tuple(worker for worker in range(size) if worker != 1), STEPS - 1)


if __name__ == "__main__":
    _, rank, size, port, folder, parameters, case = sys.argv
    main(int(rank), int(size), int(port), Path(folder), "node" if parameters == "node" else "replicated", case)
