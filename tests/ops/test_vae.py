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
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLWan,
)

from app.bench.timing import peak_bytes
from ops.models.base.picture_vae import PictureVAE
from ops.models.base.tiles import VAE_BATCH_PIXELS, Tile, deal
from ops.models.base.vae import NO_NOISE, DecodeNoise, DiffusersVAE
from ops.models.config import VAEConfig
from ops.models.decoding import decode_together
from ops.models.families import VAE_CLASSES
from ops.models.folders import tiling_of
from ops.models.forecast import vae_need
from ops.models.load import build_vae
from ops.models.vae import clip_groups, vae_of
from ops.storages import StorageCount
from ops.units import GIB
from tests.ops.channels_last import check_channels_last
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


def hunyuan(attends: bool = False) -> torch.nn.Module:
    return AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=attends,
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


def ltx_timed() -> torch.nn.Module:
    """As of 0.9.5 and later, whose decoder gets a time."""
    return AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("LTXVideo095DownBlock3D",) * 3,
        downsample_type=("spatial", "temporal", "spatiotemporal"),
        layers_per_block=(1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True),
        decoder_block_out_channels=(8, 16),
        decoder_layers_per_block=(1, 1, 1),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        upsample_residual=(True, True),
        upsample_factor=(2, 2),
        timestep_conditioning=True,
        spatial_compression_ratio=16,
        temporal_compression_ratio=4,
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


def hunyuan15() -> torch.nn.Module:
    return AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )


