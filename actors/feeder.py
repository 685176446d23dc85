"""The actor in front of the data layer: items of step t as metadata for the planner, and references to their pixels.

Everything it hands out is a pure function of (index, config, seed, step), so a new feeder continues where a dead one
stopped: the controller starts it again at the first step that is not committed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray

from actors.messages import Published
from actors.plan.types import Item, Module
from data.buckets import BatchSize
from data.cache import Cache, CachedLatents, Kind, text_key
from data.config import DataConfig
from data.dataset import Dataset
from data.decode import caption_or_empty
from data.engine import make_engine
from data.errors import DataIOError
from data.types import DataItem
from ops.config import ModelConfig
from ops.geometry import Geometry

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepItems:
    """The items of a step: for the planner, and the random-draw key of each of their samples."""

    step: int
    items: tuple[Item, ...]
    keys: tuple[tuple[str, ...], ...]  # per item, per sample
    cache_keys: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    """Item id -> names of its samples' latents and text embeddings in the cache; empty without a cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """What the data layer must know of the frozen encoders: their names in the cache, and how text becomes tokens."""

    vae: str
    text: str
    max_length: int  # tokens
    chars_per_token: float

    @staticmethod
    def of(model: ModelConfig) -> Encoders:
        """Names hold every setting of the encoder, and size and time of its weight files."""
        vae = {**asdict(model.vae), "patch": model.dit.patch, "files": _stamp(model.vae.path)}
        text = {**asdict(model.text), "files": _stamp(model.text.path)}
        return Encoders(
            vae=json.dumps(vae, sort_keys=True),
            text=json.dumps(text, sort_keys=True),
            max_length=model.text.max_length,
            chars_per_token=1.0 if model.text.path is None else 4.0,
        )


def _stamp(folder: str | None) -> list[tuple[str, int, int]]:
    files = sorted(Path(folder).rglob("*.safetensors")) if folder else []
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]


class Feeder:
    """Plain class; `actors.source` makes the actor of it."""

    def __init__(
        self,
        config: DataConfig,
        geometry: Geometry,
        seed: int,
        encoders: Encoders,
        run_dir: str,
        timed: BatchSize | None = None,
    ) -> None:
        """`timed` sizes the batches of buckets with a `target_s`."""
        self._config, self._geometry, self._seed, self._run_dir = config, geometry, seed, run_dir
        self._timed = timed
        self._dataset: Dataset | None = None
        self._engine: Any = None
        self._encoders = encoders
        self._cache = Cache(config.cache) if config.cache.path else None

    @property
    def dataset(self) -> Dataset:
        """Opened on first use, not by the constructor: an actor whose constructor fails cannot say why."""
        if self._dataset is None:
            self._dataset = Dataset.open(
                self._config,
                self._geometry,
                self._seed,
                bad_list=f"{self._run_dir}/bad.jsonl",
                timed=self._timed,
            )
            if self._cache is not None and self._cache.config.latents:  # the engine reads no pixels of what it holds
                self._dataset.latents = CachedLatents(self._cache, self._encoders.vae, self._config)
        return self._dataset

    def start(self, first_step: int, token: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Begin decoding at this step. Returns the dataset's accounting, shown once at the start of a run.

        Raises DataError when no item can be formed, and with the `token` of a checkpoint when index or data settings
        have changed since.
        """
        if token is not None:
            self.dataset.resume(token)
        if self._engine is not None:
            self._engine.stop()
        self._engine = make_engine(self.dataset, self._config)
        self._engine.start(first_step)
        return self.dataset.accounting()

    def items(self, step: int) -> StepItems:
        """Metadata only: cheap, and possible for any step at any time."""
        found = self.dataset.step(step).items
        cache_keys = {i.id: self._cache_keys(i) for i in found} if self._cache is not None else {}
        return StepItems(
            step=step,
            cache_keys=cache_keys,
            items=tuple(
                Item(
                    id=i.id,
                    batch=len(i.samples),
                    frames=i.bucket.frames,
                    height=i.bucket.height,
                    width=i.bucket.width,
                    text_tokens=self._text_tokens(i.samples),
                    cached=self._cached_modules(i, cache_keys),
                )
                for i in found
            ),
            keys=tuple(tuple(f"{s.source}/{s.epoch}/{s.row}" for s in i.samples) for i in found),
        )

    def cached(self, step: int) -> dict[tuple[str, str], Any]:
        """(module, item id) -> reference to what a worker would have published, for modules named in `items`."""
        items = self.items(step)
        return {
            (module, item.id): ray.put(self._load(module, step, item.id, items.cache_keys[item.id]))
            for item in items.items
            for module in item.cached
        }

    def batches(self, step: int) -> list[Any]:
        """References to the decoded batches of a step, in item order; returns when all are decoded."""
        values = self._engine.batches(step)  # references, or batches of an engine without Ray
        return [value if isinstance(value, ray.ObjectRef) else ray.put(value) for value in values]

    def release(self, step: int) -> None:
        """The step is committed: its pixels will not be asked for again."""
        self._engine.release(step)

    def token(self, step: int) -> dict[str, Any]:
        return self.dataset.token(step)

    def ledger(self) -> dict[str, Any]:
        """Counts of delivered and skipped samples so far."""
        return self._engine.counts() if self._engine is not None else {}

    def _cache_keys(self, item: DataItem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        encoders, job, known = self._encoders, self.dataset.job(item), self.dataset.latents
        return known.keys(item) if known is not None else ("",) * item.batch, tuple(
            text_key(caption_or_empty(clip, job), encoders.text, encoders.max_length) for clip in job.clips
        )

    def _cached_modules(
        self, item: DataItem, keys: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    ) -> tuple[Module, ...]:
        """Modules whose results exist for every sample of the item."""
        if self._cache is None:
            return ()
        cache, latents, texts = self._cache, self.dataset.latents, keys[item.id][1]
        found: list[Module] = ["text"] if cache.config.text and all(cache.has("text", name) for name in texts) else []
        if latents is not None and latents.has(item):  # the answer that the engine got, or will get
            found.append("vae")
        return tuple(found)

    def _load(
        self, module: str, step: int, item: str, keys: tuple[tuple[str, ...], tuple[str, ...]]
    ) -> list[Published]:
        assert self._cache is not None
        kind: Kind = "latents" if module == "vae" else "text"
        results: list[Published] = []
        for index, key in enumerate(keys[0] if module == "vae" else keys[1]):
            rows = self._cache.get(kind, key)
            if rows is None:
                raise DataIOError(
                    f"cache entry {kind}/{key[:12]} vanished while step {step} used it; do not clear "
                    f"data.cache.path during a run."
                )
            results.append(Published(module=module, id=(step, item, index), rows=rows, ok=True))
        return results

    def _text_tokens(self, samples: tuple[Any, ...]) -> int:
        lengths = [
            min(self._encoders.max_length, int(s.caption_chars / self._encoders.chars_per_token) + 1) for s in samples
        ]
        return sum(lengths) // max(len(lengths), 1)
