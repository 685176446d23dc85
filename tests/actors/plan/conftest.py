from __future__ import annotations

from pathlib import Path

import pytest

from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile

PROFILE = Path(__file__).resolve().parents[3] / "configs" / "profiles" / "hunyuan-13b-720p-h100.json"


@pytest.fixture(scope="session")
def h100() -> Profile:
    """The published H100 latencies: only listed points are legal."""
    return read_profile(PROFILE)


@pytest.fixture(autouse=True)
def without_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches and proofs end by their counted work only, so a busy machine plans as an idle one does."""
    monkeypatch.setattr("actors.plan.strategies.search.step.PATIENCE", 1000.0)
    monkeypatch.setattr("actors.plan.strategies.search.cells.BALANCE_S", 100.0)
    monkeypatch.setattr("actors.plan.strategies.genetic.PATIENCE", 1000.0)
    monkeypatch.setattr("actors.plan.strategies.exact.EXACT_S", 100.0)
