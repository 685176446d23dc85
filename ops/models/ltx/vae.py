"""LTX-Video's autoencoder. From 0.9.1 on its decoder gets a time and noise: it makes the last denoising step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ops.flow.noise import normal
from ops.models.base.tiles import Tile
from ops.models.base.vae import NO_NOISE, DecodeNoise, DiffusersVAE


class LTXVAE(DiffusersVAE):
    """AutoencoderKLLTXVideo. Noise is a function of a key, a place in the clip's latents, and a tile: workers that
    share the tiles decode what one does."""

    @torch.no_grad()
    def decode_tile(self, latents: Tensor, tile: Tile, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """As the pipelines decode, which mix noise into latents as the autoencoder has them."""
        if not self.model.config.timestep_conditioning:
            return super().decode_tile(latents, tile)
        scaled = tile.cut_latents(latents).to(self.device, torch.float32) * self._std + self._mean
        if noise.share:
            numbers = normal(noise.key, 0, latents[0].numel(), self.device).view_as(latents[:1])
            scaled = (1 - noise.share) * scaled + noise.share * tile.cut_latents(numbers)
        times = torch.full((len(latents),), noise.time, device=self.device, dtype=self.model.dtype)
        with self._without("use_tiling", "use_framewise_decoding"), self._drawn(noise, tile):
            pixels: Tensor = self.model.decode(scaled.to(self.model.dtype).contiguous(), times).sample
        return pixels.float()

    @contextmanager
    def _drawn(self, noise: DecodeNoise, tile: Tile) -> Iterator[None]:
        """What blocks of 0.9.1's decoder add to what they compute is drawn from a generator of clip and tile, where the
        class draws from the process's own."""
        inside = self.model.decoder.modules()
        blocks = [block for block in inside if getattr(block, "per_channel_scale1", None) is not None]
        if not blocks:
            yield
            return
        generator = torch.Generator(self.device).manual_seed((noise.key.low + tile.index) % 2**63)

        def draws(block: nn.Module, given: tuple[object, ...]) -> tuple[object, ...]:
            return *given[:2], generator

        hooks = [block.register_forward_pre_hook(draws) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
