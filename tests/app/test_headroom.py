"""The table of what models leave free on a GPU: its sums, and that it says where the planner promises too much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.plan.types import USABLE
from app.bench.headroom import Figures, Headroom, _kept, table

MEASURED = Figures(
    states=(20.0, 18.0, 12.0, 10.0, 9.0, 7.0, 4.0, 3.0),
    dit=8.0,
    vae=4.0,
    text=1.0,
    communicators=(2.0, 2.5) * 4,
    fetched=7.0,
)
LORA = replace(MEASURED, states=MEASURED.states[:4], communicators=MEASURED.communicators[:4], fetched=0.0)


def row(planned: Figures, measured: Figures = MEASURED, **fields: Any) -> Headroom:
    made = Headroom(
        model="m", lora=False, workers=8, clip="480p81", degree=2, way=3, measured=measured, planned=planned
    )
    return replace(made, **fields)


def test_what_is_free_is_left_beside_states_and_the_worst_cascade() -> None:
    assert MEASURED.free(40.0) == pytest.approx(USABLE * 38.0 - 28.0)
    assert MEASURED.free(40.0, 3) == pytest.approx(USABLE * 37.5 - 18.0)
    assert MEASURED.free(40.0, 6) == pytest.approx(USABLE * 38.0 - 4.0 - 7.0), "its blocks are fetched"
    shown = table([row(MEASURED, best_gib=31.25, best_degree=8)], 40.0)
    assert f"| node, host | {USABLE * 37.5 - 18.0:.1f} / " in shown and "| 31.2, 8 |" in shown
    assert "| node, host, fetched |" in shown and "| 7.00 / 7.00 |" in shown


def test_a_model_whose_blocks_cannot_be_fetched_has_no_such_places() -> None:
    head, _, line = table([row(LORA, LORA, lora=True)], 40.0).splitlines()
    assert line.count("|") == head.count("|") and line.count("| - ") == 5


def test_full_training_on_one_node_at_720p_should_leave_20_gib() -> None:
    said = row(MEASURED, clip="720p81", best_gib=19.0).short
    assert said == "m in full on 8 GPUs leaves 19.0 GiB at 720p81, and should leave 20"
    enough = [
        row(MEASURED, clip="720p81", best_gib=20.0),
        row(MEASURED, clip="480p81", best_gib=1.0),
        row(MEASURED, clip="720p81", best_gib=1.0, workers=64),
        row(LORA, LORA, clip="720p81", best_gib=1.0, lora=True),
    ]
    assert not [one for one in enough if one.short]


@pytest.mark.parametrize("part", ["states", "dit", "fetched", "vae", "text"])
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
