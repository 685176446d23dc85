"""What a cache holds of the items of a run: encode results that no worker has to make again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from actors.feed.encoders import Encoders
from actors.messages import PublishedResult
from actors.plan.spared import from_cache
from actors.plan.types import Module
from data.cache import Cache, EntryKind, frame_keys, latent_keys, text_key
from data.config import DataConfig
from data.decode import captions_of, fault_of
from data.ledger import BadSample, Fault
from data.types import Bucket, DataItem
from ops.geometry import Geometry

KINDS: Mapping[Module, EntryKind] = {"text": "text", "vae": "latents"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheNames:
    """Names of an item's results in the cache, one for each sample; (): nothing is kept."""

    latents: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    untold: frozenset[int] = frozenset()  # samples whose caption cannot be read: they train nothing

    def of(self, module: Module) -> tuple[str, ...]:
        return self.latents if module == "vae" else self.texts


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedResults:
    """The results of an item as a worker would have published them, of the modules whose entries are all there."""

    results: Mapping[Module, list[PublishedResult]] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()  # of samples that train nothing, as they come from the cache and are not in it


class ItemCache:
    """The results that a cache holds whole, for every sample of an item."""

    def __init__(self, config: DataConfig, encoders: Encoders, geometry: Geometry) -> None:
        """Raises ValueError where `data.cache.path` is empty: there is no cache."""
        self.cache, self.encoders = Cache(config.cache), encoders
        self._config, self._geometry = config, geometry
        self._kept: dict[Module, bool] = {"vae": config.cache.latents, "text": config.cache.text}
        self._only = from_cache(config.cache)

    def names(self, item: DataItem) -> CacheNames:
        """Names of the results of an item's samples. Reads captions, after which texts are named, if texts are kept."""
        if not self._kept["text"]:
            return CacheNames(latents=self.latents(item))
        told = captions_of(item.job)
        texts = tuple(self.text(caption or "", frame) for caption, frame in zip(told, self.frames(item), strict=True))
        untold = frozenset(index for index, caption in enumerate(told) if caption is None)
        return CacheNames(latents=self.latents(item), texts=texts, untold=untold)

    def latents(self, item: DataItem) -> tuple[str, ...]:
        """Names of the latents of an item's samples; () where none are kept."""
        return latent_keys(item, self._config, self.encoders.vae) if self._kept["vae"] else ()

    def frames(self, item: DataItem) -> tuple[str, ...]:
        """What of its samples' pixels an item's texts are made of; "" where it is nothing."""
        return frame_keys(item, self._config) if self.encoders.picture_rows else ("",) * item.batch

    def text(self, caption: str, frame: str = "") -> str:
        """The name of a text."""
        return text_key(caption, self.encoders.text, self.encoders.max_length, frame)

    def named(self, names: CacheNames) -> tuple[Module, ...]:
        """Modules that the cache has an entry of for every sample, or that come from it alone. `results` shows whether
        entries can be read."""
        return tuple(
            module
            for module, kind in KINDS.items()
            if module in self._only
            or (self._kept[module] and all(self.cache.has(kind, name) for name in names.of(module)))
        )

    def results(self, item: DataItem, names: CacheNames) -> CachedResults:
        """The results whose entries can all be read and are what the encoder makes. Of modules that come from the cache
        alone there are always all: a sample without an entry trains nothing, and is named as a fault. Raises
        DataIOError where storage fails that nothing can take the place of."""
        found: dict[Module, list[PublishedResult]] = {}
        bad: dict[int, BadSample] = {}
        for module in self.named(names):
            arrays = self._taken(module, item, names, bad) if module in self._only else self._read(module, item, names)
            if arrays is not None:
                found[module] = [
                    PublishedResult(
                        module=module, id=(item.step, item.id, index), rows=array, ok=index not in names.untold
                    )
                    for index, array in enumerate(arrays)
                ]
        for results in found.values():
            for index in bad:
                results[index] = replace(results[index], ok=False)
        clips = item.job.clips
        faults = (fault_of(clips[i], bad[i].reason, bad[i].offset, bad[i].detail) for i in sorted(bad))
        return CachedResults(results=found, faults=tuple(faults))

    def shape(self, module: Module, bucket: Bucket) -> tuple[range, int]:
        """(rows, numbers of a row) of a result."""
        encoders = self.encoders
        whole = self._geometry.tokens(bucket.frames, bucket.height, bucket.width) + encoders.latent_tail
        rows = range(whole, whole + 1) if module == "vae" else range(encoders.most_text + 1)
        return rows, encoders.latent_width if module == "vae" else encoders.text_width

    def _read(self, module: Module, item: DataItem, names: CacheNames) -> list[np.ndarray] | None:
        """The entries of all samples, or None: one has to be encoded."""
        arrays: list[np.ndarray] = []
        for name in names.of(module):
            array = self.cache.get(KINDS[module], name, *self.shape(module, item.bucket))
            if array is None:
                return None
            arrays.append(array)
        return arrays

    def _taken(self, module: Module, item: DataItem, names: CacheNames, bad: dict[int, BadSample]) -> list[np.ndarray]:
        """The entries of all samples, with zeros of the same shape for those that go into `bad`. A sample whose caption
        cannot be read is none of these: whoever reads its caption for training says so."""
        rows, width = self.shape(module, item.bucket)
        arrays: list[np.ndarray] = []
        for index, name in enumerate(names.of(module)):
            try:
                arrays.append(self.cache.take(KINDS[module], name, rows, width))
            except BadSample as error:
                if index not in names.untold:
                    bad.setdefault(index, error)
                arrays.append(np.zeros((rows[-1], width), np.float32))
        return arrays
