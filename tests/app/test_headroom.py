"""The table of what models leave free on a GPU: its sums, and that it says where the planner promises too much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.config import TrainConfig
from actors.plan.types import USABLE
from actors.planning.forecasts import sizes_of
from app.bench.headroom import WAYS, Figures, Headroom, Roomy, _kept, roomy, table
from ops.models.config import ModelConfig
from ops.models.forecast import Precision, states_bytes
from ops.models.wan.config import WanConfig
from tests.long import in_default_run

MEASURED = Figures(
    states=(20.0, 18.0, 12.0, 10.0, 9.0, 7.0, 4.0, 3.0),
    dit=8.0,
    vae=4.0,
    text=1.0,
    communicators=(2.0, 2.5) * 4,
    fetched=7.0,
)
UNFETCHED = replace(MEASURED, states=MEASURED.states[:4], communicators=MEASURED.communicators[:4], fetched=0.0)


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
    head, _, line = table([row(UNFETCHED, UNFETCHED)], 40.0).splitlines()
    assert line.count("|") == head.count("|") and line.count("| - ") == 7


def test_the_smallest_degree_that_leaves_enough_is_found_with_weights_on_gpus_and_fetched() -> None:
    """A GPU of 40 GiB has 36.48 beside its context, and half a GiB less for communicators where a node has one
    gradient. The DiT takes 24, 12, 6 and 3 GiB at degrees 1 to 8, fetched 2 less; the VAE 4."""
    at = {degree: replace(MEASURED, dit=24.0 / degree, fetched=max(24.0 / degree - 2, 0.0)) for degree in (8, 1, 2, 4)}
    free = {
        (degree, way): figures.free(40.0, way) for degree, figures in at.items() for way in range(len(figures.states))
    }
    for leave in (0.0, 3.0, 13.0, 16.0, 19.0, 21.0):
        found = roomy(at, 40.0, leave)
        for degree, way in found:
            assert free[degree, way] >= leave
            alike = [one for one in free if WAYS[one[1]].parameters == WAYS[way].parameters]
            earlier = [one for one in alike if one < (degree, way)]
            assert not [one for one in earlier if free[one] >= leave], "a smaller degree or a faster place would do"
    assert roomy(at, 40.0, 1.5) == [(1, 3), (1, 4)]
    assert roomy(at, 40.0, 19.0) == [(4, 3), (2, 5)]
    assert roomy(at, 40.0, 24.0) == [(4, 5)], "with all weights on each GPU it is nowhere"
    assert roomy(at, 40.0, 40.0) == []


def test_what_leaves_enough_is_shown_as_counted_and_planned_and_compared() -> None:
    planned = replace(MEASURED, dit=8.4)
    places = Roomy(degree=4, way=3, measured=MEASURED, planned=planned)
    fetched = replace(places, way=6, degree=2, planned=replace(MEASURED, fetched=6.3))
    one = row(MEASURED, roomy=(places, fetched), leave_gib=12.5)
    counted, expected = (figures.free(40.0, 3) for figures in (MEASURED, planned))
    shown = table([one], 40.0)
    assert "| 12.5 free from degree | 12.5 free from degree, blocks fetched |" in shown
    assert f"| 4: node, host: {counted:.1f} / {expected:.1f} | 2: own, host, fetched: " in shown
    assert one.under == pytest.approx(-0.1) and one.over == pytest.approx(0.05), "its cascades are compared, too"
    assert "| - | - | 0.0 to 0.0 % |" in table([row(MEASURED)], 40.0)


def test_full_training_on_one_node_at_720p_should_leave_20_gib() -> None:
    said = row(MEASURED, clip="720p81", best_gib=19.0).short
    assert said == "m in full on 8 GPUs leaves 19.0 GiB at 720p81, and should leave 20"
    there = (Roomy(degree=8, way=3, measured=MEASURED, planned=MEASURED),)
    enough = [
        row(MEASURED, clip="720p81", roomy=there),
        row(MEASURED, clip="480p81"),
        row(MEASURED, clip="720p81", workers=64),
        row(UNFETCHED, UNFETCHED, clip="720p81", lora=True),
    ]
    assert not [one for one in enough if one.short]


@pytest.mark.parametrize("workers", in_default_run([8], of=[1, 8, 64]))
def test_states_are_never_planned_below_what_is_counted(workers: int) -> None:
    """In every place, edges of a node's gradient included: less than 0.1 MiB above."""
    wan = WanConfig(num_layers=2, num_heads=2, ffn_dim=64, gradient_checkpointing=True)
    train = TrainConfig(parameter_dtype="bfloat16", autocast="bfloat16")
    sizes = sizes_of(ModelConfig(dit=wan), train, cuda=True)
    precision = Precision(parameters=torch.bfloat16, autocast=True, cuda=True)
    for way in WAYS:
        per_node = 0 if way.gradients == "own" else min(workers, 8)
        both = states_bytes(wan, train.optimizer, workers, precision, per_node, way.parameters == "node")
        counted = both[0 if way.state == "device" else 1]
        planned = 2**30 * replace(sizes, places=way, per_node=8).states(workers).total
        assert counted <= round(planned) <= counted + 100_000, way


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
    there = (Roomy(degree=8, way=3, measured=MEASURED, planned=replace(MEASURED, dit=8.8)),)
    found = [row(replace(MEASURED, dit=8.8), roomy=there)]
    assert _kept(tmp_path / "keep", lambda: found, "a model") == found
    assert _kept(tmp_path / "keep", lambda: pytest.fail("computed again"), "a model") == found
    assert _kept(tmp_path / "keep", lambda: [], "another") == []
