"""The schedule that `auto` takes: the paper's closed forms, numbers that are given, and nearness to the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.spatial_temporal.choice import SliceRates, SlicingRule, choose
from ops.spatial_temporal.schedule import DSP, Schedule
from ops.spatial_temporal.simulate import LayerCosts, best_schedule, simulate
from ops.spatial_temporal.slicing import AUTO, Slicing

COSTS = LayerCosts(spatial_s=4.0, temporal_s=4.0, exchange_s=0.5)  # at degree 2 slices take four times their parts
RATES = SliceRates(row_s=1e-3, key_s=1e-6, moved_s=1e-3, slice_s=1e-3, part_s=1e-4, backward=3.0)


def numbers(slices: int, lead: int) -> Slicing:
    return Slicing(temporal_slices=slices, spatial_slices=slices, temporal_lead=lead, spatial_lead=lead)


@pytest.mark.parametrize("training", [False, True])
def test_exposed_communication_of_a_pair_is_what_the_paper_counts(training: bool) -> None:
    """Comm_T + Comm_S as in DSP, Comm / N within layers, (Comm_T + Comm_S) / (N_T N_S) across them; a backward of twice
    the computation exposes the same once more."""
    whole, passes = 2 * COSTS.exchange_s, 1 + training
    for slices, lead, part in ((1, 0, 1.0), (4, 0, 1 / 4), (4, 1, 1 / 16)):
        found = choose(64, 256, 2, COSTS, training, numbers(slices, lead))
        assert found.exposed_s == pytest.approx(passes * whole * part)
        assert found.link_s == pytest.approx(passes * whole)
        assert found.exposed == pytest.approx(part)


@pytest.mark.parametrize("slices, lead", [(1, 0), (2, 0), (4, 0), (2, 1), (4, 1), (4, 3), (3, 2)])
@pytest.mark.parametrize("exchange_s", [0.1, 0.5, 1.0])
def test_a_pair_takes_what_the_simulator_says(slices: int, lead: int, exchange_s: float) -> None:
    costs = replace(COSTS, spatial_s=6.0, exchange_s=exchange_s, slice_s=0.02, part_s=0.005)
    found = choose(48, 240, 2, costs, False, numbers(slices, lead))
    pairs = 8
    simulated = simulate(48, 240, 2, found.schedule, costs, pairs)
    assert found.total_s == pytest.approx(simulated.total_s / pairs, rel=0.06)
    assert found.compute_s == pytest.approx(simulated.compute_s / pairs, rel=1e-6)


CASES = [(16, 60, 2, 0.5), (5, 24, 3, 0.5), (8, 96, 4, 1.0), (3, 24, 3, 2.0), (60, 96, 2, 0.2), (2, 30, 4, 0.5)]


@pytest.mark.parametrize("frames, positions, degree, link", CASES)
def test_auto_is_near_the_best_of_the_simulator(frames: int, positions: int, degree: int, link: float) -> None:
    """Grids that divide and that do not, more ranks than frames, links faster and slower than computation."""
    costs = LayerCosts(
        spatial_s=0.6 * degree, temporal_s=0.4 * degree, exchange_s=link / 2, slice_s=0.005, part_s=0.002
    )
    counts = (1, 2, 4)
    best = best_schedule(frames, positions, degree, costs, slices=counts)
    chosen = choose(frames, positions, degree, costs, False).schedule
    seconds = [simulate(frames, positions, degree, one, costs).total_s for one in (chosen, best, DSP)]
    assert seconds[0] <= 1.15 * seconds[1]
    assert seconds[0] < seconds[2]


def test_auto_does_not_slice_where_slices_cost_more_than_they_hide() -> None:
    costs = LayerCosts(spatial_s=1.0, temporal_s=1.0, exchange_s=0.01, slice_s=0.5)
    assert choose(16, 64, 4, costs, True).schedule == DSP
    assert choose(16, 64, 1, COSTS, True).schedule == DSP  # nothing travels


def test_latency_of_messages_speaks_against_many_parts() -> None:
    cheap, dear = (choose(16, 64, 2, replace(COSTS, part_s=part_s), False).schedule for part_s in (0.0, 0.3))
    assert dear.temporal_slices * dear.spatial_slices < cheap.temporal_slices * cheap.spatial_slices


def test_the_longer_layer_gets_the_larger_lead() -> None:
    """As the paper says of its workloads (5.3)."""
    costs = LayerCosts(spatial_s=12.0, temporal_s=4.0, exchange_s=2.0, slice_s=0.02)
    found = choose(64, 256, 2, costs, False, Slicing(temporal_slices=4, spatial_slices=4)).schedule
    assert found.spatial_lead >= found.temporal_lead


COUNTS = st.one_of(st.just("auto"), st.integers(1, 9))
LEADS = st.one_of(st.just("auto"), st.integers(0, 8))


@settings(max_examples=60, deadline=None)
@given(COUNTS, COUNTS, LEADS, LEADS, st.integers(1, 20), st.integers(1, 40), st.integers(1, 6), st.booleans())
def test_numbers_that_are_given_stay_and_the_rest_is_filled_in(
    temporal, spatial, temporal_lead, spatial_lead, frames, positions, degree, training
) -> None:  # type: ignore[no-untyped-def]
    given_numbers = {
        "temporal_slices": temporal,
        "spatial_slices": spatial,
        "temporal_lead": temporal_lead,
        "spatial_lead": spatial_lead,
    }
    try:
        slicing = Slicing(**given_numbers)
    except ValueError:
        leads = ((temporal, temporal_lead), (spatial, spatial_lead))
        assert any(lead != "auto" and lead > (8 if count == "auto" else count) for count, lead in leads)
        return
    for rates in (None, RATES):
        found = SlicingRule(slicing=slicing, rates=rates, training=training).stack(frames, positions, 2, 7, degree)
        for name, value in given_numbers.items():
            assert value in ("auto", getattr(found, name))


def test_without_rates_auto_is_the_paper() -> None:
    assert SlicingRule(slicing=AUTO).stack(16, 64, 1, 0, 2) == Schedule()


def test_a_stack_costs_what_its_rows_cost() -> None:
    """Two samples cost twice one; text counts in spatial layers alone; a bag of k sends (k - 1) / k of its rows."""
    one, two, told = (RATES.layer_costs(4, 10, samples, text, 2) for samples, text in ((1, 0), (2, 0), (1, 5)))
    assert two.spatial_s == pytest.approx(2 * one.spatial_s) and two.exchange_s == pytest.approx(2 * one.exchange_s)
    assert told.temporal_s == one.temporal_s
    assert told.spatial_s - one.spatial_s == pytest.approx(40 * 5 * RATES.key_s)
    both = replace(RATES, temporal_text=1.0).layer_costs(4, 10, 1, 5, 2)
    assert both.temporal_s - one.temporal_s == pytest.approx(40 * 5 * RATES.key_s)
    assert RATES.layer_costs(4, 10, 1, 0, 4).exchange_s == pytest.approx(40 / 4 * 3 / 4 * RATES.moved_s)
    assert RATES.layer_costs(4, 10, 1, 0, 1).exchange_s == 0


def test_rates_that_differ_little_choose_alike() -> None:
    assert replace(RATES, row_s=1.04e-3).rounded() == RATES.rounded() != replace(RATES, row_s=2e-3).rounded()


def test_leads_beyond_their_slices_and_costs_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"temporal_lead 3 of temporal_slices 2: a lead lies in 0..temporal_slices"):
        Slicing(temporal_slices=2, temporal_lead=3)
    with pytest.raises(ValueError, match="spatial_slices is 0; give a number from 1 to 64"):
        Slicing(spatial_slices=0)
    with pytest.raises(ValueError, match="moved_s is -1"):
        replace(RATES, moved_s=-1)
