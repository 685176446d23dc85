"""The autoencoder of a Diffusers folder, by the class that its config.json names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ops.models.base.family import Json, VAEClass
from ops.models.base.vae import DiffusersVAE, LatentFacts
from ops.models.config import VAEConfig
from ops.models.families import VAE_CLASSES
from ops.models.files import check_files, read_json, variant_of
from ops.models.folders import component, vae_numbers
from ops.models.place import on_device


def vae_of(model: nn.Module, config: VAEConfig, device: torch.device | str) -> DiffusersVAE:
    """A module of one of VAE_CLASSES, on the device, as its family runs it. Raises ValueError for tiles that it cannot
    be cut into."""
    kind, device = VAE_CLASSES[type(model).__name__], torch.device(device)
    if config.tiling and not kind.can_be_tiled:
        raise ValueError(f"model.vae.tiling: {kind.name} is encoded whole here. Set it to false.")
    module = on_device(model, device).eval().requires_grad_(False)
    runs: type[DiffusersVAE] = DiffusersVAE if kind.runs is None else kind.runs()
    return runs(module, _facts(module, kind, device), config.tiles, device)


def _facts(module: nn.Module, kind: VAEClass, device: torch.device) -> LatentFacts:
    fields: Json = {"_class_name": kind.name, **module.config}  # type: ignore[dict-item]
    channels, stride = kind.numbers(fields)
    mean, std = kind.normalisation(fields, channels, module)
    if len(mean) != channels or len(std) != channels:
        raise ValueError(
            f"{kind.name} has {channels} latent channels but {len(mean)} latents_mean and {len(std)} latents_std "
            f"values in its config.json. Give one of each per channel."
        )
    parts = (torch.as_tensor(part, device=device, dtype=torch.float32) for part in (mean, std))
    return LatentFacts(
        channels=channels, stride=stride, mean=next(parts), std=next(parts), of_pictures=kind.of_pictures
    )


def vae_without_weights(config: VAEConfig, device: torch.device | str) -> DiffusersVAE:
    """The autoencoder that a folder's config.json describes, with whatever values its class begins with."""
    import diffusers

    assert config.path is not None
    fields = read_json(component(config.path, "vae") / "config.json")
    vae_numbers(fields, config.path)
    return vae_of(getattr(diffusers, fields["_class_name"]).from_config(fields), config, device)


def diffusers_vae(config: VAEConfig, device: torch.device | str) -> DiffusersVAE:
    """The autoencoder of a local folder, by the class its config.json names, in fp32."""
    import diffusers  # heavy: seconds to import

    assert config.path is not None
    folder: Path = component(config.path, "vae")
    name = read_json(folder / "config.json").get("_class_name")
    if name not in VAE_CLASSES:
        raise ValueError(f"{folder} is a {name}; known video autoencoders are {', '.join(VAE_CLASSES)}.")
    check_files(folder)
    model = getattr(diffusers, name).from_pretrained(
        folder, torch_dtype=torch.float32, local_files_only=True, use_safetensors=True, variant=variant_of(folder)
    )
    return vae_of(model, config, device)
