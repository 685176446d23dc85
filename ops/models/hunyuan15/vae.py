"""HunyuanVideo-1.5's autoencoder: its class takes the share by which tiles overlap, one for height and width, where
others take two strides, and the masks of its attention are of one clip alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ops.models.base.tiles import Tiles
from ops.models.base.tiling import Tiling
from ops.models.base.vae import DiffusersVAE, LatentFacts, PixelForm

_MASK = "prepare_causal_attention_mask"  # how blocks of attention make theirs


class Hunyuan15VAE(DiffusersVAE):
    """AutoencoderKLHunyuanVideo15. Tiles are cut and blended by `self.tiles`, which may differ there."""

    def __init__(
        self,
        model: nn.Module,
        facts: LatentFacts,
        form: PixelForm,
        tiles: Tiles | None,
        tiling: Tiling,
        device: torch.device,
    ) -> None:
        super().__init__(model, facts, form, tiles, tiling, device)
        for block in model.modules():
            if hasattr(block, _MASK):
                setattr(block, _MASK, _causal_mask)

    def _set_tiles(self, tiles: Tiles) -> None:
        (least_h, least_w), (step_h, _) = tiles.least, tiles.step
        self.model.enable_tiling(
            tile_sample_min_height=least_h,
            tile_sample_min_width=least_w,
            tile_latent_min_height=least_h // self.vae_stride[1],
            tile_latent_min_width=least_w // self.vae_stride[2],
            tile_overlap_factor=1 - step_h / least_h,
        )

    def _latent_tile(self, side: str) -> tuple[int, int]:
        if self.tiles is None:
            return 0, 0  # there is one
        place, ratio = ("height", "width").index(side), self.vae_stride[1]
        kept = self.tiles.step[place] // ratio
        return kept, self.tiles.least[place] // ratio - kept


def _causal_mask(
    frames: int, pixels: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """[n, n] of n = frames * pixels rows, for any number of clips: each sees its own frame and those before.

    The class's own has one for each clip in a place where attention wants its heads, so that several clips fail, and is
    filled row by row: 4,096 calls for a tile of 61 frames.
    """
    del batch_size
    mask = torch.zeros(frames * pixels, frames * pixels, dtype=dtype, device=device)
    for after in range(pixels, frames * pixels, pixels):
        mask[after - pixels : after, after:] = -math.inf
    return mask
