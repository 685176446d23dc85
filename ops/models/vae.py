"""The autoencoder of a Diffusers folder, by the class that its config.json names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ops.models.base.family import Json, VAEClass
from ops.models.base.tiles import VAE_BATCH_PIXELS, clips_at_once
from ops.models.base.vae import DiffusersVAE, LatentFacts, PixelForm
from ops.models.config import VAEConfig
from ops.models.families import VAE_CLASSES
from ops.models.files import check_files, read_json, variant_of
from ops.models.folders import component, tiling_by, vae_numbers
from ops.models.frozen import Source, frozen, lacks
from ops.models.place import on_device


def vae_of(model: nn.Module, config: VAEConfig, device: torch.device | str) -> DiffusersVAE:
    """A module of one of VAE_CLASSES, on the device, as its family runs it. Raises ValueError for tiles that it cannot
    be cut into, and where Diffusers' own cannot be switched off."""
    kind, device = VAE_CLASSES[type(model).__name__], torch.device(device)
    if config.tiling and not kind.can_be_tiled:
        raise ValueError(
            f"model.vae.tiling: {kind.name} codes each frame by itself and has no tiles here. Set it to false."
        )
    if not hasattr(model, "use_tiling"):  # by another name it would stay as it is, and cut each of our tiles again
        raise ValueError(
            f"{kind.name} of Diffusers {version('diffusers')} has no use_tiling, by which its own tiles are "
            f"switched off. Install one that has it: pip install -c constraints.txt diffusers."
        )
    module: Any = on_device(model, device).eval().requires_grad_(False)  # of Diffusers, which is untyped
    dtype = next(module.parameters()).dtype
    layout = layout_of(config, dtype, device, kind.of_pictures)
    lay_out(module, layout)
    if kind.sees_fp32 and dtype.itemsize <= 2:  # it gets fp32, and gives what the rest computes in
        first: nn.Module = module.get_submodule(kind.sees_fp32)
        first.register_forward_hook(lambda module, inputs, output: output.to(dtype))
        form = PixelForm(dtype=torch.float32, layout=layout)
    else:
        form = PixelForm(dtype=dtype, layout=layout)
    if config.compile:
        module.encoder.compile()
    runs: type[DiffusersVAE] = DiffusersVAE if kind.runs is None else kind.runs()
    fields: Json = {"_class_name": kind.name, **module.config}
    return runs(module, _facts(module, fields, kind, device), form, config.tiles, tiling_by(fields, config), device)


def layout_of(
    config: VAEConfig, dtype: torch.dtype, device: torch.device, of_pictures: bool = False
) -> torch.memory_format:
    """How the clips that the autoencoder sees lie in memory."""
    usual = device.type == "cuda" and dtype.itemsize == 2
    if config.channels_last == "off" or (config.channels_last == "auto" and not usual):
        return torch.contiguous_format
    return torch.channels_last if of_pictures else torch.channels_last_3d


def lay_out(module: nn.Module, layout: torch.memory_format) -> None:
    """For clips with their channels last, weights of convolutions likewise: what they make is laid out alike."""
    if layout == torch.contiguous_format:
        return
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for weight in module.parameters():
        if weight.dim() in formats:
            weight.data = weight.data.contiguous(memory_format=formats[weight.dim()])


def clip_groups(
    clips: int, frames: int, height: int, width: int, *, batch_pixels: int = VAE_BATCH_PIXELS
) -> Sequence[range]:
    """Clips that are encoded together, see `clips_at_once`: the memory for that does not grow with the batch."""
    step = clips_at_once(frames, height, width, batch_pixels=batch_pixels)
    return [range(start, min(start + step, clips)) for start in range(0, clips, step)]


def _facts(module: nn.Module, fields: Json, kind: VAEClass, device: torch.device) -> LatentFacts:
    channels, stride = kind.numbers(fields)
    mean, std = kind.normalisation(fields, channels, module)
    if len(mean) != channels or len(std) != channels:
        raise ValueError(
            f"{kind.name} has {channels} latent channels but {len(mean)} latents_mean and {len(std)} latents_std "
            f"values in its config.json. Give one of each per channel."
        )
    parts = (torch.as_tensor(part, device=device, dtype=torch.float32) for part in (mean, std))
    return LatentFacts(channels=channels, stride=stride, mean=next(parts), std=next(parts))


def vae_without_weights(config: VAEConfig, device: str) -> DiffusersVAE:
    """The autoencoder that a folder's config.json describes, with whatever values its class begins with, on the CPU: in
    dtype and layout as on that kind of device."""
    import diffusers

    assert config.path is not None
    fields = read_json(component(config.path, "vae") / "config.json")
    vae_numbers(fields, config.path)
    kind = VAE_CLASSES[fields["_class_name"]]
    with bare_on(config, device, kind.of_pictures) as told:
        return vae_of(getattr(diffusers, kind.name).from_config(fields), told, "cpu")


@contextmanager
def bare_on(config: VAEConfig, device: str, of_pictures: bool = False) -> Iterator[VAEConfig]:
    """Settings for a module that is made within the block on the CPU: in dtype and layout as on that kind of device."""
    dtype = getattr(torch, config.dtype_on(device))
    plain = layout_of(config, dtype, torch.device(device), of_pictures) == torch.contiguous_format
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a cast afterwards would make every parameter twice
    try:
        yield replace(config, channels_last="off" if plain else "on", compile=False)
    finally:
        torch.set_default_dtype(before)


def diffusers_vae(config: VAEConfig, device: torch.device | str, shared: bool) -> DiffusersVAE:
    """The autoencoder of a local folder, by the class its config.json names, in the dtype of its settings. `shared` as
    `ops.models.frozen.frozen`.

    Raises ValueError for float16 where config.json says that it overflows there.
    """
    import diffusers  # heavy: seconds to import

    assert config.path is not None
    folder: Path = component(config.path, "vae")
    fields = read_json(folder / "config.json")
    name, dtype = fields.get("_class_name"), config.dtype_on(torch.device(device).type)
    if name not in VAE_CLASSES:
        raise ValueError(f"{folder} is a {name}; known video autoencoders are {', '.join(VAE_CLASSES)}.")
    if dtype == "float16" and fields.get("force_upcast"):
        raise ValueError(
            f"model.vae.dtype is float16, in which the autoencoder of {folder} overflows (force_upcast in its "
            f"config.json). Use bfloat16, which takes as little, or float32."
        )
    check_files(folder)
    kind = getattr(diffusers, name)

    def read(stored: torch.dtype) -> nn.Module:
        model: nn.Module
        model, report = kind.from_pretrained(
            folder,
            torch_dtype=stored,
            local_files_only=True,
            use_safetensors=True,
            variant=variant_of(folder),
            output_loading_info=True,
        )
        if missing := sorted(name for name, _ in model.named_parameters() if name in report["missing_keys"]):
            raise lacks(folder, missing)
        return model

    source = Source(folder=folder, read=read, bare=lambda: kind.from_config(fields))
    return vae_of(frozen(source, getattr(torch, dtype), torch.device(device), shared), config, device)
