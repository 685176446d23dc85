"""The sliced, overlapped schedule computes what whole layers compute, forward and backward, and sends in time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ops.comm.collectives import Group
from ops.packed.sequence_parallel import sequence_parallel_attention
from ops.spatial_temporal.layers import LayerFunction, run_layers
from ops.spatial_temporal.schedule import (
    DSP,
    Grid,
    Instruction,
    RunSlice,
    Schedule,
    SendPart,
    backward_program,
    forward_program,
    intra,
    length_of,
)
from ops.spatial_temporal.ulysses import frames_exchange
from ops.waiting import PendingCollective

torch.set_num_threads(1)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # of the largest entry
CHANNELS = 6
Weights = list[Tensor]


def weights_of(layers: int, dtype: torch.dtype = torch.float64) -> Weights:
    numbers = torch.Generator().manual_seed(layers)
    return [
        (torch.randn(CHANNELS, CHANNELS, dtype=torch.float64, generator=numbers) / CHANNELS**0.5)
        .to(dtype)
        .requires_grad_()
        for _ in range(layers)
    ]


def layers_of(weights: Weights, recompute: bool = False) -> list[LayerFunction]:
    """Spatial and temporal attention in turn; a layer knows where the rows of the other dimension lie."""

    def make(weight: Tensor, temporal: bool) -> LayerFunction:
        def layer(block: Tensor, rows: Tensor) -> Tensor:
            place = rows.to(block.dtype).sin()
            x = (block + (place[:, None] if temporal else place[:, None, None])) @ weight
            x = x.transpose(1, 2) if temporal else x
            x = torch.softmax(x @ x.transpose(-1, -2) / CHANNELS, dim=-1) @ x
            return block + (x.transpose(1, 2) if temporal else x)

        def recomputed(block: Tensor, rows: Tensor) -> Tensor:
            return checkpoint(layer, block, rows, use_reentrant=False)

        return recomputed if recompute else layer

    return [make(weight, bool(number % 2)) for number, weight in enumerate(weights)]


def whole_layers(x: Tensor, layers: Sequence[LayerFunction]) -> Tensor:
    for number, layer in enumerate(layers):
        x = layer(x, torch.arange(x.shape[1 + number % 2]))
    return x


def own_part(x: Tensor, schedule: Schedule, group: Group) -> tuple[Grid, Tensor]:
    """The grid of a rank and the positions that it holds."""
    grid = Grid(frames=x.shape[1], positions=x.shape[2], schedule=schedule, degree=group.size, rank=group.rank)
    rows = [torch.arange(r.start, r.stop) for r in grid.positions_of_slices]
    return grid, torch.cat(rows)


def on_ranks(
    x: Tensor, seed: Tensor, schedule: Schedule, degree: int, run_ranks: Callable, train_x: bool = True, **layers: bool
) -> tuple[Tensor, Tensor, Weights]:
    """Output, gradient of x (zeros where it is not trained) and of the weights, put together from all ranks."""
    out, grad, totals = torch.full_like(x, torch.nan), torch.zeros_like(x), weights_of(4, x.dtype)

    def work(group: Group) -> Weights:
        grid, rows = own_part(x, schedule, group)
        weights = weights_of(4, x.dtype)
        own = x[:, :, rows].requires_grad_(train_x)
        result = run_layers(own, layers_of(weights, **layers), grid, group)
        result.backward(seed[:, :, rows])
        out[:, :, rows] = result.detach()
        if own.grad is not None:
            grad[:, :, rows] = own.grad
        return [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]

    gradients = run_ranks(degree, work)
    return out, grad, [sum(parts, torch.zeros_like(total)) for total, parts in zip(totals, zip(*gradients))]


def on_one(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Weights]:
    weights, x = weights_of(4, x.dtype), x.clone().requires_grad_()
    out = whole_layers(x, layers_of(weights))
    out.backward(seed)
    return out.detach(), x.grad, [w.grad for w in weights]


def assert_equal(found: tuple[Tensor, Tensor, Weights], plain: tuple[Tensor, Tensor, Weights]) -> None:
    for ours, theirs in zip([*found[:2], *found[2]], [*plain[:2], *plain[2]], strict=True):
        largest = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours / largest, theirs / largest, rtol=0, atol=TOLERANCE[theirs.dtype])


schedules = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda n: st.builds(
        Schedule,
        temporal_slices=st.just(n[0]),
        spatial_slices=st.just(n[1]),
        temporal_lead=st.integers(0, n[0]),
        spatial_lead=st.integers(0, n[1]),
    )
)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 11)),
    schedule=schedules,
    degree=st.integers(1, 4),
    dtype=st.sampled_from(list(TOLERANCE)),
    recompute=st.booleans(),
)
def test_any_slicing_on_any_degree_equals_whole_layers(run_ranks, shape, schedule, degree, dtype, recompute) -> None:
    numbers = torch.Generator().manual_seed(0)
    x, seed = (torch.randn(*shape, CHANNELS, dtype=dtype, generator=numbers) for _ in range(2))
    found = on_ranks(x, seed, schedule, degree, run_ranks, recompute=recompute)
    assert_equal(found, on_one(x, seed))


def test_ranks_without_rows_exchange_gradients_like_the_others(run_ranks) -> None:
    """Three of four ranks have no frame in any spatial layer, and only weights are trained."""
    x, seed = torch.randn(1, 1, 3, CHANNELS, dtype=torch.float64), torch.randn(1, 1, 3, CHANNELS, dtype=torch.float64)
    out, no_gradient, weights = on_ranks(x, seed, Schedule(), 4, run_ranks, train_x=False)
    plain, _, plain_weights = on_one(x, seed)
    assert_equal((out, no_gradient, weights), (plain, torch.zeros_like(x), plain_weights))


@given(rows=st.integers(0, 40), slices=st.integers(1, 6), degree=st.integers(1, 9))
def test_no_rank_holds_more_than_one_row_above_another(rows: int, slices: int, degree: int) -> None:
    schedule = Schedule(temporal_slices=slices, spatial_slices=1, temporal_lead=0, spatial_lead=0)
    grid = Grid(frames=rows, positions=1, schedule=schedule, degree=degree, rank=0)
    held = [sum(length_of(grid.chunk("temporal", i, rank)) for i in range(slices)) for rank in range(degree)]
    assert sum(held) == rows and max(held) - min(held) <= 1


class RecordingGroup:
    """A group that writes down when an exchange begins."""

    def __init__(self, group: Group, events: list[str]) -> None:
        self.group, self.events, self.size, self.rank = group, events, group.size, group.rank

    def all_to_all_async(self, *call) -> PendingCollective:  # type: ignore[no-untyped-def]
        self.events.append("send")
        return self.group.all_to_all_async(*call)


def pattern(program: Sequence[Instruction]) -> list[str]:
    return ["send" if isinstance(step, SendPart) else "run" for step in program]


@settings(max_examples=10, deadline=None)
@given(schedule=schedules)
def test_forward_and_backward_follow_their_programs(run_ranks, schedule: Schedule) -> None:
    def work(group: Group) -> list[str]:
        events: list[str] = []

        def layer(block: Tensor, rows: Tensor) -> Tensor:
            events.append("run")
            out = block * 2
            out.register_hook(lambda gradient: events.append("run"))
            return out

        x = torch.ones(1, 8, 8, 1)  # every rank has rows in every slice
        grid, rows = own_part(x, schedule, group)
        run_layers(x[:, :, rows], [layer] * 4, grid, RecordingGroup(group, events)).sum().backward()  # type: ignore[arg-type]
        return events

    wanted = pattern([*forward_program(schedule, 4), *backward_program(schedule, 4)])
    assert run_ranks(2, work) == [wanted] * 2


def test_with_leads_a_layer_waits_for_one_part_in_its_slices() -> None:
    """All but one part of a layer's first slice is under way before the layer before it ends; without leads, none is.
    The same holds for gradients on the way back."""
    schedule = Schedule(temporal_slices=4, spatial_slices=4, temporal_lead=1, spatial_lead=1)
    assert sent_before_the_last_slice(list(forward_program(schedule, 4)), first=0) == 3
    assert sent_before_the_last_slice(list(forward_program(intra(4), 4)), first=0) == 0
    assert sent_before_the_last_slice(list(backward_program(schedule, 4)), first=3) == 3
    assert sent_before_the_last_slice(list(backward_program(intra(4), 4)), first=3) == 0


def sent_before_the_last_slice(program: list[Instruction], first: int) -> int:
    """Parts of the second layer that runs, under way when the last slice of the first layer begins."""
    last = max(n for n, step in enumerate(program) if isinstance(step, RunSlice) and step.layer == first)
    owner = 1 if first == 0 else first  # in the backward a part belongs to the layer that its gradient leaves
    return sum(isinstance(step, SendPart) and step.layer == owner for step in islice(program, last))


@given(schedule=schedules, layers=st.sampled_from([2, 4, 6]))
def test_a_program_sends_every_part_once_before_its_slice_runs(schedule: Schedule, layers: int) -> None:
    counts = {"spatial": schedule.temporal_slices, "temporal": schedule.spatial_slices}
    every = {
        SendPart(layer, target, source)
        for layer in range(layers)
        for target in range(counts["temporal" if layer % 2 else "spatial"])
        for source in range(counts["spatial" if layer % 2 else "temporal"])
    }
    there = list(forward_program(schedule, layers))
    back = list(backward_program(schedule, layers))
    for program in (there, back):
        sent = [step for step in program if isinstance(step, SendPart)]
        assert len(sent) == len(set(sent)) and set(sent) == every
    for run in (step for step in there if isinstance(step, RunSlice)):
        needed = {part for part in every if (part.layer, part.target) == (run.layer, run.index)}
        assert needed <= set(there[: there.index(run)])
    for run in (step for step in back if isinstance(step, RunSlice) and step.layer + 1 < layers):
        needed = {part for part in every if (part.layer, part.source) == (run.layer + 1, run.index)}
        assert needed <= set(back[: back.index(run)])


class LiveBytes(TorchDispatchMode):
    """The largest sum of storages that were alive at once, of those made in this thread while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: weakref.WeakSet[object] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
                self.peak = max(self.peak, self.now)
        return out

    def _freed(self, size: int) -> None:
        self.now -= size


