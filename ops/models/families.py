"""The model families, and the autoencoders: the one place where a new one is registered.

`AnyDiT` and `FAMILIES` name the same families; `tests/ops/test_families.py` holds them together and runs every family
through loading, export, LoRA and parity. Imports neither torch nor Ray.
"""

from __future__ import annotations

from ops.models.base.family import Family, Json, VAEClass
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.hunyuan.family import HUNYUAN
from ops.models.wan.config import WanConfig
from ops.models.wan.family import WAN

AnyDiT = WanConfig | HunyuanConfig  # tagged by `architecture`; the first is meant where a config names none
FAMILIES: dict[str, Family] = {family.name: family for family in (WAN, HUNYUAN)}


def _cogvideox_numbers(fields: Json) -> tuple[int, tuple[int, int, int]]:
    stride_s = 2 ** (len(fields.get("block_out_channels", (128, 256, 256, 512))) - 1)
    stride_t = int(fields.get("temporal_compression_ratio", 4))
    return fields.get("latent_channels", 16), (stride_t, stride_s, stride_s)


COGVIDEOX_VAE = VAEClass(name="AutoencoderKLCogVideoX", numbers=_cogvideox_numbers)  # its transformer is not offered
VAE_CLASSES: dict[str, VAEClass] = {vae.name: vae for vae in (WAN.vae, HUNYUAN.vae, COGVIDEOX_VAE)}
