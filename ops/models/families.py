"""The model families, found by their folders beside this file; and the autoencoders.

A family is a folder with `config.py`, `model.py` and `family.py`, whose last statement names its `FAMILY`.
`tests/ops/test_families.py` runs every family through loading, export, LoRA, parity and plans. Imports neither torch
nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Union

from ops.models.base.config import DiTConfig
from ops.models.base.family import Family, Json, VAEClass

_USUAL = "wan"  # meant where a config names no architecture
_FOLDERS = [module.name for module in iter_modules([str(Path(__file__).parent)]) if module.ispkg]
_NAMES = sorted(set(_FOLDERS) - {"base"}, key=lambda name: (name != _USUAL, name))

FAMILIES: dict[str, Family] = {  # by model.dit.architecture
    name: import_module(f"ops.models.{name}.family").FAMILY for name in _NAMES
}

if TYPE_CHECKING:
    AnyDiT = DiTConfig
else:
    AnyDiT = Union[tuple(family.config for family in FAMILIES.values())]  # noqa: UP007  (of types known at run time)
    """For configs: their reader tells the families apart by `architecture`, and refuses other names."""


def _cogvideox_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    stride_s = 2 ** (len(fields.get("block_out_channels", (128, 256, 256, 512))) - 1)
    stride_t = int(fields.get("temporal_compression_ratio", 4))
    return fields.get("latent_channels", 16), (stride_t, stride_s, stride_s)


COGVIDEOX_VAE = VAEClass(name="AutoencoderKLCogVideoX", numbers=_cogvideox_numbers)  # its transformer is not offered
VAE_CLASSES: dict[str, VAEClass] = {
    vae.name: vae for vae in (*(family.vae for family in FAMILIES.values()), COGVIDEOX_VAE)
}
