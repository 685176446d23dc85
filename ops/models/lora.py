"""LoRA: low-rank factors beside frozen projections (Hu et al. 2021), W x + (alpha / rank) B A x.

Parameter names are peft's without its prefix (`blocks.0.attn1.to_q.lora_A.weight`), so files need no renaming.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.models.base.config import DiTConfig
from ops.models.families import FAMILIES

A, B = ".lora_A.weight", ".lora_B.weight"


class LoRALinear(nn.Linear):
    """A frozen projection with trainable factors. B starts at zero, so training starts from the base model."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.reset_factors()

    def reset_factors(self) -> None:
        """B A = 0, with A drawn from torch's generator."""
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5**0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias) + self.scale * self.lora_B(self.lora_A(x))


def lora_scale(config: DiTConfig) -> float:
    """alpha / rank; an alpha of 0 means equal to the rank."""
    return (config.lora_alpha or config.lora_rank) / config.lora_rank


def add_lora(module: nn.Module, config: DiTConfig) -> None:
    """Freeze `module` and give the attention and MLP projections of its blocks trainable factors."""
    names = FAMILIES[config.architecture].lora_names
    module.requires_grad_(False)
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear) and name.startswith(names.blocks) and name.endswith(names.projections):
            module.set_submodule(name, LoRALinear(linear, config.lora_rank, lora_scale(config)))


def first_factors(module: nn.Module, seed: int) -> nn.Module:
    """Give the factors of a module on the meta device their first values, in fp32 on the CPU, drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in (part for part in module.modules() if isinstance(part, LoRALinear)):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_factors()
    return module


def merged(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The state dict of the plain model with the same outputs: W + scale B A, and no factors."""
    result = {name: tensor for name, tensor in state.items() if not name.endswith((A, B))}
    for name in state:
        if name.endswith(A):
            weight = name.removesuffix(A) + ".weight"
            factors = state[name.removesuffix(A) + B].double() @ state[name].double()
            result[weight] = (state[weight].double() + scale * factors).to(state[weight].dtype)
    return result


def for_diffusers(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The factors as `pytorch_lora_weights.safetensors` holds them. The scale goes into B: readers of files without
    an alpha take it as equal to the rank."""
    return {
        f"transformer.{name}": (scale * tensor if name.endswith(B) else tensor).to(torch.float32).contiguous()
        for name, tensor in state.items()
        if name.endswith((A, B))
    }
