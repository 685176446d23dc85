"""`data.batch: auto`: the limits of batches from a profile and the memory of a worker, found once for a run.

A new run finds them and keeps them as numbers in its config.yaml; a resume takes those, whatever machine it is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from actors.plan.costs.fit import Fit
from actors.plan.costs.profile import Profile
from actors.plan.places import Places, chosen
from actors.plan.types import Cluster
from actors.planning.batching import fitted_limits
from actors.planning.demand import Demand
from actors.planning.forecasts import forecast
from actors.planning.memory import MemoryForecast, communicators_gib
from actors.planning.options import tell_fetched
from app.inputs.beside import spared
from app.settings.config import RunConfig
from data.buckets import BucketTable
from data.config import BatchConfig, BucketsConfig, SegmentConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.typed import ConfigError
from ops.units import GIB


def device_gib(config: RunConfig, known_gib: float = 0.0) -> tuple[float | None, bool]:
    """(GiB of a worker's device, None if unknown; whether it is a GPU). `known_gib`: what a cluster file says of its
    GPUs."""
    import torch

    if config.workers.device == "cpu":
        return config.workers.memory_gib or None, False
    here = torch.cuda.is_available()
    cuda = config.workers.device == "cuda" or here or known_gib > 0
    found = known_gib or (torch.cuda.get_device_properties(0).total_memory / GIB if here else 0.0)
    limits = [gib for gib in (found, config.workers.memory_gib) if gib]
    return min(limits, default=None), cuda


def placed(
    found: MemoryForecast,
    config: RunConfig,
    demand: Demand,
    degrees: Sequence[int],
    memory_gib: float,
    per_node: int,
) -> MemoryForecast:
    """The forecast with gradients and optimizer state where a run on `workers.min` GPUs of this size would have
    them."""
    possible = found.possible(config.train, per_node)
    least = [demand.least_gib(one, degrees, config.workers.min) for one in possible]
    found = replace(found, places=chosen([one.places for one in possible], least, memory_gib), per_node=per_node)
    return demand.with_graphs(found, degrees, (config.workers.min, config.workers.max), memory_gib)


def places_of(config: RunConfig, model: ModelConfig, geometry: Geometry, device: str) -> Places:
    """Where a run of this config on a `device` (cpu or cuda) of this machine has gradients and optimizer state."""
    from ops.models.load import num_trained

    memory, _ = device_gib(config)
    if device != "cuda" or memory is None:
        return config.train.places(num_trained(model.dit), device, model.dit.fetchable)[0]
    most = max(model.dit.num_heads, config.workers.min)
    degrees = config.planner.degrees or model.dit.degrees(most, config.planner.sequence)
    demand = Demand.of(config.data, model, geometry, config.planner.bag_peers)
    found = forecast(model, geometry, config.train, demand.clips, degrees, True, spared(config))
    return placed(found, config, demand, degrees, memory, found.per_node).places


def batch_room_gib(
    config: RunConfig, model: ModelConfig, geometry: Geometry, profile: Profile, cluster: Cluster | None = None
) -> float:
    """GiB that a batch may take on one of `workers.min` workers, by the prediction of the model's memory, which the
    profile gets, as it gets what passes copy; infinite where the size of a device is unknown. `cluster`: what is known
    of the workers' nodes."""
    memory, cuda = device_gib(config, cluster.memory_gib if cluster is not None else 0.0)
    if memory is None:
        return inf
    workers, peers = config.workers.min, config.planner.bag_peers
    demand = Demand.of(config.data, model, geometry, peers)
    degrees = config.planner.degrees or profile.degrees.get("dit", (1,))
    found = forecast(model, geometry, config.train, demand.clips, degrees, cuda, spared(config))
    profile.expect_needs(found.needs)
    if cuda:
        per_node = max(cluster.nodes) if cluster is not None else found.per_node
        found = placed(found, config, demand, degrees, memory, per_node)
        tell_fetched(profile, model, found, 1 if cluster is None else per_node)
    return found.room_gib(memory, workers, communicators_gib(degrees, workers, peers))


def with_limits(
    config: RunConfig, model: ModelConfig, geometry: Geometry, profile: Profile, cluster: Cluster | None = None
) -> tuple[RunConfig, Fit | None]:
    """The config with numbers in place of every `auto` that has none yet, and the fit that gave those of the run
    itself. Raises ConfigError where the profile or the target allow none."""
    data = config.data
    if not any(is_open(limits) for limits in batch_limits(config).values()):
        return config, None
    room = batch_room_gib(config, model, geometry, profile, cluster)

    def found(tables: Sequence[BucketsConfig], limits: BatchConfig) -> tuple[BatchConfig, Fit | None]:
        if not (is_open(limits) and tables):
            return limits, None
        try:
            return fitted_limits(profile, BucketTable.buckets_of(tables, geometry), limits, room)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    batch, fit = found(data.tables_of_batch, data.batch)
    segments = tuple(
        s if s.batch is None else replace(s, batch=found([s.buckets or data.buckets], s.batch)[0])
        for s in data.segments
    )
    return replace(config, data=replace(data, batch=batch, segments=segments)), fit


def batch_limits(config: RunConfig) -> dict[str, BatchConfig]:
    """The limits of the segments that have their own, and those of the run unless each has, by the name of the
    setting."""
    named = {f"data.segments[{number}].batch": one.batch for number, one in enumerate(config.data.segments)}
    run = {"data.batch": config.data.batch} if config.data.tables_of_batch else {}
    return {**run, **{name: one for name, one in named.items() if one is not None}}


def is_open(limits: BatchConfig) -> bool:
    """Whether `auto` has not been given numbers."""
    return limits.auto and not limits.compute


def with_limits_of(config: RunConfig, folder: Path) -> RunConfig:
    """A resumed run's config: where it says `auto`, the numbers that the run has found."""
    kept = folder / "config.yaml"
    named = {"data.batch": config.data.batch, **batch_limits(config)}  # those of the run are compared in any case
    if not kept.is_file() or not any(map(is_open, named.values())):
        return config
    before = RunConfig.load(kept).data
    batch = _taken_up(config.data.batch, before.batch)
    segments = tuple(
        s if s.batch is None else replace(s, batch=_taken_up(s.batch, _same_limits(s, before.segments)))
        for s in config.data.segments
    )
    return replace(config, data=replace(config.data, batch=batch, segments=segments))


def _same_limits(segment: SegmentConfig, before: Sequence[SegmentConfig]) -> BatchConfig | None:
    """The limits that a segment had before: a resume may add segments and move their ends, so of one that has the same
    buckets and seconds, of the same end if there is one."""
    near = sorted(before, key=lambda one: one.until_step != segment.until_step)
    same = [one.batch for one in near if one.batch is not None and one.buckets == segment.buckets]
    return next((one for one in same if segment.batch is None or one.target_s == segment.batch.target_s), None)


def _taken_up(limits: BatchConfig, before: BatchConfig | None) -> BatchConfig:
    if before is None or not (is_open(limits) and before.auto):
        return limits
    return replace(
        limits,
        memory_tokens=before.memory_tokens,
        compute=before.compute,
        exponent=before.exponent,
        target_s=limits.target_s or before.target_s,
    )
