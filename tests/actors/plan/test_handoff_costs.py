"""Measured handoffs become a cost of the plan, when they matter."""

from __future__ import annotations

import numpy as np
import pytest

from actors.messages import Span
from actors.plan.costs.profile import Handoff, Profile
from actors.planning.actor import fetches
from ops.models.wan.config import WanConfig

GIB = 2**30


def observed(dit_s: float, handoffs: list[tuple[int, float]]) -> Handoff:
    profile = Profile.from_flops(WanConfig(num_layers=2, num_heads=4, head_dim=16, ffn_dim=128, freq_dim=32))
    for _ in range(3):
        profile.observe("dit", batch=1, frames=1, height=64, width=64, degree=1, seconds=dit_s)
    for num_bytes, seconds in handoffs:
        profile.observe_handoff(num_bytes, seconds)
    return profile.handoff


def test_latency_and_bandwidth_are_found_through_outliers() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.choice([2**20, 2**28], size=40)
    seconds = 0.02 + sizes / (2.0 * GIB) * rng.uniform(0.95, 1.05, 40)
    seconds[::9] += 3.0  # a host that was busy with something else
    found = observed(1.0, list(zip(sizes.tolist(), seconds.tolist())))
    assert found.latency_s == pytest.approx(0.02, rel=0.2)
    assert found.gib_per_s == pytest.approx(2.0, rel=0.2)


def test_handoffs_of_one_size_are_a_latency() -> None:
    assert observed(1.0, [(1000, 0.05)] * 10) == Handoff(latency_s=0.05)


def test_handoffs_below_a_percent_of_a_cascade_cost_nothing() -> None:
    assert observed(10.0, [(1000, 0.05)] * 10) == Handoff()


def test_few_handoffs_change_nothing() -> None:
    profile = Profile(handoff=Handoff(latency_s=0.5), extrapolate=False)
    for _ in range(5):
        profile.observe_handoff(1000, 0.1)
    assert profile.handoff == Handoff(latency_s=0.5)


def test_impossible_measurements_are_refused() -> None:
    for num_bytes, seconds in ((1, float("nan")), (1, -0.1), (-1, 0.1)):
        with pytest.raises(ValueError, match="handoff of"):
            Profile().observe_handoff(num_bytes, seconds)


def span(cascade: str, fetch_s: float | None, num_bytes: int = 8) -> Span:
    return Span(
        name="", module="dit", cascade=cascade, step=0, start=0, end=1, fetched_bytes=num_bytes, fetch_s=fetch_s
    )


def test_a_bag_counts_once_with_its_quickest_rank() -> None:
    spans = [span("a", 0.4), span("a", 0.1), span("a", None), span("b", None), span("c", 0.3, 16)]
    assert fetches(spans) == [(8, 0.1), (16, 0.3)]
