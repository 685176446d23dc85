"""The text of HunyuanVideo-1.5: states of a caption in a prompt, before them those of a ByT5 that reads what the
caption has in quotation marks, the glyphs that a clip is to show, and first of all, for image to video, the rows that a
SigLIP makes of the clip's first frame.

All travel in one matrix [P + G + L, E + 1]: P rows of the frame, of as many numbers as SigLIP has and zeros after them,
and a 2 in the last column; G rows of glyphs, of as many numbers as ByT5 has, and a 1 there; L rows of the caption's
states, and a 0 there. In text to video P is 0; without quotation marks G is 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ops.models.text import T5Text, TextEncoder, Tokenizer
from ops.models.text_vision import SiglipRows

_GLYPH, _FRAME = 1, 2  # what the last column says
_QUOTED = re.compile(r"\"(.*?)\"|\u201c(.*?)\u201d")


def quoted(caption: str) -> str | None:
    """What the ByT5 reads of a caption, as HunyuanVideo15Pipeline has it; None where nothing is quoted.

    quoted('a sign "open" and "open"')  ->  'Text "open". '
    """
    found = [straight or curly for straight, curly in _QUOTED.findall(caption)]
    return ". ".join(f'Text "{text}"' for text in dict.fromkeys(found)) + ". " if found else None


class CaptionStates(TextEncoder, Protocol):
    """What makes the rows of captions."""

    encoder: nn.Module
    tokenizer: Tokenizer
    device: torch.device


class GlyphText:
    """The text of two encoders, or of three, in one matrix. Deterministic; a caption's result does not depend on its
    batch."""

    def __init__(self, states: CaptionStates, glyphs: T5Text, frames: SiglipRows | None = None) -> None:
        """`frames` makes rows of first frames."""
        self.states, self.glyphs, self.frames = states, glyphs, frames
        self.encoder, self.second, self.device = states.encoder, glyphs.encoder, states.device
        self.tokenizer, self.second_tokenizer = states.tokenizer, glyphs.tokenizer
        self.dim = states.dim + 1
        self.vision = frames.encoder if frames else None  # by what a worker finds the weights of its parts

    def count(self, caption: str) -> int:
        read = quoted(caption)
        of_frame = self.frames.tokens if self.frames else 0
        return of_frame + self.states.count(caption) + (0 if read is None else self.glyphs.count(read))

    @torch.no_grad()
    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        """As `TextEncoder`; `pictures` are uint8 [H, W, 3], one for each caption where first frames are seen."""
        if len(pictures) != (len(captions) if self.frames else 0):
            raise ValueError(
                f"{len(captions)} captions and {len(pictures)} pictures: this text has rows of the first frame of each "
                f"clip. Give one for each caption."
            )
        texts = self.states.encode(captions)
        frames = self.frames.encode(pictures) if self.frames else [None] * len(captions)
        read = {caption: text for caption in captions if (text := quoted(caption)) is not None}
        glyphs = dict(zip(read, self.glyphs.encode(list(read.values())), strict=True)) if read else {}
        return [
            torch.cat(
                [*self._rows(_FRAME, frame, text), *self._rows(_GLYPH, glyphs.get(caption), text), pad(text, (0, 1))]
            )
            for caption, text, frame in zip(captions, texts, frames, strict=True)
        ]

    def _rows(self, kind: int, states: Tensor | None, text: Tensor) -> list[Tensor]:
        """The states of a kind as rows beside those of `text`; none without them."""
        if states is None:
            return []
        rows = pad(states.to(text), (0, self.dim - states.shape[1]))
        rows[:, -1] = kind
        return [rows]

    def parameters(self) -> chain[nn.Parameter]:
        """The parameters of all encoders."""
        modules = [module for module in (self.encoder, self.second, self.vision) if module is not None]
        return chain.from_iterable(module.parameters() for module in modules)
