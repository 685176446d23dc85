"""The sliced, overlapped schedule computes what whole layers compute, and launches early what it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops.comm import Group
from ops.spatial_temporal import Grid, Layer, Schedule, run_layers

torch.set_num_threads(1)
FP64 = {"atol": 1e-12, "rtol": 1e-12}
CHANNELS = 6


def attention_layers(count: int, dim: int) -> list[Layer]:
    """Layers that attend over one dimension and know where the rows of the other one lie."""

    def make(weight: Tensor) -> Layer:
        def layer(block: Tensor, rows: Tensor) -> Tensor:
            place = rows.double().sin()[:, None, None] if dim == 2 else rows.double().sin()[:, None]
            x = (block + place) @ weight
            x = x if dim == 2 else x.transpose(1, 2)
            x = torch.softmax(x @ x.transpose(-1, -2), dim=-1) @ x
            return block + (x if dim == 2 else x.transpose(1, 2))

        return layer

    numbers = torch.Generator().manual_seed(dim)
    return [make(torch.randn(CHANNELS, CHANNELS, dtype=torch.float64, generator=numbers)) for _ in range(count)]


def pairs(count: int) -> list[tuple[Layer, Layer]]:
    return list(zip(attention_layers(count, 2), attention_layers(count, 1)))


def whole_layers(x: Tensor, layers: list[tuple[Layer, Layer]]) -> Tensor:
    for spatial, temporal in layers:
        x = spatial(x, torch.arange(x.shape[1]))
        x = temporal(x, torch.arange(x.shape[2]))
    return x


def parallel(x: Tensor, schedule: Schedule, degree: int, run_ranks: Callable) -> Tensor:
    """The whole result, put together from all ranks."""

    def grid(rank: int) -> Grid:
        return Grid(frames=x.shape[1], positions=x.shape[2], schedule=schedule, degree=degree, rank=rank)

    def work(group: Group) -> Tensor:
        own = torch.cat([x[:, :, rows] for rows in grid(group.rank).positions_of_slices], dim=2)
        return run_layers(own, pairs(2), grid(group.rank), group)

    out = torch.full_like(x, torch.nan)
    for rank, part in enumerate(run_ranks(degree, work)):
        rows = [torch.arange(r.start, r.stop) for r in grid(rank).positions_of_slices]
        out[:, :, torch.cat(rows)] = part
    return out


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 11)), st.integers(1, 4), st.data())
def test_any_slicing_on_any_degree_equals_whole_layers(run_ranks, shape, degree, data) -> None:
    n_t, n_s = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    schedule = Schedule(
        temporal_slices=n_t,
        spatial_slices=n_s,
        temporal_lead=data.draw(st.integers(0, n_t)),
        spatial_lead=data.draw(st.integers(0, n_s)),
    )
    x = torch.randn(*shape, CHANNELS, dtype=torch.float64)
    torch.testing.assert_close(parallel(x, schedule, degree, run_ranks), whole_layers(x, pairs(2)), **FP64)


class Recorder:
    """A group of one that writes down what happens when."""

    def __init__(self) -> None:
        self.size, self.rank, self.events = 1, 0, []
        self.solo = Group.solo()

    def all_to_all_async(self, *call):  # type: ignore[no-untyped-def]
        self.events.append("exchange")
        return self.solo.all_to_all_async(*call)


def events(schedule: Schedule) -> list[str]:
    recorder = Recorder()

    def compute(block: Tensor, rows: Tensor) -> Tensor:
        recorder.events.append("compute")
        return block

    grid = Grid(frames=8, positions=8, schedule=schedule, degree=1, rank=0)
    run_layers(torch.zeros(1, 8, 8, 1), [(compute, compute)] * 2, grid, recorder)  # type: ignore[arg-type]
    return recorder.events


def test_exchanges_are_launched_before_the_slice_that_hides_them() -> None:
    """With leads, all but one part of a layer's first slice is under way before the layer before it has ended, and
    everything else before its own first slice computes."""
    seen = events(Schedule(temporal_slices=4, spatial_slices=4, temporal_lead=1, spatial_lead=1))
    assert seen.count("exchange") == 4 * 4 * 4 and seen.count("compute") == 4 * 4
    computes = [index for index, event in enumerate(seen) if event == "compute"]
    launched = [seen[:index].count("exchange") for index in computes]
    # layer 1: its 16 parts; then each of its slices adds one part of layer 2's first slice
    assert launched[:4] == [16, 17, 18, 19]
    assert launched[4:8] == [32, 33, 34, 35]
    without = events(Schedule(temporal_slices=4, spatial_slices=4, temporal_lead=0, spatial_lead=0))
    computes = [index for index, event in enumerate(without) if event == "compute"]
    assert [without[:index].count("exchange") for index in computes][:5] == [16, 16, 16, 16, 32]


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
        run_layers(torch.zeros(1, 4, 3, 2), pairs(1), grid, Group.solo())
