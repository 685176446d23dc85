"""The table of what models leave free on a GPU: its sums, and that it says where the planner promises too much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.plan.types import USABLE
from app.bench.headroom import Figures, Headroom, _kept, table

MEASURED = Figures(states=(20.0, 18.0, 12.0, 10.0), dit=8.0, vae=4.0, text=1.0, communicators=2.0)


def row(planned: Figures) -> Headroom:
    return Headroom(
        model="m", lora=False, workers=8, clip="480p81", degree=2, way=3, measured=MEASURED, planned=planned
    )


def test_what_is_free_is_left_beside_states_and_the_worst_cascade() -> None:
    assert MEASURED.free(40.0) == pytest.approx(USABLE * 38.0 - 28.0)
    assert MEASURED.free(40.0, 3) == pytest.approx(USABLE * 38.0 - 18.0)
    assert f"| node, host | {USABLE * 38.0 - 18.0:.1f} / " in table([row(MEASURED)], 40.0)


@pytest.mark.parametrize("part", ["states", "dit", "vae", "text"])
def test_every_part_is_compared(part: str) -> None:
    def scaled(share: float) -> Figures:
        value = getattr(MEASURED, part)
        last = (*value[:-1], share * value[-1]) if part == "states" else share * value
        return replace(MEASURED, **{part: last})

    below, above = scaled(0.9), scaled(1.2)
    assert row(below).under == pytest.approx(-0.1) and row(below).over == pytest.approx(0.0)
    assert row(above).over == pytest.approx(0.2) and row(above).under == pytest.approx(0.0)
    assert "0.0 to 20.0 %" in table([row(above)], 80.0)


def test_what_was_computed_is_read_again(tmp_path: Path) -> None:
    found = [row(replace(MEASURED, dit=8.8))]
    assert _kept(tmp_path / "keep", lambda: found, "a model") == found
    assert _kept(tmp_path / "keep", lambda: pytest.fail("computed again"), "a model") == found
    assert _kept(tmp_path / "keep", lambda: [], "another") == []
