"""On a machine whose costs are hidden, a run with a wrong profile comes to know them, and its plans follow."""

from __future__ import annotations

import pytest

from actors.messages import Span
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import CrossNode
from app.bench.truth import StrategyResult, learn_live, predicted_by_profile

STEPS, UNSEEN, BUDGET_S = 200, 40, 0.02


def learnt(strategy: str) -> StrategyResult:
    return learn_live(strategy, STEPS, UNSEEN, BUDGET_S)


@pytest.mark.parametrize(
    "strategy",
    [
        "static",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("knapsack", "longest_first", "flexsp_greedy", "cascade")
        ),
    ],
)
def test_hidden_costs_are_learnt_in_200_steps_despite_waiting(strategy: str) -> None:
    found = learnt(strategy)
    assert found.before > 0.5, "the run must begin with a wrong profile"
    assert found.median <= 0.05 and 0.95 <= found.step_ratio <= 1.05
    assert found.plan_ratio <= 1.03 and found.plan_profiled <= 1.03


@pytest.mark.long
def test_with_waiting_counted_as_work_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_it(span: Span) -> float:
        return span.end - span.start

    for place in ("actors.planning.observations", "actors.run.speeds"):
        monkeypatch.setattr(f"{place}.work_of", all_of_it)
    counted = learn_live("static", STEPS, UNSEEN, BUDGET_S, late=0.5)
    monkeypatch.undo()
    true = learn_live("static", STEPS, UNSEEN, BUDGET_S, late=0.5)
    assert true.median <= 0.05 and true.median < 0.7 * counted.median


@pytest.mark.parametrize("spanning", [False, True])
def test_a_profile_predicts_shapes_and_degrees_that_it_has_not_measured(spanning: bool) -> None:
    for seed in range(4):
        found = predicted_by_profile(seed, spanning)
        assert found.median <= 0.05 and found.worst <= 0.15


def test_one_factor_for_all_bags_over_nodes_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Arachne has it."""
    monkeypatch.setattr(CrossNode, "by_rows", False)
    assert predicted_by_profile(spanning=True).worst > 0.15


def test_without_their_text_tokens_measured_captions_price_others_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Profile.measure
    monkeypatch.setattr(Profile, "measure", lambda self, key, seconds, *told: plain(self, key, seconds))
    assert predicted_by_profile().worst > 10, "captions of 128 tokens, by a fit to captions of none"
