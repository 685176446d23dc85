"""What CUDA graphs of small passes are counted with, against what they can hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from actors.config import TrainConfig
from actors.planning.forecasts import forecast, sizes_of
from actors.planning.memory import MemoryForecast
from actors.planning.predicted_needs import graphs_gib
from app.settings.config import RunConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig, VAEConfig
from ops.models.folders import resolve
from ops.models.forecast import Precision
from ops.models.wan.config import WanConfig
from tests.app.test_memory_view import cluster, plan

PICTURE = (1, 480, 832)
LEARN_I2V = Path(__file__).parents[2] / "configs" / "runs" / "learn-i2v.yaml"


def wide(**dit: object) -> tuple[ModelConfig, Geometry]:
    """A model with a transformer of Wan2.1-1.3B's width."""
    sizes = {"num_heads": 12, "head_dim": 128, "ffn_dim": 8960, "num_layers": 2, "cuda_graphs": "auto"}
    return resolve(
        ModelConfig(
            dit=WanConfig(**{**sizes, **dit}),  # type: ignore[arg-type]
            vae=VAEConfig(kind="haar", temporal=4, spatial=8, channels=16),
        )
    )


def held(**dit: object) -> float:
    """GiB of its graphs."""
    model, geometry = wide(**dit)
    return graphs_gib(model, geometry, [PICTURE], sizes_of(model, TrainConfig(), True), Precision(cuda=True))


def counted(degrees: Sequence[int]) -> MemoryForecast:
    model, geometry = wide(gradient_checkpointing=True)
    return forecast(model, geometry, TrainConfig(), [PICTURE], degrees, True)


def test_graphs_of_more_blocks_hold_no_more() -> None:
    """They share one pool, and each is of one block, whose activations end with it, with checkpointing or without."""
    few, many = (held(gradient_checkpointing=False, num_layers=n) for n in (2, 8))
    assert many < 1.2 * few


def test_each_of_two_experts_has_graphs_of_its_own() -> None:
    one, both = (held(gradient_checkpointing=True, expert=expert) for expert in ("high", "both"))
    assert both > 1.9 * one


def test_passes_of_bags_have_no_graphs() -> None:
    assert counted([1]).graphs_gib == held(gradient_checkpointing=True) > 0 == counted([2]).graphs_gib


@pytest.mark.long
@pytest.mark.parametrize(("gib", "setting"), [(3.0, "true"), (8.0, "auto")])
def test_graphs_change_neither_whether_a_run_fits_nor_where_its_state_lies(
    gib: float, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are left out where they have no room."""
    shown = []
    for graphs in ("false", setting):
        plan(tmp_path, gib, f"model.dit.cuda_graphs={graphs}", "model.dit.gradient_checkpointing=true")
        figures = r"(states|free|of|room) [\d.]+ |, CUDA graphs [\d.]+|.*no room for CUDA graphs.*\n"
        shown.append(re.sub(figures, "", memory_of(capsys)))
    assert shown[0] == shown[1]


@pytest.mark.long
@pytest.mark.parametrize("gib", [7.0, 9.0])
def test_communicators_of_more_workers_come_before_graphs(
    gib: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker has room for graphs, of four each has communicators."""
    four = partial(cluster, gpus=4)
    monkeypatch.setattr("tests.app.test_memory_view.cluster", four)
    wide = ["num_layers=2", "num_heads=12", "head_dim=128", "ffn_dim=8960", "lora_rank=16"]
    model = [f"model.dit.{one}" for one in [*wide, "gradient_checkpointing=true", "cuda_graphs=true"]]
    plan(tmp_path, gib, *model, "data.buckets.table=[1x480x832]", "data.batch.max_batch=1", "planner.degrees=[1,2,3]")
    shown = memory_of(capsys)
    assert ", CUDA graphs" not in shown and "no room for CUDA graphs (2." in shown


@pytest.mark.long
def test_models_that_see_the_first_frame_are_counted_too() -> None:
    model, geometry = resolve(RunConfig.load(LEARN_I2V, ["model.dit.cuda_graphs=auto"]).model)
    assert forecast(model, geometry, TrainConfig(), [(1, 32, 48)], [1], True).graphs_gib > 0


def memory_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.partition("\nmemory")[2]
