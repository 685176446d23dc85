"""Passes of a few pictures with blocks as written and by CUDA graphs: seconds, the host's part of them, and memory.

Their gradients go into the sum of a step, as a worker's do, small ones together. In one of them blocks are captured
while another thread does what those of a worker do meanwhile: takes memory, copies, and waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from actors.worker.caching import host_copy
from actors.worker.handoff import PinnedCopy
from app.bench.gpu.cascades import PICTURE
from app.bench.gpu.counting import SMALL_PICTURE
from app.bench.gpu.measurement import Earlier, Figure, NamedFigures, Place
from app.bench.gpu.models import SMALL_CLIP, WAN_1_3B, PackedCall, build, small
from ops.comm import Group
from ops.config import OptimizerConfig
from ops.graphed_blocks import Capture, CudaGraphs, GraphedBlocks, Launches
from ops.models.base.transformer import PackedTransformer
from ops.models.experts import is_small_pass
from ops.packing import Sequence
from ops.sync import FlatSync
from ops.train_pass import packed_loss
from ops.upload_room import SMALL
from ops.uploads import upload

_ERROR = 1e-2  # of bf16 sums in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturePass:
    """Forward and backward of one cascade of pictures, both ways."""

    name: str
    pictures: tuple[Sequence, ...]
    beside: bool = False  # another thread works while blocks are captured
    estimate_s: float = 12.0

    def why_not(self, place: Place) -> str | None:
        return None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        config = replace(place.pick(WAN_1_3B, small(WAN_1_3B, 2)), gradient_checkpointing=True)
        torch.manual_seed(0)
        dit = build(config, place.device, torch.bfloat16).train()
        pictures = place.pick(list(self.pictures), [SMALL_CLIP] * len(self.pictures))
        call = PackedCall.of(config, pictures, place.device, torch.bfloat16)
        expected = _plain_gradients(dit, call)
        sync = FlatSync(dit, OptimizerConfig(), total_steps=1)
        sync.form(Group.solo(), None)
        once, repeats = _pass(dit, call, sync), place.pick(10, 2)
        written = place.seconds(once, repeats, warm_up=place.pick(3, 1)).seconds
        host_written, summed = _host_seconds(once, place, repeats), _equal(_gradients(sync), expected)
        taken = _taken_gib(place)
        capture: Capture = _RunAgain() if place.rehearse else CudaGraphs(place.device)
        dit.graphed = GraphedBlocks(partial(is_small_pass, config), capture, warm_up=1)
        once()
        with _thread_beside(place.device) if self.beside else nullcontext():
            capturing = place.seconds(once, 1, warm_up=0).seconds  # the second of its kind
        graphs = place.seconds(once, repeats).seconds
        host_graphs = _host_seconds(once, place, repeats)
        figures: dict[str, Figure] = {
            "right": summed and dit.graphed.by_graphs and _equal(_gradients(sync), expected),
            "right as written": summed,
            "rows": call.layout.local_tokens,
            "seconds as written": written,
            "seconds by graphs": graphs,
            "times faster": written / graphs,
            "host seconds as written": host_written,
            "host seconds by graphs": host_graphs,
            "seconds of the pass that captures": capturing,
            "GiB for graphs": None if taken is None else (_taken_gib(place) or 0.0) - taken,
        }
        return figures


def measurements() -> list[PicturePass]:
    return [
        PicturePass(name="graphs.wan-1.3b.one-480p", pictures=(PICTURE,)),
        PicturePass(name="graphs.wan-1.3b.four-256p", pictures=(SMALL_PICTURE,) * 4),
        PicturePass(name="graphs.wan-1.3b.one-256p", pictures=(SMALL_PICTURE,)),
        PicturePass(name="graphs.wan-1.3b.beside-a-thread", pictures=(SMALL_PICTURE,), beside=True),
    ]


def _pass(dit: PackedTransformer, call: PackedCall, sync: FlatSync) -> Callable[[], None]:
    """With gradients of this pass alone."""

    def once() -> None:
        sync.begin_step()
        _backward(dit, call)

    return once


def _backward(dit: PackedTransformer, call: PackedCall) -> None:
    out = dit(call.tokens, call.timesteps, call.text, call.layout, Group.solo())
    packed_loss(out.float(), call.target, call.layout, call.weights).backward()


def _plain_gradients(dit: PackedTransformer, call: PackedCall) -> list[Tensor]:
    """As PyTorch leaves them, in the order of the parameters."""
    _backward(dit, call)
    found = [p.grad for p in dit.parameters() if p.grad is not None]
    dit.zero_grad()
    return found


@contextmanager
def _thread_beside(device: torch.device) -> Iterator[None]:
    """A thread that publishes results and sends pixels meanwhile. Raises what it has met."""
    over, copy = threading.Event(), PinnedCopy(device) if device.type == "cuda" else host_copy
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not over.is_set():
                there = upload([torch.zeros(size, dtype=torch.uint8) for size in (100, SMALL)], device)
                copy(there[1].float()).wait()
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        except BaseException as error:  # raised where it is waited for
            failed.append(error)

    thread = threading.Thread(target=work, name="beside", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]


def _host_seconds(once: Callable[[], None], place: Place, repeats: int) -> float:
    """Until a call has returned whose device was idle when it began: what a host needs to ask for it all."""
    found = []
    for _ in range(repeats):
        place.synchronize()
        began = time.perf_counter()
        once()
        found.append(time.perf_counter() - began)
    place.synchronize()
    return sorted(found)[len(found) // 2]


def _gradients(sync: FlatSync) -> list[Tensor]:
    """What the sum of the step has of each parameter."""
    return [sync.gradient()[slot.lo : slot.hi].view(slot.shape).clone() for slot in sync.layout]


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Every gradient, but for rounding."""
    pairs = list(zip(found, expected, strict=True))
    return all(float((one - other).float().norm()) <= _ERROR * float(other.float().norm()) for one, other in pairs)


def _taken_gib(place: Place) -> float | None:
    """Memory of the device that is taken, by all that are on it."""
    if place.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(place.device)
    return (total - free) / 2**30


class _RunAgain:
    """Stands for graphs in a rehearsal: the work is done anew."""

    def prepare(self) -> None: ...

    def __call__(self, work: Launches) -> Launches:
        work()
        return work
