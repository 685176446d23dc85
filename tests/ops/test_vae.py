"""Diffusers' autoencoders: deterministic, normalised, and tiles that blend to what Diffusers' tiled encode gives."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLWan,
)

from app.bench.timing import peak_bytes
from ops.models.base.tiles import Tile, deal
from ops.models.base.vae import DiffusersVAE
from ops.models.config import VAEConfig
from ops.models.decoding import decode_together
from ops.models.families import VAE_CLASSES
from ops.models.folders import tiling_of
from ops.models.load import build_vae
from ops.models.vae import vae_of
from tests.ops.conftest import RunRanks

FP32_ATOL = 1e-6
TILES = {"tiling": True, "tile_sample_min": (32, 32), "tile_sample_stride": (24, 24)}


def wan() -> torch.nn.Module:
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 2.0, 0.5, 1.0],
    )


def wan_patched() -> torch.nn.Module:
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=16,
        is_residual=True,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )


def hunyuan() -> torch.nn.Module:
    return AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    )


def cogvideox() -> torch.nn.Module:
    return AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
    )


def ltx() -> torch.nn.Module:
    return AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
    )


def mochi() -> torch.nn.Module:
    return AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        latent_channels=4,
        layers_per_block=(1, 1, 1, 1, 1),
        temporal_expansions=(1, 2, 2),
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 2.0, 0.5, 1.0],
    )


FAMILIES = {
    "wan": wan,
    "wan_patched": wan_patched,
    "hunyuan": hunyuan,
    "cogvideox": cogvideox,
    "ltx": ltx,
    "mochi": mochi,
}
SQUARES = ("wan_patched", "ltx")  # of 16 pixels, of which tiles and their strides are multiples


def tiles_of(family: str) -> dict[str, object]:
    return {**TILES, "tile_sample_stride": (16, 16)} if family in SQUARES else TILES


def make(family: str, **settings: object) -> DiffusersVAE:
    torch.manual_seed(0)
    return vae_of(FAMILIES[family](), VAEConfig(kind="diffusers", path="-", **settings), "cpu")  # type: ignore[arg-type]


def clip(frames: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (1, frames, height, width, 3), generator=generator, dtype=torch.uint8)


def by_diffusers(vae: DiffusersVAE, video: torch.Tensor) -> torch.Tensor:
    """The plain path: Diffusers' own encode, its posterior's mode, the pipeline's normalisation."""
    pixels = video.float().div(127.5).sub(1.0).movedim(-1, 1)
    with torch.no_grad():
        latents = vae.model.encode(pixels).latent_dist.mode()
    config = vae.model.config
    if getattr(config, "latents_mean", None) is not None:
        mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1)
        return (latents - mean) / torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)
    return latents * config.scaling_factor


