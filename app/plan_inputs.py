"""What `heddle plan` plans: items of a workload file, of a run's buckets or of its real data; and the cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.feed.batching import TargetBatch
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import Cluster, Item, Module, PlanError
from actors.planning.options import profile_of as run_profile_of
from app.settings import ConfigError, parse, plain
from data.buckets import BucketTable, planned_batch
from data.types import Bucket, DataItem
from ops.geometry import Geometry
from ops.models.config import ModelConfig

if TYPE_CHECKING:
    from app.config import RunConfig
    from data.dataset.dataset import Dataset

ITEM_KEYS = ("batch", "frames", "height", "width")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Items of consecutive steps; `cluster` is the one the file names, or empty."""

    steps: tuple[tuple[Item, ...], ...]
    cluster: str = ""


def read_workload(path: Path) -> Workload:
    """A workload file: {"steps": [[{"id", "batch", "frames", "height", "width", "text_tokens"}, ...], ...]}.

    Raises ConfigError for anything malformed.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"workload {path} does not exist.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"workload {path} is not UTF-8 text; give a JSON file.") from None
    except OSError as error:
        raise ConfigError(f"workload {path} cannot be read ({error.strerror or error}).") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"workload {path} line {error.lineno} is not JSON: {error.msg}.") from None
    if not isinstance(data, Mapping) or not isinstance(data.get("steps"), list) or not data["steps"]:
        raise ConfigError(f'workload {path} must be an object with a list "steps" of at least one step.')
    steps = []
    for number, step in enumerate(data["steps"]):
        if not isinstance(step, list) or not step:
            raise ConfigError(f"workload {path}: step {number} is empty or not a list; give it at least one item.")
        steps.append(tuple(_item(entry, f"workload {path}: step {number} item {i}") for i, entry in enumerate(step)))
        ids = [item.id for item in steps[-1]]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ConfigError(f"workload {path}: step {number} has the id {twice[0]!r} twice; give each its own.")
    return Workload(steps=tuple(steps), cluster=str(data.get("cluster", "")))


def _item(entry: Any, where: str) -> Item:
    if not isinstance(entry, Mapping) or "id" not in entry:
        raise ConfigError(f"{where} must be an object with id, {', '.join(ITEM_KEYS)}.")
    if unknown := set(entry) - {"id", "text_tokens", *ITEM_KEYS}:
        raise ConfigError(f"{where} ({entry['id']}) has the unknown key {sorted(unknown)[0]!r}.")
    batch, frames, height, width = (_whole(entry.get(key), key, f"{where} ({entry['id']})", 1) for key in ITEM_KEYS)
    tokens = _whole(entry.get("text_tokens", 0), "text_tokens", f"{where} ({entry['id']})", 0)
    return Item(id=str(entry["id"]), batch=batch, frames=frames, height=height, width=width, text_tokens=tokens)


def _whole(value: Any, key: str, where: str, minimum: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{where}: {key} is {value!r}; expected a whole number of at least {minimum}.")
    return value


def read_cluster(spec: str) -> Cluster:
    """`2x8`, or a YAML file. Raises ConfigError.

    nodes: [8, 8, 4]        # GPUs of each node; or `nodes: 2` with `gpus: 8`
    nics: AABBCCDD          # NIC rail of each GPU of a node
    speed: {9: 0.8}         # relative speed of single GPUs, numbered node by node; or a list of all
    """
    path = Path(spec)
    if path.suffix not in (".yaml", ".yml"):
        try:
            return Cluster.parse(spec)
        except PlanError as error:
            raise ConfigError(str(error)) from None
    if not path.is_file():
        raise ConfigError(f"cluster file {path} does not exist.")
    data = plain(parse(path.read_text(encoding="utf-8"), path.name))
    if not isinstance(data, dict) or "nodes" not in data:
        raise ConfigError(f"cluster file {path} must hold nodes: a list of GPUs per node, or a number with gpus:.")
    if unknown := set(data) - {"nodes", "gpus", "nics", "speed"}:
        raise ConfigError(
            f"cluster file {path} has the unknown key {sorted(map(str, unknown))[0]!r}; "
            f"it may hold nodes, gpus, nics and speed."
        )
    nodes = _nodes(data, path)
    nics = str(data.get("nics", ""))
    if nics and len(nics) != max(nodes):
        raise ConfigError(
            f"cluster file {path}: nics {nics!r} names {len(nics)} GPUs; the largest node has {max(nodes)}."
        )
    return Cluster(nodes=nodes, rails=nics, speed=_speed(data.get("speed"), sum(nodes), path))


def _nodes(data: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    nodes = data["nodes"]
    counts = nodes if isinstance(nodes, list) else [data.get("gpus")] * (nodes if isinstance(nodes, int) else 1)
    if not counts or any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        raise ConfigError(
            f"cluster file {path}: nodes {nodes!r} with gpus {data.get('gpus')!r} is not a number of "
            f"GPUs for each node; write nodes: [8, 8] or nodes: 2 and gpus: 8."
        )
    return tuple(counts)


def _speed(value: Any, workers: int, path: Path) -> tuple[float, ...]:
    if not value:
        return ()
    speeds = [1.0] * workers
    entries = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else [None])
    for worker, factor in entries:
        good = isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < math.inf
        if not good or not isinstance(worker, int) or not 0 <= worker < workers:
            raise ConfigError(
                f"cluster file {path}: speed of GPU {worker!r} is {factor!r}; expected a positive number "
                f"for one of the GPUs 0 to {workers - 1}."
            )
        speeds[worker] = float(factor)
    return tuple(speeds)


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
