"""Tiles of a video or its latents: what a VAE encodes or decodes on its own, so that a bag of workers can share it. And
how many clips it takes together.

Imports neither torch nor Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VAE_BATCH_PIXELS = 1 << 20  # short clips and pictures are encoded together up to this number of pixels


def clips_at_once(frames: int, height: int, width: int, *, batch_pixels: int = VAE_BATCH_PIXELS) -> int:
    """How many clips of this shape a VAE encodes together, up to `batch_pixels`: what more of them take of memory is
    their results."""
    return max(1, batch_pixels // (frames * height * width))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How clips are cut over (height, width), in pixels: clips larger than `least` into tiles of this size, one every
    `step`."""

    least: tuple[int, int]
    step: tuple[int, int]

    def check(self, stride: int) -> None:
        """Raises ValueError for tiles that do not fall on the latents of a VAE of this stride."""
        if any(size % stride for size in (*self.least, *self.step)):
            raise ValueError(
                f"model.vae.tile_sample_min {self.least} and tile_sample_stride {self.step} must be multiples of "
                f"{stride}, the stride of the VAE."
            )


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
