"""`heddle convert`: one file in the names of Wan's own code becomes the folder that a run begins with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.export.single_file import convert
from ops.models.load import build_dit
from ops.models.wan.config import WanConfig
from ops.models.weights import read_state
from ops.typed import ConfigError

DIT = WanConfig(
    num_layers=2, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16, text_dim=16, in_channels=4, out_channels=4
)
MODEL = """
model:
  dit: {num_layers: LAYERS, num_heads: 2, head_dim: 12, ffn_dim: 32, freq_dim: 16, text_dim: 16, in_channels: 4,
        out_channels: 4}
"""
# ours -> Wan's (wan/modules/model.py of Wan2.1); its norm2 and norm3 are the other way round
ORIGINAL = (
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"attn1\.", "self_attn."),
    (r"attn2\.", "cross_attn."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"ffn\.net\.0\.proj", "ffn.0"),
    (r"ffn\.net\.2", "ffn.2"),
    (r"norm2", "norm3"),
    (r"^scale_shift_table", "head.modulation"),
    (r"scale_shift_table", "modulation"),
    (r"^proj_out", "head.head"),
)


def original(name: str) -> str:
    for ours, theirs in ORIGINAL:
        name = re.sub(ours, theirs, name)
    return name


def test_a_single_file_becomes_the_folder_that_a_run_begins_with(tmp_path: Path) -> None:
    state = build_dit(DIT, 3).state_dict()
    state = {name: torch.randn_like(tensor).bfloat16() for name, tensor in state.items()}
    file, config = tmp_path / "wan.safetensors", tmp_path / "wan.yaml"
    save_file({original(name): tensor for name, tensor in state.items()}, file)
    config.write_text(MODEL.replace("LAYERS", "2"))
    folder = convert(file, config, tmp_path / "out")
    found = read_state(folder)
    assert found.keys() == state.keys() and all(torch.equal(found[name], tensor) for name, tensor in state.items())
    begun = build_dit(WanConfig(path=str(tmp_path / "out"), **sizes()), 0).state_dict()
    assert all(torch.equal(begun[name], tensor.float()) for name, tensor in state.items())
    with pytest.raises(ConfigError, match="exists; choose another --to"):
        convert(file, config, tmp_path / "out")


def sizes() -> dict[str, int]:
    names = ("num_layers", "num_heads", "head_dim", "ffn_dim", "freq_dim", "text_dim", "in_channels", "out_channels")
    return {name: getattr(DIT, name) for name in names}


def test_files_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    state = {original(name): tensor for name, tensor in build_dit(DIT, 3).state_dict().items()}
    file, config = tmp_path / "wan.safetensors", tmp_path / "wan.yaml"
    save_file(state, file)
    config.write_text(MODEL.replace("LAYERS", "3"))
    with pytest.raises(ValueError, match=r"wan.safetensors lacks blocks\.2\..*Is it the transformer of this config"):
        convert(file, config, tmp_path / "out")
    config.write_text("model: {dit: {architecture: cogvideox, ffn_dim: 512}}")
    with pytest.raises(ConfigError, match="is of family cogvideox; single files of wan are converted"):
        convert(file, config, tmp_path / "out")
    config.write_text(MODEL.replace("LAYERS", "2"))
    file.write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        convert(file, config, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"does not exist\. Give a \.safetensors file"):
        convert(tmp_path / "no.safetensors", config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
