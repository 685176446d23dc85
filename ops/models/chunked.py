"""Video autoencoders that code a clip in chunks of frames, each for itself (Open-Sora 1.2), as a `VAE`.

The chunks are the tiles that the workers of a bag share; nothing is blended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ops.geometry import Geometry
from ops.models.base.family import Json
from ops.models.base.tiles import Tile
from ops.models.base.vae import NO_NOISE, DecodeNoise, PixelForm, frame_bytes
from ops.models.config import VAEConfig
from ops.models.families import VAE_CLASSES
from ops.models.files import check_files, read_json
from ops.models.folders import class_of, component, vae_numbers
from ops.models.frozen import Source, frozen
from ops.models.place import on_device
from ops.models.vae import bare_on, lay_out, layout_of
from ops.models.weights import fill


class ChunkCodec(Protocol):
    """A module that codes one chunk. See `ops.models.stdit3.autoencoder.VideoAutoencoder`."""

    chunk: int

    @property
    def encoders(self) -> Sequence[nn.Module]:
        """The modules that torch.compile compiles."""
        ...

    def encode_chunk(self, pixels: Tensor) -> Tensor: ...
    def decode_chunk(self, latents: Tensor, frames: int) -> Tensor: ...


class ChunkedVAE:
    """The autoencoder `model`, an nn.Module that is a `ChunkCodec`. Latents are in fp32 whatever it computes in."""

    def __init__(
        self,
        model: nn.Module,
        config: VAEConfig,
        numbers: tuple[int, tuple[int, int, int]],
        device: torch.device | str,
    ) -> None:
        """`numbers` are its latent channels and strides over time, height and width."""
        if config.tiling:
            raise ValueError(
                "model.vae.tiling: an autoencoder of chunks is cut over time alone, by itself. Set it to false."
            )
        self.device = torch.device(device)
        self.model = on_device(model, self.device).eval().requires_grad_(False)
        dtype = next(self.model.parameters()).dtype
        self._form = PixelForm(dtype=dtype, layout=layout_of(config, dtype, self.device))
        lay_out(self.model, self._form.layout)
        if config.compile:
            for part in self._codec.encoders:
                part.compile()
        self.channels, self.vae_stride = numbers
        self.geometry = Geometry(vae_stride=self.vae_stride, patch=(1, 1, 1), chunk=self._codec.chunk)

    @property
    def _codec(self) -> ChunkCodec:
        codec: ChunkCodec = self.model  # type: ignore[assignment]  # the same object, by what it can do
        return codec

    def encode(self, video: Tensor) -> Tensor:
        """uint8 [B, T, H, W, 3], or floats from 0 to 255 -> fp32 normalised latents [B, C, t, h, w]."""
        _, frames, height, width, _ = video.shape
        tiles = self.plan_tiles(frames, height, width)
        return self.blend([(tile, self.encode_tile(video, tile)) for tile in tiles], (frames, height, width))

    def decode(self, latents: Tensor, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """Normalised latents [B, C, t, h, w] -> uint8 [B, T, H, W, 3]. A chunk is bytes before the next is decoded."""
        frames, height, width = latents.shape[2:]
        tiles = self.plan_decode((frames, height, width))
        return torch.cat([frame_bytes(self.decode_tile(latents, tile, noise)) for tile in tiles], dim=1)

    def plan_tiles(self, frames: int, height: int, width: int) -> list[Tile]:
        """The chunks of a clip, in pixels."""
        return _chunks(frames, self._codec.chunk, height, width)

    @torch.no_grad()
    def encode_tile(self, video: Tensor, tile: Tile) -> Tensor:
        """Normalised latents [B, C, t', h, w] of one chunk."""
        return self._codec.encode_chunk(self._form.of(tile.cut(video).to(self.device))).float()

    def blend(self, parts: list[tuple[Tile, Tensor]], shape: tuple[int, int, int]) -> Tensor:
        """Latents of the clip of `shape` (frames, height, width) from all its chunks."""
        return _in_order(parts, len(self.plan_tiles(*shape)))

    def plan_decode(self, grid: tuple[int, int, int]) -> list[Tile]:
        """The chunks of latents of this `grid` (t, h, w)."""
        return _chunks(grid[0], self.geometry.latents_of_chunk, *grid[1:])

    @torch.no_grad()
    def decode_tile(self, latents: Tensor, tile: Tile, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """Pixels [B, 3, T', H', W'] of one chunk, from -1 to 1 and a little beyond."""
        del noise
        first, last = (self.geometry.frames_of(latent) for latent in (tile.frames[0], tile.frames[1]))
        part = tile.cut_latents(latents).to(self.device, torch.float32)
        return self._codec.decode_chunk(part.contiguous(), last - first).float()

    def join(self, parts: list[tuple[Tile, Tensor]], grid: tuple[int, int, int]) -> Tensor:
        """The video uint8 [B, T, H, W, 3] of latents of `grid` from all their chunks."""
        return frame_bytes(_in_order(parts, len(self.plan_decode(grid))))


def is_chunked(config: VAEConfig) -> bool:
    """Whether the folder of a config holds such an autoencoder."""
    if config.path is None:
        return False
    name = class_of(read_json(component(config.path, "vae") / "config.json"))
    return name in VAE_CLASSES and VAE_CLASSES[name].own is not None


def chunked_vae(config: VAEConfig, device: torch.device | str, shared: bool) -> ChunkedVAE:
    """The autoencoder of a local folder, in the dtype of its settings. `shared` as `ops.models.frozen.frozen`."""
    path = config.path
    assert path is not None
    folder, fields, made = _described(config)
    check_files(folder)

    def read(stored: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            module = made()
        fill(module, path, stored, part="vae")
        return module

    home = torch.device(device)
    dtype = getattr(torch, config.dtype_on(home.type))
    module = frozen(Source(folder=folder, read=read, bare=made), dtype, home, shared)
    return ChunkedVAE(module, config, vae_numbers(fields, str(folder)), device)


def bare_chunked(config: VAEConfig, device: str) -> ChunkedVAE:
    """The same with whatever values its class begins with, on the CPU: in dtype and layout as on that kind of
    device."""
    folder, fields, made = _described(config)
    with bare_on(config, device) as told:
        return ChunkedVAE(made(), told, vae_numbers(fields, str(folder)), "cpu")


def _described(config: VAEConfig) -> tuple[Path, Json, Callable[[], nn.Module]]:
    """(folder, its config.json, what makes the module without weights)."""
    assert config.path is not None
    folder = component(config.path, "vae")
    fields = read_json(folder / "config.json")
    own = VAE_CLASSES[class_of(fields) or ""].own
    assert own is not None, "is_chunked comes first"
    return folder, fields, partial(own(), fields)


def _chunks(length: int, chunk: int, height: int, width: int) -> list[Tile]:
    return [
        Tile(
            index=index,
            segment=index,
            row=0,
            column=0,
            frames=(start, min(start + chunk, length)),
            rows=(0, height),
            columns=(0, width),
        )
        for index, start in enumerate(range(0, length, chunk))
    ]


def _in_order(parts: list[tuple[Tile, Tensor]], planned: int) -> Tensor:
    """Raises ValueError unless each chunk is there once."""
    ordered = sorted(parts, key=lambda part: part[0].index)
    if [tile.index for tile, _ in ordered] != list(range(planned)):
        raise ValueError(
            f"a clip got chunks {[tile.index for tile, _ in ordered]}; it needs each of 0..{planned - 1} once."
        )
    return torch.cat([part for _, part in ordered], dim=2)
