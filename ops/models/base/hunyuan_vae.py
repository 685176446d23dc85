"""HunyuanVideo's autoencoder: clips are cut over time, too, always, and segments share a frame and are blended."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ops.models.base.vae import DiffusersVAE


class HunyuanVAE(DiffusersVAE):
    """AutoencoderKLHunyuanVideo."""

    def _decoded_spans(self, frames: int) -> list[tuple[int, int]]:
        full, step = (length // self.vae_stride[0] for length in self._segment)
        if not self.model.use_framewise_decoding or frames <= full:
            return [(0, frames)]
        return [(start, min(start + full + 1, frames)) for start in range(0, frames, step)]

    def _latents_of(self, segments: list[Tensor], frames: int) -> Tensor:
        full, step = (length // self.vae_stride[0] for length in self._segment)
        return self._blended(segments, step, full - step)[:, :, :frames]

    def _clip_of(self, segments: list[Tensor], frames: int) -> Tensor:
        """Segments reach beyond the clip."""
        full, step = self._segment
        return self._blended(segments, step, full - step)[:, :, :frames]

    def _blended(self, segments: list[Tensor], keep: int, extent: int) -> Tensor:
        """The blend over time of `extent` frames; every segment after the first loses the frame it shares, and leaves
        `keep`."""
        if len(segments) == 1:
            return segments[0]
        segments = [segments[0], *(segment[:, :, 1:] for segment in segments[1:])]
        result = [segments[0][:, :, : keep + 1]]
        for before, segment in pairwise(segments):
            result.append(self.model.blend_t(before, segment, extent)[:, :, :keep])
        return torch.cat(result, dim=2)

    @property
    def _segment(self) -> tuple[int, int]:
        """Segments over time, in frames: (length, from one to the next)."""
        return self.model.tile_sample_min_num_frames, self.model.tile_sample_stride_num_frames
