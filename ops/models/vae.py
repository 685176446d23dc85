"""Diffusers' video autoencoders behind one interface: deterministic, normalised latents, encode in tiles.

Diffusers' classes do the arithmetic. What is ours is the plan of tiles: the same cuts that `tiled_encode` and
`tiled_decode` make, but named in advance, so that the workers of a bag take some each and any of them blends the
result.

B batch, T H W frames, height, width in pixels, C latent channels, t h w the latent grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ops.models.base.family import Json
from ops.models.config import VAEConfig, clips_at_once
from ops.models.families import VAE_CLASSES
from ops.models.files import check_files, read_json, variant_of
from ops.models.first_frame import FirstFrame
from ops.models.folders import component, vae_numbers
from ops.models.frozen import Source, frozen
from ops.models.place import on_device
from ops.models.tiles import Tile, whole


class VAE(Protocol):
    """A frozen video autoencoder."""

    channels: int
    vae_stride: tuple[int, int, int]

    def encode(self, video: Tensor) -> Tensor:
        """uint8 [B, T, H, W, 3], or floats from 0 to 255 -> fp32 normalised latents [B, C, t, h, w]; the posterior's
        mode, so deterministic. All B at once: `clip_groups` says of how many that takes little memory."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, C, t, h, w] -> uint8 [B, T, H, W, 3]."""
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

    def decode_tile(self, latents: Tensor, tile: Tile) -> Tensor:
        """The decoder on one tile of `latents` [B, C, t, h, w], fp32; only `join` understands the result."""
        ...

    def join(self, parts: list[tuple[Tile, Tensor]], grid: tuple[int, int, int]) -> Tensor:
        """The video, as `decode` gives it, of latents of `grid` from all their tiles, whose tensors it may change."""
        ...


