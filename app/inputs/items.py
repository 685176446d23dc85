"""The items of a run's first steps: of its real data, or of its buckets alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.feed.first_sizes import segments_of
from actors.plan.costs.profile import Profile
from actors.plan.spared import from_cache
from actors.plan.types import Item
from actors.planning.batching import TargetBatch
from app.inputs.profiles import gpu_of
from app.settings.config import RunConfig
from data.buckets import planned_batch
from data.types import Bucket, DataItem
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.typed import ConfigError

if TYPE_CHECKING:
    from actors.feed.item_cache import ItemCache
    from data.config import DataConfig
    from data.dataset.dataset import Dataset


def open_dataset(config: RunConfig, geometry: Geometry, profile: Profile, bad_list: Path | None = None) -> Dataset:
    """The data of a run as training opens it, with a list of faults there. Raises DataError and ValueError as training
    would."""
    from data.dataset.dataset import Dataset

    timed = TargetBatch(profile=profile, geometry=geometry)
    return Dataset.open(config.data, geometry, config.train.seed, bad_list=bad_list, timed=timed)


def items_from_data(dataset: Dataset, steps: int, config: RunConfig, model: ModelConfig) -> list[tuple[Item, ...]]:
    """The items of the first steps as a run's planner sees them: text lengths of their captions, and what is cached.
    Workers of `device: auto` compute on what this machine has: no cluster is asked."""
    from actors.feed.item_cache import CacheNames, ItemCache
    from actors.feed.step_source import item_facts

    workers = replace(config.workers, device="cuda" if gpu_of(config) else "cpu")
    facts = item_facts(config.data, config.train, workers, model, dataset.geometry)
    cache = ItemCache(config.data, facts.encoders, dataset.geometry) if config.data.cache.path else None

    def planned(item: DataItem) -> Item:
        names = cache.names(item) if cache is not None else CacheNames()
        return facts.drawn(item, names, cache.named(names) if cache is not None else ()).plan

    return [tuple(planned(item) for item in dataset.step(step).items) for step in range(steps)]


def cache_of(config: RunConfig, data: DataConfig, *, cuda: bool) -> ItemCache:
    """The cache of a run on GPUs (`cuda`) or CPUs as its feeder has it, of this data."""
    from actors.feed.item_cache import ItemCache
    from actors.feed.step_source import item_facts
    from ops.models.folders import resolve

    model, geometry = resolve(config.model)
    workers = replace(config.workers, device="cuda" if cuda else "cpu")
    return ItemCache(data, item_facts(config.data, config.train, workers, model, geometry).encoders, geometry)


def batches_of(config: RunConfig, geometry: Geometry, profile: Profile) -> dict[Bucket, tuple[int, str]]:
    """Batch size of every bucket of the config and what sets it, without looking at data; that of the first of its
    segments that have the bucket."""
    timed = TargetBatch(profile=profile, geometry=geometry)
    found: dict[Bucket, tuple[int, str]] = {}
    for _, table, limits in segments_of(config.data, geometry):
        found = {b: planned_batch(table, b, limits, geometry, timed) for b in table.buckets} | found
    return found


def items_from_buckets(
    config: RunConfig,
    model: ModelConfig,
    batches: Mapping[Bucket, tuple[int, str]],
    steps: int,
    seed: int,
    shares: Sequence[str] = (),
) -> tuple[tuple[Item, ...], ...]:
    """Full batches of buckets drawn at random, equally often or by `shares` such as `33x32x48=0.5`."""
    rng = np.random.default_rng(seed)
    buckets = tuple(batches)
    chances = bucket_shares([str(bucket) for bucket in buckets], shares)
    tokens = min(config.data.batch.text_tokens, model.text.most_tokens)
    found = []
    for step in range(steps):
        chosen = [buckets[int(i)] for i in rng.choice(len(buckets), size=config.data.items_per_step, p=chances)]
        found.append(
            tuple(
                Item(
                    id=f"s{step}.{i}",
                    batch=batches[bucket][0],
                    frames=bucket.frames,
                    height=bucket.height,
                    width=bucket.width,
                    text_tokens=tokens,
                    cached=from_cache(config.data.cache),
                )
                for i, bucket in enumerate(chosen)
            )
        )
    return tuple(found)


def bucket_shares(names: Sequence[str], shares: Sequence[str]) -> list[float]:
    """Chance of every bucket; those without a share divide what is left equally. Raises ConfigError."""
    given: dict[str, float] = {}
    for text in shares:
        name, _, value = text.partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            raise ConfigError(f"--share {text!r} is not BUCKET=SHARE, for example {names[0]}=0.5.") from None
        if name not in names:
            raise ConfigError(f"--share {text!r}: the config has no bucket {name!r}, only {', '.join(names)}.")
        if not 0 <= given[name] <= 1:
            raise ConfigError(f"--share {text!r}: the share must be between 0 and 1.")
    left, others = 1.0 - sum(given.values()), len(names) - len(given)
    if left < -1e-9 or (not others and left > 1e-9):
        raise ConfigError(
            f"the shares {', '.join(shares)} sum to {1 - left:g}; they must sum to at most 1, and to 1 "
            f"when every bucket has one."
        )
    return [given.get(name, max(left, 0.0) / max(others, 1)) for name in names]
