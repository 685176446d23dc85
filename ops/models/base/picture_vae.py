"""Autoencoders of pictures, which code every frame of a clip by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ops.models.base.vae import DiffusersVAE, frame_bytes


class PictureVAE(DiffusersVAE):
    """A class of Diffusers that takes [B, C, H, W]. Every latent frame is a tile, and nothing is blended."""

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """A frame is bytes before the next one is decoded."""
        frames, height, width = latents.shape[2:]
        tiles = self.plan_decode((frames, height, width))
        return torch.cat([frame_bytes(self.decode_tile(latents, tile)) for tile in tiles], dim=1)

    def _decoded_spans(self, frames: int) -> list[tuple[int, int]]:
        return [(frame, frame + 1) for frame in range(frames)]

    def _clip_of(self, segments: list[Tensor], frames: int) -> Tensor:
        return torch.cat(segments, dim=2)

    def _run(self, code: Callable[[Tensor], Tensor], clips: Tensor) -> Tensor:
        frames = code(clips.transpose(1, 2).flatten(0, 1))
        found: Tensor = frames.unflatten(0, (len(clips), -1)).transpose(1, 2)
        return found
