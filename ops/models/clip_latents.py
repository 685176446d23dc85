"""What is encoded of clips, some at a time: their latents, and what the transformer is told of their first frames.

    for part in groups(len(pixels), frames, height, width):
        latents += latents_of(vae, frame, pixels[part.start : part.stop].to(device))

B clips of T frames of H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.models.config import clips_at_once
from ops.models.first_frame import FirstFrame
from ops.models.vae import VAE


def groups(clips: int, frames: int, height: int, width: int) -> Sequence[range]:
    """Clips that are encoded together: the memory for that does not grow with the batch."""
    step = clips_at_once(frames, height, width)
    return [range(start, min(start + step, clips)) for start in range(0, clips, step)]


@torch.no_grad()
def latents_of(vae: VAE, frame: FirstFrame, clips: Tensor) -> list[Tensor]:
    """[C + Q, t, h, w] of each of [B, T, H, W, 3]: the Q channels tell of first frames, where the model is told."""
    latents = list(vae.encode(clips))
    if not frame.is_told:
        return latents
    still = vae.encode(frame.still(clips))
    return [frame.joined(latent, told) for latent, told in zip(latents, still, strict=True)]
