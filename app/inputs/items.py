"""What `heddle plan` plans: items of a workload file, of a run's buckets or of its real data; and the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.feed.batching import TargetBatch
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import Cluster, Item, Module, PlanError, refuse_below
from actors.planning.options import profile_of as run_profile_of
from data.buckets import BucketTable, planned_batch
from data.types import Bucket, DataItem
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.typed import ConfigError, as_plain, build, node_of, parse, read_json

if TYPE_CHECKING:
    from app.settings.config import RunConfig
    from data.dataset.dataset import Dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadItem:
    """An item as a workload file gives it."""

    id: str
    batch: int
    frames: int
    height: int
    width: int
    text_tokens: int = 0

    def __post_init__(self) -> None:
        refuse_below(1, self, "batch", "frames", "height", "width")
        refuse_below(0, self, "text_tokens")

    def item(self) -> Item:
        return Item(**as_plain(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Items of consecutive steps; `cluster` is the one the file names, or empty."""

    steps: tuple[tuple[Item, ...], ...]
    cluster: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadFile:
    """A workload as it is written."""

    steps: tuple[tuple[WorkloadItem, ...], ...]
    cluster: str = ""

    def __post_init__(self) -> None:
        for number, step in enumerate(self.steps):
            if not step:
                raise ValueError(f"step {number} is empty; give it at least one item.")
            ids = [item.id for item in step]
            if twice := sorted({name for name in ids if ids.count(name) > 1}):
                raise ValueError(f"step {number} has the id {twice[0]!r} twice; give each its own.")

    def workload(self) -> Workload:
        steps = tuple(tuple(item.item() for item in step) for step in self.steps)
        return Workload(steps=steps, cluster=self.cluster)


