"""Clips become the same rows on one worker, some at a time, and on a bag, tile by tile; also with first frames."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from actors.worker.encoding import encode_clips
from ops.comm.collectives import Group
from ops.flow.noise import NoiseKey, ScaledNoise
from ops.geometry import Geometry
from ops.models.base.tiles import Tile
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.first_frame import FirstFrame
from ops.models.folders import resolve
from ops.models.image import random_clip
from ops.models.vae import vae_of
from ops.models.wan.config import WanConfig
from ops.models.wan.vae import WanVAE
from tests.long import in_default_run
from tests.ops.conftest import _run_ranks as on_ranks

torch.set_num_threads(1)
CPU = torch.device("cpu")
CLIPS, FRAMES, HEIGHT, WIDTH = 3, 5, 64, 48
DIT = WanConfig(num_layers=1, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16)
IMAGE = ImageConfig(size=32, patch=16, d_model=16, num_layers=2, num_heads=2)
TOLD = {
    "text to video": (DIT, None),
    "told by channels": (replace(DIT, first_frame="channels"), None),
    "told by channels and an embedding": (replace(DIT, first_frame="channels"), IMAGE),
    "told by two frames and their embeddings": (replace(DIT, first_frame="channels", pos_embed_seq_len=10), IMAGE),
}


class AllAtOnce:
    """Stands for what times a cascade; notes how many clips each call had."""

    def __init__(self) -> None:
        self.parts: list[int] = []

    def phase(self, name: str) -> None: ...

    def in_parts(self, encode: Callable[[range], list[Tensor]], samples: range) -> list[Tensor]:
        self.parts.append(len(samples))
        return encode(samples)


def modules(dit: WanConfig, image: ImageConfig | None, dtype: torch.dtype) -> Any:
    stated = VAEConfig(kind="haar", channels=16, temporal=4, spatial=8)  # resolved by hand: the VAE is in no folder
    model, _ = resolve(ModelConfig(dit=dit, vae=stated, text=TextConfig(d_model=8, num_heads=2), image=image))
    torch.manual_seed(0)
    wan = AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    tiles = VAEConfig(kind="diffusers", path="-", tiling=True, tile_sample_min=(32, 32), tile_sample_stride=(24, 24))
    vae = vae_of(torch.nn.Module.to(wan, dtype), tiles, "cpu")
    encoder = random_clip(image, "cpu") if image else None
    return SimpleNamespace(config=model, vae=vae, geometry=Geometry(patch=(1, 2, 2)), image=encoder)


@pytest.mark.parametrize(
    ("dtype", "sigma"),
    [
        (torch.bfloat16, 0.2),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in ((torch.float32, 0.2), (torch.float32, 0.0), (torch.bfloat16, 0.0))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", in_default_run([next(iter(TOLD)), next(reversed(TOLD))], of=TOLD))
def test_a_bag_encodes_the_rows_of_one_worker(how: str, sigma: float, dtype: torch.dtype) -> None:
    """Tiles in bf16 are blended in fp32 and travel in bf16, which changes no bit."""
    made = modules(*TOLD[how], dtype)
    frame = FirstFrame.of(made.config)
    pixels = torch.randint(
        0, 256, (CLIPS, FRAMES, HEIGHT, WIDTH, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    before, alone = pixels.clone(), AllAtOnce()
    two = 2 * FRAMES * HEIGHT * WIDTH
    noise = [ScaledNoise(sigma, NoiseKey.of(0, 0, str(clip))) for clip in range(CLIPS)] if sigma else []
    rows = encode_clips(made, frame, pixels, Group.solo(), alone, CPU, noise, batch_pixels=two)
    assert alone.parts == [2, 1] and len(rows) == CLIPS
    quiet = encode_clips(made, frame, pixels, Group.solo(), AllAtOnce(), CPU, batch_pixels=two)
    changed = [not torch.equal(one, other) for one, other in zip(rows, quiet, strict=True)]
    assert changed == [frame.is_told and sigma > 0] * CLIPS
    assert all(row.shape == (2 * 4 * 3 + frame.tail, frame.width) and row.dtype == torch.float32 for row in rows)
    seen: dict[tuple[int, int], list[int]] = {}  # rank and length of a video -> the clips that its tiles are of

    class Noting(WanVAE):
        def __init__(self, rank: int) -> None:  # ranks are threads here, and Wan's module keeps the frames before
            self.__dict__.update(made.vae.__dict__)
            self.model, self._rank = copy.deepcopy(made.vae.model), rank

        def encode_tile(self, video: Tensor, tile: Tile) -> Tensor:
            seen.setdefault((self._rank, len(video)), []).append(video.data_ptr())
            return super().encode_tile(video, tile)

    def work(group: Group) -> list[Tensor]:
        own = SimpleNamespace(**{**vars(made), "vae": Noting(group.rank)})
        return encode_clips(own, frame, pixels, group, AllAtOnce(), CPU, noise)

    for found in on_ranks(3, work):
        for ours, theirs in zip(found, rows, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6 if dtype == torch.float32 else 0.0, rtol=0)
    assert torch.equal(pixels, before)
    tiles = CLIPS * len(made.vae.plan_tiles(FRAMES, HEIGHT, WIDTH)) * (1 + frame.is_told)
    assert sum(map(len, seen.values())) == tiles and {length for _, length in seen} == {1}


def test_pictures_of_an_image_encoder_are_encoded_as_many_at_a_time_as_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    made = modules(*TOLD["told by channels and an embedding"], torch.float32)
    frame, counts, encode = FirstFrame.of(made.config), [], made.image.encode
    monkeypatch.setattr(made.image, "encode", lambda pictures: (counts.append(len(pictures)), encode(pictures))[1])
    pixels = torch.zeros(5, FRAMES, 32, 32, 3, dtype=torch.uint8)
    two = 2 * FRAMES * 32 * 32
    assert len(encode_clips(made, frame, pixels, Group.solo(), AllAtOnce(), CPU, batch_pixels=two)) == 5
    assert counts == [2, 2, 1]


def test_the_last_frame_stands_after_the_first_in_each_result() -> None:
    made, one = (
        modules(*TOLD[f"told by {how}"], torch.float32)
        for how in ("two frames and their embeddings", "channels and an embedding")
    )
    both, first = FirstFrame.of(made.config), FirstFrame.of(one.config)
    pixels = torch.randint(0, 256, (2, FRAMES, 32, 32, 3), dtype=torch.uint8)
    found = encode_clips(made, both, pixels, Group.solo(), AllAtOnce(), CPU)
    for clip, rows in zip(pixels, found, strict=True):
        images = both.image_of(rows[len(rows) - both.tail :]).split(5)
        for frame, image in zip((clip[0], clip[-1]), images, strict=True):
            torch.testing.assert_close(image, made.image.encode(frame[None])[0])
    same = encode_clips(one, first, pixels, Group.solo(), AllAtOnce(), CPU)
    assert first.tail < both.tail and not torch.equal(found[0][: len(same[0]) - first.tail], same[0][: -first.tail])
