"""What a transformer gets of prompts, from the encoders of its model, which nothing needs afterwards.

    told = encode_prompts(text, image, model.config, ["a red disc"], negative="", first=())

Rows lie on the CPU: they wait for their clip there, and may be sent to the process that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ops.models.config import ModelConfig
from ops.models.first_frame import FirstFrame
from ops.models.image import ImageEncoder
from ops.models.text_pair import split

_AT_ONCE = 64  # texts whose rows wait on the device: half a GiB of the largest encoders


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """One prompt: its text [L, text_dim], the vector [pooled_dim] of a second encoder, and the rows [image tokens,
    image_dim] of the pictures that its clip is made from; what the transformer does not take is None. `negative` is
    what guidance moves its clip away from, where that is not the same for all."""

    text: Tensor
    vector: Tensor | None = None
    image: Tensor | None = None
    negative: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompts:
    """Prompts in their order, and what guidance moves away from."""

    prompts: tuple[PromptRows, ...]
    negative: PromptRows


class Texts(Protocol):
    """What makes the rows of prompts: a text encoder, or what it has made."""

    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]: ...


@torch.no_grad()
def encode_prompts(
    text: Texts,
    image: ImageEncoder | None,
    model: ModelConfig,
    prompts: Sequence[str],
    negative: str,
    first: Sequence[np.ndarray] = (),
) -> EncodedPrompts:
    """Encode by the encoders of a resolved model. `first` are the pictures that clips are made from, uint8 [1 or 2, H,
    W, 3] for each prompt (`app.sampling.clips.first_frames`), or none. Beside the negative prompt an encoder of
    captions that sees pictures is shown a black one, as HunyuanVideoImageToVideoPipeline does; one that sees pictures
    alone is shown that of each clip, as HunyuanVideo15ImageToVideoPipeline does."""
    shown = [pictures[0] for pictures in first] if model.text.sees_picture else []
    own = bool(shown and model.text.vision_dim)  # each clip has its own negative
    texts = [*prompts, *[negative] * (len(prompts) if own else 1)]
    seen = [*shown, *(shown if own else [np.zeros_like(shown[0])])] if shown else []
    told: list[PromptRows] = []
    for start in range(0, len(texts), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        states, vectors = split(text.encode(texts[some], seen[some]), model.text)
        told += [
            PromptRows(text=rows.cpu(), vector=None if vectors is None else vectors[index].cpu())
            for index, rows in enumerate(states)
        ]
    if image is not None and FirstFrame.of(model).channels:
        for index, pictures in enumerate(first):
            rows = image.encode(torch.from_numpy(pictures)).flatten(0, 1)
            told[index] = replace(told[index], image=rows.cpu())
    wanted, away = told[: len(prompts)], told[len(prompts) :]
    if own:
        wanted = [replace(one, negative=other.text) for one, other in zip(wanted, away, strict=True)]
    return EncodedPrompts(prompts=tuple(wanted), negative=away[0])
