"""Diffusers' autoencoders: deterministic, normalised, and tiles that blend to what Diffusers' tiled encode gives."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLHunyuanVideo, AutoencoderKLWan

from ops.models.base.tiles import Tile, deal
from ops.models.base.vae import DiffusersVAE
from ops.models.config import VAEConfig
from ops.models.decoding import decode_together
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


FAMILIES = {"wan": wan, "wan_patched": wan_patched, "hunyuan": hunyuan, "cogvideox": cogvideox}


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
    settings = TILES if family != "wan_patched" else {**TILES, "tile_sample_stride": (16, 16)}
    vae = make(family, **settings)
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


TILED = {"wan": (2, 7, 4), "wan_patched": (2, 3, 2), "hunyuan": (6, 5, 4), "cogvideox": (2, 7, 4)}
"""By family: the grid of latents that its tiles cut. HunyuanVideo's is cut over time, too."""


@pytest.fixture(scope="module", params=TILED)
def tiled(request: pytest.FixtureRequest) -> tuple[DiffusersVAE, torch.Tensor]:
    """An autoencoder with tiles, and latents that need several."""
    settings = TILES if request.param != "wan_patched" else {**TILES, "tile_sample_stride": (16, 16)}
    generator = torch.Generator().manual_seed(3)
    return make(request.param, **settings), torch.randn(1, 4, *TILED[request.param], generator=generator)


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


@pytest.mark.parametrize("workers", [1, 2, 3])
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
