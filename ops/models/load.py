"""From settings to modules: the transformer, the autoencoder and the text encoder that a worker hosts.

Importing this file costs nothing; torch, Diffusers and Transformers are imported by the functions that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.models.base.config import DiTConfig
from ops.models.config import TextConfig, VAEConfig
from ops.models.families import FAMILIES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ops.models.text import TextEncoder
    from ops.models.vae import VAE


def build_dit(config: DiTConfig, seed: int) -> nn.Module:
    """The transformer on the CPU in fp32: random from `seed`, or with the weights of `config.path`.

    With a `lora_rank` only the low-rank factors are trainable (`requires_grad`).

    Raises ValueError when the folder's weights do not fit the config (missing, unexpected, wrong shape or dtype).
    """
    import torch

    from ops.models.weights import load_transformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _bare_dit(config)
    if config.path:
        load_transformer(module, config.path)
    return module


def dit_skeleton(config: DiTConfig) -> nn.Module:
    """The same module on the meta device: names, shapes and what is trainable, without memory or weights."""
    import torch

    with torch.device("meta"):
        return _bare_dit(config)


def num_trained(config: DiTConfig) -> int:
    """Trainable weights of the transformer; counted without memory."""
    return sum(weight.numel() for weight in dit_skeleton(config).parameters() if weight.requires_grad)


def _bare_dit(config: DiTConfig) -> nn.Module:
    module = FAMILIES[config.architecture].model()(config)
    if config.lora_rank:
        from ops.models.lora import add_lora

        add_lora(module, config)
    return module


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
