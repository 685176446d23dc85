"""The simulated time of a schedule: the paper's closed forms where they hold, and the choice of N and L."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.spatial_temporal.schedule import DSP, Schedule, intra
from ops.spatial_temporal.simulate import Forecast, LayerCosts, best_schedule, simulate, ulysses_forecast

PAIRS = 10
COSTS = LayerCosts(spatial_s=4.0, temporal_s=4.0, exchange_s=0.5)  # at degree 2 slices take four times their parts


def forecast(schedule: Schedule, costs: LayerCosts = COSTS, degree: int = 2, direction: str = "forward") -> Forecast:
    return simulate(64, 256, degree, schedule, costs, PAIRS, direction)  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_exposed_communication_is_what_the_paper_counts(direction: str) -> None:
    """Per exchange: all of it (DSP), 1/N within layers, 1/N^2 across them."""
    exchanges, whole = 2 * PAIRS, COSTS.exchange_s
    leads = Schedule(temporal_slices=4, spatial_slices=4, temporal_lead=1, spatial_lead=1)
    for schedule, part in ((DSP, whole), (intra(4), whole / 4), (leads, whole / 16)):
        found = forecast(schedule, direction=direction)
        # the stack's end differs: forward has a first exchange to wait for, backward a last one
        assert found.exposed_s == pytest.approx(exchanges * part, rel=1e-9, abs=whole)
        assert found.link_s == pytest.approx(exchanges * whole)
    assert forecast(leads, direction=direction).exposed_s <= 0.1 * forecast(DSP, direction=direction).exposed_s


def test_a_link_slower_than_computation_bounds_the_time_from_below() -> None:
    slow = LayerCosts(spatial_s=1.0, temporal_s=1.0, exchange_s=5.0)
    found = forecast(Schedule(), slow)
    assert found.total_s >= found.link_s and found.exposed_s > 0


@settings(max_examples=60, deadline=None)
@given(
    frames=st.integers(1, 20),
    positions=st.integers(1, 30),
    degree=st.integers(1, 6),
    n=st.integers(1, 5),
    lead=st.integers(0, 5),
    exchange=st.floats(0, 3),
)
def test_no_schedule_beats_compute_or_link(frames, positions, degree, n, lead, exchange) -> None:  # type: ignore[no-untyped-def]
    schedule = Schedule(temporal_slices=n, spatial_slices=n, temporal_lead=min(n, lead), spatial_lead=min(n, lead))
    costs = LayerCosts(spatial_s=2.0, temporal_s=1.0, exchange_s=exchange)
    found = simulate(frames, positions, degree, schedule, costs)
    assert found.total_s >= max(found.compute_s, found.link_s) - 1e-9
    assert 0 <= found.hidden <= 1
    if degree == 1:
        assert found.exposed_s == pytest.approx(0, abs=1e-9) and found.link_s == 0


def test_slicing_costs_what_it_is_said_to_cost() -> None:
    costs = LayerCosts(spatial_s=4.0, temporal_s=4.0, exchange_s=0.0, slice_s=0.25)
    assert forecast(intra(4), costs).total_s - forecast(DSP, costs).total_s == pytest.approx(2 * PAIRS * 3 * 0.25)


def test_the_longer_layer_gets_the_larger_lead() -> None:
    """Spatial layers three times as long as temporal ones: a temporal layer's parts travel under the spatial layer
    before it, as the paper says of its workloads (5.3)."""
    costs = LayerCosts(spatial_s=12.0, temporal_s=4.0, exchange_s=2.0, slice_s=0.02)
    chosen = best_schedule(64, 256, 2, costs, slices=(4,))
    assert chosen.spatial_lead >= chosen.temporal_lead


def test_auto_is_the_shortest_of_all_it_may_choose_from() -> None:
    costs = LayerCosts(spatial_s=6.0, temporal_s=3.0, exchange_s=1.2, slice_s=0.05, part_s=0.005)
    chosen = simulate(30, 80, 4, best_schedule(30, 80, 4, costs), costs).total_s
    for schedule in (DSP, intra(2), intra(4), intra(8), Schedule()):
        assert chosen <= simulate(30, 80, 4, schedule, costs).total_s


def test_auto_does_not_slice_where_slices_cost_more_than_they_hide() -> None:
    costs = LayerCosts(spatial_s=1.0, temporal_s=1.0, exchange_s=0.01, slice_s=0.5)
    assert best_schedule(16, 64, 4, costs) == DSP
    assert best_schedule(16, 64, 1, COSTS) == DSP  # nothing travels


def test_ulysses_exchanges_three_times_as_much_as_dsp_and_stops_at_the_heads() -> None:
    """q, k, v and their result, then the queries for the text and theirs. Rows of a frame are padded to the degree."""
    found = ulysses_forecast(16, 2, 16, COSTS, PAIRS)
    assert found is not None
    assert found.link_s == pytest.approx(3 * forecast(DSP).link_s)
    assert found.compute_s == pytest.approx(forecast(DSP).compute_s)
    assert ulysses_forecast(256, 32, 16, COSTS) is None
    padded = ulysses_forecast(15, 2, 16, COSTS, PAIRS)  # to 16
    assert padded is not None
    assert padded.link_s == pytest.approx(16 / 15 * found.link_s)
    assert padded.compute_s == pytest.approx(16 / 15 * found.compute_s)


def test_a_cost_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="slice_s is -1; a cost is at least 0"):
        LayerCosts(spatial_s=1.0, temporal_s=1.0, exchange_s=1.0, slice_s=-1)
