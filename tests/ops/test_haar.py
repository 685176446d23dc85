"""The wavelet codec: orthonormal, invertible, about unit variance, good enough to see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ops.models.config import VAEConfig
from ops.models.haar import HaarVAE, haar_matrix


def noise_clip(frames: int = 9, height: int = 16, width: int = 24, batch: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, frames, height, width, 3), generator=generator, dtype=torch.uint8)


def shape_clip(colour: tuple[int, int, int], frames: int = 17, height: int = 64, width: int = 96) -> torch.Tensor:
    """A disc that moves right over a grey ground, [1, T, H, W, 3]."""
    y, x = np.mgrid[:height, :width]
    video = np.full((1, frames, height, width, 3), 110, np.uint8)
    for t in range(frames):
        inside = (y - height / 2) ** 2 + (x - width * (0.25 + 0.5 * t / frames)) ** 2 < (height / 4) ** 2
        video[0, t, inside] = colour
    return torch.from_numpy(video)


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(10 * torch.log10(255.0**2 / (a.float() - b.float()).square().mean()))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_haar_matrix_is_orthonormal(size: int) -> None:
    matrix = haar_matrix(size)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    np.testing.assert_allclose(matrix[0], size**-0.5)


def test_haar_matrix_refuses_other_strides() -> None:
    with pytest.raises(ValueError, match="6 is not a power of two"):
        haar_matrix(6)


@pytest.mark.parametrize(("temporal", "spatial"), [(4, 8), (4, 4), (2, 8), (1, 4)])
def test_all_channels_invert_exactly(temporal: int, spatial: int) -> None:
    codec = HaarVAE(VAEConfig(temporal=temporal, spatial=spatial, channels=3 * temporal * spatial**2))
    video = noise_clip()
    latents = codec.encode(video)
    assert latents.shape == (2, 3 * temporal * spatial**2, 8 // temporal + 1, 16 // spatial, 24 // spatial)
    assert torch.equal(codec.decode(latents), video)


def test_first_latent_depends_on_the_first_frame_alone() -> None:
    codec = HaarVAE(VAEConfig(temporal=4, spatial=8, channels=48))
    video = noise_clip()
    torch.testing.assert_close(codec.encode(video[:, :1]), codec.encode(video)[:, :, :1], atol=1e-5, rtol=0)


def test_kept_channels_are_a_prefix_of_all_channels() -> None:
    video = noise_clip()
    few = HaarVAE(VAEConfig(channels=48)).encode(video)
    full = HaarVAE(VAEConfig(channels=768)).encode(video)
    torch.testing.assert_close(few, full[:, :48], atol=1e-6, rtol=0)


def test_noise_in_motion_channels_of_the_first_frame_is_ignored() -> None:
    codec = HaarVAE(VAEConfig(temporal=4, spatial=4, channels=192))
    latents = codec.encode(noise_clip())
    disturbed = latents.clone()
    disturbed[:, :, 0] += 5.0 * (latents[:, :, 0] == 0)  # exactly the coefficients that a still block leaves at zero
    assert not torch.equal(disturbed, latents)
    assert torch.equal(codec.decode(disturbed), codec.decode(latents))


@pytest.mark.parametrize(("spatial", "least_db"), [(8, 23.0), (4, 30.0)])
def test_48_channels_show_moving_shapes(spatial: int, least_db: float) -> None:
    codec = HaarVAE(VAEConfig(temporal=4, spatial=spatial, channels=48))
    for colour in [(220, 40, 40), (40, 80, 220), (240, 220, 50)]:
        video = shape_clip(colour)
        assert psnr(codec.decode(codec.encode(video)), video) > least_db


def test_illegal_shapes_name_the_rule() -> None:
    with pytest.raises(ValueError, match=r"frames must be 4\*k \+ 1"):
        HaarVAE(VAEConfig()).encode(noise_clip(frames=8))
