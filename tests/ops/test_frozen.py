"""Frozen modules of folders: their weights go straight to where they stay, for one process or once for a node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ByT5Tokenizer, CLIPVisionModel, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from ops.models.config import ImageConfig, TextConfig, VAEConfig
from ops.models.folders import resolve
from ops.models.frozen import Source, frozen, stored_dtype, without_data
from ops.models.image import clip_skeleton, random_clip
from ops.models.load import build_image, build_text, build_vae
from tests.families import test_flux
from tests.ops import test_text_picture
from tests.ops.test_image_to_video import picture
from tests.ops.test_vae import every, shapes_in_motion

torch.set_num_threads(1)
CAPTIONS = ["a red disc moves", "", "two blue squares"]


def t5_folder(folder: Path, kind: type = T5EncoderModel, config: type = T5Config) -> TextConfig:
    torch.manual_seed(0)
    model = kind(config(vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
    model.bfloat16().save_pretrained(folder / "text_encoder")
    ByT5Tokenizer().save_pretrained(folder / "tokenizer")
    return TextConfig(path=str(folder), max_length=24, d_model=32)


TEXTS: dict[str, Callable[[Path], TextConfig]] = {
    "t5": t5_folder,
    "umt5": lambda folder: t5_folder(folder, UMT5EncoderModel, UMT5Config),
    "t5 and clip": lambda folder: resolve(test_flux.settings(test_flux.publish(folder)))[0].text,
    "llava and clip": lambda folder: (
        resolve(test_text_picture.settings(test_text_picture.publish(folder, "token_replace")))[0].text
    ),
}


def weights_of(encoder: object) -> dict[str, torch.Tensor]:
    modules = [(name, value) for name, value in vars(encoder).items() if isinstance(value, nn.Module)]
    found = {f"{name}.{inner}": w for name, module in modules for inner, w in module.named_parameters()}
    return found | {f"{name}.{inner}": b for name, module in modules for inner, b in module.named_buffers()}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_encoder_that_a_node_shares_is_that_of_one_process(case: str, tmp_path: Path) -> None:
    config = TEXTS[case](tmp_path)
    seen: Any = [picture(i) for i in range(len(CAPTIONS))] if config.sees_picture else ()
    alone, *together = build_text(config), build_text(config, shared=True), build_text(config, shared=True)
    wanted = alone.encode(CAPTIONS, seen)
    for encoder in together:
        for ours, theirs in zip(encoder.encode(CAPTIONS, seen), wanted, strict=True):
            assert torch.equal(ours, theirs)
        weights, own = weights_of(encoder), weights_of(alone)
        assert weights.keys() == own.keys()
        assert all(torch.equal(weights[name], own[name]) and weights[name].dtype == own[name].dtype for name in own)
        assert not any(weight.requires_grad for weight in weights.values())
    first, second = (weights_of(encoder) for encoder in together)
    for (name, one), other in zip(first.items(), second.values(), strict=True):
        if isinstance(one, nn.Parameter):  # two mappings of one memory
            one.data.view(-1)[0] = 7.0
            assert float(other.view(-1)[0]) == 7.0, name


@pytest.mark.parametrize("family", ["wan", "ltx", "pictures"])
def test_an_autoencoder_that_a_node_shares_is_that_of_one_process(family: str, tmp_path: Path) -> None:
    every(family).model.half().save_pretrained(tmp_path / "vae")
    config, video = VAEConfig(kind="diffusers", path=str(tmp_path)), shapes_in_motion(9, 32, 64)
    wanted = build_vae(config).encode(video)
    for shared in (True, True):
        assert torch.equal(build_vae(config, shared=shared).encode(video), wanted)
    exact = every(family)
    for weight in exact.model.parameters():
        weight.data = weight.data.half().float()
    assert torch.equal(exact.encode(video), wanted), "read in fp16, computed in fp32"


def test_an_image_encoder_that_a_node_shares_is_that_of_one_process(tmp_path: Path) -> None:
    made = random_clip(ImageConfig(d_model=16, num_layers=2), "cpu")
    made.encoder.save_pretrained(tmp_path / "image_encoder")
    made.save_processor(tmp_path / "image_processor")
    pictures = torch.stack([torch.from_numpy(picture(i)) for i in range(2)])
    config = ImageConfig(path=str(tmp_path), d_model=16, num_layers=2)
    for shared in (False, True, True):
        encoder = build_image(config, shared=shared)
        assert encoder is not None and torch.equal(encoder.encode(pictures), made.encode(pictures))


def test_a_file_that_changes_later_changes_no_model(tmp_path: Path) -> None:
    config = t5_folder(tmp_path)
    encoders = [build_text(config), build_text(config, shared=True)]
    wanted = encoders[0].encode(CAPTIONS)
    file = tmp_path / "text_encoder" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-file.stat().st_size // 2, 2)
        opened.write(b"\x35" * (file.stat().st_size // 2))
    for encoder in encoders:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(encoder.encode(CAPTIONS), wanted, strict=True))
    later = build_text(config, shared=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in zip(later.encode(CAPTIONS), wanted, strict=True))


def test_a_module_is_asked_of_its_library_in_the_dtype_of_its_files(tmp_path: Path) -> None:
    """So it maps them and copies nothing."""
    t5_folder(tmp_path)
    folder, asked = tmp_path / "text_encoder", []

    def read(dtype: torch.dtype) -> nn.Module:
        asked.append(dtype)
        return T5EncoderModel.from_pretrained(folder, dtype=dtype)

    def bare() -> nn.Module:
        raise AssertionError("needed where weights are shared alone")

    module = frozen(Source(folder=folder, read=read, bare=bare), torch.float32, torch.device("cpu"))
    assert asked == [torch.bfloat16] == [stored_dtype(folder)]
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}


def test_weights_of_several_dtypes_are_read_in_one_that_holds_all_of_them(tmp_path: Path) -> None:
    """Norms in fp32 beside matrices in bf16 keep their bits, though they are the fewer."""
    made = nn.Sequential(nn.Linear(16, 16).bfloat16(), nn.LayerNorm(16))
    nn.init.normal_(made[1].weight)
    save_file(made.state_dict(), tmp_path / "model.safetensors")

    def read(dtype: torch.dtype) -> nn.Module:
        module = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).to(dtype)
        module.load_state_dict(load_file(tmp_path / "model.safetensors"))
        return module

    bare = lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))  # noqa: E731
    for shared in (False, True):
        source = Source(folder=tmp_path, read=read, bare=bare)
        found = frozen(source, torch.float32, torch.device("cpu"), shared=shared)
        assert all(torch.equal(found.state_dict()[name], w.float()) for name, w in made.state_dict().items())


def test_another_version_of_a_library_shares_nothing_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = t5_folder(tmp_path)
    first = build_text(config, shared=True)
    monkeypatch.setattr("ops.models.frozen.version", lambda library: "another")
    other = build_text(config, shared=True)
    for one, two in zip(weights_of(first).values(), weights_of(other).values(), strict=True):
        one.data.view(-1)[0] = 7.0
        assert float(two.view(-1)[0]) != 7.0


def test_a_module_without_data_has_the_values_of_its_buffers() -> None:
    with without_data():
        module = clip_skeleton(ImageConfig())
        frozen_linear = nn.Linear(3, 2).requires_grad_(False)
    assert all(weight.is_meta for weight in module.parameters()) and isinstance(module, CLIPVisionModel)
    usual = dict(clip_skeleton(ImageConfig()).named_buffers())
    assert usual and all(torch.equal(buffer, usual[name]) for name, buffer in module.named_buffers())
    assert frozen_linear.weight.is_meta and not nn.Linear(3, 2).weight.is_meta, "modules made later have weights"


def test_weights_whose_address_somebody_else_has_are_read_by_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = t5_folder(tmp_path)
    wanted = build_text(config).encode(CAPTIONS)
    monkeypatch.setattr("ops.memory.node_weights.claim", lambda number: None)
    found = build_text(config, shared=True).encode(CAPTIONS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    assert "does not lend them; this process has a copy of its own" in caplog.text


def without_first(folder: Path) -> str:
    """Drops the first weight of a folder's file, and returns its name."""
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    name = min(weights)
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    return name


@pytest.mark.parametrize("part", ["text_encoder", "image_encoder", "vae"])
def test_a_folder_that_lacks_a_weight_is_refused(part: str, tmp_path: Path) -> None:
    """Transformers draws it at random, Diffusers leaves it on the meta device."""
    folder = tmp_path / part
    if part == "text_encoder":
        t5_folder(tmp_path)
    elif part == "image_encoder":
        random_clip(ImageConfig(), "cpu").encoder.save_pretrained(folder)
    else:
        every("wan").model.save_pretrained(folder)
    missing, path = without_first(folder), str(tmp_path)
    builds: dict[str, Callable[[], object]] = {
        "text_encoder": lambda: build_text(TextConfig(path=path)),
        "image_encoder": lambda: build_image(ImageConfig(path=path)),
        "vae": lambda: build_vae(VAEConfig(kind="diffusers", path=path)),
    }
    with pytest.raises(ValueError, match=rf"{part} lacks 1 of its weights, the first {missing}\."):
        builds[part]()
