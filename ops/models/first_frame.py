"""How a transformer gets the first frame of a clip, or the first and the last: as channels after the noisy ones or in
place of the first latent frame, and as an image embedding.

    frame = FirstFrame.of(model)                         # of a resolved model
    latent = frame.joined(vae.encode(video)[0], vae.encode(frame.still(video))[0])     # [C + Q, t, h, w]
    rows = frame.packed(patchify(latent, patch), image.encode(frame.pictures(video))[0])  # [tokens + tail, width]

Everything that is encoded of a clip travels in one matrix: a row for each token, then the image embedding, cut and
padded with zeros to rows of the same width. So it is cached, published and handed over like a latent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.models.config import ModelConfig
from ops.models.families import FAMILIES

if TYPE_CHECKING:
    from torch import Tensor

    from ops.flow.noise import ScaledNoise

GREY = 127.5  # what VAEs see as zero


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstFrame:
    """What is added to the latents of clips of one model. Nothing, for text to video."""

    channels: int  # of conditions, after those of the latent
    width: int  # of a row: latent and condition channels of one token
    image_tokens: int  # of all pictures of a clip
    image_dim: int
    stride_t: int  # of the VAE
    tell: Callable[[Tensor, int, bool], Tensor] | None
    last: bool  # the last frame is given, too
    scale: float  # of the latent that becomes channels
    depth: int  # latent frames of a token
    drops: bool  # the frames of a sampled clip's first latent are not shown
    alone: bool  # the VAE sees the frame without grey frames after it
    given: bool  # its latent stands in place of the clip's first latent frame
    hint_share: float  # of its latent in the noise that sampling begins with

    @staticmethod
    def of(model: ModelConfig) -> FirstFrame:
        """What a resolved model takes of the first frame."""
        dit, image, family = model.dit, model.image, FAMILIES[model.dit.architecture]
        channels = dit.in_channels - dit.out_channels
        return FirstFrame(
            channels=channels,
            width=(model.vae.channels + channels) * math.prod(dit.patch),
            image_tokens=image.tokens * (2 if dit.takes_last_frame else 1) if image else 0,
            image_dim=image.d_model if image else 0,
            stride_t=model.vae.temporal,
            tell=family.first_frame,
            last=dit.takes_last_frame,
            scale=dit.condition_scale,
            depth=dit.patch[0],
            drops=dit.drops_first_latent,
            alone=dit.encodes_frame_alone,
            given=dit.gives_first_frame,
            hint_share=family.hint_share,
        )

    @property
    def is_told(self) -> bool:
        """Whether the VAE encodes the first frame of each clip for itself."""
        return self.channels > 0 or self.given

    @property
    def dropped_frames(self) -> int:
        """Frames of a sampled clip, from its beginning, that are not shown."""
        return self.stride_t if self.drops else 0

    @property
    def tail(self) -> int:
        """Rows after those of the tokens."""
        return -(-self.image_tokens * self.image_dim // self.width)

    def still_frames(self, frames: int) -> int:
        """Frames that the VAE sees of a clip's first one."""
        return 1 if self.alone else frames

    def pictures(self, video: Tensor) -> Tensor:
        """[B, T, H, W, 3] -> the frames that an image encoder sees, clip by clip: [B or 2 B, H, W, 3]."""
        return video[:, [0, -1] if self.last else [0]].flatten(0, 1)

    def still(self, video: Tensor, noise: Sequence[ScaledNoise] = ()) -> Tensor:
        """uint8 [B, T, H, W, 3] -> what the VAE encodes of the first frame: it alone [B, 1, H, W, 3], or the same with
        grey in place of all others (but the last, where that is given), in floats from 0 to 255. With `noise` of each
        clip, whose sigma is in pixels from -1 to 1, on the frames that are given."""
        if self.alone and not noise:
            return video[:, :1]
        seen = video[:, :1] if self.alone else video
        still = seen.clone() if seen.is_floating_point() else seen.float()
        if not self.alone:
            still[:, 1 : -1 if self.last else None] = GREY
        for clip, own in zip(still, noise, strict=bool(noise)):
            self._add(own, clip)
        return still

    def _add(self, noise: ScaledNoise, clip: Tensor) -> None:
        """Adds it to the frames of a clip [T, H, W, 3] that are given."""
        from ops.flow.noise import normal  # and with it torch, which plans and the data layer do without

        given = clip[:: len(clip) - 1] if self.last and len(clip) > 1 else clip[:1]
        numbers = normal(noise.key, 0, given.numel(), clip.device).view_as(given)
        given = given + noise.sigma * GREY * numbers.to(clip.dtype)
        clip[0], clip[-1 if self.last else 0] = given[0], given[-1]

    def joined(self, latent: Tensor, still: Tensor) -> Tensor:
        """[C, t, h, w] of the clip (or no channel of it), and the latent of its `still` -> [C + Q, t, h, w], where t is
        that of whole tokens: the clip may be filled up in front, its condition begins with the picture and is not."""
        if self.given:
            joined = latent.clone()
            joined[:, :1] = still
            return joined
        from ops.packed.patches import filled_up  # and with it torch, which plans and the data layer do without

        assert self.tell is not None
        latent = filled_up(latent, self.depth)
        behind = still.new_zeros(len(still), latent.shape[1], *still.shape[2:])
        behind[:, : still.shape[1]] = still * self.scale if self.scale != 1.0 else still
        condition = self.tell(behind, self.stride_t, self.last)
        joined = latent.new_empty(len(latent) + len(condition), *latent.shape[1:])
        joined[: len(latent)], joined[len(latent) :] = latent, condition
        return joined

    def packed(self, rows: Tensor, image: Tensor) -> Tensor:
        """[tokens, width] and [image_tokens, image_dim] -> [tokens + tail, width]."""
        packed = rows.new_zeros(len(rows) + self.tail, self.width)
        packed[: len(rows)] = rows
        packed[len(rows) :].view(-1)[: image.numel()] = image.to(rows).reshape(-1)
        return packed

    def image_of(self, tail: Tensor) -> Tensor:
        """[tail, width] -> [image_tokens, image_dim]"""
        return tail.reshape(-1)[: self.image_tokens * self.image_dim].view(self.image_tokens, self.image_dim)
