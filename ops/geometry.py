"""How pixels become latents and tokens. Pure arithmetic: no torch, so plans and configs may use it.

T, H, W are the frames, height and width of a clip in pixels; t, h, w those of its latent or token grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

PixelShape = tuple[int, int, int]  # T, H, W of a clip


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Strides of a VAE and the patch of the transformer that follows it."""

    vae_stride: tuple[int, int, int] = (4, 8, 8)
    patch: tuple[int, int, int] = (1, 2, 2)
    causal: bool = True  # causal VAEs keep the first frame alone, so legal frame counts are stride*k + 1
    # frames of a chunk, where the VAE codes each chunk by itself; after whole chunks come whole latents, or the one
    # frame of a picture. 0: no chunks
    chunk: int = 0

    def latent_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latent (t, h, w) of a clip. Raises ValueError for a shape the VAE cannot encode."""
        stride_t, stride_h, stride_w = self.vae_stride
        if self.chunk:
            latent_frames = self._in_chunks(frames)
        elif self.causal:
            if (frames - 1) % stride_t:
                legal = (frames - 1) // stride_t * stride_t + 1
                raise ValueError(
                    f"{frames} frames: a causal VAE of temporal stride {stride_t} takes "
                    f"{stride_t}*k+1 frames. Use {legal} or {legal + stride_t}."
                )
            latent_frames = (frames - 1) // stride_t + 1
        else:
            latent_frames = max(frames // stride_t, 1)
        if height % stride_h or width % stride_w:
            raise ValueError(
                f"{height}x{width} is not a multiple of the VAE's spatial stride {stride_h}x{stride_w}. Use multiples "
                f"of {self.spatial_multiple} pixels."
            )
        return latent_frames, height // stride_h, width // stride_w

    @property
    def latents_of_chunk(self) -> int:
        """Latent frames of a whole chunk, whose first frames are filled up with empty ones."""
        return -(-self.chunk // self.vae_stride[0])

    def frames_of(self, latents: int) -> int:
        """Frames of a clip of `latents` latent frames: the inverse of `latent_grid`."""
        stride = self.vae_stride[0]
        if self.chunk:
            full, rest = divmod(latents, self.latents_of_chunk)
            return 1 if latents == 1 else full * self.chunk + rest * stride
        return max((latents - 1) * stride + 1, 0) if self.causal else latents * stride

    def _in_chunks(self, frames: int) -> int:
        """Latent frames. Raises ValueError for a clip whose latents would stand for clips of several lengths."""
        stride, (full, rest) = self.vae_stride[0], divmod(frames, self.chunk)
        if frames != 1 and (rest % stride or (not full and rest == stride)):
            near = [n for n in range(1, frames + self.chunk + 1) if self.frames_of(self._count(n)) == n]
            legal = [max(n for n in near if n <= frames), min(n for n in near if n > frames)]
            raise ValueError(
                f"{frames} frames: a VAE of chunks of {self.chunk} frames takes whole chunks and {stride}*k frames "
                f"more, or 1. Use {legal[0]} or {legal[1]}."
            )
        return self._count(frames)

    def _count(self, frames: int) -> int:
        full, rest = divmod(frames, self.chunk)
        return full * self.latents_of_chunk + -(-rest // self.vae_stride[0])

    def token_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Token (t, h, w) of a clip: the latent grid divided by the patch, frames rounded up
        (`ops.packed.patches.patchify`). Remembered: a step of a thousand workers asks some ten thousand times for the
        grids of a few buckets."""
        return _token_grid(self, frames, height, width)

    def _divided(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        grid = self.latent_grid(frames, height, width)
        if any(size % patch for size, patch in zip(grid[1:], self.patch[1:], strict=True)):
            raise ValueError(
                f"latent grid {grid} of {frames}x{height}x{width} is not a multiple of patch "
                f"{self.patch}. Use multiples of {self.spatial_multiple} pixels."
            )
        t, h, w = (-(-size // patch) for size, patch in zip(grid, self.patch, strict=True))
        return t, h, w

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Number of video tokens of one clip."""
        t, h, w = self.token_grid(frames, height, width)
        return t * h * w

    @property
    def spatial_multiple(self) -> int:
        """Heights and widths must be multiples of this."""
        return max(self.vae_stride[1] * self.patch[1], self.vae_stride[2] * self.patch[2])


@lru_cache(maxsize=1024)
def _token_grid(geometry: Geometry, frames: int, height: int, width: int) -> tuple[int, int, int]:
    return geometry._divided(frames, height, width)
