"""Clips of a transformer that its GPU does not hold: the same, with blocks that are fetched from host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.state import checkpoint_files as checkpoint
from app.sampling import model as sampled
from app.sampling.clips import ClipSettings, make_clips
from app.sampling.model import fills_device, saved_model
from ops.models import frozen_blocks
from ops.models.folders import dit_json, resolve
from ops.models.load import build_dit, dit_skeleton
from ops.models.wan.config import WanConfig
from ops.models.weights import write_folder
from ops.shards import ShardState
from ops.update.parameter_places import BlockBuffers
from tests.app.test_sample import tiny_run, write_checkpoint
from tests.ops.block_copies import LateCopies

GIB = 2**30


def clip(folder: Path) -> np.ndarray:
    saved = saved_model(folder)
    return make_clips(saved.load(), saved.encode(["a disc"], negative=""), ClipSettings.of(saved.config))[0]


def exported(folder: Path) -> Path:
    """Whole weights, in Diffusers' form beside the settings of their run."""
    config = tiny_run()
    dit = resolve(config.model)[0].dit
    write_folder(folder / "transformer", build_dit(dit, 3).state_dict(), dit_json(dit))
    (folder / "heddle.yaml").write_text(config.to_yaml(), encoding="utf-8")
    return folder


def lora_run(folder: Path) -> Path:
    """A checkpoint of factors for such a folder."""
    config, base = tiny_run(), exported(folder / "base")
    tuned = replace(config.model.dit, path=str(base), lora_rank=2)
    config = replace(config, model=replace(config.model, dit=tuned))
    dit = resolve(config.model)[0].dit
    factors = {name: p for name, p in dit_skeleton(dit).named_parameters() if p.requires_grad}
    total = sum(p.numel() for p in factors.values())
    arrays = {"master": np.random.default_rng(0).normal(size=total).astype(np.float32)}
    step = checkpoint.step_folder(folder / "checkpoints", 1)
    checkpoint.begin(step)
    checkpoint.write_shard(step, ShardState(updates=1, lo=0, hi=total, total=total, arrays=arrays))
    parameters = [{"name": name, "shape": list(p.shape)} for name, p in factors.items()]
    checkpoint.seal(step, {"step": 1, "parameters": parameters, "config": config.to_yaml()})
    return folder


@pytest.mark.parametrize("made", [exported, lora_run])
def test_they_are_bit_for_bit_those_of_weights_on_the_device(
    made: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, copies = made(tmp_path), LateCopies()
    plain = clip(folder)
    monkeypatch.setattr(sampled, "fills_device", lambda *given: True)
    monkeypatch.setattr(frozen_blocks, "place_on", lambda device: BlockBuffers(copies))
    np.testing.assert_array_equal(clip(folder), plain)
    assert copies.begun, "no block was fetched"
    assert capsys.readouterr().out.count("its blocks are fetched from the host's") == 1


def test_weights_of_a_whole_training_are_read_into_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a checkpoint's, and no file of a folder has them."""
    write_checkpoint(tmp_path, tiny_run())
    plain = clip(tmp_path)
    monkeypatch.setattr(sampled, "fills_device", lambda *given: True)
    np.testing.assert_array_equal(clip(tmp_path), plain)


@pytest.mark.parametrize(
    ("free_gib", "frozen_dtype", "fills"), [(23, "same", True), (44, "same", False), (23, "float8", False)]
)
def test_what_fills_a_device_leaves_less_than_a_third_of_what_is_free(
    free_gib: int, frozen_dtype: str, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the weights of Wan2.1-14B: 26.6 GiB in bf16, 13.6 with blocks in 8 bits."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * GIB, 80 * GIB))
    config = WanConfig(
        num_layers=40, num_heads=40, head_dim=128, ffn_dim=13824, freq_dim=256, text_dim=4096, lora_rank=16
    )
    config = replace(config, frozen_dtype=frozen_dtype)
    assert fills_device(config, torch.bfloat16, torch.device("cuda")) == fills
    assert not fills_device(config, torch.bfloat16, torch.device("cpu"))
