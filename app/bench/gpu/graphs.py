"""Passes of a few pictures with blocks as written and by CUDA graphs: seconds, the host's part of them, and memory.

Their gradients go into the sum of a step, as a worker's do, small ones together. In one of them blocks are captured
while another thread does what those of a worker do meanwhile: takes memory, copies, and waits.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from actors.worker.caching import host_copy
from actors.worker.handoff import PinnedCopy
from app.bench.gpu.measurement import Earlier, Figure, NamedFigures, Place
from app.bench.gpu.models import PICTURE_256P, PICTURE_480P, SMALL_CLIP, WAN_1_3B, PackedCall, build, small, with_layers
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.models.base.config import DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.experts import share_of_small
from ops.packed.graphed_blocks import Capture, CudaGraphs, GraphedBlocks, Launches
from ops.packed.packing import Sequence
from ops.packed.uploads import upload
from ops.units import GIB
from ops.update.sync import FlatSync
from ops.upload_room import SMALL

_ERROR = 1e-2  # of bf16 sums in another order
NEEDS_GIB = 36.0  # states of 1.3B and a pass take 29 to 32, expected gradients 3
_TIMES_NOISE = 4.0  # what two passes as written may differ by: attention on a GPU adds in any order


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturePass:
    """Forward and backward of one cascade of pictures, both ways."""

    name: str
    pictures: tuple[Sequence, ...]
    beside: bool = False  # another thread works while blocks are captured
    layers: int = WAN_1_3B.num_layers
    estimate_s: float = 20.0

    def why_not(self, place: Place) -> str | None:
        return None if place.has_gib(NEEDS_GIB) else f"{NEEDS_GIB:g} GiB are not free: all of 1.3B is trained."

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        model = place.pick(with_layers(WAN_1_3B, self.layers), small(WAN_1_3B, 2))
        config = replace(model, gradient_checkpointing=True)
        torch.manual_seed(0)
        dit = build(config, place.device).train()
        pictures = place.pick(list(self.pictures), [SMALL_CLIP] * len(self.pictures))
        call = PackedCall.of(config, pictures, place.device)
        expected = _Expected(_plain_gradients(dit, call), _plain_gradients(dit, call))
        sync = FlatSync(dit, OptimizerConfig(), total_steps=1)
        sync.form(Group.solo(), None)
        once, repeats = _pass(dit, call, sync), place.pick(10, 2)
        written = place.seconds(once, repeats, warm_up=place.pick(3, 1)).seconds
        host_written = _host_seconds(once, place, repeats)
        as_written = expected.compared(_gradients(sync), "as written")
        taken = _taken_gib(place)
        dit.graphed = graphed(config, place)
        once()
        with _thread_beside(place.device) if self.beside else nullcontext():
            capturing = place.seconds(once, 1, warm_up=0).seconds  # the second of its kind
        graphs = place.seconds(once, repeats).seconds
        host_graphs = _host_seconds(once, place, repeats)
        by_graphs = expected.compared(_gradients(sync), "by graphs")
        figures: dict[str, Figure] = {
            "right": dit.graphed.by_graphs and bool(as_written["right as written"] and by_graphs["right by graphs"]),
            "by graphs": dit.graphed.by_graphs,
            **as_written,
            **by_graphs,
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
        PicturePass(name="graphs.wan-1.3b.one-480p", pictures=(PICTURE_480P,)),
        PicturePass(name="graphs.wan-1.3b.eight-480p", pictures=(PICTURE_480P,) * 8),
        PicturePass(name="graphs.wan-1.3b.four-256p", pictures=(PICTURE_256P,) * 4),
        PicturePass(name="graphs.wan-1.3b.one-256p", pictures=(PICTURE_256P,)),
        PicturePass(name="graphs.wan-1.3b.beside-a-thread", pictures=(PICTURE_256P,), beside=True),
    ]


def graphed(config: DiTConfig, place: Place) -> GraphedBlocks:
    """Blocks of small passes by graphs from the second pass of a kind on."""
    capture: Capture = _RunAgain() if place.rehearse else CudaGraphs(place.device)
    return GraphedBlocks(partial(share_of_small, config), capture, warm_up=1)


def _pass(dit: PackedTransformer, call: PackedCall, sync: FlatSync) -> Callable[[], None]:
    """A pass of a step of its own, so that the sum has its gradients alone."""

    def once() -> None:
        sync.begin_step()
        call.loss(dit).backward()

    return once


def _plain_gradients(dit: PackedTransformer, call: PackedCall) -> dict[str, Tensor]:
    """As PyTorch leaves them, by the names of the parameters."""
    call.loss(dit).backward()
    found = {name: p.grad for name, p in dit.named_parameters() if p.grad is not None}
    dit.zero_grad()
    return found


class _Expected:
    """Gradients of two plain passes: what is expected, and how far two passes are apart that do the same."""

    def __init__(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
        self._first = first
        self._noise = {name: _distance(one, second[name]) for name, one in first.items()}

    def compared(self, found: dict[str, Tensor], way: str) -> dict[str, Figure]:
        """Each gradient is right but for rounding, or for some times what two plain passes differ by. Beside that the
        error of all together, as a share of their norm, and the parameter whose gradient is furthest off."""
        off = {name: _distance(found[name], one) for name, one in self._first.items()}
        norms = {name: float(one.float().norm()) for name, one in self._first.items()}
        shares = {name: off[name] / max(norms[name], 1e-30) for name in off}
        worst = max(shares, key=shares.__getitem__)
        noise = self._noise[worst] / max(norms[worst], 1e-30)
        return {
            f"right {way}": all(off[name] <= _ERROR * norms[name] + _TIMES_NOISE * self._noise[name] for name in off),
            f"error {way}": math.hypot(*off.values()) / max(math.hypot(*norms.values()), 1e-30),
            f"worst {way}": f"{worst} {shares[worst]:.1e}, two plain passes {noise:.1e}",
        }


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm())


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
    """What a host needs to ask for all of it."""
    return statistics.median(place.host_seconds(once) for _ in range(repeats))


def _gradients(sync: FlatSync) -> dict[str, Tensor]:
    """What the sum of the step has of each parameter."""
    return {slot.name: sync.gradient()[slot.lo : slot.hi].view(slot.shape).clone() for slot in sync.layout}


def _taken_gib(place: Place) -> float | None:
    """Memory of the device that is taken, by all that are on it."""
    if place.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(place.device)
    return (total - free) / GIB


class _RunAgain:
    """Stands for graphs in a rehearsal: the work is done anew."""

    def prepare(self) -> None: ...

    def __call__(self, work: Launches) -> Launches:
        work()
        return work
