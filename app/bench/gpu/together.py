"""Whether the GPUs of a node work together, by the run's own code and in processes that see one GPU each, as Ray has
it: exchanges and sums over NCCL, gradients added in each other's memory, and what is left when one of them dies.

In a rehearsal Gloo and host memory stand in their place.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from app.bench.gpu.measurement import Earlier, Figure, NamedFigures, Place
from app.bench.gpu.node_peers import NodePeers
from app.bench.gpu.processes import PATIENCE_S, answers_of
from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.memory.cuda_memory import CudaPeers
from ops.shards import STAGE, Slot, padding, shard_bounds
from ops.update.node_sum import Unreachable, meet
from ops.update.peer_sum import PeerSum
from ops.waiting import CancelToken

MOST = 8  # processes
ELEMENTS, SMALL_ELEMENTS = 2**28, 2**16  # of a gradient
ROUNDS = 5
QUEUED_S = 3.0  # of computing before the collective whose member dies, and after it
SEEN_S = 1.0  # after which a death is noticed
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class GpusTogether:
    """All collectives of a run in bags that overlap, exact and with their speed; then one member is killed while the
    others have a collective with it and other work queued, and these end what they have begun."""

    name: str = "together"
    estimate_s: float = 60.0

    def why_not(self, place: Place) -> str | None:
        if place.rehearse or torch.cuda.device_count() > 1:
            return None
        return "there is one GPU here"

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        size = place.pick(min(MOST, torch.cuda.device_count()), 3)
        settings = (size, not place.rehearse, place.pick(ELEMENTS, SMALL_ELEMENTS))
        figures = answers_of(take_part, settings, size, size - 1)
        return {
            "GPUs": size,
            "right": all(one["right"] for one in figures),
            "adds": next((one["adds"] for one in figures if one["adds"] != "exactly"), "exactly"),
            **{name: _worst(name, figures) for name in figures[0] if name not in ("right", "adds")},
        }


def _worst(name: str, figures: Sequence[dict[str, Figure]]) -> float:
    values = [float(one[name] or 0.0) for one in figures]
    return min(values) if name.startswith("GB/s") else max(values)


def take_part(store: dist.Store, rank: int, size: int, cuda: bool, elements: int) -> dict[str, Figure]:
    """One process. The last one is killed at the end, and answers nothing."""
    if cuda:
        _see_one(rank)
    place = torch.device("cuda", 0) if cuda else torch.device("cpu")
    token, backend = CancelToken(), "nccl" if cuda else "gloo"
    world = tuple(range(size))
    groups = Groups(store, rank, world, backend, 0, PATIENCE_S, token, "127.0.0.1", device=place)
    bags = [bag for bag in ((0, 1), world) if rank in bag]
    groups.prepare(bags if rank % 2 else bags[::-1])  # as they connect in any order
    right = [_right(groups.get(bag), place) for bag in bags for _ in range(2)]
    everyone = groups.world_group()
    found: dict[str, Figure] = {"right": all(right), "adds": _adds(everyone, place, elements)}
    found |= _speeds(everyone, place, elements)
    meet(everyone, place)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return found | _left_alone(groups, token, place)


def _see_one(rank: int) -> None:
    """Before CUDA begins in this process."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[rank] if shown else str(rank)


def _right(group: Group, place: torch.device) -> bool:
    """Whether its collectives give what they should: of rows in uneven numbers, none of them from some, of a sum, and
    of a vector that is summed in parts and gathered."""
    rank, ranks = group.rank, range(group.size)
    out, into = [(rank + 2 * other) % 3 for other in ranks], [(other + 2 * rank) % 3 for other in ranks]
    sent = torch.cat([torch.full((n, 5), 10.0 * rank + other) for other, n in zip(ranks, out)])
    due = torch.cat([torch.full((n, 5), 10.0 * other + rank) for other, n in zip(ranks, into)])
    received = torch.empty(due.shape, dtype=torch.bfloat16, device=place)
    group.all_to_all(received, sent.to(place, torch.bfloat16), into, out)
    numbers = torch.full((3,), 2**40 + rank, dtype=torch.int64, device=place)
    group.all_reduce(numbers)
    total = 1000 + group.size
    flat = torch.zeros(total + padding(total), device=place)
    flat[:total] = torch.arange(total, device=place) * (rank + 1)
    bounds = group.even_ranges(flat, total) or shard_bounds(total, group.size)
    for pending in group.reduce_scatter_ranges_async(flat, bounds):
        pending.wait()
    group.all_gather_ranges(flat, bounds)
    told = group.exchange_numbers([rank] * rank)
    times = sum(ranks) + group.size
    return (
        torch.equal(received.float().cpu(), due)
        and numbers.tolist() == [group.size * 2**40 + sum(ranks)] * 3
        and torch.equal(flat[:total].cpu(), torch.arange(float(total)) * times)
        and told == [[other] * other for other in ranks]
    )


