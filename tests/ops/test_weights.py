"""Diffusers transformer folders in and out: equal weights, equal forward, one sentence for what does not fit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from app.export.frozen_parts import link_tree
from ops.comm.collectives import Group
from ops.models.files import (
    STEM,
    check_files,
    files_of,
    index_name,
    plain_name,
    read_json,
    variant_of,
    weight_files,
)
from ops.models.folders import dit_config, dit_json
from ops.models.load import build_dit, dit_skeleton, first_values
from ops.models.wan.config import WanConfig
from ops.models.weights import check_state, read_whole, write_folder
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify

ROOT = Path(__file__).parents[2]
FP32_ATOL = 1e-5
SMALL = WanConfig(
    num_layers=2, num_heads=2, head_dim=12, ffn_dim=40, freq_dim=16, text_dim=8, in_channels=4, out_channels=4
)


def published(folder: Path, **save: object) -> WanTransformer3DModel:
    """A random transformer as Diffusers itself saves it."""
    torch.manual_seed(0)
    fields = {key: value for key, value in dit_json(SMALL).items() if not key.startswith("_")}
    model = WanTransformer3DModel(**fields).eval()
    model.save_pretrained(folder / "transformer", **save)
    return model


def forward(module: torch.nn.Module, latent: torch.Tensor, text: torch.Tensor, sigma: float) -> torch.Tensor:
    grid = (latent.shape[1], latent.shape[2] // 2, latent.shape[3] // 2)
    layout = Layout([Sequence(grid, len(text))])
    with torch.no_grad():
        tokens = module(patchify(latent, SMALL.patch), torch.tensor([sigma * 1000]), text, layout, Group.solo())
    return unpatchify(tokens, grid, SMALL.patch, 4)


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "20KB"}], ids=["single", "sharded"])
def test_published_folder_gives_diffusers_outputs(tmp_path: Path, save: dict[str, object]) -> None:
    reference = published(tmp_path, **save)
    assert (len(weight_files(tmp_path / "transformer")) > 1) == bool(save)
    config = dit_config(read_json(tmp_path / "transformer" / "config.json"), WanConfig(path=str(tmp_path)), "here")
    module = build_dit(config, seed=7)
    latent, text = torch.randn(4, 3, 4, 6), torch.randn(5, 8)
    with torch.no_grad():
        expected = reference(latent[None], torch.tensor([400.0]), text[None]).sample[0]
    torch.testing.assert_close(forward(module, latent, text, 0.4), expected, atol=FP32_ATOL, rtol=FP32_ATOL)


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000], ids=["single", "sharded"])
def test_written_folder_loads_in_diffusers(tmp_path: Path, shard_bytes: int) -> None:
    state = build_dit(SMALL, seed=3).state_dict()
    write_folder(tmp_path, state, dit_json(SMALL), shard_bytes)
    loaded, report = WanTransformer3DModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    again = read_whole(tmp_path)
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert again.keys() == state.keys()
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1, "weights may be read by whoever may read their config"


def test_same_seed_same_random_model() -> None:
    first, second = build_dit(SMALL, seed=1).state_dict(), build_dit(SMALL, seed=1).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def spoil(folder: Path, change: str) -> None:
    path = folder / "transformer" / f"{STEM}.safetensors"
    state = load_file(path)
    if change == "missing":
        del state["proj_out.bias"]
    elif change == "unexpected":
        state["blocks.9.ffn.bias"] = torch.zeros(1)
    elif change == "shape":
        state["proj_out.bias"] = torch.zeros(3)
    elif change == "dtype":
        state["proj_out.bias"] = state["proj_out.bias"].to(torch.int8)
    save_file(state, path)
    if change == "torn":
        path.write_bytes(path.read_bytes()[:-100])
    if change == "absent":
        path.rename(path.with_name("diffusion_pytorch_model.bin"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("missing", r"lacks proj_out\.bias, which the model has"),
        ("unexpected", r"holds blocks\.9\.ffn\.bias, which the model does not have"),
        ("shape", r"proj_out\.bias has shape \[3\], the model's is \[16\]"),
        ("dtype", r"proj_out\.bias is int8; weights must be float32"),
        ("torn", "is not a whole safetensors file"),
        ("absent", "pickled weights are not read"),
    ],
)
def test_weights_that_do_not_fit_are_one_sentence(tmp_path: Path, change: str, sentence: str) -> None:
    published(tmp_path)
    spoil(tmp_path, change)
    config = dit_config(dit_json(SMALL), WanConfig(path=str(tmp_path)), "here")
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as caught:
        build_dit(config, seed=0)
    assert "\n" not in str(caught.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    published(tmp_path, max_shard_size="20KB")
    gone = weight_files(tmp_path / "transformer")[1]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=f"names {gone.name}, which is not there"):
        read_whole(tmp_path / "transformer")


@pytest.mark.parametrize(
    "text", ['{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "{", "[]"]
)
def test_an_index_that_is_none_is_one_sentence_and_keeps_nobody_from_its_shards(tmp_path: Path, text: str) -> None:
    shards = [tmp_path / f"{STEM}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard in shards:
        shard.touch()
    index = tmp_path / index_name(STEM)
    index.write_text(text)
    for given in (tmp_path, index):
        with pytest.raises(ValueError, match=rf"{index.name} (names no shards|is not valid JSON|holds a list)"):
            files_of(given)
    assert files_of(shards[1]) == shards


def test_long_lists_of_names_are_cut() -> None:
    expected = {f"layer{i}": torch.zeros(1) for i in range(9)}
    with pytest.raises(ValueError, match="lacks layer0, layer1, layer2 and 6 more"):
        check_state(expected, {}, "folder")


LOADING = """
import sys, threading, torch
from pathlib import Path
import ops.models.lora, ops.models.weights
from ops.models.load import build_dit, dit_skeleton
from ops.models.wan.config import WanConfig

