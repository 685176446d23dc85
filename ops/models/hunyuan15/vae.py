"""HunyuanVideo-1.5's autoencoder: its class takes the share by which tiles overlap, one for height and width, where
others take two strides."""

from __future__ import annotations

from ops.models.base.tiles import Tiles
from ops.models.base.vae import DiffusersVAE


class Hunyuan15VAE(DiffusersVAE):
    """AutoencoderKLHunyuanVideo15. Tiles are cut and blended by `self.tiles`, which may differ there."""

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