def read_workload(path: Path) -> Workload:
    """A workload file: {"steps": [[{"id", "batch", "frames", "height", "width", "text_tokens"}, ...], ...]}.

    Raises ConfigError for anything malformed.
    """
    data = read_json(path, "workload")
    if not isinstance(data, Mapping) or not isinstance(data.get("steps"), list) or not data["steps"]:
        raise ConfigError(f'workload {path} must be an object with a list "steps" of at least one step.')
    held = {key: data[key] for key in ("steps", "cluster") if key in data}
    try:
        return build(WorkloadFile, node_of(held)).workload()
    except ConfigError as error:
        raise ConfigError(f"workload {path}: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A cluster as a YAML file gives it.

    nodes: [8, 8, 4]        # GPUs of each node; or `nodes: 2` with `gpus: 8`
    nics: AABBCCDD          # NIC rail of each GPU of a node
    speed: {9: 0.8}         # relative speed of single GPUs, numbered node by node; or a list of all
    memory_gib: 80          # of each GPU; without it plans know no limit of memory
    """

    nodes: int | tuple[int, ...] | None = None
    gpus: int | None = None
    nics: str = ""
    speed: Mapping[str, float] | tuple[float, ...] = ()
    memory_gib: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes is None:
            raise ValueError("a cluster file must hold nodes: a list of GPUs per node, or a number with gpus:.")
        if not self.counts or min(self.counts) < 1:
            nodes = list(self.nodes) if isinstance(self.nodes, tuple) else self.nodes
            raise ValueError(
                f"nodes {nodes} with gpus {self.gpus} is not a number of GPUs for each node; write nodes: [8, 8] or "
                f"nodes: 2 and gpus: 8."
            )
        if self.nics and len(self.nics) != max(self.counts):
            raise ValueError(
                f"nics {self.nics!r} names {len(self.nics)} GPUs; the largest node has {max(self.counts)}."
            )
        if not 0 <= self.memory_gib < 1 << 20:
            raise ValueError(
                f"memory_gib {self.memory_gib:g} is not the GiB of a GPU; write for example 80, or nothing."
            )
        for worker, factor in self._factors():
            if not factor > 0 or not worker.isdecimal() or int(worker) >= sum(self.counts):
                raise ValueError(
                    f"speed of GPU {worker} is {factor:g}; expected a positive number for one of the GPUs 0 to "
                    f"{sum(self.counts) - 1}."
                )

    @property
    def counts(self) -> tuple[int, ...]:
        """GPUs of each node."""
        return self.nodes if isinstance(self.nodes, tuple) else (self.gpus or 0,) * (self.nodes or 0)

    def _factors(self) -> Sequence[tuple[str, float]]:
        if isinstance(self.speed, Mapping):
            return list(self.speed.items())
        return [(str(worker), factor) for worker, factor in enumerate(self.speed)]

    def cluster(self) -> Cluster:
        speeds = [1.0] * sum(self.counts)
        for worker, factor in self._factors():
            speeds[int(worker)] = factor
        return Cluster(
            nodes=self.counts, rails=self.nics, speed=tuple(speeds) if self.speed else (), memory_gib=self.memory_gib
        )


def read_cluster(spec: str) -> Cluster:
    """`2x8`, or a YAML file. Raises ConfigError."""
    path = Path(spec)
    if path.suffix not in (".yaml", ".yml"):
        try:
            return Cluster.parse(spec)
        except PlanError as error:
            raise ConfigError(str(error)) from None
    if not path.is_file():
        raise ConfigError(f"cluster file {path} does not exist.")
    return build(ClusterFile, parse(path.read_text(encoding="utf-8"), path.name)).cluster()


def load_profile(path: str | Path) -> Profile:
    """A profile file. Raises ConfigError."""
    return _as_config_error(lambda: read_profile(path), path)


def _as_config_error(read: Callable[[], Profile], path: str | Path | None) -> Profile:
    """A bad file is a mistake of usage, not a workload without a legal plan."""
    try:
        return read()
    except (PlanError, ValueError) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read ({error.strerror or error}).") from None


def profile_of(config: RunConfig, model: ModelConfig, geometry: Geometry) -> Profile:
    """The profile that a run of this config plans with. Raises ConfigError."""
    return _as_config_error(lambda: run_profile_of(config.planner, model, geometry), config.planner.profile)


def items_from_data(dataset: Dataset, steps: int, config: RunConfig, model: ModelConfig) -> list[tuple[Item, ...]]:
    """The items of the first steps as a run's planner sees them: text lengths of their captions, and what is cached."""
    from actors.feed.encoders import Encoders, modules_in_cache, plan_item, text_keys
    from data.cache import Cache, CachedLatents

    if not config.data.cache.path:
        encoders = Encoders.of(model, named=False)
        return [tuple(plan_item(item, encoders, ()) for item in dataset.step(step).items) for step in range(steps)]
    from actors.pool.workers import uses_gpu
    from ops.models.text import text_dtype

    encoders = Encoders.of(model, text_dtype(model.text, "cuda" if uses_gpu(config.workers) else "cpu"))
    cache = Cache(config.data.cache)
    latents = CachedLatents(cache, encoders.vae, config.data) if config.data.cache.latents else None

    def known(item: DataItem) -> set[Module]:
        return modules_in_cache(item, text_keys(dataset.job(item), encoders), cache, latents)

    return [tuple(plan_item(item, encoders, known(item)) for item in dataset.step(step).items) for step in range(steps)]


def open_dataset(config: RunConfig, geometry: Geometry, profile: Profile) -> Dataset:
    """The data of a run as training opens it. Raises DataError and ValueError as training would."""
    from data.dataset.dataset import Dataset

    return Dataset.open(config.data, geometry, config.train.seed, timed=TargetBatch(profile=profile, geometry=geometry))


def batches_of(config: RunConfig, geometry: Geometry, profile: Profile) -> dict[Bucket, tuple[int, str]]:
    """Batch size of every bucket of the config and what sets it, without looking at data."""
    table, timed = BucketTable.build(config.data.buckets, geometry), TargetBatch(profile=profile, geometry=geometry)
    return {bucket: planned_batch(table, bucket, config.data.batch, geometry, timed) for bucket in table.buckets}


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
    tokens = min(config.data.batch.text_tokens, model.text.max_length)
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
