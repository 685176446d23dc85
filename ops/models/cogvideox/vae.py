"""CogVideoX's autoencoder: it names overlaps of tiles instead of strides, and rounds by them."""

from __future__ import annotations

import math

from torch import Tensor

from ops.models.base.tiles import Tiles
from ops.models.base.vae import DiffusersVAE


class CogVideoXVAE(DiffusersVAE):
    """AutoencoderKLCogVideoX. Of an even number of latent frames it makes 4 frames of each, and the first frame of a
    clip is the last of its four."""

    def _set_tiles(self, tiles: Tiles) -> None:
        pairs, ratio = zip(tiles.least, tiles.step, strict=True), self.vae_stride[1]
        height, width = (_overlap(least, step, ratio) for least, step in pairs)
        self.model.enable_tiling(*tiles.least)
        # not by enable_tiling, which takes an overlap of 0 for one that is not given
        self.model.tile_overlap_factor_height, self.model.tile_overlap_factor_width = height, width

    def _latent_tile(self, side: str) -> tuple[int, int]:
        full = getattr(self.model, f"tile_latent_min_{side}")
        blended = int(full * getattr(self.model, f"tile_overlap_factor_{side}"))
        return full - blended, blended

    def _trimmed(self, plane: Tensor, height: int, width: int) -> Tensor:
        """Its tiles end with the clip."""
        return plane


def _overlap(length: int, stride: int, ratio: int) -> float:
    """The overlap factor from which CogVideoX's truncated products give back this stride in pixels and latents."""
    exact = 1 - stride / length
    for factor in (exact, math.nextafter(exact, 1.0), math.nextafter(exact, 0.0)):
        if int(length * (1 - factor)) == stride and int(length / ratio * factor) == (length - stride) // ratio:
            return factor
    raise ValueError(
        f"CogVideoX cannot express tiles of {length} pixels every {stride}: its overlap factor is "
        f"rounded. Use a stride of {length * 3 // 4} or {length // 2} in model.vae.tile_sample_stride."
    )
