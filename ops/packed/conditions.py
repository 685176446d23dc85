"""What a transformer may get beside noisy tokens, times and text. Every field is optional; a family reads its own.

What has a row per token, as the latent of a first frame, is not here: it is joined to the noisy tokens as channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Conditions of S sequences, whole on every rank of a bag."""

    image: Tensor | None = None  # [sum of `Sequence.image_tokens`, image_dim]: an image encoder's rows, by sequence
    pooled: Tensor | None = None  # [S, pooled_dim]: one vector for each text
    guidance: Tensor | None = None  # [S]: times 1000, for guidance-distilled weights
    first_times: Tensor | None = None  # [S]: of frames that are given (`Sequence.clean_frames`); 0 without


NOTHING = Conditions()