class DiffusersVAE:
    """A video autoencoder of Diffusers, one of VAE_CLASSES.

    `encode` is plan + encode every tile + blend, so one worker and a bag of workers compute the same numbers; `decode`
    likewise.
    """

    def __init__(self, model: torch.nn.Module, config: VAEConfig, device: torch.device | str) -> None:
        self.device = torch.device(device)
        # Any: three classes of Diffusers, which is untyped, with different switches and tiles.
        self.model: Any = on_device(model, self.device).eval().requires_grad_(False)
        self.config = config
        fields = {"_class_name": type(model).__name__, **model.config}  # type: ignore[dict-item]
        self.channels, self.vae_stride = vae_numbers(fields, type(model).__name__)
        self._mean, self._std = self._normalisation(fields)
        self._cog = type(model).__name__ == "AutoencoderKLCogVideoX"
        self._wan = type(model).__name__ == "AutoencoderKLWan"
        self._of_pictures = VAE_CLASSES[type(model).__name__].of_pictures
        self._layout = _layout_of(config, next(model.parameters()).dtype, self.device, self._of_pictures)
        if self._layout is not None:
            _lay_out(model)
        self._first_dtype = self._set_first_dtype(VAE_CLASSES[type(model).__name__].sees_fp32)
        if config.compile:
            self._compile()
        if config.tiling:
            if not VAE_CLASSES[fields["_class_name"]].can_be_tiled:
                raise ValueError(f"model.vae.tiling: {fields['_class_name']} is encoded whole here. Set it to false.")
            self._set_tiles(config)

    def _normalisation(self, fields: Json) -> tuple[Tensor, Tensor]:
        """(mean, std) that take the model's latents to what the transformer was trained on, as [1, C, 1, 1, 1]."""
        name = fields["_class_name"]
        mean, std = VAE_CLASSES[name].normalisation(fields, self.channels, self.model)
        if len(mean) != self.channels or len(std) != self.channels:
            raise ValueError(
                f"{name} has {self.channels} latent channels but {len(mean)} latents_mean and "
                f"{len(std)} latents_std values in its config.json. Give one of each per channel."
            )
        view = (1, self.channels, 1, 1, 1)
        tensors = [torch.as_tensor(part, device=self.device, dtype=torch.float32).view(view) for part in (mean, std)]
        return tensors[0], tensors[1]

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        _, frames, height, width, _ = video.shape
        tiles = self.plan_tiles(frames, height, width)
        return self.blend([(tile, self.encode_tile(video, tile)) for tile in tiles], (frames, height, width))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        frames, height, width = latents.shape[2:]
        grid = (frames, height, width)
        return self.join([(tile, self.decode_tile(latents, tile)) for tile in self.plan_decode(grid)], grid)

    def plan_tiles(self, frames: int, height: int, width: int) -> list[Tile]:
        starts = [(0, frames)]
        model = self.model
        if getattr(model, "use_framewise_encoding", False) and frames > model.tile_sample_min_num_frames:
            # HunyuanVideo: segments share their first frame with the one before.
            starts = [
                (start, min(start + model.tile_sample_min_num_frames + 1, frames))
                for start in range(0, frames, model.tile_sample_stride_num_frames)
            ]
        rows, columns = [(0, height)], [(0, width)]
        if self.config.tiling and (height > model.tile_sample_min_height or width > model.tile_sample_min_width):
            # With a patch (Wan 2.2) Diffusers counts tiles in patched pixels.
            scale = getattr(model.config, "patch_size", None) or 1
            rows = _cuts(height, self._stride_of("height"), model.tile_sample_min_height, scale)
            columns = _cuts(width, self._stride_of("width"), model.tile_sample_min_width, scale)
        tiles = _grid_of(starts, rows, columns)
        return tiles if len(tiles) > 1 else whole(frames, height, width)

    @torch.no_grad()
    def encode_tile(self, video: Tensor, tile: Tile) -> Tensor:
        """Posterior mean [B, C, t', h', w'] of one tile, not normalised, in the model's dtype."""
        clips = tile.cut(video).to(self.device)
        if not self._of_pictures:
            return self._means(clips)
        frames = clips.flatten(0, 1)
        means = [self._means(some) for some in frames.split(clips_at_once(1, *frames.shape[1:3]))]
        found: Tensor = torch.cat(means).unflatten(0, (len(clips), -1)).transpose(1, 2)
        return found

    def _set_first_dtype(self, sees_fp32: str) -> torch.dtype:
        """What pixels are given in. The named part gets them in fp32, and gives what the rest computes in."""
        dtype: torch.dtype = self.model.dtype
        if not sees_fp32 or dtype.itemsize > 2:
            return dtype
        self.model.get_submodule(sees_fp32).register_forward_hook(lambda module, inputs, output: output.to(dtype))
        return torch.float32

    def _compile(self) -> None:
        self.model.encoder.compile()

    def _means(self, pixels: Tensor) -> Tensor:
        """Posterior means of [B, T, H, W, 3], or for a class of pictures of [B, H, W, 3]."""
        scaled = torch.div(pixels, 127.5).sub_(1.0).to(self._first_dtype).movedim(-1, 1)
        scaled = scaled.contiguous(memory_format=self._layout or torch.contiguous_format)
        with _without(self.model, "use_tiling", "use_framewise_encoding"):
            moments: Tensor = self.model._encode(scaled)
        means: Tensor = moments[:, : self.channels]
        return means

    def plan_decode(self, grid: tuple[int, int, int]) -> list[Tile]:
        """As Diffusers' `_decode` cuts: HunyuanVideo's over time always, others' over height and width with tiling."""
        frames, height, width = grid
        times, rows, columns = [(0, frames)], [(0, height)], [(0, width)]
        stride = self.vae_stride
        if getattr(self.model, "use_framewise_decoding", False):
            full, step = self._segment[0] // stride[0], self._segment[1] // stride[0]
            if frames > full:
                times = [(start, min(start + full + 1, frames)) for start in range(0, frames, step)]
        if self.config.tiling:
            (tile_h, tile_w), (step_h, step_w) = self.config.tile_sample_min, self.config.tile_sample_stride
            if height > tile_h // stride[1] or width > tile_w // stride[2]:
                rows = _cuts(height, step_h // stride[1], tile_h // stride[1], 1)
                columns = _cuts(width, step_w // stride[2], tile_w // stride[2], 1)
        return _grid_of(times, rows, columns)

    @torch.no_grad()
    def decode_tile(self, latents: Tensor, tile: Tile) -> Tensor:
        """Pixels [B, 3, T', H', W'] of one tile, from -1 to 1; Wan's in patches, and not clamped yet."""
        scaled = tile.cut_latents(latents).to(self.device, torch.float32) * self._std + self._mean
        scaled = scaled.to(self.model.dtype).contiguous()
        if self._wan:
            return self._wan_frames(scaled).float()
        with _without(self.model, "use_tiling", "use_framewise_decoding"):
            return self._on_frames(lambda x: self.model.decode(x).sample, scaled).float()

    def _wan_frames(self, latents: Tensor) -> Tensor:
        """Wan's decoder over one tile, frame by frame. Its own `_decode` clamps and unpatchifies, and `tiled_decode`
        does both after tiles are blended."""
        model = self.model
        model.clear_cache()
        rows, found = model.post_quant_conv(latents), []
        for index in range(latents.shape[2]):
            model._conv_idx = [0]
            found.append(
                model.decoder(
                    rows[:, :, index : index + 1],
                    feat_cache=model._feat_map,
                    feat_idx=model._conv_idx,
                    first_chunk=index == 0,
                )
            )
        model.clear_cache()
        return torch.cat(found, dim=2)

    def join(self, parts: list[tuple[Tile, Tensor]], grid: tuple[int, int, int]) -> Tensor:
        pixels = self._joined(parts, grid).movedim(1, -1).add(1.0).mul(127.5)
        return pixels.round_().clamp_(0, 255).to(torch.uint8)

    def _joined(self, parts: list[tuple[Tile, Tensor]], grid: tuple[int, int, int]) -> Tensor:
        """[B, 3, T, H, W], from -1 to 1 and a little beyond."""
        ordered = _ordered(parts, self.plan_decode(grid), f"decode of {'x'.join(map(str, grid))} latents")
        patch = self._patch
        tile, step = self.config.tile_sample_min, self.config.tile_sample_stride
        rows, columns = ((step[i] // patch, (tile[i] - step[i]) // patch) for i in range(2))
        segments = [
            self._blend_plane(list(group), rows, columns)
            for _, group in groupby(ordered, key=lambda part: part[0].segment)
        ]
        pixels = segments[0]
        if len(segments) > 1:
            pixels = self._blend_segments(segments, self._segment[1], self._segment[0] - self._segment[1])
        if patch > 1:
            pixels = _unpatchified(pixels, patch)
        # HunyuanVideo's segments reach beyond the clip; CogVideoX turns an even number of latent frames into 4 per
        # latent, and the first frame is the last of its four.
        frames = (grid[0] - 1) * self.vae_stride[0] + 1
        return pixels[:, :, :frames] if len(segments) > 1 else pixels[:, :, -frames:]

    def _on_frames(self, run: Callable[[Tensor], Tensor], clips: Tensor) -> Tensor:
        """`run` on [B, C, T, H, W], for a class of pictures on each frame by itself."""
        if not self._of_pictures:
            return run(clips)
        frames = run(clips.transpose(1, 2).flatten(0, 1))
        found: Tensor = frames.unflatten(0, (len(clips), -1)).transpose(1, 2)
        return found

    def blend(self, parts: list[tuple[Tile, Tensor]], shape: tuple[int, int, int]) -> Tensor:
        frames, height, width = shape
        latent_frames = (frames - 1) // self.vae_stride[0] + 1
        ordered = _ordered(parts, self.plan_tiles(frames, height, width), f"blend of a {frames}x{height}x{width} clip")
        segments = [
            self._latent_plane([(tile, part.to(torch.float32, copy=True)) for tile, part in group], height, width)
            for _, group in groupby(ordered, key=lambda part: part[0].segment)
        ]
        latents = segments[0]
        if len(segments) > 1:
            keep, full = self._segment[1] // self.vae_stride[0], self._segment[0] // self.vae_stride[0]
            latents = self._blend_segments(segments, keep, full - keep)[:, :, :latent_frames]
        return (latents - self._mean) / self._std

    def _latent_plane(self, parts: list[tuple[Tile, Tensor]], height: int, width: int) -> Tensor:
        """The latents of a plane's tiles, without what stands over the clip's edge."""
        if len(parts) == 1:
            return parts[0][1]
        plane = self._blend_plane(parts, self._latent_tile("height"), self._latent_tile("width"))
        return plane if self._cog else plane[..., : height // self.vae_stride[1], : width // self.vae_stride[2]]

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

    def _blend_segments(self, segments: list[Tensor], keep: int, extent: int) -> Tensor:
        """HunyuanVideo's blend over time of `extent` frames; every segment after the first loses the frame it shares,
        and leaves `keep`."""
        segments = [segments[0], *(segment[:, :, 1:] for segment in segments[1:])]
        result = [segments[0][:, :, : keep + 1]]
        for before, segment in pairwise(segments):
            result.append(self.model.blend_t(before, segment, extent)[:, :, :keep])
        return torch.cat(result, dim=2)

    @property
    def _segment(self) -> tuple[int, int]:
        """HunyuanVideo's segments over time, in frames: (length, from one to the next)."""
        return self.model.tile_sample_min_num_frames, self.model.tile_sample_stride_num_frames

    @property
    def _patch(self) -> int:
        """Wan 2.2's decoder makes squares of so many pixels, which are taken apart last; else 1."""
        return (getattr(self.model.config, "patch_size", None) or 1) if self._wan else 1

    def _set_tiles(self, config: VAEConfig) -> None:
        (min_h, min_w), (stride_h, stride_w) = config.tile_sample_min, config.tile_sample_stride
        for size in (min_h, min_w, stride_h, stride_w):
            if size % self.vae_stride[1]:
                raise ValueError(
                    f"model.vae.tile_sample_min {config.tile_sample_min} and tile_sample_stride "
                    f"{config.tile_sample_stride} must be multiples of {self.vae_stride[1]}, the stride "
                    f"of the VAE."
                )
        if self._cog:  # CogVideoX names overlaps instead of strides
            ratio = self.vae_stride[1]
            self.model.enable_tiling(min_h, min_w, _overlap(min_h, stride_h, ratio), _overlap(min_w, stride_w, ratio))
        else:
            self.model.enable_tiling(
                tile_sample_min_height=min_h,
                tile_sample_min_width=min_w,
                tile_sample_stride_height=stride_h,
                tile_sample_stride_width=stride_w,
            )

    def _stride_of(self, side: str) -> int:
        if not self._cog:
            return int(getattr(self.model, f"tile_sample_stride_{side}"))
        overlap = getattr(self.model, f"tile_overlap_factor_{side}")
        return int(getattr(self.model, f"tile_sample_min_{side}") * (1 - overlap))

    def _latent_tile(self, side: str) -> tuple[int, int]:
        """(rows kept of each tile, rows blended with its neighbour), in latents, as Diffusers rounds them."""
        if self._cog:
            full = getattr(self.model, f"tile_latent_min_{side}")
            blended = int(full * getattr(self.model, f"tile_overlap_factor_{side}"))
            return full - blended, blended
        ratio = self.vae_stride[1] // (getattr(self.model.config, "patch_size", None) or 1)
        full = getattr(self.model, f"tile_sample_min_{side}") // ratio
        kept = getattr(self.model, f"tile_sample_stride_{side}") // ratio
        return kept, full - kept


def clip_groups(clips: int, frames: int, height: int, width: int) -> Sequence[range]:
    """Clips that are encoded together: the memory for that does not grow with the batch."""
    step = clips_at_once(frames, height, width)
    return [range(start, min(start + step, clips)) for start in range(0, clips, step)]


@torch.no_grad()
def latents_of(vae: VAE, frame: FirstFrame, clips: Tensor) -> list[Tensor]:
    """[C + Q, t, h, w] of each of [B, T, H, W, 3]: Q channels that tell of first frames, where there are."""
    latents = list(vae.encode(clips))
    if not frame.is_told:
        return latents
    still = vae.encode(frame.still(clips))
    return [frame.joined(latent, told) for latent, told in zip(latents, still, strict=True)]


@contextmanager
def _without(model: object, *switches: str) -> Iterator[None]:
    """Diffusers' own cutting off: a tile is encoded whole."""
    before = {name: getattr(model, name) for name in switches if hasattr(model, name)}
    for name in before:
        setattr(model, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


def _grid_of(times: list[tuple[int, int]], rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> list[Tile]:
    grid = product(enumerate(times), enumerate(rows), enumerate(columns))
    return [
        Tile(index=index, segment=k, row=i, column=j, frames=span, rows=row, columns=column)
        for index, ((k, span), (i, row), (j, column)) in enumerate(grid)
    ]


def _ordered(parts: list[tuple[Tile, Tensor]], planned: list[Tile], what: str) -> list[tuple[Tile, Tensor]]:
    """In the order of the plan. Raises ValueError unless each tile is there once."""
    ordered = sorted(parts, key=lambda part: part[0].index)
    if [tile.index for tile, _ in ordered] != list(range(len(planned))):
        raise ValueError(
            f"{what} got tiles {[tile.index for tile, _ in ordered]}; it needs each of 0..{len(planned) - 1} once."
        )
    return ordered


def _unpatchified(pixels: Tensor, patch: int) -> Tensor:
    """[B, 3 p p, T, H, W] -> [B, 3, T, H p, W p], in Wan 2.2's order of channels: colour, column, row."""
    batch, channels, frames, height, width = pixels.shape
    squares = pixels.view(batch, channels // patch**2, patch, patch, frames, height, width)
    return squares.permute(0, 1, 4, 5, 3, 6, 2).reshape(batch, -1, frames, height * patch, width * patch)


def _cuts(size: int, stride: int, length: int, scale: int) -> list[tuple[int, int]]:
    patched = size // scale
    return [(start * scale, min(start + length, patched) * scale) for start in range(0, patched, stride)]


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


def _layout_of(
    config: VAEConfig, dtype: torch.dtype, device: torch.device, of_pictures: bool
) -> torch.memory_format | None:
    """How clips lie in memory that it sees; None: plain."""
    usual = device.type == "cuda" and dtype.itemsize == 2
    if config.channels_last == "off" or (config.channels_last == "auto" and not usual):
        return None
    return torch.channels_last if of_pictures else torch.channels_last_3d


def _lay_out(model: torch.nn.Module) -> None:
    """Weights of convolutions with their channels last: what they make is laid out alike."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for weight in model.parameters():
        if weight.dim() in formats:
            weight.data = weight.data.contiguous(memory_format=formats[weight.dim()])


def vae_without_weights(config: VAEConfig, device: str) -> DiffusersVAE:
    """The autoencoder that a folder's config.json describes, with whatever values its class begins with, on the CPU: in
    dtype and layout as on that kind of device."""
    import diffusers

    assert config.path is not None
    fields = read_json(component(config.path, "vae") / "config.json")
    vae_numbers(fields, config.path)
    dtype = getattr(torch, config.dtype_on(device))
    layout = _layout_of(config, dtype, torch.device(device), VAE_CLASSES[fields["_class_name"]].of_pictures)
    config = replace(config, channels_last="off" if layout is None else "on", compile=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a cast afterwards would make every parameter twice
    try:
        return DiffusersVAE(getattr(diffusers, fields["_class_name"]).from_config(fields), config, "cpu")
    finally:
        torch.set_default_dtype(before)


def diffusers_vae(config: VAEConfig, device: torch.device | str, shared: bool = False) -> DiffusersVAE:
    """The autoencoder of a local folder, by the class its config.json names, in the dtype of its settings. `shared` as
    `ops.models.frozen.frozen`.

    Raises ValueError for float16 where config.json says that it overflows there.
    """
    import diffusers  # heavy: seconds to import

    assert config.path is not None
    folder: Path = component(config.path, "vae")
    fields = read_json(folder / "config.json")
    name, dtype = fields.get("_class_name"), config.dtype_on(torch.device(device).type)
    if name not in VAE_CLASSES:
        raise ValueError(f"{folder} is a {name}; known video autoencoders are {', '.join(VAE_CLASSES)}.")
    if dtype == "float16" and fields.get("force_upcast"):
        raise ValueError(
            f"model.vae.dtype is float16, in which the autoencoder of {folder} overflows (force_upcast in its "
            f"config.json). Use bfloat16, which takes as little, or float32."
        )
    check_files(folder)
    kind = getattr(diffusers, name)

    def read(stored: torch.dtype) -> torch.nn.Module:
        model: torch.nn.Module = kind.from_pretrained(
            folder, torch_dtype=stored, local_files_only=True, use_safetensors=True, variant=variant_of(folder)
        )
        return model

    source = Source(folder=folder, read=read, bare=lambda: kind.from_config(fields))
    return DiffusersVAE(frozen(source, getattr(torch, dtype), torch.device(device), shared), config, device)
