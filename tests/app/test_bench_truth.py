"""On a machine whose costs are hidden, a run with a wrong profile comes to know them, and its plans follow."""

from __future__ import annotations

import pytest

from actors.messages import Span
from app.bench.truth import Learned, learn_live

STEPS, UNSEEN, BUDGET_S = 200, 10, 0.02


def learnt(strategy: str) -> Learned:
    return learn_live(strategy, STEPS, UNSEEN, BUDGET_S)


@pytest.mark.parametrize("strategy", ["static", "knapsack"])
def test_hidden_costs_are_learnt_in_200_steps_despite_waiting(strategy: str) -> None:
    found = learnt(strategy)
    assert found.before > 0.5, "the run must begin with a wrong profile"
    assert found.median <= 0.05
    assert found.plan_ratio <= 1.03


def test_with_waiting_counted_as_work_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_it(span: Span) -> float:
        return span.end - span.start

    for place in ("actors.planning.observations", "actors.run.speeds"):
        monkeypatch.setattr(f"{place}.work_of", all_of_it)
    counted = learn_live("static", STEPS, UNSEEN, BUDGET_S, late=0.5)
    monkeypatch.undo()
    true = learn_live("static", STEPS, UNSEEN, BUDGET_S, late=0.5)
    assert true.median <= 0.05 and true.median < 0.7 * counted.median
