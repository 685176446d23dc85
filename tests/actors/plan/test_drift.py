"""What measured cascades say of those that did not run: near ones most, and in doubt nothing."""

from __future__ import annotations

import math

import pytest

from actors.plan.costs.drift import Drift
from actors.plan.costs.forms import Load


def load(tokens: int = 1024, batch: int = 4, degree: int = 4) -> Load:
    return Load(batch=batch, frames=17, height=64, width=64, text_tokens=0, tokens=tokens, degree=degree)


def test_one_measured_load_speaks_for_all_where_there_is_no_doubt() -> None:
    drift = Drift([load()], [1.5], doubt=0.0)
    for other in (load(), load(tokens=1), load(tokens=10**6, batch=64, degree=1)):
        assert drift.factor(other) == pytest.approx(1.5)
    assert Drift([], [], doubt=0.0).factor(load()) == 1.0


def test_between_two_loads_lies_the_geometric_mean_and_each_has_most_of_its_own() -> None:
    few, many = load(tokens=512), load(tokens=2048)
    drift = Drift([few, many], [0.5, 2.0], doubt=0.0)
    assert drift.factor(load()) == pytest.approx(1.0)
    assert 0.5 < drift.factor(few) < 0.7 < drift.factor(load(tokens=900)) < 1.0
    assert drift.factor(many) == pytest.approx(1 / drift.factor(few))
    assert all(0.5 <= drift.factor(load(tokens=2**power)) <= 2.0 for power in range(24)), "never beyond what was seen"
    for far in (load(tokens=1), load(tokens=10**8)):
        assert drift.factor(far) == pytest.approx(1.0, abs=0.01), "far from both it is their mean"


@pytest.mark.parametrize("doubt", [0.5, 2.0])
def test_with_doubt_a_factor_goes_to_one_with_the_distance(doubt: float) -> None:
    """The kernel has a width of 0.7 in logarithms: 1 at its point, exp(-1/2) one width away, exp(-2) two."""
    tokens = 1_000_000
    drift = Drift([load(tokens=tokens)], [3.0], doubt=doubt)
    for widths in (0.0, 1.0, 2.0):
        weight = math.exp(-(widths**2) / 2)
        away = load(tokens=round(tokens * math.exp(0.7 * widths)))
        assert drift.factor(away) == pytest.approx(3.0 ** (weight / (weight + doubt)), rel=1e-4)
    assert drift.factor(load(tokens=1)) == pytest.approx(1.0)


def test_twice_the_tokens_the_samples_or_the_workers_is_as_far() -> None:
    drift = Drift([load()], [3.0], doubt=1.0)
    near = [drift.factor(other) for other in (load(tokens=2048), load(batch=8), load(degree=8), load(degree=2))]
    assert near == pytest.approx([near[0]] * 4) and 1.0 < near[0] < drift.factor(load())
