"""`heddle convert`: one file in the names of a family's own code becomes the folder that a run begins with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file

from app.export.single_file import by_diffusers_names, convert
from ops.models.families import FAMILIES
from ops.models.load import build_dit, dit_skeleton, kept_weights
from ops.models.wan.config import WanConfig
from ops.models.weights import check_state, read_whole
from ops.typed import ConfigError, as_plain
from tests.families.kit import Renames
from tests.families.registry import CASES
from tests.families.test_wan import DIT, ORIGINAL

MODEL = """
model:
  dit: {num_layers: LAYERS, num_heads: 2, head_dim: 12, ffn_dim: 32, freq_dim: 16, text_dim: 16, in_channels: 4,
        out_channels: 4}
"""


def original(name: str) -> str:
    for ours, theirs in ORIGINAL:
        name = re.sub(ours, theirs, name)
    return name


def test_a_single_file_becomes_the_folder_that_a_run_begins_with(tmp_path: Path) -> None:
    state = build_dit(DIT, 3).state_dict()
    state = {name: torch.randn_like(tensor).bfloat16() for name, tensor in state.items()}
    file, config = tmp_path / "wan.safetensors", tmp_path / "wan.yaml"
    save_file({original(name): tensor for name, tensor in state.items()}, file)
    config.write_text(MODEL.replace("LAYERS", "2, lora_rank: 4"))  # as a run's that trains factors on these weights
    folder = convert(file, config, tmp_path / "out")
    found = read_whole(folder)
    assert found.keys() == state.keys() and all(torch.equal(found[name], tensor) for name, tensor in state.items())
    begun = build_dit(WanConfig(path=str(tmp_path / "out"), **sizes()), 0).state_dict()
    assert all(torch.equal(begun[name], tensor.float()) for name, tensor in state.items())
    with pytest.raises(ConfigError, match="exists; choose another --to"):
        convert(file, config, tmp_path / "out")


INDEX = "diffusion_pytorch_model.safetensors.index.json"
SHARDS = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def in_shards(folder: Path, state: dict[str, torch.Tensor], index: str = INDEX) -> None:
    """As the authors of Wan publish their weights."""
    folder.mkdir()
    parts = [dict(list(state.items())[start::2]) for start in (0, 1)]
    for name, part in zip(SHARDS, parts, strict=True):
        save_file(part, folder / name)
    (folder / "config.json").write_text('{"_class_name": "WanModel", "model_type": "ti2v"}')
    if index:
        names = {weight: name for name, part in zip(SHARDS, parts, strict=True) for weight in part}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize(
    ("given", "index"), [(".", INDEX), (INDEX, INDEX), *((shard, index) for shard in SHARDS for index in (INDEX, ""))]
)
def test_shards_become_the_folder_that_one_file_becomes(tmp_path: Path, given: str, index: str) -> None:
    state = {original(name): tensor.bfloat16() for name, tensor in build_dit(DIT, 3).state_dict().items()}
    file, config = tmp_path / "wan.safetensors", tmp_path / "wan.yaml"
    config.write_text(MODEL.replace("LAYERS", "2"))
    save_file(state, file)
    in_shards(tmp_path / "theirs", state, index)
    of_one, of_shards = (
        convert(source, config, tmp_path / out) for source, out in ((file, "a"), (tmp_path / "theirs" / given, "b"))
    )
    assert {one.name: one.read_bytes() for one in of_shards.iterdir()} == {
        one.name: one.read_bytes() for one in of_one.iterdir()
    }


def test_shards_that_are_not_whole_are_one_sentence(tmp_path: Path) -> None:
    state = {original(name): tensor for name, tensor in build_dit(DIT, 3).state_dict().items()}
    config, theirs = tmp_path / "wan.yaml", tmp_path / "theirs"
    config.write_text(MODEL.replace("LAYERS", "2"))
    in_shards(theirs, state)
    (theirs / SHARDS[1]).unlink()
    gone = rf"names {SHARDS[1]}, which is not there\. Copy all shards\."
    for given in (".", INDEX, SHARDS[0]):
        with pytest.raises(FileNotFoundError, match=gone):
            convert(theirs / given, config, tmp_path / "out")
    (theirs / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=gone):
        convert(theirs / SHARDS[0], config, tmp_path / "out")
    with pytest.raises(ValueError, match=r"config\.json names no shards in a weight_map\. Give the index"):
        convert(theirs / "config.json", config, tmp_path / "out")
    (pickled := tmp_path / "mp_rank_00_model_states.pt").touch()  # as the authors of HunyuanVideo publish theirs
    for given in (pickled, tmp_path):
        with pytest.raises(ValueError, match=r"as mp_rank_00_model_states\.pt, a pickle; pickled weights are not read"):
            convert(given, config, tmp_path / "out")


def test_a_file_that_has_the_names_of_diffusers_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {name: torch.randn_like(tensor) for name, tensor in build_dit(DIT, 3).state_dict().items()}
    file, config = tmp_path / "wan.safetensors", tmp_path / "wan.yaml"
    save_file({**state, "vae.weight": torch.zeros(3)}, file)
    config.write_text(MODEL.replace("LAYERS", "2"))
    found = read_whole(convert(file, config, tmp_path / "out"))
    printed = capsys.readouterr().out
    assert re.match(r"converting 0\.\d M weights of \S+ into \S+/out/transformer\n", printed)
    assert found.keys() == state.keys() and all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert "wan.safetensors, which has the names of Diffusers already, loaded back" in printed


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


def test_a_diffusers_without_a_converter_or_one_that_stumbles_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {original(name): tensor for name, tensor in build_dit(DIT, 3).state_dict().items()}

    def stumbles(checkpoint: dict[str, torch.Tensor]) -> None:
        raise AttributeError("'NoneType' object has no attribute 'shape'")

    monkeypatch.setattr(single_file_utils, FAMILIES["wan"].converter, stumbles)
    with pytest.raises(ValueError, match=r"here is not a WanTransformer3DModel .* AttributeError: 'NoneType'"):
        by_diffusers_names(state, FAMILIES["wan"], "here")
    monkeypatch.delattr(single_file_utils, FAMILIES["wan"].converter)
    with pytest.raises(ValueError, match=r"Diffusers [\d.]+ has no convert_wan_transformer_to_diffusers, .*Install"):
        by_diffusers_names(state, FAMILIES["wan"], "here")


FUSED = re.compile(r"(.*(?:qkv|qkv_[xy]|linear1))\.([qkvx])\.(weight|bias)")


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


ORIGINALS = {name: cases.original for name, cases in CASES.items() if cases.original}


def test_every_family_whose_files_are_converted_says_how_they_name_their_weights() -> None:
    assert set(ORIGINALS) == {name for name, family in FAMILIES.items() if family.converter}


@pytest.mark.parametrize("family", [name for name, original in ORIGINALS.items() if not original.rows_alone])
def test_single_files_become_folders(tmp_path: Path, family: str) -> None:
    original = ORIGINALS[family]
    file, config = tmp_path / "whole.safetensors", tmp_path / "sizes.yaml"
    config.write_text(yaml.safe_dump({"model": {"dit": as_plain(original.config)}}))
    whole = {**build_dit(original.config, 3).state_dict(), **kept_weights(original.config)}
    state = {name: torch.randn_like(tensor) for name, tensor in whole.items()}
    stored = {original.prefix + name: t for name, t in as_original(state, original.renames, original.halves).items()}
    others = {"vae.decoder.conv.weight": torch.zeros(3)} if original.prefix else {}
    save_file({name: tensor.contiguous() for name, tensor in (stored | others).items()}, file)
    found = read_whole(convert(file, config, tmp_path / "out"))
    assert found.keys() == state.keys() and all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("family", [name for name, original in ORIGINALS.items() if original.rows_alone])
@pytest.mark.parametrize("prefix", ["", "model.model."])
def test_of_families_of_one_width_every_row_of_a_single_file_comes_to_its_place(family: str, prefix: str) -> None:
    original = ORIGINALS[family]
    skeleton = dit_skeleton(original.config).state_dict()
    state = {name: torch.randn(t.shape[:1] + (1,) * (t.dim() - 1)) for name, t in skeleton.items()}
    stored = {prefix + name: t for name, t in as_original(state, original.renames, original.halves).items()}
    found = by_diffusers_names(stored, FAMILIES[family], "here")
    check_state(state, found, "here")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("family", [name for name in ORIGINALS if name != "wan"])
def test_a_file_of_another_family_is_one_sentence(tmp_path: Path, family: str) -> None:
    state = {original(name): tensor for name, tensor in build_dit(DIT, 3).state_dict().items()}
    save_file(state, tmp_path / "wan.safetensors")
    (tmp_path / "wan.yaml").write_text(f"model: {{dit: {{architecture: {family}, ffn_dim: 512}}}}")
    with pytest.raises(ValueError, match=r"wan\.safetensors (is not a|lacks) .*Is it the .* of this config") as caught:
        convert(tmp_path / "wan.safetensors", tmp_path / "wan.yaml", tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
