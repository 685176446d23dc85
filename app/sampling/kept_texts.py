"""Texts of a cache in the place of the encoder that made them, for a worker that has none (`data.cache.only`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.feed.item_cache import ItemCache
from data.cache import Cache
from data.config import CacheConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTexts:
    """Some texts by their names in a cache; it is pickled. Stands for a `TextEncoder` where texts are encoded."""

    cache: CacheConfig
    names: Mapping[str, str]  # caption -> name
    most_rows: int
    width: int
    dtype: str  # of what the encoder gives; a cache has it in fp32

    def encode(self, captions: Sequence[str], pictures: Sequence[np.ndarray] = ()) -> list[Tensor]:
        """Rows [L, width] of each caption. Raises BadSample for one that is not there, DataIOError where storage
        fails."""
        assert not len(pictures), "texts that no pixels are needed for"
        store, rows, dtype = Cache(self.cache), range(self.most_rows + 1), getattr(torch, self.dtype)
        arrays = (store.take("text", self.names[caption], rows, self.width) for caption in captions)
        return [torch.from_numpy(array).to(dtype) for array in arrays]


def kept_texts(cache: ItemCache, texts: Sequence[str], dtype: str) -> KeptTexts:
    """These texts of a cache, from an encoder that gives this dtype."""
    encoders = cache.encoders
    return KeptTexts(
        cache=cache.cache.config,
        names={text: cache.text(text) for text in texts},
        most_rows=encoders.most_text,
        width=encoders.text_width,
        dtype=dtype,
    )
