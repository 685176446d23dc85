"""What CUDA graphs of small passes are counted with, against what they can hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.config import TrainConfig
from actors.planning.memory import MemoryForecast, forecast
from ops.models.config import ModelConfig, VAEConfig
from ops.models.folders import resolve
from ops.models.wan.config import WanConfig
from tests.app.test_memory_view import plan

PICTURE = (1, 480, 832)


def counted(degrees: Sequence[int] = (1,), **dit: object) -> MemoryForecast:
    """The forecast of a transformer of Wan2.1-1.3B's width."""
    wide = {"num_heads": 12, "head_dim": 128, "ffn_dim": 8960, "num_layers": 2, "cuda_graphs": "auto"}
    model, geometry = resolve(
        ModelConfig(
            dit=WanConfig(**{**wide, **dit}),  # type: ignore[arg-type]
            vae=VAEConfig(kind="haar", temporal=4, spatial=8, channels=16),
        )
    )
    return forecast(model, geometry, TrainConfig(), [PICTURE], degrees, True)


def test_graphs_of_more_blocks_hold_no_more() -> None:
    """They share one pool, and each is of one block, whose activations end with it, with checkpointing or without."""
    few, many = (counted(gradient_checkpointing=False, num_layers=n) for n in (2, 8))
    assert many.graphs_gib < 1.2 * few.graphs_gib


def test_each_of_two_experts_has_graphs_of_its_own() -> None:
    one, both = (counted(gradient_checkpointing=True, expert=expert) for expert in ("high", "both"))
    assert both.graphs_gib > 1.9 * one.graphs_gib


def test_passes_of_bags_have_no_graphs() -> None:
    assert (
        counted(gradient_checkpointing=True).graphs_gib > 0 == counted([2, 4], gradient_checkpointing=True).graphs_gib
    )


@pytest.mark.parametrize("gib", [3.0, 8.0])
@pytest.mark.parametrize("setting", ["true", "auto"])
def test_graphs_change_neither_whether_a_run_fits_nor_where_its_state_lies(
    gib: float, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are left out where they have no room."""
    shown = []
    for graphs in ("false", setting):
        plan(tmp_path, gib, f"model.dit.cuda_graphs={graphs}", "model.dit.gradient_checkpointing=true")
        shown.append(re.sub(r"(states|free|of|room) [\d.]+ |, CUDA graphs [\d.]+", "", memory_of(capsys)))
    assert shown[0] == shown[1]


def memory_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.partition("\nmemory")[2]
