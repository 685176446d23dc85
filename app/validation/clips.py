"""The held-out clips of a run: what `validation.sources` offer, in the run's buckets, the same clips every time.

They are drawn as training draws its own, from a seed that never changes, and each is a batch of its own: their losses
do not depend on the run's batch sizes, workers or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.feed.item_cache import CacheNames, ItemCache
from app.settings.config import RunConfig
from data.config import BatchConfig, DataConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.readers.registry import with_kind
from data.storage import absolute, expand
from data.types import DataItem, DecodeJob
from ops.counted import counted
from ops.geometry import Geometry
from ops.models.folders import resolve
from ops.typed import ConfigError

SEED = 0  # of everything that chance decides; not the run's: runs of other seeds are measured alike
_STEPS_PER_CLIP = 50  # drawn for each clip that is wanted: sources with small weights come late


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutClip:
    """One clip: how it is decoded, and the key of its random draws."""

    job: DecodeJob  # of this clip alone
    key: str
    own_rate: float = 0.0  # its frame rate (1/s) where the transformer takes that of each clip
    kept: CacheNames | None = None  # in the cache of a run that takes its own results from it; None: it is encoded

    @property
    def bucket(self) -> str:
        """Such as "17x48x32"."""
        size = self.job.bucket
        return f"{size.frames}x{size.height}x{size.width}"


def held_out_clips(config: RunConfig, geometry: Geometry, cache: ItemCache | None = None) -> list[HeldOutClip]:
    """The first `validation.clips` of a fixed shuffle, or all where there are fewer; `config` with its model resolved.
    Where they come from a `cache` of `held_out_data`, with their names in it.

    Raises what `Dataset.open` raises: DataError where no clip fits a bucket of the run.
    """
    own_rates = config.model.dit.clip_rate is not None and config.data.fps == 0
    found: list[HeldOutClip] = []
    for item in held_out_items(config, geometry):
        (sample,), (clip,) = item.samples, item.job.clips
        names = cache.names(item) if cache is not None else None
        rate = clip.fps if own_rates else 0.0
        found.append(HeldOutClip(job=item.job, key=f"held out {sample.draw}", own_rate=rate, kept=names))
    return found


def held_out_items(config: RunConfig, geometry: Geometry) -> list[DataItem]:
    """The clips of `held_out_clips` as items of the data layer, each of one clip."""
    wanted = config.validation.clips
    dataset = Dataset.open(held_out_data(config), geometry, SEED)
    usable = sum(int((population.shape >= 0).sum()) for population in dataset.planner.populations)
    found: list[DataItem] = []
    for number in range(_STEPS_PER_CLIP * wanted):
        if len(found) == min(wanted, usable):
            break
        found += [item for item in dataset.step(number).items if item.samples[0].epoch == 0]
    return found


def check_held_out(config: RunConfig) -> str:
    """What will be measured, in words; empty where nothing will. Raises as `held_out_clips` does, and ConfigError for a
    clip that lies in a shard of `data.sources`, however that is written there."""
    validation = config.validation
    if not validation.every:
        return ""
    model, geometry = resolve(config.model)
    clips = held_out_clips(replace(config, model=model), geometry)
    trained = _local_shards(config.data.sources)
    if doubled := next((path for clip in clips if (path := absolute(clip.job.clips[0].shard)) in trained), ""):
        raise ConfigError(
            f"validation.sources has {doubled}, which data.sources trains on; give clips that are in no other source."
        )
    buckets = counted(len({clip.bucket for clip in clips}), "bucket")
    levels = counted(validation.draws, "noise level")
    return f"{counted(len(clips), 'held-out clip')} of {buckets}, {levels} each, every {validation.every:,} steps"


def _local_shards(sources: Sequence[SourceConfig]) -> set[str]:
    """The tars of sources on this machine; no remote storage is asked."""
    local = [with_kind(source) for source in sources if "://" not in source.path]
    tars = [source.path for source in local if source.kind == "webdataset"]
    return {absolute(shard) for path in tars for shard in expand(path, (".tar",))}


def held_out_data(config: RunConfig) -> DataConfig:
    """The run's data settings, of these sources and by single clips, each with its caption. Of a curriculum the buckets
    of its last segment."""
    return replace(
        config.data,
        sources=config.validation.sources,
        buckets=config.data.tables[-1],
        segments=(),
        batch=BatchConfig(max_batch=1),
        items_per_step=1,
        mixture="samples",
        max_wait=0,
        caption_dropout=0.0,
    )
