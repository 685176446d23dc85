"""The table of what models leave free on a GPU: its sums, and that it says where the planner promises too much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.plan.types import USABLE
from app.bench.headroom import Figures, Headroom, table

MEASURED = Figures(states=20.0, host=10.0, dit=8.0, vae=4.0, text=1.0, communicators=2.0)


def row(planned: Figures) -> Headroom:
    return Headroom(model="m", lora=False, workers=8, clip="480p81", degree=2, measured=MEASURED, planned=planned)


def test_what_is_free_is_left_beside_states_and_the_worst_cascade() -> None:
    assert MEASURED.free(40.0) == pytest.approx(USABLE * 38.0 - 28.0)
    assert MEASURED.free(40.0, "host") == pytest.approx(USABLE * 38.0 - 18.0)


@pytest.mark.parametrize("part", ["states", "host", "dit", "vae", "text"])
def test_every_part_is_compared(part: str) -> None:
    below, above = (replace(MEASURED, **{part: share * getattr(MEASURED, part)}) for share in (0.9, 1.2))
    assert row(below).under == pytest.approx(-0.1) and row(below).over == pytest.approx(0.0)
    assert row(above).over == pytest.approx(0.2) and row(above).under == pytest.approx(0.0)
    assert "0.0 to 20.0 %" in table([row(above)], 80.0)
