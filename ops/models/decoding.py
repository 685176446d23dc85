"""Decoding of latents by the members of a bag: their tiles dealt out, decoded, and blended by the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.comm.collectives import Group
from ops.comm.units import share_units
from ops.models.base.tiles import Tile
from ops.models.base.vae import NO_NOISE, VAE, DecodeNoise


@torch.no_grad()
def decode_together(
    vae: VAE, latents: Sequence[Tensor], group: Group, device: torch.device, noise: Sequence[DecodeNoise] = ()
) -> list[Tensor]:
    """uint8 [T, H, W, 3] of each of `latents` [C, t, h, w] on the first rank; nothing on the others.

    Collective: every rank of `group` has all latents, and the `noise` of each for an autoencoder that takes some. The
    tiles of all clips (over height and width with `model.vae.tiling`; over time HunyuanVideo's segments, chunks of
    frames, and each frame of an autoencoder of pictures) are dealt round robin, and joined as `vae.decode` does: the
    same clip as that of one worker. A clip of one tile (no tiling; haar) is decoded by one.
    """
    noises = noise or [NO_NOISE] * len(latents)
    if group.size == 1:
        return [vae.decode(one[None], own)[0] for one, own in zip(latents, noises, strict=True)]
    grids = [_grid(one) for one in latents]
    plans = [vae.plan_decode(grid) for grid in grids]
    units: list[tuple[int, Tile]] = [(clip, tile) for clip, plan in enumerate(plans) for tile in plan]
    mine = range(group.rank, len(units), group.size)
    found = {u: vae.decode_tile(latents[units[u][0]][None], units[u][1], noises[units[u][0]]) for u in mine}
    found = share_units(found, len(units), group, device, only=0)
    if group.rank:
        return []
    return [
        vae.join([(tile, found[u]) for u, (of, tile) in enumerate(units) if of == clip], grid)[0]
        for clip, grid in enumerate(grids)
    ]


def _grid(latents: Tensor) -> tuple[int, int, int]:
    _, frames, height, width = latents.shape
    return frames, height, width
