"""A snapshot: copies of the optimizer's state to pinned host memory while the device computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from app.bench.gpu.measurement import Earlier, Figures, Place

STATE_BYTES = 4 * 2**30
PIECE_BYTES = 2**26


class CopyLane(Protocol):
    """Where copies run beside compute: a stream, or a thread where there are no streams."""

    def start(self, work: Callable[[], None]) -> None: ...

    def wait(self) -> None: ...


class StreamLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, work: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()

    def wait(self) -> None:
        self._stream.synchronize()


class ThreadLane:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCopies:
    """Seconds of the copy, of compute, and of compute with the copy beside it."""

    name: str = "copies"
    estimate_s: float = 20.0

    def why_not(self, place: Place) -> str | None:
        return None

    def run(self, place: Place, earlier: Earlier) -> Figures:
        cuda = place.device.type == "cuda"
        size = place.pick(STATE_BYTES, 2**20) // 4
        state = torch.randn(size, device=place.device)
        kept = torch.empty(size, pin_memory=cuda)
        lane: CopyLane = StreamLane(place.device) if cuda else ThreadLane()
        piece = place.pick(PIECE_BYTES, 2**18) // 4

        def copy() -> None:
            for target, source in zip(kept.split(piece), state.split(piece), strict=True):
                target.copy_(source, non_blocking=cuda)

        def copy_alone() -> None:
            lane.start(copy)
            lane.wait()

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
            lane.start(copy)
            compute()
            if cuda:
                torch.cuda.current_stream().synchronize()

        compute_s = place.seconds(compute, place.pick(3, 1)).seconds
        beside = []
        for _ in range(place.pick(3, 1)):
            beside.append(_until_compute_ends(compute_beside, place))
            lane.wait()
        beside_s = sorted(beside)[len(beside) // 2]
        return {
            "right": torch.equal(kept, state.cpu()),
            "GiB": 4 * size / 2**30,
            "copy alone seconds": alone.seconds,
            "copy alone GB/s": 4 * size / alone.seconds / 1e9,
            "compute alone seconds": compute_s,
            "compute beside seconds": beside_s,
            "slow-down of compute": beside_s / compute_s - 1,
            "seconds for 1.3B on one GPU": 16 * 1.419e9 / (4 * size) * alone.seconds,
        }


def _until_compute_ends(call: Callable[[], None], place: Place) -> float:
    """Seconds until the call's own stream is done; its copies may still run."""
    place.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
