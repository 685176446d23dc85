"""LoRA: starts from the base model, trains its factors alone, merges into plain weights with the same outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ops.comm import Group
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.load import build_dit
from ops.models.lora import for_diffusers, lora_scale, merged
from ops.models.wan.config import WanConfig
from ops.packing import Layout, Sequence

FP32_ATOL = 1e-5
CONFIGS = {
    "wan": WanConfig(
        num_layers=2,
        num_heads=2,
        head_dim=12,
        ffn_dim=40,
        freq_dim=16,
        text_dim=8,
        in_channels=4,
        out_channels=4,
        lora_rank=3,
        lora_alpha=6.0,
    ),
    "hunyuan": HunyuanConfig(
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        num_heads=2,
        head_dim=32,
        ffn_dim=128,
        text_dim=8,
        in_channels=4,
        out_channels=4,
        lora_rank=2,
    ),
}


def forward(module: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    layout = Layout([Sequence((2, 2, 3), 4), Sequence((1, 2, 2), 3)])
    return module(
        torch.randn(16, 16, generator=generator),
        torch.tensor([300.0, 700.0]),
        torch.randn(7, 8, generator=generator),
        layout,
        Group.solo(),
    )


def disturb(module: torch.nn.Module) -> None:
    """As after some training: factors away from their start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_starts_from_the_base_model_and_merges_exactly(architecture: str) -> None:
    config = CONFIGS[architecture]
    module = build_dit(config, seed=0)
    plain = build_dit(replace(config, lora_rank=0), seed=0)
    torch.testing.assert_close(forward(module), forward(plain), atol=FP32_ATOL, rtol=0)
    disturb(module)
    assert (forward(module) - forward(plain)).abs().max() > 1e-3
    plain.load_state_dict(merged(module.state_dict(), lora_scale(config)))
    torch.testing.assert_close(forward(module), forward(plain), atol=FP32_ATOL, rtol=FP32_ATOL)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_only_the_factors_get_gradients(architecture: str) -> None:
    module = build_dit(CONFIGS[architecture], seed=0)
    disturb(module)
    forward(module).square().sum().backward()
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert trained == {name for name in module.state_dict() if "lora_" in name}
    kept = {"ffn.net.2", "attn2.to_out.0"} if architecture == "wan" else {"attn.add_k_proj", "proj_mlp"}
    assert all(any(f"{name}.lora_A" in parameter for parameter in trained) for name in kept)


def test_file_for_diffusers_folds_the_scale_into_b() -> None:
    config = CONFIGS["wan"]
    module = build_dit(config, seed=0)
    disturb(module)
    state, file = module.state_dict(), for_diffusers(module.state_dict(), lora_scale(config))
    name = "blocks.1.attn1.to_v"
    assert torch.equal(file[f"transformer.{name}.lora_A.weight"], state[f"{name}.lora_A.weight"])
    assert torch.equal(file[f"transformer.{name}.lora_B.weight"], 2.0 * state[f"{name}.lora_B.weight"])
    assert len(file) == 2 * 2 * 10  # A and B of ten projections in each of two blocks
