"""Tiles of a video or its latents: what a VAE encodes or decodes on its own, so that a bag of workers can share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Pixels [frames, rows, columns) that one call of the encoder sees, or latents that one of the decoder does.

    Made by `plan_tiles` and `plan_decode`, used by `encode_tile` and `decode_tile`.

    `segment`, `row` and `column` are its place in the grid of tiles; `index` its place in the plan.
    """

    index: int
    segment: int
    row: int
    column: int
    frames: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def pixels(self) -> int:
        """Pixels in the tile: what its encode costs, up to a constant."""
        return (self.frames[1] - self.frames[0]) * (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def cut(self, video: Tensor) -> Tensor:
        """The tile's part of `video` [B, T, H, W, 3]."""
        return video[:, slice(*self.frames), slice(*self.rows), slice(*self.columns)]

    def cut_latents(self, latents: Tensor) -> Tensor:
        """The tile's part of `latents` [B, C, t, h, w]."""
        return latents[:, :, slice(*self.frames), slice(*self.rows), slice(*self.columns)]


def whole(frames: int, height: int, width: int) -> list[Tile]:
    """The plan of a clip, or of its latents, that is taken in one piece."""
    return [Tile(index=0, segment=0, row=0, column=0, frames=(0, frames), rows=(0, height), columns=(0, width))]


def deal(tiles: list[Tile], workers: int) -> list[list[Tile]]:
    """Tiles of each worker: largest first to the worker with least pixels; some may get none. Same on every rank."""
    hands: list[list[Tile]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for tile in sorted(tiles, key=lambda tile: (-tile.pixels, tile.index)):
        target = min(range(workers), key=lambda worker: (loads[worker], worker))
        hands[target].append(tile)
        loads[target] += tile.pixels
    return hands


def frame_bytes(pixels: Tensor) -> Tensor:
    """[B, 3, T, H, W] from -1 to 1 -> uint8 [B, T, H, W, 3]"""
    return pixels.movedim(1, -1).add(1.0).mul(127.5).round_().clamp_(0, 255).to(torch.uint8)
