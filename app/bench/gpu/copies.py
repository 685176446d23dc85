"""A snapshot, as a worker makes it: the optimizer's state is copied to memory of its node, which is pinned, while the
device computes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere
from app.bench.gpu.timeline import timeline_of
from ops.shards import ARRAYS
from ops.units import GIB
from ops.update.shard_export import CopyArrays, CopyAtOnce, CopyOnStream
from ops.update.state_memory import StateMemory

STATE_BYTES = 4 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCopies(RunsAnywhere):
    """Seconds of the copy, of compute, and of compute with the copy beside it."""

    name: str = "copies"
    estimate_s: float = 12.0

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        cuda = place.device.type == "cuda"
        size = place.pick(STATE_BYTES, 2**20) // 4 // len(ARRAYS)
        state = {name: torch.randn(size, device=place.device) for name in ARRAYS}
        num_bytes = sum(4 * array.numel() for array in state.values())
        memory = StateMemory.reserve(size)
        memory.take(0, 0, size)
        into = {name: torch.from_numpy(array) for name, array in memory.arrays(0, 0, size).items()}
        begin: CopyArrays = CopyOnStream(place.device) if cuda else CopyAtOnce()
        wait = begin(state, into)

        def copy_alone() -> None:
            begin(state, into)()

        edge = place.pick(8192, 64)
        a, b = (torch.randn(edge, edge, device=place.device, dtype=torch.bfloat16) for _ in range(2))
        alone = place.seconds(copy_alone, place.pick(3, 1))
        # as much compute as the copy lasts, so that they lie beside each other all the time
        product = place.seconds(lambda: torch.mm(a, b), place.pick(10, 2)).seconds
        count = max(2, min(2000, int(1.2 * alone.seconds / product)))

        def compute() -> None:
            for _ in range(count):
                torch.mm(a, b)

        def compute_beside() -> None:
            nonlocal wait
            wait = begin(state, into)
            compute()
            if cuda:
                torch.cuda.current_stream().synchronize()

        compute_s = place.seconds(compute, place.pick(3, 1)).seconds
        beside = []
        for _ in range(place.pick(3, 1)):
            beside.append(place.host_seconds(compute_beside))
            wait()
        beside_s = statistics.median(beside)
        shown = timeline_of(compute_beside, self.name, place)
        wait()
        right = all(torch.equal(into[name], array.cpu()) for name, array in state.items())
        begin.release()
        return {
            "right": right,
            "GiB": num_bytes / GIB,
            "copy alone seconds": alone.seconds,
            "copy alone GB/s": num_bytes / alone.seconds / 1e9,
            "compute alone seconds": compute_s,
            "compute beside seconds": beside_s,
            "slow-down of compute": beside_s / compute_s - 1,
            "seconds for 1.3B on one GPU": 16 * 1.419e9 / num_bytes * alone.seconds,
            **shown,
        }