@pytest.mark.parametrize("family", FAMILIES)
def test_encode_equals_diffusers(family: str) -> None:
    vae = make(family)
    video = clip(5, 32, 48)
    latents = vae.encode(video)
    assert latents.shape == (1, 4, 2, 32 // vae.vae_stride[1], 48 // vae.vae_stride[2])
    torch.testing.assert_close(latents, by_diffusers(vae, video), atol=FP32_ATOL, rtol=FP32_ATOL)
    assert torch.equal(latents, vae.encode(video))


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_blend_to_diffusers_tiled_encode(family: str) -> None:
    vae = make(family, **tiles_of(family))
    video = clip(5, 96, 80)
    shape = (5, 96, 80)
    tiles = vae.plan_tiles(*shape)
    assert len(tiles) >= 6
    hands = deal(tiles, 3)
    assert sorted(tile.index for hand in hands for tile in hand) == list(range(len(tiles)))
    parts = [(tile, vae.encode_tile(video, tile)) for hand in reversed(hands) for tile in hand]
    blended = vae.blend(parts, shape)
    vae.model.use_tiling = True
    torch.testing.assert_close(blended, by_diffusers(vae, video), atol=FP32_ATOL, rtol=FP32_ATOL)
    assert torch.equal(blended, vae.blend(parts, shape)), "blend must not change the tiles it is given"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_bag_member_encodes_is_known_from_the_settings_alone(family: str, tmp_path: Path) -> None:
    """Plans price it by the config.json of the folder, without the autoencoder."""
    settings = tiles_of(family)
    vae = make(family, **settings)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": type(vae.model).__name__, **vae.model.config}))
    tiling = tiling_of(VAEConfig(kind="diffusers", path=str(tmp_path), **settings))  # type: ignore[arg-type]
    for shape in ((5, 96, 80), (29, 64, 32), (1, 32, 32)):
        tiles = vae.plan_tiles(*shape)
        for clips, members in ((1, 1), (3, 1), (1, 2), (3, 4)):
            units = [tile for _ in range(clips) for tile in tiles]
            hands = [units[rank::members] for rank in range(members)]
            dealt = tiling.dealt(clips, shape, members)
            assert dealt.pixels == max(sum(tile.pixels for tile in hand) for hand in hands)
            assert dealt.count == max(map(len, hands))
            largest = max(tiles, key=lambda tile: tile.pixels)
            assert dealt.shape == tuple(b - a for a, b in (largest.frames, largest.rows, largest.columns))


def test_hunyuan_is_cut_over_time_as_its_class_says() -> None:
    model = make("hunyuan").model
    assert VAE_CLASSES["AutoencoderKLHunyuanVideo"].segments == (
        model.tile_sample_min_num_frames,
        model.tile_sample_stride_num_frames,
    )
    assert model.use_framewise_encoding
    assert not any(getattr(make(name).model, "use_framewise_encoding", False) for name in ("wan", "cogvideox"))


def test_hunyuan_segments_over_time_equal_diffusers() -> None:
    vae = make("hunyuan", **TILES)
    video = clip(29, 40, 32)
    assert len({tile.segment for tile in vae.plan_tiles(29, 40, 32)}) == 3
    torch.testing.assert_close(vae.encode(video), by_diffusers(vae, video), atol=FP32_ATOL, rtol=FP32_ATOL)


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_equals_diffusers(family: str) -> None:
    vae = make(family)
    latents = torch.randn(1, 4, 2, 2, 2, generator=torch.Generator().manual_seed(2))
    pixels = vae.decode(latents)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (1, 5, 2 * vae.vae_stride[1], 2 * vae.vae_stride[2], 3)
    with torch.no_grad():
        plain = vae.model.decode(latents * vae._std + vae._mean).sample
    plain = plain[:, :, -5:]  # CogVideoX gives eight frames for two latent frames
    assert torch.equal(pixels, ((plain.movedim(1, -1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))


def tiled_by_diffusers(vae: DiffusersVAE, latents: torch.Tensor) -> torch.Tensor:
    """Diffusers' own tiled decode, before its clamp: [B, 3, T, H, W]."""
    vae.model.use_tiling = vae.tiles is not None
    with torch.no_grad():
        return vae.model.decode(latents * vae._std + vae._mean).sample


TILED = {
    "wan": (2, 7, 4),
    "wan_patched": (2, 3, 2),
    "hunyuan": (6, 5, 4),
    "cogvideox": (2, 7, 4),
    "ltx": (2, 4, 3),
    "mochi": (2, 7, 4),
}
"""By family: the grid of latents that its tiles cut. HunyuanVideo's is cut over time, too."""


@pytest.fixture(scope="module", params=TILED)
def tiled(request: pytest.FixtureRequest) -> tuple[DiffusersVAE, torch.Tensor]:
    """An autoencoder with tiles, and latents that need several."""
    generator = torch.Generator().manual_seed(3)
    return make(request.param, **tiles_of(request.param)), torch.randn(1, 4, *TILED[request.param], generator=generator)


def test_decoded_tiles_blend_to_diffusers_tiled_decode(tiled: tuple[DiffusersVAE, torch.Tensor]) -> None:
    vae, latents = tiled
    frames, height, width = latents.shape[2:]
    grid = (frames, height, width)
    tiles = vae.plan_decode(grid)
    assert len(tiles) >= 6
    joined = vae._joined([(tile, vae.decode_tile(latents, tile)) for tile in reversed(tiles)], grid)
    wanted = tiled_by_diffusers(vae, latents)[:, :, -joined.shape[2] :]  # CogVideoX: of an even number some are cut
    torch.testing.assert_close(joined.clamp(-1, 1), wanted.clamp(-1, 1), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=rf"needs each of 0\.\.{len(tiles) - 1} once"):
        vae.join([(tiles[0], joined)], grid)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_bag_decodes_the_clip_of_one_worker(
    tiled: tuple[DiffusersVAE, torch.Tensor], workers: int, run_ranks: RunRanks
) -> None:
    vae, latents = tiled
    one = vae.decode(latents)[0]
    clips = [latents[0], latents[0].flip(-1)]
    mine: list[list[int]] = [[] for _ in range(workers)]

    class Counted(type(vae)):  # type: ignore[misc]  # of one of several classes
        """Notes which tiles a rank has decoded. Ranks are threads here, and Wan's module keeps the frames before."""

        def __init__(self, rank: int) -> None:
            self.__dict__.update(vae.__dict__)
            self.model, self._rank = copy.deepcopy(vae.model), rank

        def decode_tile(self, latents: torch.Tensor, tile: Tile) -> torch.Tensor:
            mine[self._rank].append(tile.index)
            return super().decode_tile(latents, tile)

    made = run_ranks(workers, lambda group: decode_together(Counted(group.rank), clips, group, torch.device("cpu")))
    assert len(made[0]) == 2 and not any(made[1:])
    assert torch.equal(made[0][0], one) and not torch.equal(made[0][1], one)
    frames, height, width = latents.shape[2:]
    total = 2 * len(vae.plan_decode((frames, height, width)))
    assert sum(map(len, mine)) == total and max(map(len, mine)) == -(-total // workers)


@pytest.fixture(scope="module")
def pictures() -> DiffusersVAE:
    """A class that codes frames one by one."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = AutoencoderKL(block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=2, **blocks)
    return vae_of(model, VAEConfig(kind="diffusers", path="-"), "cpu")


def test_every_frame_of_a_picture_vae_is_a_tile(pictures: DiffusersVAE) -> None:
    """What they decode to is what one batch of them decodes to."""
    latents = torch.randn(2, 4, 5, 6, 4, generator=torch.Generator().manual_seed(5))
    assert [tile.frames for tile in pictures.plan_decode((5, 6, 4))] == [(n, n + 1) for n in range(5)]
    frames = (latents * pictures._std + pictures._mean).transpose(1, 2).flatten(0, 1)
    with torch.no_grad():
        together = pictures.model.decode(frames).sample.unflatten(0, (2, 5)).movedim(2, -1)
    away = pictures.decode(latents).float() - (together + 1).mul(127.5).round().clamp(0, 255)
    assert away.abs().max() <= 1  # rounding to 8 bits
    with pytest.raises(ValueError, match="AutoencoderKL codes each frame by itself and has no tiles"):
        vae_of(pictures.model, VAEConfig(kind="diffusers", path="-", **TILES), "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_bag_shares_the_frames_of_a_picture_vae(pictures: DiffusersVAE, workers: int, run_ranks: RunRanks) -> None:
    latents = torch.randn(4, 5, 6, 4, generator=torch.Generator().manual_seed(6))
    one = pictures.decode(latents[None])[0]
    made = run_ranks(workers, lambda group: decode_together(pictures, [latents], group, torch.device("cpu")))
    assert torch.equal(made[0][0], one) and not any(made[1:])


def test_more_frames_of_a_picture_vae_take_no_more_memory_than_their_bytes(pictures: DiffusersVAE) -> None:
    def peak(frames: int) -> int:
        latents = torch.randn(1, 4, frames, 16, 16, generator=torch.Generator().manual_seed(7))
        return peak_bytes(lambda: pictures.decode(latents), torch.device("cpu"))

    one_frame = 32 * 32 * 3
    assert peak(12) - peak(2) <= 2 * 10 * one_frame  # beside the others, and joined with them


def test_a_clip_of_one_tile_is_decoded_by_one(run_ranks: RunRanks) -> None:
    codec = build_vae(VAEConfig(temporal=2, spatial=2, channels=8), "cpu")
    latents = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(4))
    made = run_ranks(2, lambda group: decode_together(codec, [latents], group, torch.device("cpu")))
    assert torch.equal(made[0][0], codec.decode(latents[None])[0]) and made[1] == []


def test_blend_names_missing_tiles() -> None:
    vae = make("wan", **TILES)
    tiles = vae.plan_tiles(1, 64, 64)
    parts = [(tile, torch.zeros(1, 4, 1, 4, 4)) for tile in tiles[1:]]
    with pytest.raises(ValueError, match=r"needs each of 0\.\.8 once"):
        vae.blend(parts, (1, 64, 64))


@pytest.mark.parametrize("family", ["wan", "hunyuan", "cogvideox"])
def test_folder_loads_by_its_own_class(family: str, tmp_path: Path) -> None:
    vae = make(family)
    vae.model.save_pretrained(tmp_path / "vae")
    loaded = build_vae(VAEConfig(kind="diffusers", path=str(tmp_path)), "cpu")
    video = clip(5, 16, 16)
    assert torch.equal(loaded.encode(video), vae.encode(video))


def test_a_folder_whose_weights_are_a_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    torch.save({"weight": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(ValueError, match=r"diffusion_pytorch_model\.bin, a pickle"):
        build_vae(VAEConfig(kind="diffusers", path=str(tmp_path)))


def test_unknown_class_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLAllegro"}')
    with pytest.raises(ValueError, match="is a AutoencoderKLAllegro; known video autoencoders are AutoencoderKLWan"):
        build_vae(VAEConfig(kind="diffusers", path=str(tmp_path)), "cpu")
