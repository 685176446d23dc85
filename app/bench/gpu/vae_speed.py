"""Encode of one 480p81 clip by Wan's autoencoder with random weights: dtype, memory format, compiled, in tiles, and the
distance to fp32."""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from app.bench.gpu.measurement import Earlier, NamedFigures, Place

CLIP, SMALL_CLIP = (1, 3, 81, 480, 832), (1, 3, 5, 32, 32)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeSpeed:
    """Seconds and peak memory in one dtype and memory format; PSNR of the latents to those of a whole clip in fp32."""

    dtype: str
    channels_last: bool
    way: Literal["whole", "compiled", "tiled"] = "whole"
    estimate_s: float = 30.0

    @property
    def name(self) -> str:
        way = "" if self.way == "whole" else f"{self.way}."
        return f"vae.{way}{self.dtype}{'.channels-last' if self.channels_last else ''}"

    def why_not(self, place: Place) -> str | None:
        if importlib.util.find_spec("diffusers") is None:
            return "diffusers is not installed."
        return None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        vae, clip = _random_vae(place), torch.rand(place.pick(CLIP, SMALL_CLIP), device=place.device) * 2 - 1
        exact = _encode(vae, clip)
        vae, clip = vae.to(DTYPES[self.dtype]), clip.to(DTYPES[self.dtype])
        if self.channels_last:
            _channels_last(vae)
            clip = clip.to(memory_format=torch.channels_last_3d)
        if self.way == "compiled":  # as `model.vae.compile`; a rehearsal traces without making code
            vae.get_submodule("encoder").compile(backend=place.pick("inductor", "eager"))
        if self.way == "tiled":
            _tile(vae, *place.pick((256, 192), (16, 8)))
        timing = place.seconds(lambda: _encode(vae, clip), place.pick(3, 1))
        peak = place.peak_gib(lambda: _encode(vae, clip))
        step = earlier.get("step.wan-1.3b.as-trained", {}).get("seconds")
        share = timing.seconds / step if isinstance(step, float) else None
        return {
            "seconds": timing.seconds,
            "peak GiB": peak,
            "PSNR to fp32 dB": psnr(_encode(vae, clip), exact),
            "share of the 1.3B step": share,
        }


def measurements() -> list[VaeSpeed]:
    return [
        *(VaeSpeed(dtype=dtype, channels_last=last) for dtype in ("bf16", "fp32", "fp16") for last in (False, True)),
        VaeSpeed(dtype="bf16", channels_last=True, way="tiled"),
        VaeSpeed(dtype="bf16", channels_last=True, way="compiled", estimate_s=150.0),
    ]


def psnr(actual: Tensor, expected: Tensor) -> float:
    """The peak signal-to-noise ratio, by the range of what was expected, in dB."""
    expected = expected.double()
    error = float((actual.double() - expected).square().mean())
    span = float(expected.max() - expected.min())
    return math.inf if error == 0 else 10 * math.log10(span**2 / error)


def _random_vae(place: Place) -> nn.Module:
    autoencoder = importlib.import_module("diffusers").AutoencoderKLWan
    with torch.device(place.device):
        model: nn.Module = autoencoder(base_dim=place.pick(96, 8), z_dim=16)
    return model.eval()


def _channels_last(vae: nn.Module) -> None:
    """Weights of its three-dimensional convolutions; it has two-dimensional ones too, which have no such format."""
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)


def _tile(vae: nn.Module, size: int, stride: int) -> None:
    """Encode in tiles of these pixels, as `model.vae.tiling`."""
    vae.enable_tiling(  # type: ignore[operator]
        tile_sample_min_height=size,
        tile_sample_min_width=size,
        tile_sample_stride_height=stride,
        tile_sample_stride_width=stride,
    )


@torch.no_grad()
def _encode(vae: nn.Module, clip: Tensor) -> Tensor:
    latent: Tensor = vae.encode(clip).latent_dist.mode()  # type: ignore[operator]
    return latent
