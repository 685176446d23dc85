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
