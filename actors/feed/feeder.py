"""The actor in front of the data layer: items of step t as metadata for the planner, and references to their pixels.

Everything it hands out is a pure function of (index, config, seed, step), so a new feeder continues where a dead one
stopped: the controller starts it again at the first step that is not committed.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

import ray

from actors.feed.encoders import Encoders, modules_in_cache, plan_item, text_keys
from actors.feed.pulse import Answering
from actors.messages import PublishedResult
from actors.plan.types import ENCODED, Module
from actors.ray_calls import put
from actors.refs import Ref
from actors.step import CacheKeys, Position, StepBatches, StepItems
from data.buckets import BatchSize
from data.cache import Cache, CachedLatents, Kind
from data.config import DataConfig
from data.dataset.dataset import Dataset
from data.dataset.order import BatchSizes, SizesRecord
from data.engines.engine import Engine, make_engine
from data.types import DataItem
from ops.geometry import Geometry

log = logging.getLogger(__name__)


def _end_when_terminated() -> None:
    """Makes SIGTERM end an actor's process at once. Ray would first wait for the tasks that the actor has submitted,
    and these wait for the actor: neither would end, and callers would get no answer."""
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(1))


def _reference(value: object) -> Ref[object]:
    """A batch, or Ray's reference to one, as a reference."""
    found: Any = value if isinstance(value, ray.ObjectRef) else put(value)  # at run time a Ref is Ray's own
    return found


class Feeder(Answering):
    """Plain class; `actors.feed.step_source` makes the actor of it."""

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
        _end_when_terminated()
        self._dataset: Dataset | None = None
        self._engine: Engine | None = None
        self._items: dict[int, StepItems] = {}  # told and not released
        self._encoders = encoders
        self._cache = Cache(config.cache) if config.cache.path else None
        wanted = self._cache if config.cache.latents else None
        texts = self._text_names if encoders.picture_rows else None
        self._latents = CachedLatents(wanted, encoders.vae, config, texts) if wanted is not None else None

    @property
    def _running(self) -> Engine:
        assert self._engine is not None, "start() comes before the first step"
        return self._engine

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
                latents=self._latents,  # the engine reads no pixels of what it holds
            )
        return self._dataset

    def start(self, first_step: int, token: Position | None = None) -> Mapping[str, object]:
        """Begin decoding at this step. Returns the dataset's accounting, shown once at the start of a run.

        Raises DataError when no item can be formed, and with the `token` of a checkpoint when index or data settings
        have changed since.
        """
        self._items.clear()
        if token is not None:
            plain: Any = token  # JSON out of a checkpoint; `resume` checks its version and what it was made from
            self.dataset.resume(plain)
        if self._engine is not None:
            self._engine.stop()
        self._engine = make_engine(self.dataset, self._config)
        self._engine.start(first_step)
        return self.dataset.accounting()

    def resize(self, record: SizesRecord) -> None:
        """Batches have these sizes from a step on, before which all that was asked for has been handed out: what is
        decoded ahead is formed anew."""
        decision = BatchSizes.from_json(record)
        self.dataset.resize(decision)
        if self._engine is not None:
            self._engine.start(decision.from_step)

    def items(self, step: int) -> StepItems:
        """Metadata, and what a cache holds of it: possible for any step at any time, and the same answer each time
        until the step is released. Ask before `batches`: what the cache should hold and does not is decoded then."""
        if step not in self._items:
            self._items[step] = self._look_up(step)
        return self._items[step]

    def batches(self, step: int) -> StepBatches:
        """References to the decoded batches of a step; returns when all are decoded."""
        values = self._running.batches(step)  # references, or batches of an engine without Ray
        references = tuple(_reference(value) for value in values)
        return StepBatches(references=references, position=self.token(step + 1))

    def release(self, step: int) -> None:
        """The step is committed: its pixels will not be asked for again."""
        self._items = {held: items for held, items in self._items.items() if held > step}
        self._running.release(step)

    def token(self, step: int) -> Position:
        return self.dataset.token(step)

    def ledger(self) -> Mapping[str, object]:
        """Counts of delivered and skipped samples so far."""
        return self._engine.counts() if self._engine is not None else {}

    def _look_up(self, step: int) -> StepItems:
        found = self.dataset.step(step).items
        cache_keys = {i.id: self._cache_keys(i) for i in found} if self._cache is not None else {}
        cached = {key: value for i in found for key, value in self._cached(step, i, cache_keys).items()}
        return StepItems(
            step=step,
            cache_keys=cache_keys,
            cached=cached,
            items=tuple(
                plan_item(i, self._encoders, [module for module in ENCODED if (module, i.id) in cached]) for i in found
            ),
            keys=tuple(tuple(f"{s.source}/{s.epoch}/{s.row}" for s in i.samples) for i in found),
        )

    def _cache_keys(self, item: DataItem) -> CacheKeys:
        latent_keys = self._latents.keys(item) if self._latents is not None else ("",) * item.batch
        return latent_keys, self._text_names(item)

    def _text_names(self, item: DataItem) -> tuple[str, ...]:
        return text_keys(item, self.dataset.job(item), self._encoders, self._config)

    def _cached(
        self, step: int, item: DataItem, keys: Mapping[str, CacheKeys]
    ) -> dict[tuple[str, str], Ref[list[PublishedResult]]]:
        """References to the results that are there, whole, for every sample of the item."""
        if self._cache is None:
            return {}
        latents, (latent_names, text_names) = self._latents, keys[item.id]
        named = modules_in_cache(item, text_names, self._cache, latents)
        found: dict[tuple[str, str], Ref[list[PublishedResult]]] = {}
        if "text" in named:
            results = self._load("text", step, item, text_names)
            if results is not None:
                found["text", item.id] = put(results)
        seen = self._encoders.picture_rows > 0 and ("text", item.id) not in found  # a text to be made of pixels
        if seen and latents is not None and latents.spares_pixels(item):  # damaged, or gone since it was named
            latents.deny(item)
            named.discard("vae")
        if "vae" in named:
            assert latents is not None
            results = self._load("vae", step, item, latent_names)
            if results is None:
                latents.deny(item)
            else:
                found["vae", item.id] = put(results)
        return found

    def _load(self, module: Module, step: int, item: DataItem, names: tuple[str, ...]) -> list[PublishedResult] | None:
        """Results of all samples of an item; None when one of them is not there, or not what the encoder makes."""
        assert self._cache is not None
        encoders, bucket = self._encoders, item.bucket
        kind: Kind = "latents" if module == "vae" else "text"
        tokens = self._geometry.tokens(bucket.frames, bucket.height, bucket.width)
        whole = tokens + encoders.latent_tail
        rows = range(whole, whole + 1) if module == "vae" else range(encoders.most_text + 1)
        width = encoders.latent_width if module == "vae" else encoders.text_width
        results: list[PublishedResult] = []
        for index, name in enumerate(names):
            array = self._cache.get(kind, name, rows, width)
            if array is None:
                return None
            results.append(PublishedResult(module=module, id=(step, item.id, index), rows=array, ok=True))
        return results