FAMILIES = {
    "wan": wan,
    "wan_patched": wan_patched,
    "hunyuan": hunyuan,
    "hunyuan15": hunyuan15,
    "cogvideox": cogvideox,
    "ltx": ltx,
    "ltx_timed": ltx_timed,
    "mochi": mochi,
}
SQUARES = ("wan_patched", "ltx", "ltx_timed")  # of 16 pixels, of which tiles and their strides are multiples


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
def test_a_diffusers_whose_tiles_cannot_be_switched_off_is_refused(family: str) -> None:
    """It would cut each of our tiles again, without a word."""
    model = FAMILIES[family]()
    model.use_tiles = model.__dict__.pop("use_tiling")
    with pytest.raises(
        ValueError, match=rf"{type(model).__name__} of Diffusers [\d.]+ has no use_tiling, .*Install one"
    ):
        vae_of(model, VAEConfig(kind="diffusers", path="-"), "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_several_clips_at_once_are_coded_as_each_alone(family: str) -> None:
    """Workers encode short clips and pictures together (`clip_groups`)."""
    vae, videos = make(family), torch.cat([clip(5, 32, 32), 255 - clip(5, 32, 32)])
    latents = vae.encode(videos)
    torch.testing.assert_close(latents, torch.cat([vae.encode(video[None]) for video in videos]), atol=1e-5, rtol=1e-4)
    pixels = torch.cat([vae.decode(latent[None]) for latent in latents])
    assert (vae.decode(latents).int() - pixels.int()).abs().max() <= 1  # rounding to 8 bits


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
    assert tiling == vae.tiling
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


def plainly_decoded(vae: DiffusersVAE, latents: torch.Tensor) -> torch.Tensor:
    """By Diffusers' class; a decoder that takes a time gets 0, as its pipelines do by default."""
    time = torch.zeros(len(latents)) if getattr(vae.model.config, "timestep_conditioning", False) else None
    given = (latents * vae._std + vae._mean, *([] if time is None else [time]))
    pixels: torch.Tensor = vae.model.decode(*given).sample
    return pixels


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_equals_diffusers(family: str) -> None:
    vae = make(family)
    latents = torch.randn(1, 4, 2, 2, 2, generator=torch.Generator().manual_seed(2))
    pixels = vae.decode(latents)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (1, 5, 2 * vae.vae_stride[1], 2 * vae.vae_stride[2], 3)
    with torch.no_grad():
        plain = plainly_decoded(vae, latents)
    plain = plain[:, :, -5:]  # CogVideoX gives eight frames for two latent frames
    assert torch.equal(pixels, ((plain.movedim(1, -1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))


def tiled_by_diffusers(vae: DiffusersVAE, latents: torch.Tensor) -> torch.Tensor:
    """Diffusers' own tiled decode, before its clamp: [B, 3, T, H, W]."""
    vae.model.use_tiling = vae.tiles is not None
    with torch.no_grad():
        return plainly_decoded(vae, latents)


TILED = {
    "wan": (2, 7, 4),
    "wan_patched": (2, 3, 2),
    "hunyuan": (6, 5, 4),
    "hunyuan15": (2, 7, 4),
    "cogvideox": (2, 7, 4),
    "ltx": (2, 4, 3),
    "ltx_timed": (2, 4, 3),
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

        def decode_tile(self, latents: torch.Tensor, tile: Tile, noise: DecodeNoise = NO_NOISE) -> torch.Tensor:
            mine[self._rank].append(tile.index)
            return super().decode_tile(latents, tile, noise)

    made = run_ranks(workers, lambda group: decode_together(Counted(group.rank), clips, group, torch.device("cpu")))
    assert len(made[0]) == 2 and not any(made[1:])
    assert torch.equal(made[0][0], one) and not torch.equal(made[0][1], one)
    frames, height, width = latents.shape[2:]
    total = 2 * len(vae.plan_decode((frames, height, width)))
    assert sum(map(len, mine)) == total and max(map(len, mine)) == -(-total // workers)


@pytest.fixture(scope="module")
def picture_vae() -> DiffusersVAE:
    """A class that codes frames one by one."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = AutoencoderKL(block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=2, **blocks)
    return vae_of(model, VAEConfig(kind="diffusers", path="-"), "cpu")


def test_every_frame_of_a_picture_vae_is_a_tile(picture_vae: DiffusersVAE) -> None:
    """What they decode to is what one batch of them decodes to."""
    latents = torch.randn(2, 4, 5, 6, 4, generator=torch.Generator().manual_seed(5))
    assert [tile.frames for tile in picture_vae.plan_decode((5, 6, 4))] == [(n, n + 1) for n in range(5)]
    frames = (latents * picture_vae._std + picture_vae._mean).transpose(1, 2).flatten(0, 1)
    with torch.no_grad():
        together = picture_vae.model.decode(frames).sample.unflatten(0, (2, 5)).movedim(2, -1)
    away = picture_vae.decode(latents).float() - (together + 1).mul(127.5).round().clamp(0, 255)
    assert away.abs().max() <= 1  # rounding to 8 bits
    with pytest.raises(ValueError, match="AutoencoderKL codes each frame by itself and has no tiles"):
        vae_of(picture_vae.model, VAEConfig(kind="diffusers", path="-", **TILES), "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_bag_shares_the_frames_of_a_picture_vae(picture_vae: DiffusersVAE, workers: int, run_ranks: RunRanks) -> None:
    latents = torch.randn(4, 5, 6, 4, generator=torch.Generator().manual_seed(6))
    one = picture_vae.decode(latents[None])[0]
    made = run_ranks(workers, lambda group: decode_together(picture_vae, [latents], group, torch.device("cpu")))
    assert torch.equal(made[0][0], one) and not any(made[1:])


def test_more_frames_of_a_picture_vae_take_no_more_memory_than_their_bytes(picture_vae: DiffusersVAE) -> None:
    def peak(frames: int) -> int:
        latents = torch.randn(1, 4, frames, 16, 16, generator=torch.Generator().manual_seed(7))
        return peak_bytes(lambda: picture_vae.decode(latents), torch.device("cpu"))

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


@pytest.mark.parametrize("stride", [(64, 64), (48, 64)])
def test_tiles_of_cogvideox_need_not_overlap(stride: tuple[int, int]) -> None:
    vae = make("cogvideox", tiling=True, tile_sample_min=(64, 64), tile_sample_stride=stride)
    assert vae.encode(clip(1, 128, 128)).shape[-2:] == (16, 16)


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


def pictures() -> torch.nn.Module:
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[8, 8, 8],
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=4,
    )


EVERY = {**FAMILIES, "pictures": pictures}
CLOSE_DB = 40.0  # of latents in 16 bits beside those in fp32


def every(family: str, dtype: torch.dtype = torch.float32, **settings: object) -> DiffusersVAE:
    torch.manual_seed(0)
    model = torch.nn.Module.to(EVERY[family](), dtype)  # Diffusers' own warns of what it keeps in fp32: nothing
    return vae_of(model, VAEConfig(kind="diffusers", path="-", **settings), "cpu")  # type: ignore[arg-type]


def shapes_in_motion(frames: int, height: int, width: int) -> torch.Tensor:
    """Smooth colours that change slowly, and a little noise, as video has."""
    generator = torch.Generator().manual_seed(5)
    coarse = torch.rand(1, 3, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(frames, height, width), mode="trilinear")
    noise = 0.03 * torch.randn(smooth.shape, generator=generator)
    return ((smooth + noise) * 255).clamp(0, 255).to(torch.uint8).movedim(1, -1)


def psnr_db(found: torch.Tensor, wanted: torch.Tensor) -> float:
    peak = wanted.max() - wanted.min()
    return float(20 * torch.log10(peak / (found - wanted).square().mean().sqrt()))


@pytest.mark.parametrize("layout", ["off", pytest.param("on", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.long) if family == "mochi" else family for family in EVERY]
)
def test_latents_of_bf16_are_close_to_those_of_fp32(family: str, layout: str) -> None:
    video = shapes_in_motion(9, 32, 64)
    half = every(family, torch.bfloat16, channels_last=layout)
    latents = half.encode(video)
    (tile,) = half.plan_tiles(*video.shape[1:4])
    assert (latents.dtype, half.encode_tile(video, tile).dtype) == (torch.float32, torch.bfloat16)
    assert psnr_db(latents, every(family).encode(video)) > CLOSE_DB


@pytest.mark.parametrize("family", ["wan", pytest.param("cogvideox", marks=pytest.mark.long)])
def test_latents_of_fp16_are_closer_to_those_of_fp32_than_those_of_bf16(family: str) -> None:
    """A CPU is slow in fp16."""
    video, exact = shapes_in_motion(1, 16, 32), every(family)
    half, brain = (every(family, dtype) for dtype in (torch.float16, torch.bfloat16))
    wanted = exact.encode(video)
    assert psnr_db(half.encode(video), wanted) > psnr_db(brain.encode(video), wanted) > CLOSE_DB


@pytest.mark.parametrize("family", EVERY)
def test_channels_last_changes_the_layout_alone(family: str) -> None:
    video = shapes_in_motion(5, 32, 64)
    vae = every(family, channels_last="on")
    weight = next(
        w for w in vae.model.encoder.parameters() if w.dim() in (4, 5) and w.shape[1] > 1 and w[0, 0].numel() > 1
    )
    assert weight.stride(1) == 1
    torch.testing.assert_close(vae.encode(video), every(family).encode(video), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.long) if family == "mochi" else family for family in EVERY]
)
def test_activations_with_channels_last_are_coded_alike(family: str) -> None:
    """As on a GPU, where that is the default: views and reshapes of activations meet the other layout."""
    check_channels_last(every(family, channels_last="on"), every(family), shapes_in_motion(5, 32, 64))


@pytest.mark.long
def test_a_compiled_encoder_gives_the_same_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced without making code, which needs a compiler."""
    plain, compiled = torch.nn.Module.compile, []

    def traced(module: torch.nn.Module) -> None:
        compiled.append(module)
        plain(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    vae = every("wan", compile=True)
    assert compiled == [vae.model.encoder]
    for video in (shapes_in_motion(5, 32, 48), shapes_in_motion(1, 32, 32)):
        torch.testing.assert_close(vae.encode(video), every("wan").encode(video), atol=1e-5, rtol=1e-5)


def encode_peak(vae: DiffusersVAE, video: torch.Tensor, batch_pixels: int = VAE_BATCH_PIXELS) -> int:
    groups = clip_groups(len(video), *video.shape[1:4], batch_pixels=batch_pixels)
    parts = [slice(part.start, part.stop) for part in groups]
    with StorageCount() as count:
        latents = [row for part in parts for row in vae.encode(video[part])]
    assert len(latents) == len(video)
    return count.peak_bytes


@pytest.mark.parametrize("family", ["wan", "pictures"])
def test_the_peak_of_an_encode_does_not_grow_with_the_batch(family: str) -> None:
    vae = every(family)
    one, many = shapes_in_motion(5, 32, 32), shapes_in_motion(5, 32, 32).expand(6, -1, -1, -1, -1)
    latent = vae.encode(one).nbytes
    assert encode_peak(vae, many, 5 * 32 * 32) <= encode_peak(vae, one) + 5 * latent
    assert encode_peak(vae, one) > 20 * latent


def test_frames_of_a_class_of_pictures_are_encoded_a_few_at_a_time() -> None:
    vae, video = every("pictures"), shapes_in_motion(12, 32, 32)
    assert isinstance(vae, PictureVAE)
    whole, peak = vae.encode(video), encode_peak(vae, video)
    vae.batch_pixels = 3 * 32 * 32
    torch.testing.assert_close(vae.encode(video), whole, atol=FP32_ATOL, rtol=FP32_ATOL)
    assert encode_peak(vae, video) < 0.4 * peak
    vae.batch_pixels = 1
    torch.testing.assert_close(vae.encode(video), whole, atol=FP32_ATOL, rtol=FP32_ATOL)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_what_an_encode_needs_is_predicted_in_its_dtype(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    every("wan").model.save_pretrained(tmp_path / "vae")
    config, shape = VAEConfig(kind="diffusers", path=str(tmp_path)), (1, 5, 32, 48)
    vae, video = every("wan", dtype, channels_last="on" if device == "cuda" else "off"), shapes_in_motion(5, 32, 48)
    with StorageCount() as count:
        vae.encode(video.to("cpu", copy=True))
    need = vae_need(config, *shape, device=device)
    assert need.peak_gib * GIB == pytest.approx(count.peak_bytes, rel=0.02)
    assert need.weights_gib * GIB == sum(dtype.itemsize * p.numel() for p in vae.model.parameters())
    assert need.left_gib * GIB == vae.encode(video).nbytes


def test_a_dtype_that_an_autoencoder_cannot_have_is_refused(tmp_path: Path) -> None:
    every("pictures").model.save_pretrained(tmp_path / "vae")
    with pytest.raises(ValueError, match=r"dtype is float16, in which the autoencoder of .* overflows \(force_upcast"):
        build_vae(VAEConfig(kind="diffusers", path=str(tmp_path), dtype="float16"))
    loaded = build_vae(VAEConfig(kind="diffusers", path=str(tmp_path), dtype="bfloat16"))
    assert isinstance(loaded, DiffusersVAE) and loaded.model.dtype == torch.bfloat16
    for wrong in ({"dtype": "bfloat16"}, {"compile": True}):
        with pytest.raises(ValueError, match="the haar codec is one matrix product in float32"):
            VAEConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["encode", "decode"])
def test_a_call_that_fails_half_way_leaves_no_frames_in_the_model(call: str) -> None:
    """Memory ran out, or the generation ended: the model would hold them until its next call."""
    model = wan()
    vae = vae_of(model, VAEConfig(kind="diffusers", path="-"), "cpu")
    size = {"encode": (1, 9, 32, 32, 3), "decode": (1, 4, 3, 4, 4)}[call]
    seen = 0

    def second(module: torch.nn.Module, args: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise RuntimeError("out of memory")

    (model.encoder if call == "encode" else model.decoder).register_forward_pre_hook(second)
    with pytest.raises(RuntimeError, match="out of memory"):
        getattr(vae, call)(torch.zeros(size, dtype=torch.uint8 if call == "encode" else torch.float32))
    kept = model._enc_feat_map if call == "encode" else model._feat_map
    assert len(kept) > 3 and not any(isinstance(part, torch.Tensor) for part in kept)
