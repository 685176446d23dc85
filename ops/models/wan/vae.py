"""Wan's autoencoders: decoded frame by frame, and tiles of Wan 2.2 are blended in patches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ops.models.base.vae import DiffusersVAE


class WanVAE(DiffusersVAE):
    """AutoencoderKLWan. Its own `_decode` clamps and unpatchifies; `tiled_decode` does both after tiles are blended, as
    here."""

    @property
    def _encoder_patch(self) -> int:
        """Side in pixels of the patches that Wan 2.2 makes of a clip before it encodes it; 1 for Wan 2.1."""
        return self.model.config.patch_size or 1

    def _means(self, pixels: Tensor) -> Tensor:
        with self._forgetting():
            return DiffusersVAE._means(self, pixels)

    def _decoded(self, latents: Tensor) -> Tensor:
        with self._forgetting():
            return self._frame_by_frame(latents)

    def _frame_by_frame(self, latents: Tensor) -> Tensor:
        model = self.model
        model.clear_cache()
        rows, found = model.post_quant_conv(latents), []
        for index in range(latents.shape[2]):
            model._conv_idx = [0]
            found.append(
                model.decoder(
                    rows[:, :, index : index + 1],
                    feat_cache=model._feat_map,
                    feat_idx=model._conv_idx,
                    first_chunk=index == 0,
                )
            )
        return torch.cat(found, dim=2)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Drops the frames of the chunk before, which the model keeps (2.4 GiB of a clip of 81 frames at 720p), also
        when a call fails in the middle: other work needs that memory until the next call."""
        try:
            yield
        finally:
            self.model.clear_cache()

    def _decoded_tile(self, side: int) -> tuple[int, int]:
        kept, blended = DiffusersVAE._decoded_tile(self, side)
        return kept // self._encoder_patch, blended // self._encoder_patch

    def _clip_of(self, segments: list[Tensor], frames: int) -> Tensor:
        pixels, patch = segments[0], self._encoder_patch
        return (_unpatchified(pixels, patch) if patch > 1 else pixels)[:, :, -frames:]


def _unpatchified(pixels: Tensor, patch: int) -> Tensor:
    """[B, 3 p p, T, H, W] -> [B, 3, T, H p, W p], in Wan 2.2's order of channels: colour, column, row."""
    batch, channels, frames, height, width = pixels.shape
    squares = pixels.view(batch, channels // patch**2, patch, patch, frames, height, width)
    return squares.permute(0, 1, 4, 5, 3, 6, 2).reshape(batch, -1, frames, height * patch, width * patch)