def anonymous():
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("RssAnon"))

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous())

config = WanConfig(num_layers=4, num_heads=8, head_dim=128, ffn_dim=4096, path=sys.argv[1], lora_rank=int(sys.argv[2]))
dit_skeleton(config)  # what is imported counts before
before, peak, done = anonymous(), [0], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
module = build_dit(config, 0, torch.bfloat16)
done.set()
thread.join()
assert all(p.dtype == torch.bfloat16 and not p.is_meta for p in module.parameters())
print(peak[0] - before, sum(p.nbytes for p in module.parameters()))
"""


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 4])
def test_loading_needs_no_more_memory_than_the_weights(tmp_path: Path, rank: int) -> None:
    """Not even when they are stored in another dtype; initial values are not drawn."""
    config = WanConfig(num_layers=4, num_heads=8, head_dim=128, ffn_dim=4096)
    state = {name: torch.zeros(t.shape, dtype=torch.float16) for name, t in dit_skeleton(config).state_dict().items()}
    write_folder(tmp_path, state, dit_json(config))
    command = [sys.executable, "-c", LOADING, str(tmp_path), str(rank)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    peak, weights = map(int, said.split())
    assert weights > 100 << 20
    assert peak <= 1.1 * weights + (16 << 20), f"{peak >> 20} MiB for {weights >> 20} MiB"


def test_first_values_are_those_of_the_folder_not_rounded(tmp_path: Path) -> None:
    published(tmp_path)
    config = dit_config(dit_json(SMALL), WanConfig(path=str(tmp_path)), "here")
    rounded, value = build_dit(config, 0, torch.bfloat16), first_values(config, 0)
    stored = read_whole(tmp_path / "transformer")
    for name, parameter in rounded.named_parameters():
        assert torch.equal(value(name), stored[name]) and torch.equal(parameter, stored[name].bfloat16())


def test_first_factors_beside_a_folder_come_from_the_seed(tmp_path: Path) -> None:
    published(tmp_path)
    config = replace(dit_config(dit_json(SMALL), WanConfig(path=str(tmp_path)), "here"), lora_rank=2)
    module, same, other = (dict(build_dit(config, seed).named_parameters()) for seed in (3, 3, 4))
    factors = [name for name in module if name.endswith("lora_A.weight")]
    assert factors and all(torch.equal(module[n], same[n]) and not torch.equal(module[n], other[n]) for n in factors)
    value = first_values(config, 3)
    assert all(torch.equal(value(name), p) for name, p in module.items() if p.requires_grad)
    assert not any(module[name.replace("lora_A", "lora_B")].any() for name in factors)


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "20KB"}], ids=["single", "sharded"])
def test_weights_that_are_there_in_a_variant_alone_are_read(tmp_path: Path, save: dict[str, str]) -> None:
    plain = published(tmp_path, **save)
    folder = tmp_path / "transformer"
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    plain.half().save_pretrained(folder, variant="fp16", **save)
    assert variant_of(folder) == "fp16" and all("fp16" in file.name for file in weight_files(folder))
    check_files(folder)
    config = dit_config(dit_json(SMALL), WanConfig(path=str(tmp_path)), "here")
    found = build_dit(config, seed=0).state_dict()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in plain.half().state_dict().items())
    plain.save_pretrained(folder, variant="bf16", **save)
    with pytest.raises(ValueError, match="holds its weights as bf16 and as fp16, and no plain"):
        weight_files(folder)
    plain.float().save_pretrained(folder, **save)
    assert variant_of(folder) is None and not any("16" in file.suffixes[0] for file in weight_files(folder))


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "20KB"}], ids=["single", "sharded"])
def test_a_variant_by_plain_names_is_what_its_class_looks_for(tmp_path: Path, save: dict[str, str]) -> None:
    plain = published(tmp_path / "published").half()
    plain.save_pretrained(tmp_path / "source", variant="fp16", **save)
    target = tmp_path / "target"
    link_tree(tmp_path / "source", target)
    assert plain_name("config.json", "fp16") == "config.json" and variant_of(target) is None
    again = WanTransformer3DModel.from_pretrained(target, torch_dtype=torch.float16).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.state_dict().items())
