"""Two processes on one device that add gradients into each other's memory, as the workers of a node do in a run.

By the run's own code: `PeerSum` exchanges handles, tries the way, stages and pushes; each process is home to a half.
On a GPU memory goes over by CUDA IPC and additions are the kernel's; a rehearsal has host memory in its place.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from app.bench.gpu.measurement import Earlier, NamedFigures, Place
from app.bench.gpu.node_peers import NodePeers
from ops.comm.groups import Groups
from ops.memory.cuda_memory import CudaPeers
from ops.shards import STAGE, Slot, shard_bounds
from ops.units import GIB
from ops.update.peer_sum import PeerSum
from ops.waiting import CancelToken

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from multiprocessing.queues import Queue

    Answers = Queue[tuple[str, bool, list[float]]]

PATIENCE_S = 240.0  # two processes that import all of torch first, on a machine with other work
PROCESSES = 2
ELEMENTS, SMALL_ELEMENTS = 2**28, 2**16  # of the gradient: a layer of a 14B model has some 2**28
ROUNDS = 8
BYTES_PER_ELEMENT = 2 + 4 + 4  # bf16 gradient read, fp32 sum read and written
MODULUS = 64  # small whole numbers: sums in fp32 are exact, whatever their order


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSidedAddition:
    """Checks that both find the exact sum of both in their half, in two generations, and measures how fast they add."""

    name: str = "ipc"
    estimate_s: float = 12.0

    def why_not(self, place: Place) -> str | None:
        return None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        elements = place.pick(ELEMENTS, SMALL_ELEMENTS)
        stage = place.pick(STAGE, SMALL_ELEMENTS // 8)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        answers: Answers = context.Queue()
        processes = [
            context.Process(
                target=add_gradients, args=(answers, rank, store.port, str(place.device), elements, stage), daemon=True
            )
            for rank in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        try:
            found = [_answer(answers, processes) for _ in processes]
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
        for word, _, _ in found:
            if word != "added":
                raise RuntimeError(f"a process could not add into memory of the other: {word}")
        fastest = min(max(both) for both in zip(*(seconds for _, _, seconds in found), strict=True))
        return {
            "right": all(right for _, right, _ in found),
            "GiB": 4 * elements / GIB,
            "seconds of an addition": fastest,
            "GB/s of each of two": BYTES_PER_ELEMENT * elements / fastest / 1e9,
        }


def add_gradients(answers: Answers, rank: int, port: int, device: str, elements: int, stage: int) -> None:
    """One process: in two generations, add a gradient several times while the other does, and look at the own half."""
    try:
        place = torch.device(device)
        peers = CudaPeers(place) if place.type == "cuda" else NodePeers()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
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
        answers.put(("added", right, seconds))
    except Exception as error:  # reported to the process that waits
        answers.put((f"{type(error).__name__}: {error}", False, []))


def _answer(answers: Answers, processes: Sequence[BaseProcess]) -> tuple[str, bool, list[float]]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            return answers.get(timeout=0.5)
        except queue.Empty:
            ended = [process.exitcode for process in processes if process.exitcode]
            if ended:
                return f"it ended with code {ended[0]}", False, []
    return f"no answer in {PATIENCE_S:.0f} s", False, []
