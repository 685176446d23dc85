"""Open-Sora's video autoencoder against a reference written here in plain products; its folder, its chunks in a bag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor

from ops.geometry import Geometry
from ops.models.chunked import ChunkedVAE
from ops.models.config import VAEConfig
from ops.models.decoding import decode_together
from ops.models.folders import tiling_of
from ops.models.forecast import vae_need
from ops.models.load import build_vae
from ops.models.stdit3.autoencoder import VideoAutoencoder
from ops.models.stdit3.autoencoder_fields import numbers
from ops.storages import StorageCount
from ops.units import GIB
from tests.ops.channels_last import check_channels_last
from tests.ops.conftest import RunRanks

torch.set_num_threads(1)
PUBLISHED = {
    "architectures": ["VideoAutoencoderPipeline"],
    "model_type": "VideoAutoencoderPipeline",
    "vae_2d": {"type": "VideoAutoencoderKL", "from_pretrained": "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers"},
    "vae_temporal": {"type": "VAE_Temporal_SD", "from_pretrained": None},
    "cal_loss": False,
    "micro_frame_size": 17,
    "shift": [-0.10, 0.34, 0.27, 0.98],
    "scale": [3.85, 2.32, 2.33, 3.06],
}
WIDTHS = (4, 8, 8, 16)  # of the four levels over time
SMALL = PUBLISHED | {
    "vae_2d": {"block_out_channels": [4, 4], "layers_per_block": 1, "norm_num_groups": 2},
    "vae_temporal": {"filters": 4, "num_res_blocks": 1, "num_groups": 2},
}


def module() -> VideoAutoencoder:
    """Small, with every weight drawn: a fresh one's biases would hide where they are left out."""
    made = VideoAutoencoder(SMALL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return made


@pytest.fixture(scope="module")
def vae() -> ChunkedVAE:
    return ChunkedVAE(module(), VAEConfig(kind="diffusers", path="-"), numbers(SMALL), "cpu")


class Reference:
    """The temporal half by the names of its weights: convolutions that see zeros before the first frame."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = {name.removeprefix("temporal_vae."): tensor for name, tensor in state.items()}

    def conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight, bias = self.state[f"{name}.conv.weight"], self.state.get(f"{name}.conv.bias")
        before = x.new_zeros(*x.shape[:2], weight.shape[2] - stride, *x.shape[3:])
        side = weight.shape[3] // 2
        return F.conv3d(torch.cat([before, x], dim=2), weight, bias, (stride, 1, 1), (0, side, side))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, 2, self.state[f"{name}.weight"], self.state[f"{name}.bias"], 1e-5))

    def block(self, name: str, x: Tensor) -> Tensor:
        y = self.conv(f"{name}.conv1", self.norm(f"{name}.norm1", x))
        y = self.conv(f"{name}.conv2", self.norm(f"{name}.norm2", y))
        return y + (self.conv(f"{name}.conv3", x) if f"{name}.conv3.conv.weight" in self.state else x)

    def encode(self, x: Tensor) -> Tensor:
        empty = -x.shape[2] % 4
        x = torch.cat([x.new_zeros(*x.shape[:2], empty, *x.shape[3:]), x], dim=2)
        x = self.conv("encoder.conv_in", x)
        for level in range(4):
            x = self.block(f"encoder.block_res_blocks.{level}.0", x)
            if level in (1, 2):
                x = self.conv(f"encoder.conv_blocks.{level}", x, stride=2)
        x = self.conv("encoder.conv2", self.norm("encoder.norm1", self.block("encoder.res_blocks.0", x)))
        return self.conv("quant_conv", x)[:, :4]

    def decode(self, z: Tensor, frames: int) -> Tensor:
        x = self.block("decoder.res_blocks.0", self.conv("decoder.conv1", self.conv("post_quant_conv", z)))
        for level in (3, 2, 1, 0):
            x = self.block(f"decoder.block_res_blocks.{level}.0", x)
            if level in (2, 3):
                twice = self.conv(f"decoder.conv_blocks.{level - 1}", x)
                x = torch.stack([twice[:, 0::2], twice[:, 1::2]], dim=3).flatten(2, 3)
        x = self.conv("decoder.conv_out", self.norm("decoder.norm1", x))
        return x[:, :, x.shape[2] - frames :]


def spatial(vae: ChunkedVAE) -> AutoencoderKL:
    return vae.model.spatial_vae.module  # type: ignore[no-any-return, union-attr]


@torch.no_grad()
def encoded(vae: ChunkedVAE, video: Tensor) -> Tensor:
    """Frame by frame, then chunk by chunk."""
    pixels = video.float().div(127.5).sub(1).movedim(-1, 1)
    frames = [spatial(vae).encode(frame).latent_dist.mean * 0.18215 for frame in pixels.unbind(2)]
    reference = Reference(vae.model.state_dict())
    chunks = [reference.encode(chunk) for chunk in torch.stack(frames, dim=2).split(17, dim=2)]
    mean, deviation = (torch.tensor(SMALL[name]).view(1, 4, 1, 1, 1) for name in ("shift", "scale"))
    return (torch.cat(chunks, dim=2) - mean) / deviation


def clip(frames: int, height: int = 8, width: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.randint(0, 256, (2, frames, height, width, 3), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (12, 3), (17, 5), (25, 7), (34, 10)])
def test_clips_are_coded_as_published(vae: ChunkedVAE, frames: int, latents: int) -> None:
    video = clip(frames)
    found = vae.encode(video)
    assert found.shape == (2, 4, latents, 4, 6)
    torch.testing.assert_close(found, encoded(vae, video), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (12, 3), (17, 5), (25, 7)])
def test_latents_are_decoded_as_published(vae: ChunkedVAE, frames: int, latents: int) -> None:
    z = torch.randn(2, 4, latents, 4, 6, generator=torch.Generator().manual_seed(latents))
    mean, deviation = (torch.tensor(SMALL[name]).view(1, 4, 1, 1, 1) for name in ("shift", "scale"))
    reference, scaled, left, chunks = Reference(vae.model.state_dict()), z * deviation + mean, frames, []
    with torch.no_grad():
        for part in scaled.split(5, dim=2):
            chunks.append(reference.decode(part, min(17, left)))
            left -= 17
        pictures = [spatial(vae).decode(one / 0.18215).sample for one in torch.cat(chunks, dim=2).unbind(2)]
    expected = torch.stack(pictures, dim=1).movedim(2, -1).add(1).mul(127.5).round().clamp(0, 255)
    found = vae.decode(z)
    assert found.shape == (2, frames, 8, 12, 3) and found.dtype == torch.uint8
    assert (found.float() - expected).abs().max() <= 1  # rounding to 8 bits


def test_names_and_sizes_are_the_published_ones() -> None:
    with torch.device("meta"):
        published = VideoAutoencoder(PUBLISHED)
    names = {name: tuple(tensor.shape) for name, tensor in published.state_dict().items()}
    assert sum(p.numel() for p in published.spatial_vae.parameters()) == 83_653_863  # SDXL's
    assert {name.split(".")[0] for name in names} == {"spatial_vae", "temporal_vae", "shift", "scale"}
    assert names["shift"] == names["scale"] == (1, 4, 1, 1, 1)
    for name, shape in {
        "spatial_vae.module.encoder.down_blocks.3.resnets.1.conv2.weight": (512, 512, 3, 3),
        "spatial_vae.module.decoder.mid_block.attentions.0.to_q.weight": (512, 512),
        "temporal_vae.encoder.conv_in.conv.weight": (128, 4, 3, 3, 3),
        "temporal_vae.encoder.block_res_blocks.1.0.norm1.weight": (128,),
        "temporal_vae.encoder.block_res_blocks.1.0.conv3.conv.weight": (256, 128, 1, 1, 1),
        "temporal_vae.encoder.block_res_blocks.3.3.conv2.conv.weight": (512, 512, 3, 3, 3),
        "temporal_vae.encoder.conv_blocks.1.conv.bias": (256,),
        "temporal_vae.encoder.conv2.conv.weight": (8, 512, 1, 1, 1),
        "temporal_vae.quant_conv.conv.bias": (8,),
        "temporal_vae.post_quant_conv.conv.weight": (4, 4, 1, 1, 1),
        "temporal_vae.decoder.conv1.conv.bias": (512,),
        "temporal_vae.decoder.res_blocks.3.norm2.bias": (512,),
        "temporal_vae.decoder.block_res_blocks.2.0.conv3.conv.weight": (256, 512, 1, 1, 1),
        "temporal_vae.decoder.conv_blocks.2.conv.weight": (1024, 512, 3, 3, 3),
        "temporal_vae.decoder.norm1.weight": (128,),
        "temporal_vae.decoder.conv_out.conv.weight": (4, 128, 3, 3, 3),
    }.items():
        assert names[name] == shape, name
    without = ("encoder.conv_in.conv.bias", "encoder.conv_blocks.0.conv.weight", "decoder.conv_blocks.0.conv.weight")
    assert not {f"temporal_vae.{name}" for name in without} & set(names), "the first level keeps its frames"
    blocks = [name for name in names if ".block_res_blocks." in name and name.endswith("conv1.conv.weight")]
    assert len(blocks) == 2 * 4 * 4


def save(folder: Path, fields: dict[str, object] = SMALL) -> Path:
    (folder / "vae").mkdir(parents=True)
    (folder / "vae" / "config.json").write_text(json.dumps(fields))
    save_file(module().state_dict(), folder / "vae" / "model.safetensors")
    return folder


def test_a_folder_is_read_by_its_class(tmp_path: Path, vae: ChunkedVAE) -> None:
    config = VAEConfig(kind="diffusers", path=str(save(tmp_path)))
    loaded = build_vae(config)
    assert isinstance(loaded, ChunkedVAE) and (loaded.channels, loaded.vae_stride) == (4, (4, 2, 2))
    assert torch.equal(loaded.encode(clip(25)), vae.encode(clip(25)))
    need = vae_need(config, 2, 25, 8, 12)
    assert need.weights_gib * GIB == 4 * sum(p.numel() for p in vae.model.parameters()) and need.peak_gib > 0
    with pytest.raises(ValueError, match=r"model\.vae\.tiling: an autoencoder of chunks is cut over time alone"):
        build_vae(VAEConfig(kind="diffusers", path=str(tmp_path), tiling=True))
    with pytest.raises(ValueError, match="micro_frame_size is None: autoencoders of Open-Sora are run in chunks"):
        build_vae(VAEConfig(kind="diffusers", path=str(save(tmp_path / "whole", SMALL | {"micro_frame_size": None}))))


def test_its_chunks_are_priced_by_the_folder_alone(tmp_path: Path, vae: ChunkedVAE) -> None:
    tiling = tiling_of(VAEConfig(kind="diffusers", path=str(save(tmp_path / "vae"))))
    for frames in (4, 17, 34, 38):
        times, rows, columns = tiling.spans(frames, 8, 12)
        assert (rows, columns) == ([(0, 8)], [(0, 12)])
        assert times == [tile.frames for tile in vae.plan_tiles(frames, 8, 12)]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_it_computes_in_the_dtype_of_the_settings_also_with_weights_that_a_node_shares(
    device: str, dtype: torch.dtype, tmp_path: Path, vae: ChunkedVAE
) -> None:
    """In 16 bits with its channels last, as on a GPU. Latents and pixels are in fp32 and near those of fp32."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "channels_last": "on"} if device == "cuda" else {}
    config = VAEConfig(kind="diffusers", path=str(save(tmp_path)), **settings)
    alone, shared = (build_vae(config, shared=shared) for shared in (False, True))
    assert isinstance(alone, ChunkedVAE) and isinstance(shared, ChunkedVAE)
    assert next(alone.model.parameters()).dtype == dtype
    video = clip(21)
    latents = alone.encode(video)
    assert torch.equal(shared.encode(video), latents) and torch.equal(shared.decode(latents), alone.decode(latents))
    wanted = vae.encode(video)
    assert latents.dtype == torch.float32 and (latents - wanted).norm() < 0.05 * wanted.norm()
    with StorageCount() as count:
        alone.encode(video.to("cpu", copy=True))
    found = vae_need(VAEConfig(kind="diffusers", path=config.path), *video.shape[:4], device=device)
    assert found.weights_gib * GIB == sum(p.nbytes for p in alone.model.parameters())
    assert found.peak_gib * GIB == pytest.approx(count.peak_bytes, rel=0.05)


def test_activations_with_channels_last_are_coded_alike(tmp_path: Path, vae: ChunkedVAE) -> None:
    laid_out = build_vae(VAEConfig(kind="diffusers", path=str(save(tmp_path)), channels_last="on"))
    assert isinstance(laid_out, ChunkedVAE)
    check_channels_last(laid_out, vae, clip(21))


@pytest.mark.parametrize("workers", [2, 3])
def test_a_bag_shares_chunks(vae: ChunkedVAE, workers: int, run_ranks: RunRanks) -> None:
    """Three chunks of latents, the last one in part, to the same bytes; three chunks of frames to the same latents."""
    latents = torch.randn(4, 12, 4, 6, generator=torch.Generator().manual_seed(1))
    made = run_ranks(workers, lambda group: decode_together(vae, [latents], group, torch.device("cpu")))
    assert len(vae.plan_decode((12, 4, 6))) == 3 and not any(made[1:])
    assert torch.equal(made[0][0], vae.decode(latents[None])[0]) and len(made[0][0]) == 42
    video = clip(42)
    tiles = vae.plan_tiles(42, 8, 12)
    assert [tile.frames for tile in tiles] == [(0, 17), (17, 34), (34, 42)]
    parts = [(tile, vae.encode_tile(video, tile)) for tile in reversed(tiles)]
    assert torch.equal(vae.blend(parts, (42, 8, 12)), vae.encode(video))
    with pytest.raises(ValueError, match=r"needs each of 0\.\.2 once"):
        vae.blend(parts[1:], (42, 8, 12))


def test_frames_follow_from_latents_and_others_are_refused() -> None:
    geometry = Geometry(vae_stride=(4, 8, 8), chunk=17)
    for frames in range(1, 120):
        try:
            latents = geometry.latent_grid(frames, 16, 16)[0]
        except ValueError:
            assert frames != 1 and (frames % 17 % 4 or frames == 4)
            continue
        assert geometry.frames_of(latents) == frames
    assert geometry.latent_grid(51, 16, 16)[0] == 15 and geometry.latent_grid(102, 16, 16)[0] == 30
    with pytest.raises(
        ValueError, match=r"49 frames: a VAE of chunks of 17 frames takes whole chunks .* Use 46 or 50\."
    ):
        geometry.latent_grid(49, 16, 16)
    for causal, frames in ((True, 9), (False, 12)):
        assert Geometry(causal=causal).frames_of(Geometry(causal=causal).latent_grid(frames, 16, 16)[0]) == frames
