"""Spatial-temporal layers on real ranks over Gloo whose link is throttled: DSP, intra, inter and Ulysses in one round.

Ranks are processes of this machine. Their exchanges are Gloo's; a result may be read only when a link of given delay
and bandwidth, which carries one message at a time, would have delivered it. Paced ranks compute the real layers, then
wait until a device of given speed would have ended: ranks that share cores then behave like ranks with one device each.
Without pacing the layers take what they take here, and the link is set to half of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from app.bench.ranks import rank_main, run_ranks
from app.bench.timing import peak_bytes
from ops.comm.collectives import Group
from ops.packed.sequence_parallel import HeadsToRows, RowsToHeads, sequence_parallel_attention
from ops.spatial_temporal.layers import run_layers
from ops.spatial_temporal.schedule import DSP, Grid, Schedule, intra
from ops.spatial_temporal.simulate import LayerCosts, simulate, ulysses_forecast
from ops.spatial_temporal.ulysses import frames_exchange
from ops.waiting import PendingCollective

SCHEDULES = {"DSP": DSP, "intra": intra(4), "inter": Schedule()}
ULYSSES = "Ulysses"
UNPACED = LayerCosts(spatial_s=0.0, temporal_s=0.0, exchange_s=0.0)
_BLOCKED_S = 1e-3  # a rank that has waited for longer was there before the message
_LIMIT_S = 900.0  # for all ranks together


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksCase:
    """What is run: sizes, and the speed of device and link."""

    ranks: int = 2
    frames: int = 16
    height: int = 8  # of a frame, in rows of positions
    positions: int = 64
    text: int = 8  # rows that every layer attends to
    width: int = 64
    heads: int = 4
    pairs: int = 3
    rounds: int = 3
    backward: bool = False
    costs: LayerCosts | None = None  # of paced ranks and their link; None: measured here

    @property
    def exchange_bytes(self) -> float:
        """That a rank sends in one change of layout."""
        held = self.frames * self.positions * self.width * 4 / self.ranks
        return held * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantSeconds:
    """One variant: its fastest round, of the rank that took longest. What else the machine does only adds time."""

    variant: str
    total_s: float
    exposed_s: float  # waiting for messages
    simulated_s: float
    simulated_exposed_s: float
    peak_mib: float  # beyond what stands before, of one run without pacing

    @property
    def off(self) -> float:
        """Distance to the simulation."""
        return self.total_s / self.simulated_s - 1


# A throttled link and a paced device ---------------------------------------------------------------------------------


class Awaitable(Protocol):
    def wait(self) -> None: ...


class Clock(Protocol):
    """Seconds from any moment on."""

    def now(self) -> float: ...
    def sleep_until(self, due: float) -> None: ...


class WallClock:
    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, due: float) -> None:
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)


class PacedDevice:
    """A device of given speed; counts the seconds that it computes.

    It has a timeline of its own, which the process follows: that computes the real layers, then sleeps until the device
    would have ended. What one slice came late the next ones make up for, so neither the machine's other work nor the
    process's between two slices counts, unless the device would have ended long before, or a peer waits for it. Not
    paced, its time is the clock's.
    """

    def __init__(self, backward: float, paced: bool = True, clock: Clock | None = None) -> None:
        self.backward, self.paced, self.clock = backward, paced, clock or WallClock()
        self.spent_s, self._until = 0.0, self.clock.now()

    def now(self) -> float:
        """When it has done what it was given so far."""
        return self._until if self.paced else self.clock.now()

    def reach(self, due: float) -> None:
        """The rank has nothing to do until then."""
        self._until = max(self._until, due)
        self.clock.sleep_until(due)

    def run(self, work: Callable[[Tensor], Tensor], x: Tensor, seconds: float) -> Tensor:
        """work(x), `seconds` long where it is paced, and its backward as much longer as a backward is. That of an `x`
        without a gradient is not noticed."""
        begin = self.now()
        out = work(_BackwardCall.apply(x, lambda: self._computed(self.backward * seconds)))
        self._computed(seconds)
        self.spent_s += self.now() - begin
        return out

    def _computed(self, seconds: float) -> None:
        if self.paced:
            self.reach(self._until + seconds)


class _BackwardCall(Function):
    """The same tensor; calls when its gradient is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:  # torch's ctx takes any attribute
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # the same ctx
        ctx.call()
        return gradient, None


