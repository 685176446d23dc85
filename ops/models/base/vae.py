"""Diffusers' video autoencoders behind one interface: deterministic, normalised latents, encode in tiles.

Diffusers' classes do the arithmetic. What is ours is the plan of tiles: the same cuts that `tiled_encode` and
`tiled_decode` make, but named in advance, so that the workers of a bag take some each and any of them blends the
result.

B batch, T H W frames, height, width in pixels, C latent channels, t h w the latent grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, Protocol

import torch
from torch import Tensor

from ops.flow.noise import NoiseKey, ScaledNoise
from ops.models.base.tiles import Tile, Tiles, whole
from ops.models.base.tiling import Tiling, cuts

_NO_KEY = NoiseKey(0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeNoise:
    """What an autoencoder that decodes with a timestep is given beside latents (LTX-Video from 0.9.1 on); others take
    none of it. A `share` of noise is mixed into the latents, which are not normalised, and the decoder gets `time`;
    both are from 0 to 1."""

    time: float = 0.0
    share: float = 0.0
    key: NoiseKey = _NO_KEY


NO_NOISE = DecodeNoise()


class VAE(Protocol):
    """A frozen video autoencoder."""

    channels: int
    vae_stride: tuple[int, int, int]

    def encode(self, video: Tensor) -> Tensor:
        """uint8 [B, T, H, W, 3], or floats from 0 to 255 -> fp32 normalised latents [B, C, t, h, w]; the posterior's
        mode, so deterministic. All B at once: `clip_groups` says of how many that takes little memory."""
        ...

    def decode(self, latents: Tensor, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """Normalised latents [B, C, t, h, w] -> uint8 [B, T, H, W, 3]. Each clip of several gets the same noise."""
        ...

    def plan_tiles(self, frames: int, height: int, width: int) -> list[Tile]:
        """The tiles whose encodes, blended, are the encode of a clip of this shape. One tile: nothing to deal."""
        ...

    def encode_tile(self, video: Tensor, tile: Tile) -> Tensor:
        """The encoder on one tile of `video` (the whole clip); only `blend` understands the result."""
        ...

    def blend(self, parts: list[tuple[Tile, Tensor]], shape: tuple[int, int, int]) -> Tensor:
        """Latents, as `encode` gives them, of the clip of `shape` (frames, height, width) from all its tiles."""
        ...

    def plan_decode(self, grid: tuple[int, int, int]) -> list[Tile]:
        """The tiles of latents of this `grid` (t, h, w) whose decodes, blended, are their decode."""
        ...

    def decode_tile(self, latents: Tensor, tile: Tile, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """The decoder on one tile of `latents` [B, C, t, h, w] (the whole clip's), fp32; only `join` understands the
        result."""
        ...

    def join(self, parts: list[tuple[Tile, Tensor]], grid: tuple[int, int, int]) -> Tensor:
        """The video, as `decode` gives it, of latents of `grid` from all their tiles, whose tensors it may change."""
        ...


class ToldFrame(Protocol):
    """What a transformer gets of a clip's first frame (`ops.models.first_frame.FirstFrame`)."""

    @property
    def is_told(self) -> bool: ...

    def still(self, video: Tensor, noise: Sequence[ScaledNoise] = ()) -> Tensor: ...

    def joined(self, latent: Tensor, still: Tensor) -> Tensor: ...


@torch.no_grad()
def latents_of(vae: VAE, frame: ToldFrame, clips: Tensor, noise: Sequence[ScaledNoise] = ()) -> list[Tensor]:
    """[C + Q, t, h, w] of each of [B, T, H, W, 3]: Q channels that tell of first frames, where there are; with `noise`
    on these, one for each clip."""
    latents = list(vae.encode(clips))
    if not frame.is_told:
        return latents
    still = vae.encode(frame.still(clips, noise))
    return [frame.joined(latent, told) for latent, told in zip(latents, still, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentFacts:
    """Numbers of an autoencoder's latents. `mean` and `std` [C], fp32 on its device, take them to what the transformer
    was trained on."""

    channels: int
    stride: tuple[int, int, int]  # over t, h, w
    mean: Tensor
    std: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelForm:
    """How an encoder is given clips: their dtype, and how they lie in memory."""

    dtype: torch.dtype
    layout: torch.memory_format

    def of(self, pixels: Tensor) -> Tensor:
        """Colours from 0 to 255 [B, ..., 3] -> from -1 to 1 [B, 3, ...]."""
        scaled = torch.div(pixels, 127.5).sub_(1.0).to(self.dtype).movedim(-1, 1)
        return scaled.contiguous(memory_format=self.layout)


class DiffusersVAE:
    """A video autoencoder of Diffusers.

    `encode` is plan + encode every tile + blend, so one worker and a bag of workers compute the same numbers; `decode`
    likewise. This one cuts no clip over time, names strides of tiles, and trims what stands over the edge; a class that
    does otherwise is a subclass in the folder of its family (`VAEClass.runs`). What these define anew is at the end.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        facts: LatentFacts,
        form: PixelForm,
        tiles: Tiles | None,
        tiling: Tiling,
        device: torch.device,
    ) -> None:
        """Take a module that lies on the device. Clips are cut by `tiling` before they are encoded; with `tiles` also
        their latents over height and width."""
        self.device = device
        # Any: classes of Diffusers, which is untyped, with different switches and tiles.
        self.model: Any = model
        self.channels, self.vae_stride = facts.channels, facts.stride
        self._mean, self._std = (part.view(1, -1, 1, 1, 1) for part in (facts.mean, facts.std))
        self._form, self.tiles, self.tiling = form, tiles, tiling
        if tiles is not None:
            tiles.check(self.vae_stride[1])
            self._set_tiles(tiles)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        _, frames, height, width, _ = video.shape
        tiles = self.plan_tiles(frames, height, width)
        return self.blend([(tile, self.encode_tile(video, tile)) for tile in tiles], (frames, height, width))

    @torch.no_grad()
    def decode(self, latents: Tensor, noise: DecodeNoise = NO_NOISE) -> Tensor:
        frames, height, width = latents.shape[2:]
        grid = (frames, height, width)
        return self.join([(tile, self.decode_tile(latents, tile, noise)) for tile in self.plan_decode(grid)], grid)

    def plan_tiles(self, frames: int, height: int, width: int) -> list[Tile]:
        tiles = _grid_of(*self.tiling.spans(frames, height, width))
        return tiles if len(tiles) > 1 else whole(frames, height, width)

    @torch.no_grad()
    def encode_tile(self, video: Tensor, tile: Tile) -> Tensor:
        """Posterior mean [B, C, t', h', w'] of one tile, not normalised, in the model's dtype."""
        return self._means(tile.cut(video).to(self.device))

    def _means(self, pixels: Tensor) -> Tensor:
        """Posterior means of [B, T, H, W, 3], or for a class of pictures of [B, H, W, 3]."""
        scaled = self._form.of(pixels)
        with self._without("use_tiling", "use_framewise_encoding"):
            moments: Tensor = self.model._encode(scaled)
        means: Tensor = moments[:, : self.channels]
        return means

    def plan_decode(self, grid: tuple[int, int, int]) -> list[Tile]:
        """As Diffusers' `_decode` cuts."""
        frames, height, width = grid
        rows, columns = [(0, height)], [(0, width)]
        stride = self.vae_stride
        if self.tiles:
            (tile_h, tile_w), (step_h, step_w) = self.tiles.least, self.tiles.step
            if height > tile_h // stride[1] or width > tile_w // stride[2]:
                rows = cuts(height, step_h // stride[1], tile_h // stride[1])
                columns = cuts(width, step_w // stride[2], tile_w // stride[2])
        return _grid_of(self._decoded_spans(frames), rows, columns)

    @torch.no_grad()
    def decode_tile(self, latents: Tensor, tile: Tile, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """Pixels [B, 3, T', H', W'] of one tile, from -1 to 1; only `join` understands them."""
        del noise
        scaled = tile.cut_latents(latents).to(self.device, torch.float32) * self._std + self._mean
        return self._decoded(scaled.to(self.model.dtype).contiguous()).float()

    def join(self, parts: list[tuple[Tile, Tensor]], grid: tuple[int, int, int]) -> Tensor:
        return frame_bytes(self._joined(parts, grid))

    def _joined(self, parts: list[tuple[Tile, Tensor]], grid: tuple[int, int, int]) -> Tensor:
        """[B, 3, T, H, W], from -1 to 1 and a little beyond."""
        ordered = _ordered(parts, self.plan_decode(grid), f"decode of {'x'.join(map(str, grid))} latents")
        rows, columns = self._decoded_tile(0), self._decoded_tile(1)
        segments = [
            self._blend_plane(list(group), rows, columns)
            for _, group in groupby(ordered, key=lambda part: part[0].segment)
        ]
        return self._clip_of(segments, (grid[0] - 1) * self.vae_stride[0] + 1)

    def blend(self, parts: list[tuple[Tile, Tensor]], shape: tuple[int, int, int]) -> Tensor:
        frames, height, width = shape
        ordered = _ordered(parts, self.plan_tiles(frames, height, width), f"blend of a {frames}x{height}x{width} clip")
        segments = [
            self._latent_plane([(tile, part.to(torch.float32, copy=True)) for tile, part in group], height, width)
            for _, group in groupby(ordered, key=lambda part: part[0].segment)
        ]
        latents = self._latents_of(segments, (frames - 1) // self.vae_stride[0] + 1)
        return (latents - self._mean) / self._std

    def _latent_plane(self, parts: list[tuple[Tile, Tensor]], height: int, width: int) -> Tensor:
        """The latents of a plane's tiles, without what stands over the clip's edge."""
        if len(parts) == 1:
            return parts[0][1]
        plane = self._blend_plane(parts, self._latent_tile("height"), self._latent_tile("width"))
        return self._trimmed(plane, height // self.vae_stride[1], width // self.vae_stride[2])

    def _blend_plane(self, parts: list[tuple[Tile, Tensor]], rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Diffusers' order: a tile is blended in place with the blended tile above, then with the one on its left.
        Of each, `rows` and `columns` say (kept, blended with its neighbour)."""
        if len(parts) == 1:
            return parts[0][1]
        (keep_h, blend_h), (keep_w, blend_w) = rows, columns
        by_row = [[part for _, part in group] for _, group in groupby(parts, key=lambda part: part[0].row)]
        lines = []
        for i, row in enumerate(by_row):
            line = []
            for j, tile in enumerate(row):
                if i > 0:
                    tile = self.model.blend_v(by_row[i - 1][j], tile, blend_h)
                if j > 0:
                    tile = self.model.blend_h(row[j - 1], tile, blend_w)
                line.append(tile[:, :, :, :keep_h, :keep_w])
            lines.append(torch.cat(line, dim=-1))
        return torch.cat(lines, dim=-2)

    @contextmanager
    def _without(self, *switches: str) -> Iterator[None]:
        """Diffusers' own cutting off: a tile is encoded or decoded whole."""
        before = {name: getattr(self.model, name) for name in switches if hasattr(self.model, name)}
        for name in before:
            setattr(self.model, name, False)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.model, name, value)

    # -- what classes do in ways of their own -------------------------------------------------------------------------

    @property
    def _encoder_patch(self) -> int:
        """Pixels of a side of what the encoder cuts: of a patch, where it makes patches first."""
        return 1

    def _decoded_spans(self, frames: int) -> list[tuple[int, int]]:
        """Latent frames of each segment over time that is decoded by itself."""
        return [(0, frames)]

    def _latents_of(self, segments: list[Tensor], frames: int) -> Tensor:
        """The first `frames` latent frames of all segments."""
        return segments[0]

    def _clip_of(self, segments: list[Tensor], frames: int) -> Tensor:
        """The last `frames` frames of what was decoded of all segments."""
        return segments[0][:, :, -frames:]

    def _decoded(self, latents: Tensor) -> Tensor:
        """Pixels of one tile's latents, which are not normalised."""
        with self._without("use_tiling", "use_framewise_decoding"):
            pixels: Tensor = self.model.decode(latents).sample
        return pixels

    def _set_tiles(self, tiles: Tiles) -> None:
        """Tell the module of its tiles."""
        (least_h, least_w), (step_h, step_w) = tiles.least, tiles.step
        self.model.enable_tiling(
            tile_sample_min_height=least_h,
            tile_sample_min_width=least_w,
            tile_sample_stride_height=step_h,
            tile_sample_stride_width=step_w,
        )

    def _latent_tile(self, side: str) -> tuple[int, int]:
        """(rows kept of each tile, rows blended with its neighbour), in latents, as Diffusers rounds them."""
        ratio = self.vae_stride[1] // self._encoder_patch
        full = getattr(self.model, f"tile_sample_min_{side}") // ratio
        kept = getattr(self.model, f"tile_sample_stride_{side}") // ratio
        return kept, full - kept

    def _decoded_tile(self, side: int) -> tuple[int, int]:
        """The same of decoded tiles, in what `_decoded` gives."""
        if self.tiles is None:
            return 0, 0  # there is one
        return self.tiles.step[side], self.tiles.least[side] - self.tiles.step[side]

    def _trimmed(self, plane: Tensor, height: int, width: int) -> Tensor:
        """Blended latents without what stands over the clip's edge."""
        return plane[..., :height, :width]


def frame_bytes(pixels: Tensor) -> Tensor:
    """[B, 3, T, H, W] from -1 to 1 -> uint8 [B, T, H, W, 3]"""
    return pixels.movedim(1, -1).add(1.0).mul(127.5).round_().clamp_(0, 255).to(torch.uint8)


def _grid_of(times: list[tuple[int, int]], rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> list[Tile]:
    grid = product(enumerate(times), enumerate(rows), enumerate(columns))
    return [
        Tile(index=index, segment=k, row=i, column=j, frames=span, rows=row, columns=column)
        for index, ((k, span), (i, row), (j, column)) in enumerate(grid)
    ]


def _ordered(parts: list[tuple[Tile, Tensor]], planned: list[Tile], what: str) -> list[tuple[Tile, Tensor]]:
    """The parts in the order of the plan. Raises ValueError unless each tile is there once."""
    ordered = sorted(parts, key=lambda part: part[0].index)
    if [tile.index for tile, _ in ordered] != list(range(len(planned))):
        raise ValueError(
            f"{what} got tiles {[tile.index for tile, _ in ordered]}; it needs each of 0..{len(planned) - 1} once."
        )
    return ordered
