"""What a cache holds of the items of a run: encode results that no worker has to make again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.feed.encoders import Encoders
from actors.messages import PublishedResult
from actors.plan.types import Module
from data.cache import Cache, EntryKind, frame_keys, latent_keys, text_key
from data.config import DataConfig
from data.decode import caption_or_empty
from data.types import DataItem
from ops.geometry import Geometry

KINDS: Mapping[Module, EntryKind] = {"text": "text", "vae": "latents"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheNames:
    """Names of an item's results in the cache, one for each sample; (): nothing is kept."""

    latents: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    def of(self, module: Module) -> tuple[str, ...]:
        return self.latents if module == "vae" else self.texts


class ItemCache:
    """The results that a cache holds whole, for every sample of an item."""

    def __init__(self, config: DataConfig, encoders: Encoders, geometry: Geometry) -> None:
        """Raises ValueError where `data.cache.path` is empty: there is no cache."""
        self.cache = Cache(config.cache)
        self._config, self._encoders, self._geometry = config, encoders, geometry

    def names(self, item: DataItem) -> CacheNames:
        """Reads captions, after which texts are named."""
        config, encoders, job = self._config, self._encoders, item.job
        frames = frame_keys(item, config) if encoders.picture_rows else ("",) * item.batch
        texts = tuple(
            text_key(caption_or_empty(clip, job), encoders.text, encoders.max_length, frame)
            for clip, frame in zip(job.clips, frames, strict=True)
        )
        return CacheNames(latents=latent_keys(item, config, encoders.vae) if config.cache.latents else (), texts=texts)

    def named(self, names: CacheNames) -> tuple[Module, ...]:
        """Modules that the cache has an entry of for every sample. `results` shows whether these can be read."""
        wanted = {"vae": self._config.cache.latents, "text": self._config.cache.text}
        return tuple(
            module
            for module, kind in KINDS.items()
            if wanted[module] and all(self.cache.has(kind, name) for name in names.of(module))
        )

    def results(self, item: DataItem, names: CacheNames) -> dict[Module, list[PublishedResult]]:
        """The results as a worker would have published them, for the modules whose entries can all be read and are what
        the encoder makes."""
        found = {module: self._read(module, item, names.of(module)) for module in self.named(names)}
        return {module: results for module, results in found.items() if results is not None}

    def _read(self, module: Module, item: DataItem, names: tuple[str, ...]) -> list[PublishedResult] | None:
        encoders, bucket = self._encoders, item.bucket
        whole = self._geometry.tokens(bucket.frames, bucket.height, bucket.width) + encoders.latent_tail
        rows = range(whole, whole + 1) if module == "vae" else range(encoders.most_text + 1)
        width = encoders.latent_width if module == "vae" else encoders.text_width
        results: list[PublishedResult] = []
        for index, name in enumerate(names):
            array = self.cache.get(KINDS[module], name, rows, width)
            if array is None:
                return None
            results.append(PublishedResult(module=module, id=(item.step, item.id, index), rows=array, ok=True))
        return results
