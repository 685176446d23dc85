"""The `haar` video codec: an orthonormal 3-D wavelet without weights.

A clip is cut into blocks of (temporal, spatial, spatial) pixels x 3 colours. Each block is multiplied by a fixed
orthonormal matrix (colour transform x Haar over time x Haar over height x Haar over width); the coefficients with the
largest expected energy become the latent channels, divided by their expected standard deviation. The first frame is
encoded alone, as causal video VAEs do: it is taken as a block that stands still.

With all 3 * temporal * spatial^2 channels the codec is exactly invertible. Letters in the code: B batch,
C channels, T H W frames, height, width in pixels, t h w of the latent grid, s spatial and r temporal stride.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ops.models.base.tiles import Tile, whole
from ops.models.base.vae import NO_NOISE, DecodeNoise
from ops.models.config import VAEConfig

# Expected statistics of pixel blocks, from which the order and the scale of the channels come: neighbours at distance
# d correlate as rho^d. Measured on rendered shapes and close to the 0.9-0.97 usually quoted for natural video.
_RHO_SPACE = 0.95
_RHO_TIME = 0.85
# Standard deviation of luma and of the two chroma axes of pixels in [-1, 1], in the orthonormal colour basis below.
_COLOUR_STD = (0.60, 0.33, 0.27)
_COLOUR_BASIS = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]]) / np.sqrt([[3.0], [2.0], [6.0]])


def haar_matrix(size: int) -> np.ndarray:
    """Orthonormal Haar matrix [size, size], rows from coarse to fine. `size` is a power of two.

    Example: haar_matrix(2) = [[1, 1], [1, -1]] / sqrt(2).
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"Haar stride {size} is not a power of two. Use 1, 2, 4 or 8 in model.vae.")
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        coarse = np.kron(matrix, [1.0, 1.0])
        fine = np.kron(np.eye(len(matrix)), [1.0, -1.0])
        matrix = np.concatenate([coarse, fine]) / np.sqrt(2.0)
    return matrix


def _variances(matrix: np.ndarray, rho: float) -> np.ndarray:
    """Variance of each row's coefficient for unit-variance samples with correlation rho^distance."""
    place = np.arange(len(matrix))
    covariance = rho ** np.abs(place[:, None] - place[None, :])
    variances: np.ndarray = np.einsum("ij,jk,ik->i", matrix, covariance, matrix)
    return variances


class HaarVAE:
    """The codec as a `VAE` (ops/models/base/vae.py). Holds two small matrices; has no parameters to train."""

    def __init__(self, config: VAEConfig, device: torch.device | str = "cpu") -> None:
        r, s = config.temporal, config.spatial
        self.channels = config.channels
        self.vae_stride = (r, s, s)
        time, space = haar_matrix(r), haar_matrix(s)
        variance = np.einsum(
            "c,t,h,w->cthw",
            np.square(_COLOUR_STD),
            _variances(time, _RHO_TIME),
            _variances(space, _RHO_SPACE),
            _variances(space, _RHO_SPACE),
        ).reshape(-1)
        # A stable sort over the natural index: equal energies (width and height are symmetric) keep one fixed order.
        kept = np.argsort(-variance, kind="stable")[: config.channels]
        basis = np.einsum("ca,tb,hi,wj->cthwabij", _COLOUR_BASIS, time, space, space).reshape(len(variance), -1)
        basis = basis[kept]
        scale = np.sqrt(variance[kept])[:, None]
        self._analysis = torch.tensor(basis / scale, dtype=torch.float32, device=device)
        self._synthesis = torch.tensor(basis * scale, dtype=torch.float32, device=device)
        # A still block has the same picture r times: only its coefficients constant in time differ from zero.
        still = (kept // (s * s)) % r == 0
        self._still = torch.tensor(still, dtype=torch.float32, device=device)
        self.device = torch.device(device)

    def encode(self, video: Tensor) -> Tensor:
        """uint8 [B, T, H, W, 3], or floats from 0 to 255 -> fp32 latents [B, C, t, h, w]; T is r*k + 1, H and W
        multiples of s."""
        r, s, _ = self.vae_stride
        batch, frames, height, width, _ = video.shape
        if (frames - 1) % r or height % s or width % s:
            raise ValueError(
                f"{frames}x{height}x{width} cannot be cut into blocks of {r}x{s}x{s}: frames must be "
                f"{r}*k + 1, height and width multiples of {s}."
            )
        pixels = video.to(self.device).float().div(127.5).sub_(1.0)
        first = pixels[:, :1].expand(-1, r, -1, -1, -1)
        blocks = torch.cat([first, pixels[:, 1:]], dim=1)
        blocks = blocks.reshape(batch, -1, r, height // s, s, width // s, s, 3)
        blocks = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)  # [B, t, h, w, 3 r s s]
        return (blocks @ self._analysis.T).movedim(-1, 1).contiguous()

    def decode(self, latents: Tensor, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """Latents [B, C, t, h, w] -> uint8 [B, T, H, W, 3], clipped to the pixel range."""
        del noise
        r, s, _ = self.vae_stride
        latents = latents.to(self.device, torch.float32).movedim(1, -1)
        batch, t, h, w, _ = latents.shape
        # Motion coefficients of the first latent frame mean nothing; a sampler leaves noise there.
        latents = torch.cat([latents[:, :1] * self._still, latents[:, 1:]], dim=1)
        blocks = (latents @ self._synthesis).reshape(batch, t, h, w, 3, r, s, s)
        pixels = blocks.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(batch, t * r, h * s, w * s, 3)
        pixels = pixels[:, r - 1 :]  # of the still first block one frame is the picture
        return pixels.add(1.0).mul_(127.5).round_().clamp_(0, 255).to(torch.uint8)

    def plan_tiles(self, frames: int, height: int, width: int) -> list[Tile]:
        """One tile: blocks are independent, and the work is too small to deal out."""
        return whole(frames, height, width)

    def encode_tile(self, video: Tensor, tile: Tile) -> Tensor:
        """Latents [B, C, t', h', w'] of the part of `video` [B, T, H, W, 3] that `tile` names."""
        return self.encode(tile.cut(video))

    def blend(self, parts: list[tuple[Tile, Tensor]], shape: tuple[int, int, int]) -> Tensor:
        """Latents of the clip of `shape` (frames, height, width) from its tiles."""
        del shape
        ((_, latents),) = parts
        return latents

    def plan_decode(self, grid: tuple[int, int, int]) -> list[Tile]:
        """One tile, as of `plan_tiles`."""
        return whole(*grid)

    def decode_tile(self, latents: Tensor, tile: Tile, noise: DecodeNoise = NO_NOISE) -> Tensor:
        """Video [B, T', H', W', 3] of the part of `latents` [B, C, t, h, w] that `tile` names, fp32."""
        return self.decode(tile.cut_latents(latents), noise).float()

    def join(self, parts: list[tuple[Tile, Tensor]], grid: tuple[int, int, int]) -> Tensor:
        """uint8 video of latents of `grid` from their tiles."""
        del grid
        ((_, video),) = parts
        return video.to(torch.uint8)
