"""The held-out clips of a run: what `validation.sources` offer, in the run's buckets, the same clips every time.

They are drawn as training draws its own, from a seed that never changes, and each is a batch of its own: their losses
do not depend on the run's batch sizes, workers or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.settings.config import RunConfig
from data.config import BatchConfig, DataConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.readers.registry import with_kind
from data.storage import absolute, expand
from data.types import DecodeJob
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

    @property
    def bucket(self) -> str:
        """Such as "17x48x32"."""
        size = self.job.bucket
        return f"{size.frames}x{size.height}x{size.width}"


def held_out_clips(config: RunConfig, geometry: Geometry) -> list[HeldOutClip]:
    """The first `validation.clips` of a fixed shuffle, or all where there are fewer; `config` with its model resolved.

    Raises what `Dataset.open` raises: DataError where no clip fits a bucket of the run.
    """
    data, wanted = held_out_data(config), config.validation.clips
    dataset = Dataset.open(data, geometry, SEED)
    usable = sum(int((population.shape >= 0).sum()) for population in dataset.planner.populations)
    own_rates = config.model.dit.clip_rate is not None and data.fps == 0
    found: list[HeldOutClip] = []
    for number in range(_STEPS_PER_CLIP * wanted):
        if len(found) == min(wanted, usable):
            break
        for item in dataset.step(number).items:
            (sample,), (clip,) = item.samples, item.job.clips
            if sample.epoch == 0:
                key = f"held out {sample.draw}"
                found.append(HeldOutClip(job=item.job, key=key, own_rate=clip.fps if own_rates else 0.0))
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
