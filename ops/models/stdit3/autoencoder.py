"""Open-Sora 1.2's video autoencoder, with the parameter names of its published weights (Zheng et al. 2024).

Frames are coded one by one by the autoencoder of SDXL; what that makes of a chunk of frames is coded over time by a
causal convolutional autoencoder, and normalised channel by channel. Chunks know nothing of each other.

B clips, T frames of a chunk, H W height and width in pixels, z = 4 channels of both autoencoders, t h w of the latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.models.base.family import Json
from ops.models.stdit3.autoencoder_fields import chunk_of, spatial, temporal

_SPATIAL_SCALE = 0.18215  # of the latents of pictures, in the published code
_NORM_EPS = 1e-5  # of nn.GroupNorm, as published


class VideoAutoencoder(nn.Module):
    """VideoAutoencoderPipeline of Open-Sora: both autoencoders, and what latents are normalised by."""

    shift: Tensor  # [1, z, 1, 1, 1]
    scale: Tensor

    def __init__(self, fields: Json) -> None:
        """Built from its config.json: what that does not say is as published."""
        super().__init__()
        pictures, over_time = spatial(fields), temporal(fields)
        self.chunk = chunk_of(fields)
        self.spatial_vae = FrameAutoencoder(pictures)
        self.temporal_vae = TemporalAutoencoder(
            channels=pictures["latent_channels"],
            filters=over_time["filters"],
            blocks=over_time["num_res_blocks"],
            multipliers=over_time["channel_multipliers"],
            halves=over_time["temporal_downsample"],
            groups=over_time["num_groups"],
        )
        for name in ("shift", "scale"):
            self.register_buffer(name, torch.tensor(fields[name], dtype=torch.float32).view(1, -1, 1, 1, 1))

    @property
    def encoders(self) -> tuple[nn.Module, nn.Module]:
        """The encoder of frames and the one over time."""
        return self.spatial_vae.module.encoder, self.temporal_vae.encoder

    def encode_chunk(self, pixels: Tensor) -> Tensor:
        """[B, 3, T, H, W] from -1 to 1, T at most a chunk -> normalised latents [B, z, t, h, w], the mean of what both
        posteriors allow."""
        frames = torch.stack([self.spatial_vae.encode(frame) for frame in pixels.unbind(2)], dim=2)
        return (self.temporal_vae.encode(frames) - self.shift) / self.scale

    def decode_chunk(self, latents: Tensor, frames: int) -> Tensor:
        """The inverse, of a chunk that had `frames` frames: [B, z, t, h, w] -> [B, 3, T, H, W]."""
        scaled = (latents * self.scale + self.shift).to(self.temporal_vae.post_quant_conv.conv.weight.dtype)
        pictures = self.temporal_vae.decode(scaled, frames)
        return torch.stack([self.spatial_vae.decode(picture) for picture in pictures.unbind(2)], dim=2)


class FrameAutoencoder(nn.Module):
    """SDXL's autoencoder, one frame of each clip at a time."""

    def __init__(self, numbers: Json) -> None:
        from diffusers import AutoencoderKL  # heavy: seconds to import

        super().__init__()
        levels = len(numbers["block_out_channels"])
        # Any: of Diffusers, which is untyped
        self.module: Any = AutoencoderKL(  # type: ignore[no-untyped-call]
            **numbers,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
        )

    def encode(self, frame: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, z, h, w]"""
        mode: Tensor = self.module.encode(frame).latent_dist.mode()
        return mode * _SPATIAL_SCALE

    def decode(self, latent: Tensor) -> Tensor:
        """[B, z, h, w] -> [B, 3, H, W]"""
        pixels: Tensor = self.module.decode(latent / _SPATIAL_SCALE).sample
        return pixels


class CausalConv(nn.Module):
    """A convolution over time and space that sees no later frame; what is before the first one is zero."""

    def __init__(self, inside: int, outside: int, size: int, *, halves: bool = False, bias: bool = True) -> None:
        super().__init__()
        stride = 2 if halves else 1
        self.conv = nn.Conv3d(inside, outside, size, stride=(stride, 1, 1), bias=bias)
        side = size // 2
        self.padding = (side, side, side, side, size - stride, 0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, H, W] -> the same with other channels; with `halves`, half of the frames."""
        y: Tensor = self.conv(F.pad(x, self.padding))
        return y


class ResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice, beside the input."""

    def __init__(self, inside: int, outside: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inside, _NORM_EPS), CausalConv(inside, outside, 3, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outside, _NORM_EPS), CausalConv(outside, outside, 3, bias=False)
        if inside != outside:
            self.conv3 = CausalConv(inside, outside, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, H, W]"""
        y: Tensor = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return y + (self.conv3(x) if hasattr(self, "conv3") else x)