def _adds(group: Group, place: torch.device, elements: int) -> str:
    """Whether gradients add up in the memory of the members: "exactly", or why not."""
    cuda = place.type == "cuda"
    peers = CudaPeers(place) if cuda else NodePeers()
    one = PeerSum(elements, torch.float32, torch.bfloat16, peers, STAGE if cuda else elements // 8)
    bounds = shard_bounds(elements, group.size)
    why = ""
    try:
        one.form(group, bounds, [()] * group.size)
        gradient = (torch.arange(elements, device=place) % 16).to(torch.bfloat16)
        one.add(Slot(name="layer", shape=(elements,), lo=0, hi=elements), gradient)
        one.flush()
        meet(group, place)
        lo, hi = bounds[group.rank]
        why = "exactly" if torch.equal(one.part(lo, hi), group.size * gradient[lo:hi].float()) else "something else"
    except Unreachable as error:
        why = str(error)
    one.leave()
    meet(group, place)
    one.release()
    return why


def _speeds(group: Group, place: torch.device, elements: int) -> dict[str, Figure]:
    """What each member sends in a second: of an exchange in bf16, and of a sum in fp32."""
    share = elements // group.size
    rows, received = (torch.zeros(share * group.size, dtype=torch.bfloat16, device=place) for _ in range(2))
    splits, flat = [share] * group.size, torch.zeros(share * group.size, device=place)
    bounds = [(share * rank, share * (rank + 1)) for rank in range(group.size)]
    others = share * (group.size - 1)

    def summed() -> None:
        for pending in group.reduce_scatter_ranges_async(flat, bounds):
            pending.wait()

    return {
        "GB/s of an exchange": 2e-9
        * others
        / _seconds(lambda: group.all_to_all(received, rows, splits, splits), place),
        "GB/s of a sum": 4e-9 * others / _seconds(summed, place),
    }


def _left_alone(groups: Groups, token: CancelToken, place: torch.device) -> dict[str, Figure]:
    """Seconds of the end, when a member has died while this one has a collective with it queued after other work, and
    more after that."""
    a, count = _product(place)
    world, stop, gaps = groups.world_group(), threading.Event(), [0.0]
    beats = threading.Thread(target=_tick, args=(stop, gaps), daemon=True)
    beats.start()
    for _ in range(2):
        for _ in range(count):
            torch.mm(a, a)
        with suppress(RuntimeError):  # Gloo says it here
            world.all_reduce(torch.ones(8, device=place))
    time.sleep(SEEN_S)
    began = time.perf_counter()
    token.set("a member has died")
    cancelled = time.perf_counter()
    _settle(place)
    freed = time.perf_counter()
    groups.close()
    stop.set()
    beats.join()
    return {
        "seconds of a cancel": cancelled - began,
        "seconds until the device is free": freed - began,
        "longest silence of another thread": gaps[0],
    }


def _product(place: torch.device) -> tuple[Tensor, int]:
    """A matrix, and how often its square takes `QUEUED_S`; on the CPU once."""
    if place.type == "cpu":
        return torch.ones(8, 8), 1
    a = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=place)
    return a, max(1, int(QUEUED_S / _seconds(lambda: torch.mm(a, a), place)))


def _seconds(call: Callable[[], object], place: torch.device) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    least = float("inf")
    for number in range(1 + ROUNDS):
        _settle(place)
        began = time.perf_counter()
        call()
        _settle(place)
        least = min(least, time.perf_counter() - began) if number else least
    return least


def _settle(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _tick(stop: threading.Event, gaps: list[float]) -> None:
    """As heartbeats: `gaps` gets the longest time between two."""
    last = time.perf_counter()
    while not stop.wait(_LOOK_S):
        now = time.perf_counter()
        gaps[0], last = max(gaps[0], now - last), now
