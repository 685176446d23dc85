"""A strategy is one file: its name is the file's, a config may name it, and it plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.plan.registry import STRATEGIES
from actors.plan.types import PlanError
from actors.planning.make_plan import strategy_named
from app.settings.config import RunConfig
from ops.typed import ConfigError

DEMO = Path(__file__).resolve().parents[3] / "configs" / "runs" / "demo.yaml"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_bears_the_name_of_its_file_and_a_config_may_name_it(name: str) -> None:
    assert strategy_named(name).name == name
    assert RunConfig.load(DEMO, [f"planner.strategy={name}"]).planner.strategy == name


def test_a_strategy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(PlanError, match="cascade, exact"):
        strategy_named("magic")
    with pytest.raises(ConfigError, match="did you mean knapsack"):
        RunConfig.load(DEMO, ["planner.strategy=knapsak"])