def _blocks(inside: int, outside: int, count: int, groups: int) -> nn.ModuleList:
    return nn.ModuleList(ResidualBlock(outside if number else inside, outside, groups) for number in range(count))


class TemporalEncoder(nn.Module):
    """Levels of residual blocks, after some of which the frames are halved."""

    def __init__(
        self, channels: int, out: int, widths: Sequence[int], blocks: int, halves: Sequence[bool], groups: int
    ) -> None:
        super().__init__()
        self.conv_in = CausalConv(channels, widths[0], 3, bias=False)
        before = (widths[0], *widths)
        self.block_res_blocks = nn.ModuleList(_blocks(a, b, blocks, groups) for a, b in zip(before, widths))
        self.conv_blocks = nn.ModuleList(
            CausalConv(width, width, 3, halves=True) if halved else nn.Identity()
            for width, halved in zip(widths, halves)
        )
        self.res_blocks = _blocks(widths[-1], widths[-1], blocks, groups)
        self.norm1 = nn.GroupNorm(groups, widths[-1], _NORM_EPS)
        self.conv2 = CausalConv(widths[-1], out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, z, T, h, w] -> [B, out, t, h, w]"""
        x = self.conv_in(x)
        for level, blocks in enumerate(self.block_res_blocks):
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                x = block(x)
            if level < len(self.conv_blocks):
                x = self.conv_blocks[level](x)
        for block in self.res_blocks:
            x = block(x)
        out: Tensor = self.conv2(F.silu(self.norm1(x)))
        return out


class TemporalDecoder(nn.Module):
    """The same levels from the last to the first, before some of which the frames are doubled."""

    def __init__(
        self, channels: int, out: int, widths: Sequence[int], blocks: int, halves: Sequence[bool], groups: int
    ) -> None:
        super().__init__()
        self.conv1 = CausalConv(channels, widths[-1], 3)
        self.res_blocks = _blocks(widths[-1], widths[-1], blocks, groups)
        above = (*widths[1:], widths[-1])
        self.block_res_blocks = nn.ModuleList(_blocks(a, b, blocks, groups) for a, b in zip(above, widths))
        self.conv_blocks = nn.ModuleList(
            CausalConv(width, 2 * width, 3) if halved else nn.Identity() for width, halved in zip(widths[1:], halves)
        )
        self.norm1 = nn.GroupNorm(groups, widths[0], _NORM_EPS)
        self.conv_out = CausalConv(widths[0], out, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[B, z, t, h, w] -> [B, out, T, h, w], T the frames of t full latents."""
        x = self.conv1(x)
        for block in self.res_blocks:
            x = block(x)
        for level in reversed(range(len(self.block_res_blocks))):
            blocks = self.block_res_blocks[level]
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                x = block(x)
            if level and isinstance(doubled := self.conv_blocks[level - 1], CausalConv):
                x = doubled(x).unflatten(1, (-1, 2))  # [B, C, 2, T, h, w]: of each frame, the first and the second
                x = x.permute(0, 1, 3, 2, 4, 5).flatten(2, 3)
        out: Tensor = self.conv_out(F.silu(self.norm1(x)))
        return out


class TemporalAutoencoder(nn.Module):
    """VAE_Temporal of Open-Sora."""

    def __init__(
        self, channels: int, filters: int, blocks: int, multipliers: Sequence[int], halves: Sequence[bool], groups: int
    ) -> None:
        super().__init__()
        widths = [filters * one for one in multipliers]
        self.factor = 2 ** sum(halves)
        self.encoder = TemporalEncoder(channels, 2 * channels, widths, blocks, halves, groups)
        self.quant_conv = CausalConv(2 * channels, 2 * channels, 1)
        self.post_quant_conv = CausalConv(channels, channels, 1)
        self.decoder = TemporalDecoder(channels, channels, widths, blocks, halves, groups)

    def encode(self, x: Tensor) -> Tensor:
        """[B, z, T, h, w] -> [B, z, t, h, w], the posterior's mean. Frames of zeros before the first one fill T up to a
        multiple of what a latent stands for."""
        x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % self.factor, 0))
        moments: Tensor = self.quant_conv(self.encoder(x))
        return moments.chunk(2, dim=1)[0]

    def decode(self, latents: Tensor, frames: int) -> Tensor:
        """[B, z, t, h, w] -> [B, z, frames, h, w]"""
        decoded: Tensor = self.decoder(self.post_quant_conv(latents))
        return decoded[:, :, -frames:]
