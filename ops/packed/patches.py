"""Latents as token rows, and back: what a transformer's first and last layer take and give.

C channels, T frames, H and W rows and columns of a latent; a patch is `pt` frames of `ph` by `pw` numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def filled_up(latent: Tensor, frames: int) -> Tensor:
    """[C, T, H, W] -> the same with copies of its first frame in front, up to the next multiple of `frames`."""
    missing = -latent.shape[1] % frames
    return torch.cat([latent[:, :1].expand(-1, missing, -1, -1), latent], dim=1) if missing else latent


def patchify(latent: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Latent [C, T, H, W] to tokens [n, C * pt * ph * pw], rows in (t, h, w) order, features channel first (the order
    of a convolution's weight). Frames that do not fill the last patch are filled up in front with the first one, as
    CogVideoX 1.5 was trained."""
    latent = filled_up(latent, patch[0])
    channels, *size = latent.shape
    if any(full % part for full, part in zip(size, patch, strict=True)):
        raise ValueError(f"latent {tuple(latent.shape)} is not a multiple of patch {patch}.")
    t, h, w = (full // part for full, part in zip(size, patch))
    pt, ph, pw = patch
    blocks = latent.reshape(channels, t, pt, h, ph, w, pw).permute(1, 3, 5, 0, 2, 4, 6)
    return blocks.reshape(t * h * w, channels * pt * ph * pw)


def unpatchify(tokens: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int], channels: int) -> Tensor:
    """The inverse of `patchify`: tokens [n, C * pt * ph * pw] of one sequence to a latent [C, T, H, W]. Frames with
    which it was filled up are there, too."""
    (t, h, w), (pt, ph, pw) = grid, patch
    if tokens.shape != (t * h * w, channels * pt * ph * pw):
        raise ValueError(
            f"tokens {tuple(tokens.shape)} do not fit grid {grid}, patch {patch} and {channels} channels: "
            f"expected {(t * h * w, channels * pt * ph * pw)}."
        )
    blocks = tokens.reshape(t, h, w, channels, pt, ph, pw).permute(3, 0, 4, 1, 5, 2, 6)
    return blocks.reshape(channels, t * pt, h * ph, w * pw)
