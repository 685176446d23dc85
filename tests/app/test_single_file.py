"""`heddle convert`: one file in the names of a family's own code becomes the folder that a run begins with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.export.single_file import by_diffusers_names, convert
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.flux.config import FluxConfig
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.load import build_dit, dit_skeleton
from ops.models.wan.config import WanConfig
from ops.models.weights import check_state, read_state
from ops.typed import ConfigError, build, parse

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
    with pytest.raises(ConfigError, match=r"is of family cogvideox; single files of wan, .* are converted"):
        convert(file, config, tmp_path / "out")
    config.write_text(MODEL.replace("LAYERS", "2"))
    file.write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        convert(file, config, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"does not exist\. Give a \.safetensors file"):
        convert(tmp_path / "no.safetensors", config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Original names of the other families, as their code has them: (ours, theirs); of fused ones, with the part behind.
Renames = tuple[tuple[str, str], ...]
LTX: Renames = ((r"^proj_in", "patchify_proj"), (r"time_embed", "adaln_single"), (r"norm_([qk])\b", r"\1_norm"))
MOCHI: Renames = (
    (r"^patch_embed\.proj", "x_embedder.proj"),
    (r"^time_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^time_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"^time_embed\.pooler", "t5_y_embedder"),
    (r"^time_embed\.caption_proj", "t5_yproj"),
    (r"^transformer_blocks", "blocks"),
    (r"norm1\.linear\.", "mod_x."),
    (r"norm1_context\.linear(_1)?\.", "mod_y."),
    (r"attn1\.norm_([qk])", r"attn.\1_norm_x"),
    (r"attn1\.norm_added_([qk])", r"attn.\1_norm_y"),
    (r"attn1\.to_out\.0", "attn.proj_x"),
    (r"attn1\.to_add_out", "attn.proj_y"),
    (r"ff\.net\.0\.proj", "mlp_x.w1"),
    (r"ff\.net\.2", "mlp_x.w2"),
    (r"ff_context\.net\.0\.proj", "mlp_y.w1"),
    (r"ff_context\.net\.2", "mlp_y.w2"),
    (r"attn1\.to_([qkv])", r"attn.qkv_x.\1"),
    (r"attn1\.add_([qkv])_proj", r"attn.qkv_y.\1"),
    (r"^norm_out\.linear", "final_layer.mod"),
    (r"^proj_out", "final_layer.linear"),
)
FLUX: Renames = (
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^time_text_embed\.timestep_embedder", "time_in"),
    (r"^time_text_embed\.text_embedder", "vector_in"),
    (r"^time_text_embed\.guidance_embedder", "guidance_in"),
    (r"_in\.linear_1", "_in.in_layer"),
    (r"_in\.linear_2", "_in.out_layer"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks", "double_blocks"),
    (r"^single_transformer_blocks", "single_blocks"),
    (r"norm1\.linear", "img_mod.lin"),
    (r"norm1_context\.linear", "txt_mod.lin"),
    (r"norm\.linear", "modulation.lin"),
    (r"(single_blocks\.\d+)\.attn\.norm_q\.weight", r"\1.norm.query_norm.scale"),
    (r"(single_blocks\.\d+)\.attn\.norm_k\.weight", r"\1.norm.key_norm.scale"),
    (r"(single_blocks\.\d+)\.attn\.to_([qkv])", r"\1.linear1.\2"),
    (r"proj_mlp", "linear1.x"),
    (r"(single_blocks\.\d+)\.proj_out", r"\1.linear2"),
    (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
    (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
    (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
    (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
    (r"attn\.to_([qkv])", r"img_attn.qkv.\1"),
    (r"attn\.add_([qkv])_proj", r"txt_attn.qkv.\1"),
    (r"attn\.to_out\.0", "img_attn.proj"),
    (r"attn\.to_add_out", "txt_attn.proj"),
    (r"ff\.net\.0\.proj", "img_mlp.0"),
    (r"ff\.net\.2", "img_mlp.2"),
    (r"ff_context\.net\.0\.proj", "txt_mlp.0"),
    (r"ff_context\.net\.2", "txt_mlp.2"),
)
HUNYUAN: Renames = (
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^txt_in\.proj_in", "txt_in.input_embedder"),
    (r"^txt_in\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
    (r"^txt_in\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
    (r"^txt_in\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
    (r"token_refiner\.refiner_blocks", "individual_token_refiner.blocks"),
    (r"(^txt_in.*)attn\.to_([qkv])", r"\1self_attn_qkv.\2"),
    (r"(^txt_in.*)attn\.to_out\.0", r"\1self_attn_proj"),
    (r"(^txt_in.*)ff\.net\.0\.proj", r"\1mlp.fc1"),
    (r"(^txt_in.*)ff\.net\.2", r"\1mlp.fc2"),
    (r"(^txt_in.*)norm_out\.linear", r"\1adaLN_modulation.1"),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.mlp.0"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.mlp.2"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks", "double_blocks"),
    (r"^single_transformer_blocks", "single_blocks"),
    (r"norm1\.linear", "img_mod.linear"),
    (r"norm1_context\.linear", "txt_mod.linear"),
    (r"(single_blocks\.\d+)\.norm\.linear", r"\1.modulation.linear"),
    (r"(single_blocks\.\d+)\.attn\.norm_([qk])", r"\1.\2_norm"),
    (r"(single_blocks\.\d+)\.attn\.to_([qkv])", r"\1.linear1.\2"),
    (r"proj_mlp", "linear1.x"),
    (r"(single_blocks\.\d+)\.proj_out", r"\1.linear2"),
    (r"attn\.norm_([qk])", r"img_attn_\1_norm"),
    (r"attn\.norm_added_([qk])", r"txt_attn_\1_norm"),
    (r"(double_blocks.*)attn\.to_([qkv])", r"\1img_attn_qkv.\2"),
    (r"attn\.add_([qkv])_proj", r"txt_attn_qkv.\1"),
    (r"attn\.to_out\.0", "img_attn_proj"),
    (r"attn\.to_add_out", "txt_attn_proj"),
    (r"ff\.net\.0\.proj", "img_mlp.fc1"),
    (r"ff\.net\.2", "img_mlp.fc2"),
    (r"ff_context\.net\.0\.proj", "txt_mlp.fc1"),
    (r"ff_context\.net\.2", "txt_mlp.fc2"),
)
FUSED = re.compile(r"(.*(?:qkv|qkv_[xy]|linear1))\.([qkvx])\.(weight|bias)")
HALVES = {"flux": "adaLN_modulation", "hunyuan": "final_layer.adaLN_modulation", "mochi": r"final_layer\.mod|w1"}


def as_original(state: dict[str, torch.Tensor], renames: Renames, halves: str | None) -> dict[str, torch.Tensor]:
    """What the family's own code stores: fused projections in the order q, k, v (and the MLP), and those halves that
    Diffusers swaps as they were."""
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        for ours, theirs in renames:
            name = re.sub(ours, theirs, name)
        if halves and re.search(halves, name):
            tensor = torch.cat(list(reversed(tensor.chunk(2))))
        if fused := FUSED.fullmatch(name):
            parts.setdefault(f"{fused[1]}.{fused[3]}", {})[fused[2]] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.cat([of[part] for part in "qkvx" if part in of]) for name, of in parts.items()}


@pytest.mark.parametrize(
    ("family", "dit", "renames", "prefix"),
    [
        ("ltx", "num_layers: 2, num_heads: 2, head_dim: 8, ffn_dim: 64, text_dim: 8", LTX, "model.diffusion_model."),
        (  # its converter counts the published 48 layers
            "mochi",
            "num_layers: 48, num_heads: 2, head_dim: 8, ffn_dim: 64, context_dim: 12, text_dim: 8, freq_dim: 16",
            MOCHI,
            "",
        ),
    ],
)
def test_single_files_of_other_families_become_folders(
    tmp_path: Path, family: str, dit: str, renames: Renames, prefix: str
) -> None:
    text = f"model: {{dit: {{architecture: {family}, {dit}, in_channels: 4, out_channels: 4}}}}"
    file, config = tmp_path / "whole.safetensors", tmp_path / "sizes.yaml"
    config.write_text(text)
    shape = build(ModelConfig, parse(text).value["model"], path="model").dit
    state = {name: torch.randn_like(tensor) for name, tensor in build_dit(shape, 3).state_dict().items()}
    stored = {prefix + name: t for name, t in as_original(state, renames, HALVES.get(family)).items()}
    others = {"vae.decoder.conv.weight": torch.zeros(3)} if prefix else {}
    save_file({name: tensor.contiguous() for name, tensor in (stored | others).items()}, file)
    found = read_state(convert(file, config, tmp_path / "out"))
    assert found.keys() == state.keys() and all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(("family", "renames"), [("flux", FLUX), ("hunyuan", HUNYUAN)])
@pytest.mark.parametrize("prefix", ["", "model.model."])
def test_of_families_of_one_width_every_row_of_a_single_file_comes_to_its_place(
    family: str, renames: Renames, prefix: str
) -> None:
    """Their converters split at the published width of 3,072: weights of all rows, with one column of each."""
    kind = {"flux": FluxConfig, "hunyuan": HunyuanConfig}[family]
    config: DiTConfig = kind(
        num_layers=2, num_single_layers=2, num_heads=24, head_dim=128, ffn_dim=12288, text_dim=8, guidance_embeds=True
    )
    skeleton = dit_skeleton(config).state_dict()
    state = {name: torch.randn(t.shape[:1] + (1,) * (t.dim() - 1)) for name, t in skeleton.items()}
    stored = {prefix + name: t for name, t in as_original(state, renames, HALVES[family]).items()}
    found = by_diffusers_names(stored, FAMILIES[family], "here")
    check_state(state, found, "here")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("family", ["flux", "mochi", "hunyuan", "ltx"])
def test_a_file_of_another_family_is_one_sentence(tmp_path: Path, family: str) -> None:
    state = {original(name): tensor for name, tensor in build_dit(DIT, 3).state_dict().items()}
    save_file(state, tmp_path / "wan.safetensors")
    (tmp_path / "wan.yaml").write_text(f"model: {{dit: {{architecture: {family}, ffn_dim: 512}}}}")
    with pytest.raises(ValueError, match=r"wan\.safetensors (is not a|lacks) .*Is it the .* of this config") as caught:
        convert(tmp_path / "wan.safetensors", tmp_path / "wan.yaml", tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
