"""The text of HunyuanVideo-1.5: states of a caption in a prompt, and before them those of a ByT5 that reads what the
caption has in quotation marks, the glyphs that a clip is to show.

Both travel in one matrix [G + L, E + 1]: G rows of glyphs, of as many numbers as ByT5 has and zeros after them, and a 1
in the last column; L rows of the caption's states, and a 0 there. Without quotation marks G is 0.
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
    """The text of two encoders in one matrix. Deterministic; a caption's result does not depend on its batch."""

    def __init__(self, states: CaptionStates, glyphs: T5Text) -> None:
        self.states, self.glyphs = states, glyphs
        self.encoder, self.second, self.device = states.encoder, glyphs.encoder, states.device
        self.tokenizer, self.second_tokenizer = states.tokenizer, glyphs.tokenizer
        self.dim = states.dim + 1

    def count(self, caption: str) -> int:
        read = quoted(caption)
        return self.states.count(caption) + (0 if read is None else self.glyphs.count(read))

    @torch.no_grad()
    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        texts = self.states.encode(captions, pictures)
        read = {caption: text for caption in captions if (text := quoted(caption)) is not None}
        glyphs = dict(zip(read, self.glyphs.encode(list(read.values())), strict=True)) if read else {}
        return [
            torch.cat([*self._glyph_rows(glyphs.get(caption), text), pad(text, (0, 1))])
            for caption, text in zip(captions, texts, strict=True)
        ]

    def _glyph_rows(self, glyphs: Tensor | None, text: Tensor) -> list[Tensor]:
        if glyphs is None:
            return []
        rows = pad(glyphs.to(text), (0, self.dim - glyphs.shape[1]))
        rows[:, -1] = 1
        return [rows]

    def parameters(self) -> chain[nn.Parameter]:
        """The parameters of both encoders."""
        return chain(self.encoder.parameters(), self.second.parameters())
