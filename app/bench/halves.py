"""`heddle bench halves`: how much of Ulysses' exchanges attention hides when heads travel in two halves.

Two ranks of this machine over Gloo run one layer's attention, forward and backward, whole and in halves. Their device
takes given seconds for attention, twice as many for its backward, and their link, which carries one message at a time,
given seconds for q, k and v (`PacedDevice` and `ThrottledGroup` of `scalefusion_ranks`): what is measured is the
schedule and its order on real exchanges, neither this machine nor what exchange and attention take from each other on a
GPU. Beside it stands what no schedule of the way avoids: of X seconds there and X / 3 back, forward and backward, all
of it, or one half of each.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from app.bench.scalefusion_ranks import Awaitable, PacedDevice, ThrottledGroup
from ops.attention.varlen import attention
from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.packed.exchange_halves import attention_in_halves
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.packed.sequence_parallel import HeadsToRows, RowsToHeads
from ops.typed import ConfigError
from ops.waiting import CancelToken

WHOLE, HALVES = "whole", "halves"
_RANKS, _HEADS, _HEAD_SIZE, _ROWS = 2, 8, 16, 96
_COLUMNS = 72  # of a timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What the device of rank 0, or its link, did, in seconds from the layer's begin."""

    lane: str  # device | link
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSeconds:
    """One way, of the slower rank of its fastest round; what else the machine does only adds time."""

    way: str
    exchange_s: float  # of q, k and v there
    seconds: float
    exposed_s: float  # in which nothing was computed
    timeline: tuple[Stretch, ...]

    @property
    def least_exposed_s(self) -> float:
        """Waiting that the way cannot avoid."""
        both = 2 * (self.exchange_s + self.exchange_s / 3)
        return both if self.way == WHOLE else both / 2


@dataclass
class _Watched:
    """A layer that is run, and what it does meanwhile."""

    device: PacedDevice
    attention_s: float
    began: float = field(default_factory=time.perf_counter)
    seen: list[Stretch] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        lengths, heads = layout.video_exchange.lengths, q.shape[1]
        seconds = self.attention_s * heads * layout.degree / _HEADS
        begin = self.device.now() - self.began

        def work(qkv: Tensor) -> Tensor:
            return attention(qkv[0], qkv[1], qkv[2], lengths, lengths)

        out = self.device.run(work, torch.stack([q, k, v]), seconds)
        self.seen.append(Stretch(lane="device", name="attention", start_s=begin, end_s=self.device.now() - self.began))
        out.register_hook(lambda _: self._goes_back(seconds))
        return out

    def _goes_back(self, seconds: float) -> None:
        begin = self.device.now() - self.began
        end = begin + self.device.backward * seconds
        self.seen.append(Stretch(lane="device", name="its backward", start_s=begin, end_s=end))


class _WatchedLink(ThrottledGroup):
    """A link that notes when it carries what."""

    def __init__(self, group: Group, watched: _Watched, bandwidth: float) -> None:
        super().__init__(group, watched.device, 0.0, bandwidth)
        self._watched = watched

    def all_to_all_async(self, output: Tensor, input: Tensor, into: list[int], out_of: list[int]) -> Awaitable:
        begin, began = max(self._free, self.device.now()), self._watched.began
        delivery = super().all_to_all_async(output, input, into, out_of)
        name = "q, k, v" if input.shape[1] == 3 else "result"
        self._watched.seen.append(Stretch(lane="link", name=name, start_s=begin - began, end_s=self._free - began))
        return delivery