def peak_bytes(schedule: Schedule, run_ranks: Callable) -> int:
    def work(group: Group) -> int:
        x = torch.ones(1, 32, 64, 16)
        grid, rows = own_part(x, schedule, group)

        def layer(block: Tensor, rows: Tensor) -> Tensor:
            inner = torch.cat([block] * 4, -1)  # as wide as an MLP's
            return block + inner[..., :16]

        with torch.no_grad(), LiveBytes() as live:
            run_layers(x[:, :, rows], [layer] * 4, grid, group)
        return live.peak

    return max(run_ranks(2, work))


def test_slices_need_less_memory_than_whole_layers(run_ranks) -> None:
    """Inner activations exist for one slice at a time, and the buffers of an exchange end with their part."""
    whole, sliced = peak_bytes(DSP, run_ranks), peak_bytes(Schedule(), run_ranks)
    assert sliced < 0.75 * whole, f"{sliced} of {whole}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temporal_lead": 5}, "temporal_lead 5 of temporal_slices 4"),
        ({"spatial_slices": 0, "spatial_lead": 0}, "spatial_lead 0 of spatial_slices 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**change)


def test_activations_of_another_grid_are_refused() -> None:
    grid = Grid(frames=4, positions=4, schedule=Schedule(), degree=1, rank=0)
    with pytest.raises(ValueError, match="do not fit 4 frames and 4 of 4"):
        run_layers(torch.zeros(1, 4, 3, 2), layers_of(weights_of(2)), grid, Group.solo())


def test_layers_without_a_partner_are_refused() -> None:
    grid = Grid(frames=4, positions=4, schedule=Schedule(), degree=1, rank=0)
    with pytest.raises(ValueError, match="3 layers; spatial and temporal layers come in pairs"):
        run_layers(torch.zeros(1, 4, 4, 2), layers_of(weights_of(3)), grid, Group.solo())


@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 2), frames=st.integers(1, 4), positions=st.integers(1, 9), degree=st.sampled_from([1, 2, 4])
)
def test_ulysses_over_frames_equals_attention_within_each_frame(run_ranks, batch, frames, positions, degree) -> None:
    q, k, v = (torch.randn(batch, frames, positions, 4, 2, dtype=torch.float64) for _ in range(3))
    plain = F.scaled_dot_product_attention(*(x.movedim(3, 2) for x in (q, k, v))).movedim(2, 3)
    out = torch.full_like(q, torch.nan)

    def work(group: Group) -> None:
        _, rows = own_part(q, DSP, group)
        exchange = frames_exchange(batch, frames, positions, group.size, group.rank)
        own = (x[:, :, rows].flatten(0, 2) for x in (q, k, v))
        heads = sequence_parallel_attention(*own, exchange, group)
        out[:, :, rows] = heads.unflatten(0, (batch, frames, len(rows)))

    run_ranks(degree, work)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-12)
