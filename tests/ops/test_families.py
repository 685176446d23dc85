"""What every model family promises: it is registered once, and loading, folders, LoRA and parity work by its facts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import typing
from dataclasses import fields, replace
from pathlib import Path

import diffusers
import pytest
import torch

from app.export.parity import (
    TOLERANCE,
    compare_forward,
    compare_weights,
    our_velocity,
    parity_sample,
    their_velocity,
)
from ops.config import FlowConfig
from ops.models.base.config import DiTConfig
from ops.models.base.family import ParitySample
from ops.models.families import FAMILIES, VAE_CLASSES, AnyDiT
from ops.models.folders import dit_config, dit_json
from ops.models.load import build_dit, dit_skeleton, num_trained
from ops.models.weights import write_folder

ROOT = Path(__file__).parent.parent.parent
NAMES = list(FAMILIES)


CASES: dict[str, tuple[str, dict[str, object]]] = {  # a family in each of its variants
    "wan": ("wan", {}),
    "wan i2v": ("wan", {"in_channels": 12, "first_frame": "channels", "image_dim": 20}),
    "wan i2v without an image encoder": ("wan", {"in_channels": 12, "first_frame": "channels"}),
    "ltx": ("ltx", {"patch": (1, 1, 1)}),
    "ltx of a width that a sixth does not divide": ("ltx", {"num_heads": 4, "head_dim": 16, "frame_rate": 8.0}),
    "cogvideox 2b": ("cogvideox", {"rotary": False, "text_rows": 9, "time_dim": 16, "snr_shift": 3.0}),
    "cogvideox 5b": ("cogvideox", {"time_dim": 16, "sample_size": (12, 20)}),
    "cogvideox 1.5": ("cogvideox", {"time_dim": 16, "patch": (2, 2, 2)}),
    "flux": ("flux", {"num_single_layers": 1, "pooled_dim": 8, "guidance_embeds": True}),
    "flux schnell with text as wide as its vector": ("flux", {"num_single_layers": 1, "rope_axes": (8, 12, 12)}),
    "latte": ("latte", {"video_length": 3, "sample_size": 8}),
    "latte of a size beyond 64": ("latte", {"video_length": 3, "sample_size": 128, "patch": (1, 4, 4)}),
    "mochi": ("mochi", {"num_layers": 2, "context_dim": 20}),
    "stdit3": ("stdit3", {"base_size": 96, "caption_rows": 5}),
    "hunyuan": ("hunyuan", {"num_single_layers": 1, "num_refiner_layers": 1, "pooled_dim": 8, "guidance_embeds": True}),
    "hunyuan i2v latent_concat": (
        "hunyuan",
        {"num_single_layers": 1, "pooled_dim": 8, "first_frame": "latent_concat", "in_channels": 9},
    ),
    "hunyuan i2v token_replace": (
        "hunyuan",
        {"num_single_layers": 1, "pooled_dim": 8, "first_frame": "token_replace", "guidance_embeds": True},
    ),
}


IN_DIFFUSERS = [case for case, (name, _) in CASES.items() if FAMILIES[name].own_code is None]


def small(case: str) -> DiTConfig:
    name, own = CASES[case]
    common = {"num_layers": 1, "num_heads": 2, "head_dim": 32, "ffn_dim": 256, "freq_dim": 32, "text_dim": 24}
    return FAMILIES[name].settings(**{**common, "in_channels": 4, "out_channels": 4, **own})


def test_every_family_has_a_case() -> None:
    assert {name for name, _ in CASES.values()} == set(NAMES)


def test_every_folder_is_a_family_and_wan_is_meant_where_none_is_named() -> None:
    folders = {file.parent.name for file in (ROOT / "ops" / "models").glob("*/family.py")} - {"base"}
    assert set(NAMES) == folders and NAMES[0] == "wan"
    assert typing.get_args(AnyDiT) == tuple(family.config for family in FAMILIES.values())
    assert [family.settings().architecture for family in FAMILIES.values()] == NAMES


def test_a_new_folder_is_found_by_configs_without_another_line(tmp_path: Path) -> None:
    """A copy of the models room with a family more: its name is an architecture that a config may choose."""
    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    models = tmp_path / "ops" / "models"
    shutil.copytree(models / "wan", models / "loom")
    for file in (models / "loom").glob("*.py"):
        file.write_text(file.read_text().replace("models.wan", "models.loom").replace('"wan"', '"loom"'))
    code = (
        "from ops.models.config import ModelConfig; from ops.typed import build, parse\n"
        "print(type(build(ModelConfig, parse('dit: {architecture: loom}')).dit).__module__)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "ops.models.loom.config", found.stderr


@pytest.mark.parametrize("case", IN_DIFFUSERS)
def test_diffusers_has_the_named_classes(case: str) -> None:
    family, config = FAMILIES[CASES[case][0]], small(case)
    shift = family.scheduler(config, FlowConfig(flow_shift=5.0))
    for cls in (family.diffusers_class, family.pipeline_class(config), family.vae.name, shift.name):
        assert hasattr(diffusers, cls), cls
    assert family.vae is VAE_CLASSES[family.vae.name]
    getattr(diffusers, shift.name)(num_train_timesteps=1000, **shift.settings)


@pytest.mark.parametrize("case", CASES)
def test_every_number_of_a_folder_comes_back(case: str) -> None:
    family, config = FAMILIES[CASES[case][0]], small(case)
    assert set(family.key_map) <= {setting.name for setting in fields(family.config)}
    runtime = replace(config, gradient_checkpointing=True, lora_rank=2)
    assert dit_config(dit_json(config), runtime, "here") == runtime


def test_diffusers_has_no_class_of_families_with_code_of_their_own() -> None:
    for family in (FAMILIES[name] for name in NAMES if FAMILIES[name].own_code):
        assert not hasattr(diffusers, family.diffusers_class)
        assert VAE_CLASSES[family.vae.name] is family.vae and hasattr(diffusers, family.vae.name)
        with pytest.raises(AssertionError, match="Diffusers has no class of this family"):
            family.pipeline_class(family.settings())


@pytest.mark.parametrize("case", IN_DIFFUSERS)
def test_a_written_folder_is_the_same_transformer_to_diffusers(case: str, tmp_path: Path) -> None:
    config = small(case)
    state = build_dit(config, seed=0).state_dict()
    generator = torch.Generator().manual_seed(0)
    state = {key: 0.1 * torch.randn(value.shape, generator=generator) for key, value in state.items()}
    write_folder(tmp_path, state, dit_json(config))
    compare_weights(tmp_path, FAMILIES[CASES[case][0]].diffusers_class, state)
    assert 0 < compare_forward(tmp_path, config, state) <= TOLERANCE


@pytest.mark.parametrize("case", IN_DIFFUSERS)
def test_forward_and_gradients_are_those_of_diffusers(case: str) -> None:
    """Every parameter is random, also those that start at zero, so that a forgotten one shows."""
    compare_with_diffusers(small(case), parity_sample(small(case)))


@pytest.mark.parametrize("case", [case for case in CASES if small(case).frame_times])
def test_frames_with_a_time_of_their_own_are_those_of_diffusers(case: str) -> None:
    """Wan2.2 TI2V-5B: one time for the tokens of the first latent frame, another for the rest."""
    compare_with_diffusers(small(case), parity_sample(small(case), clean_frames=1))


def compare_with_diffusers(config: DiTConfig, sample: ParitySample) -> None:
    """Forward and gradients, against the largest of each."""
    reference = their_class(config)
    module = build_dit(config, seed=0)
    module.load_state_dict(reference.state_dict())  # strict: the same names and shapes
    ours, theirs = our_velocity(module, sample), their_velocity(reference, config, sample)
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.detach().abs().max()), rtol=0)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    expected = {name: weight.grad for name, weight in reference.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        torch.testing.assert_close(weight.grad, expected[name], atol=1e-5 * largest, rtol=1e-4, msg=name)


def their_class(config: DiTConfig) -> torch.nn.Module:
    """The class of Diffusers with random weights."""
    described = {key: value for key, value in dit_json(config).items() if not key.startswith("_")}
    torch.manual_seed(0)
    reference = getattr(diffusers, FAMILIES[config.architecture].diffusers_class)(**described)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    return reference


@pytest.mark.parametrize("case", CASES)
def test_lora_reaches_the_projections_of_every_block(case: str) -> None:
    config = replace(small(case), lora_rank=2)
    module = dit_skeleton(config)
    trained = [key for key, weight in module.named_parameters() if weight.requires_grad]
    assert trained and all(".lora_" in key for key in trained)
    for prefix in FAMILIES[CASES[case][0]].lora_names.blocks:
        blocks = {key.removeprefix(prefix).split(".")[0] for key in module.state_dict() if key.startswith(prefix)}
        assert blocks == {key.removeprefix(prefix).split(".")[0] for key in trained if key.startswith(prefix)}
    assert num_trained(config) == sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