def measure_rank(group: Group, way: str, attention_s: float, exchange_s: float) -> LayerSeconds:
    """One layer forward and backward. All ranks call it; seconds are those of the slower one."""
    layout = Layout([PackedSequence((1, 1, _ROWS), 0)], _RANKS, group.rank)
    own = torch.randn(3, layout.local_tokens, _HEADS, _HEAD_SIZE, requires_grad=True)
    sent = layout.local_tokens * 3 * (_HEADS // _RANKS) * _HEAD_SIZE * own.element_size()
    group.barrier()
    watched = _Watched(PacedDevice(backward=2.0), attention_s)
    link = _WatchedLink(group, watched, sent / exchange_s)
    exchange = layout.video_exchange

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return watched.attend(q, k, v, layout)

    q, k, v = own.unbind(0)
    if way == HALVES:
        out = attention_in_halves(q, k, v, exchange, link, attend)  # type: ignore[arg-type]  # all that it asks a group
    else:
        q, k, v = RowsToHeads.apply(exchange, link, q, k, v)
        (out,) = HeadsToRows.apply(exchange, link, attend(q, k, v))
    out.sum().backward()
    found = torch.tensor([time.perf_counter() - watched.began, link.waited_s], dtype=torch.float64)
    group.all_reduce(found, "max")
    seconds, exposed_s = found.tolist()
    return LayerSeconds(
        way=way, exchange_s=exchange_s, seconds=seconds, exposed_s=exposed_s, timeline=tuple(watched.seen)
    )


def measured(attention_s: float, exchange_s: float, rounds: int) -> dict[str, LayerSeconds]:
    """The fastest round of each way, on two ranks that are threads of this process."""
    store, cancel = dist.HashStore(), CancelToken()
    found: dict[str, list[LayerSeconds]] = {WHOLE: [], HALVES: []}
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        groups = Groups(store, rank, tuple(range(_RANKS)), "gloo", 0, 60.0, cancel)
        try:
            for _ in range(rounds):
                for way, runs in found.items():
                    one = measure_rank(groups.world_group(), way, attention_s, exchange_s)
                    if rank == 0:
                        runs.append(one)
        except BaseException as error:  # handed to the thread that asked
            errors.append(error)
            cancel.set(f"rank {rank} failed: {error}")
        finally:
            groups.close()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {way: min(runs, key=lambda one: one.seconds) for way, runs in found.items()}


def drawn(one: LayerSeconds) -> list[str]:
    """Device and link over time, a line each: # computes or carries, . does nothing."""
    end = max(stretch.end_s for stretch in one.timeline)
    lines = []
    for lane in ("device", "link"):
        cells = ["."] * _COLUMNS
        for stretch in one.timeline:
            if stretch.lane == lane:
                first, last = (round(at / end * _COLUMNS) for at in (stretch.start_s, stretch.end_s))
                cells[first:last] = "#" * (last - first)
        lines.append(f"{lane:>7} {''.join(cells)}")
    return lines


def run(
    attention: Annotated[float, typer.Option(help="Seconds of a layer's attention.", min=0.001)] = 0.3,
    shares: Annotated[str, typer.Option(help="Seconds of q, k and v on the link, as shares of that.")] = "0.1,0.3,1",
    rounds: Annotated[int, typer.Option(help="Of both ways in turn.", min=1)] = 3,
) -> None:
    """A layer's seconds whole and in halves, and what device and link did meanwhile."""
    torch.set_num_threads(1)
    try:
        exchanges = [float(share) * attention for share in shares.split(",")]
    except ValueError:
        exchanges = []
    if not exchanges or min(exchanges) <= 0:
        raise ConfigError(f"--shares {shares} is not a list of numbers above 0, such as 0.1,0.3.")
    print("| q, k, v on the link, of attention | way | layer, s | exposed, s | at least | |\n|---|---|---|---|---|---|")
    pictures = []
    for exchange_s in exchanges:
        found = measured(attention, exchange_s, rounds)
        for way, one in found.items():
            ratio = one.seconds / found[WHOLE].seconds
            print(
                f"| {exchange_s / attention:.2f} | {way} | {one.seconds:.3f} | {one.exposed_s:.3f} "
                f"| {one.least_exposed_s:.3f} | {ratio:.3f} |",
                flush=True,
            )
            pictures += [f"{way}, {exchange_s / attention:.2f}", *drawn(one), ""]
    print("\n" + "\n".join(pictures))
