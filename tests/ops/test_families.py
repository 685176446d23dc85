"""What every model family promises: it is registered once, and loading, folders, LoRA and parity work by its facts."""

from __future__ import annotations

import typing
from dataclasses import fields, replace
from pathlib import Path

import diffusers
import pytest
import torch

from app.export.parity import TOLERANCE, compare_forward, compare_weights
from ops.models.base.config import DiTConfig
from ops.models.families import FAMILIES, VAE_CLASSES, AnyDiT
from ops.models.folders import dit_config, dit_json
from ops.models.load import build_dit, dit_skeleton, num_trained
from ops.models.weights import write_folder

NAMES = list(FAMILIES)


def small(name: str) -> DiTConfig:
    return FAMILIES[name].config(  # type: ignore[call-arg]  # each family has its own default of `architecture`
        num_layers=1, num_heads=2, head_dim=32, ffn_dim=256, freq_dim=32, text_dim=24, in_channels=4, out_channels=4
    )


def test_the_union_of_settings_and_the_registry_name_the_same_families() -> None:
    assert typing.get_args(AnyDiT) == tuple(family.config for family in FAMILIES.values())
    assert [family.config().architecture for family in FAMILIES.values()] == NAMES  # type: ignore[call-arg]


@pytest.mark.parametrize("name", NAMES)
def test_diffusers_has_the_named_classes(name: str) -> None:
    family = FAMILIES[name]
    shift = family.scheduler(5.0)
    for cls in (family.diffusers_class, family.pipeline_class, family.vae.name, shift.name):
        assert hasattr(diffusers, cls), cls
    assert family.vae is VAE_CLASSES[family.vae.name]
    getattr(diffusers, shift.name)(num_train_timesteps=1000, **shift.settings)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_folder_comes_back(name: str) -> None:
    family, config = FAMILIES[name], small(name)
    assert set(family.key_map) <= {setting.name for setting in fields(family.config)}
    runtime = replace(config, gradient_checkpointing=True, lora_rank=2)
    assert dit_config(dit_json(config), runtime, "here") == runtime


@pytest.mark.parametrize("name", NAMES)
def test_a_written_folder_is_the_same_transformer_to_diffusers(name: str, tmp_path: Path) -> None:
    config = small(name)
    state = build_dit(config, seed=0).state_dict()
    generator = torch.Generator().manual_seed(0)
    state = {key: 0.1 * torch.randn(value.shape, generator=generator) for key, value in state.items()}
    write_folder(tmp_path, state, dit_json(config))
    compare_weights(tmp_path, FAMILIES[name].diffusers_class, state)
    assert 0 < compare_forward(tmp_path, config, state) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_lora_reaches_the_projections_of_every_block(name: str) -> None:
    config = replace(small(name), lora_rank=2)
    module = dit_skeleton(config)
    trained = [key for key, weight in module.named_parameters() if weight.requires_grad]
    assert trained and all(".lora_" in key for key in trained)
    for prefix in FAMILIES[name].lora_names.blocks:
        blocks = {key.removeprefix(prefix).split(".")[0] for key in module.state_dict() if key.startswith(prefix)}
        assert blocks == {key.removeprefix(prefix).split(".")[0] for key in trained if key.startswith(prefix)}
    assert num_trained(config) == sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
