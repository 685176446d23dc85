"""Two processes on one device that add gradients into each other's memory, as the workers of a node do in a run.

By the run's own code: `PeerSum` exchanges handles, tries the way, stages and pushes; each process is home to a half.
On a GPU memory goes over by CUDA IPC and additions are the kernel's; a rehearsal has host memory in its place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere
from app.bench.gpu.node_peers import NodePeers
from app.bench.gpu.processes import PATIENCE_S, answers_of
from ops.comm.groups import Groups
from ops.memory.cuda_memory import CudaPeers
from ops.shards import STAGE, Slot, shard_bounds
from ops.units import GIB
from ops.update.peer_sum import PeerSum
from ops.waiting import CancelToken

PROCESSES = 2
ELEMENTS, SMALL_ELEMENTS = 2**28, 2**16  # of the gradient: a layer of a 14B model has some 2**28
ROUNDS = 8
BYTES_PER_ELEMENT = 2 + 4 + 4  # bf16 gradient read, fp32 sum read and written
MODULUS = 64  # small whole numbers: sums in fp32 are exact, whatever their order


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSidedAddition(RunsAnywhere):
    """Checks that both find the exact sum of both in their half, in two generations, and measures how fast they add."""

    name: str = "ipc"
    estimate_s: float = 12.0

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        elements = place.pick(ELEMENTS, SMALL_ELEMENTS)
        stage = place.pick(STAGE, SMALL_ELEMENTS // 8)
        found = answers_of(add_gradients, (str(place.device), elements, stage), PROCESSES, PROCESSES)
        fastest = min(max(both) for both in zip(*(seconds for _, seconds in found), strict=True))
        return {
            "right": all(right for right, _ in found),
            "GiB": 4 * elements / GIB,
            "seconds of an addition": fastest,
            "GB/s of each of two": BYTES_PER_ELEMENT * elements / fastest / 1e9,
        }


def add_gradients(store: dist.Store, rank: int, device: str, elements: int, stage: int) -> tuple[bool, list[float]]:
    """One process: in two generations, add a gradient several times while the other does, and look at the own half.
    Whether that is right, and the seconds of each time."""
    place = torch.device(device)
    peers = CudaPeers(place) if place.type == "cuda" else NodePeers()
    one = PeerSum(elements, torch.float32, torch.bfloat16, peers, stage)
    slot = Slot(name="layer", shape=(elements,), lo=0, hi=elements)
    gradient = (torch.arange(elements, device=place) % MODULUS).to(torch.bfloat16)
    bounds = shard_bounds(elements, PROCESSES)
    lo, hi = bounds[rank]
    seconds, right = [], True
    for generation in range(2):
        groups = Groups(store, rank, (0, 1), "gloo", generation, PATIENCE_S, CancelToken(), "127.0.0.1")
        group = groups.world_group()
        one.form(group, bounds, [(), ()])
        for _ in range(ROUNDS):
            group.barrier()
            start = time.perf_counter()
            one.add(slot, gradient)
            one.flush()
            seconds.append(time.perf_counter() - start)
        group.barrier()
        right = right and torch.equal(one.part(lo, hi), PROCESSES * ROUNDS * gradient[lo:hi].float())
        one.leave()
        group.barrier()
        one.release()
        groups.close()
    return right, seconds