@dataclass(slots=True)
class _Delivery:
    """A message that has arrived when Gloo says so and the link would have brought it."""

    pending: PendingCollective
    due: float
    link: ThrottledGroup

    def wait(self) -> None:
        device = self.link.device
        begin, asked = device.now(), device.clock.now()
        self.pending.wait()
        came = device.clock.now()
        late = not device.paced or came - asked > _BLOCKED_S  # else it was there before the process came to look
        there = max(self.due, came) if late else self.due
        self.link.waited_s += max(0.0, there - begin)
        device.reach(there)


class ThrottledGroup:
    """A device's group whose messages cross a link of one message at a time; `bandwidth` 0 leaves them as they are."""

    def __init__(self, group: Group, device: PacedDevice, delay_s: float = 0.0, bandwidth: float = 0.0) -> None:
        self.group, self.device, self.delay_s, self.bandwidth = group, device, delay_s, bandwidth
        self.size, self.rank = group.size, group.rank
        self.waited_s = self._free = 0.0

    def all_to_all_async(self, output: Tensor, input: Tensor, into: list[int], out_of: list[int]) -> Awaitable:
        pending = self.group.all_to_all_async(output, input, into, out_of)
        if not self.bandwidth:
            return _Delivery(pending, 0.0, self)
        rows = max(sum(counts) - counts[self.rank] for counts in (into, out_of))
        size = rows * (input.numel() // max(1, len(input))) * input.element_size()
        self._free = max(self._free, self.device.now()) + self.delay_s + size / self.bandwidth
        return _Delivery(pending, self._free, self)

    def all_to_all(self, output: Tensor, input: Tensor, into: list[int], out_of: list[int]) -> None:
        self.all_to_all_async(output, input, into, out_of).wait()


# The layers ----------------------------------------------------------------------------------------------------------


class BenchBlock(nn.Module):
    """Attention within the last but one dimension, attention to `text` rows, and an MLP: what a block of a
    spatial-temporal transformer costs."""

    text: Tensor  # [text, C]

    def __init__(self, width: int, heads: int, text: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.text_q, self.text_kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.text_proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.register_buffer("text", torch.randn(text, width))

    def project(self, x: Tensor) -> Tensor:
        """[..., L, C] -> q, k, v [3, ..., L, H, d]"""
        qkv: Tensor = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        return qkv

    def over_frames(self, x: Tensor) -> Tensor:
        """[B, T, S, C], attending over T."""
        out: Tensor = self(x.transpose(1, 2)).transpose(1, 2)
        return out

    def add(self, x: Tensor, heads: Tensor) -> Tensor:
        """What attention [..., L, H, d] found is added."""
        out: Tensor = x + self.proj(heads.flatten(-2))
        return out

    def text_queries(self, x: Tensor) -> Tensor:
        """[..., C] -> [rows, H, d]"""
        queries: Tensor = self.text_q(x).flatten(0, -2).unflatten(-1, (self.heads, -1))
        return queries

    def attend_to_text(self, queries: Tensor, first: int = 0) -> Tensor:
        """queries [rows, h, d] of heads from the `first` one on -> [rows, h, d]"""
        some = slice(first, first + queries.shape[1])
        k, v = self.text_kv(self.text).unflatten(-1, (2, self.heads, -1))[:, :, some].permute(1, 2, 0, 3)
        # As a batch of one: of three dimensions the kernels for GPUs take none.
        found: Tensor = F.scaled_dot_product_attention(queries.transpose(0, 1)[None], k[None], v[None])
        return found[0].transpose(0, 1)

    def add_text(self, x: Tensor, found: Tensor) -> Tensor:
        """What attention to the text [rows, H, d] found is added."""
        out: Tensor = x + self.text_proj(found.flatten(1)).view_as(x)
        return out

    def through_mlp(self, x: Tensor) -> Tensor:
        """[..., C]"""
        out: Tensor = x + self.mlp(x)
        return out

    def attend(self, x: Tensor) -> Tensor:
        """[..., L, C] within L."""
        q, k, v = (one.transpose(-2, -3) for one in self.project(x))
        return self.add(x, F.scaled_dot_product_attention(q, k, v).transpose(-2, -3))

    def read_text(self, x: Tensor) -> Tensor:
        """[..., C], attending to the text."""
        return self.add_text(x, self.attend_to_text(self.text_queries(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.through_mlp(self.read_text(self.attend(x)))


class RankRun:
    """One rank's stack of layers, by every variant."""

    def __init__(self, case: RanksCase, group: Group) -> None:
        torch.manual_seed(0)
        self.case, self.group = case, group
        self.blocks = [BenchBlock(case.width, case.heads, case.text) for _ in range(2 * case.pairs)]
        self.x = torch.randn(1, case.frames, case.positions, case.width)

    def run(self, variant: str, costs: LayerCosts, link: ThrottledGroup) -> None:
        """Forward, and backward where the case has one, on the link's device; by `costs` where it is paced."""
        for block in self.blocks:
            block.zero_grad()
        with torch.set_grad_enabled(self.case.backward):
            if variant == ULYSSES:
                out = self._ulysses(costs, link)
            else:
                out = self._sliced(variant, costs, link)
            if self.case.backward:
                out.sum().backward()

    def _sliced(self, variant: str, costs: LayerCosts, link: ThrottledGroup) -> Tensor:
        grid = self._grid(SCHEDULES[variant])
        own = torch.cat([self.x[:, :, rows] for rows in grid.positions_of_slices], dim=2)
        layers = [partial(self._layer, number, costs, link.device) for number in range(len(self.blocks))]
        return run_layers(own, layers, grid, link)  # type: ignore[arg-type]

    def _layer(self, number: int, costs: LayerCosts, device: PacedDevice, block: Tensor, rows: Tensor) -> Tensor:
        seconds = self._seconds(number, len(rows), costs)
        return device.run(self.blocks[number].over_frames if number % 2 else self.blocks[number], block, seconds)

    def _seconds(self, number: int, rows: int, costs: LayerCosts) -> float:
        full = self.case.positions if number % 2 else self.case.frames
        return rows / full * costs.compute_s(number) + costs.slice_s

    def _ulysses(self, costs: LayerCosts, link: ThrottledGroup) -> Tensor:
        grid = self._grid(DSP)
        (rows,) = grid.positions_of_slices
        case, device = self.case, link.device
        x = self.x[:, :, rows].requires_grad_(case.backward)  # as activations of layers before it would
        share = (rows.stop - rows.start) / case.positions
        exchange = frames_exchange(1, case.frames, case.positions, case.ranks, self.group.rank, in_halves=False)
        for number, block in enumerate(self.blocks):
            seconds = share * costs.compute_s(number) + costs.slice_s
            if number % 2:
                x = device.run(block.over_frames, x, seconds)
                continue
            qkv = device.run(block.project, x, seconds / 3)
            q, k, v = qkv.flatten(1, 3).unbind(0)
            heads = sequence_parallel_attention(q, k, v, exchange, link)  # type: ignore[arg-type]
            joined = torch.cat([x, heads.flatten(1).view_as(x)], dim=-1)
            joined = device.run(partial(_up_to_text, block), joined, seconds / 3)
            x, queries = joined.chunk(2, dim=-1)
            # Open-Sora exchanges these, too, though every rank has the text
            (queries,) = RowsToHeads.apply(exchange, link, queries.flatten(0, 2).unflatten(-1, (block.heads, -1)))
            found = block.attend_to_text(queries, self.group.rank * queries.shape[1])
            (found,) = HeadsToRows.apply(exchange, link, found)
            joined = torch.cat([x, found.flatten(1).view_as(x)], dim=-1)
            x = device.run(partial(_finish, block), joined, seconds / 3)
        return x

    def _grid(self, schedule: Schedule) -> Grid:
        case = self.case
        return Grid(
            frames=case.frames, positions=case.positions, schedule=schedule, degree=case.ranks, rank=self.group.rank
        )


def _up_to_text(block: BenchBlock, joined: Tensor) -> Tensor:
    """The stream and what self-attention found -> the stream and queries for the text, all [..., C]."""
    x, heads = joined.chunk(2, dim=-1)
    x = block.add(x, heads.unflatten(-1, (block.heads, -1)))
    return torch.cat([x, block.text_q(x)], dim=-1)


def _finish(block: BenchBlock, joined: Tensor) -> Tensor:
    x, found = joined.chunk(2, dim=-1)
    return block.through_mlp(block.add_text(x, found.flatten(0, -2).unflatten(-1, (block.heads, -1))))


# A rank --------------------------------------------------------------------------------------------------------------


def measured_costs(run: RankRun) -> LayerCosts:
    """What layers cost here, unpaced, of the slower rank; the link takes half of it."""
    case = run.case
    spent: dict[str, float] = {}
    for variant in ("DSP", "DSP", "intra"):  # the first one warms up
        device = PacedDevice(2.0, paced=False)
        run.run(variant, UNPACED, ThrottledGroup(run.group, device))
        spent[variant] = device.spent_s
    found = torch.tensor([spent["DSP"], max(0.0, spent["intra"] - spent["DSP"])], dtype=torch.float64)
    run.group.all_reduce(found, "max")
    layers = 2 * case.pairs
    whole, extra = (found / layers).tolist()  # spatial and temporal layers are taken alike: only their sum matters much
    slice_s = extra / (SCHEDULES["intra"].temporal_slices - 1)
    compute = max(whole - slice_s, 1e-6) * case.ranks
    return LayerCosts(spatial_s=compute, temporal_s=compute, exchange_s=whole / 2, slice_s=slice_s)


def measure_rank(
    group: Group,
    costs: dict[str, float] | None,
    **sizes: Any,  # the other fields of a `RanksCase`
) -> list[dict[str, float | str]]:
    """Every variant once per round, in turn, of the case that these describe. All ranks call it and return the same:
    seconds are those of the slowest rank of a round."""
    case = RanksCase(costs=LayerCosts(**costs) if costs else None, **sizes)
    run = RankRun(case, group)
    layers = case.costs or measured_costs(run)
    bandwidth = case.exchange_bytes / layers.exchange_s if layers.exchange_s else 0.0
    variants = [*SCHEDULES, *([ULYSSES] if case.heads % case.ranks == 0 else [])]
    seconds: dict[str, list[list[float]]] = {variant: [] for variant in variants}
    for number in range(case.rounds + 1):
        for variant in variants:
            group.barrier()
            device = PacedDevice(layers.backward, paced=case.costs is not None)
            link = ThrottledGroup(group, device, layers.part_s, bandwidth)
            begin = time.perf_counter()
            run.run(variant, layers, link)
            found = torch.tensor([time.perf_counter() - begin, link.waited_s], dtype=torch.float64)
            group.all_reduce(found, "max")
            if number:  # the first round warms up
                seconds[variant].append(found.tolist())
    return [asdict(_result(run, variant, layers, seconds[variant])) for variant in variants]


def _result(run: RankRun, variant: str, costs: LayerCosts, rounds: Sequence[Sequence[float]]) -> VariantSeconds:
    total, exposed = min(map(tuple, rounds))
    link = ThrottledGroup(run.group, PacedDevice(0.0, paced=False))
    peak = torch.tensor([peak_bytes(lambda: run.run(variant, UNPACED, link), torch.device("cpu"))])
    run.group.all_reduce(peak, "max")
    simulated_s, simulated_exposed_s = predicted(run.case, variant, costs)
    return VariantSeconds(
        variant=variant,
        total_s=total,
        exposed_s=exposed,
        simulated_s=simulated_s,
        simulated_exposed_s=simulated_exposed_s,
        peak_mib=float(peak) / 2**20,
    )


def predicted(case: RanksCase, variant: str, costs: LayerCosts) -> tuple[float, float]:
    """Simulated seconds and exposed seconds of a variant."""
    if variant == ULYSSES:
        found = ulysses_forecast(case.height, case.ranks, case.heads, costs, case.pairs)
        assert found is not None, "only run where the degree divides the heads"
        times = 1 + costs.backward if case.backward else 1.0
        link = found.link_s * (2 if case.backward else 1)
        return times * found.compute_s + link, link
    directions = ("forward", "backward") if case.backward else ("forward",)
    schedule = SCHEDULES[variant]
    all_found = [
        simulate(case.frames, case.positions, case.ranks, schedule, costs, case.pairs, direction)
        for direction in directions
    ]
    return sum(one.total_s for one in all_found), sum(one.exposed_s for one in all_found)


def measure_ranks(case: RanksCase) -> list[VariantSeconds]:
    """Starts the ranks, waits for them, and returns what rank 0 found."""
    found, *_ = run_ranks("app.bench.scalefusion_ranks", asdict(case), case.ranks, _LIMIT_S)
    return [VariantSeconds(**told) for told in found]


if __name__ == "__main__":
    rank_main(measure_rank)
