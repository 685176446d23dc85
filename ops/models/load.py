"""From settings to modules: the transformer, the autoencoder and the text encoder that a worker hosts.

Importing this file costs nothing; torch, Diffusers and Transformers are imported by the functions that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.config import DiTConfig, TextConfig, VAEConfig
from ops.folders import resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ops.models.text import TextEncoder
    from ops.models.vae import VAE

__all__ = ["build_dit", "build_text", "build_vae", "resolve"]


def build_dit(config: DiTConfig, seed: int) -> nn.Module:
    """The transformer on the CPU in fp32: random from `seed`, or with the weights of `config.path`.

    With a `lora_rank` only the low-rank factors are trainable (`requires_grad`).

    Raises ValueError when the folder's weights do not fit the config (missing, unexpected, wrong shape or dtype).
    """
    import torch

    from ops.weights import load_transformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _dit_class(config)(config)
        if config.lora_rank:
            from ops.models.lora import add_lora

            add_lora(module, config)
    if config.path:
        load_transformer(module, config.path)
    return module


def dit_skeleton(config: DiTConfig) -> nn.Module:
    """The same module on the meta device: names, shapes and what is trainable, without memory or weights."""
    import torch

    with torch.device("meta"):
        module = _dit_class(config)(config)
        if config.lora_rank:
            from ops.models.lora import add_lora

            add_lora(module, config)
    return module


def _dit_class(config: DiTConfig) -> type[nn.Module]:
    if config.architecture == "wan":
        from ops.models.dit import WanDiT

        return WanDiT
    from ops.models.mmdit import HunyuanDiT

    return HunyuanDiT


def build_vae(config: VAEConfig, device: torch.device | str = "cpu") -> VAE:
    """The frozen autoencoder of `config` on `device`."""
    if config.kind == "haar":
        from ops.models.haar import HaarVAE

        return HaarVAE(config, device)
    from ops.models.vae import diffusers_vae

    return diffusers_vae(config, device)


def build_text(config: TextConfig, device: torch.device | str = "cpu") -> TextEncoder:
    """The frozen text encoder of `config` on `device`."""
    from ops.models.text import folder_t5, random_t5

    return folder_t5(config, device) if config.path else random_t5(config, device)
