"""Autoencoders of pictures, which code every frame of a clip by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.models.base.tiles import VAE_BATCH_PIXELS, Tile, clips_at_once
from ops.models.base.vae import NO_NOISE, DecodeNoise, DiffusersVAE, frame_bytes


class PictureVAE(DiffusersVAE):
    """A class of Diffusers that takes [B, C, H, W]. Every latent frame is a tile of a decode; nothing is blended."""

    batch_pixels = VAE_BATCH_PIXELS  # of the frames that are encoded together

    @torch.no_grad()
    def encode_tile(self, video: Tensor, tile: Tile) -> Tensor:
        """A few frames at a time."""
        frames = tile.cut(video).to(self.device).flatten(0, 1)
        means = [
            self._means(some)
            for some in frames.split(clips_at_once(1, *frames.shape[1:3], batch_pixels=self.batch_pixels))
        ]
        found: Tensor = torch.cat(means).unflatten(0, (len(video), -1)).transpose(1, 2)
        return found

    @torch.no_grad()
    def decode(self, latents: Tensor, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """A frame is bytes before the next one is decoded."""
        frames, height, width = latents.shape[2:]
        tiles = self.plan_decode((frames, height, width))
        return torch.cat([frame_bytes(self.decode_tile(latents, tile, noise)) for tile in tiles], dim=1)

    def _decoded_spans(self, frames: int) -> list[tuple[int, int]]:
        return [(frame, frame + 1) for frame in range(frames)]

    def _clip_of(self, segments: list[Tensor], frames: int) -> Tensor:
        return torch.cat(segments, dim=2)

    def _decoded(self, latents: Tensor) -> Tensor:
        frames: Tensor = self.model.decode(latents.transpose(1, 2).flatten(0, 1)).sample
        found: Tensor = frames.unflatten(0, (len(latents), -1)).transpose(1, 2)
        return found
