"""The cluster that a plan is for: `2x8`, or a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.plan.devices import ProductPrecision, device_speed, nearest_device
from actors.plan.types import MOST_GPUS, Cluster, PlanError, places_in
from app.settings.config import RunConfig
from ops.ranges import between, check_numbers
from ops.typed import ConfigError, build, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A cluster as a YAML file gives it. GPUs of a node are in the order of `nvidia-smi`.

    nodes: [8, 8, 4]        # GPUs of each node; or `nodes: 2` with `gpus: 8`
    hosts: [a, b, c]        # names of the nodes, for a run whose nodes are not alike
    nics: AABBCCDD          # NIC rail of each GPU of a node
    islands: AABBCCDD       # NVLink island of each GPU of a node; without it any two are taken for as near
    numa: [0, 0, 0, 0, 1, 1, 1, 1]  # memory node of each GPU of a node
    island_gbps: 25         # GB/s that a GPU sends to another island of its node; without it bags over islands are not
                            # priced, and only avoided where that costs nothing
    device: NVIDIA H100 80GB HBM3   # as `nvidia-smi -L` and torch name it, or a list, one for each node: how fast plans
                            # take GPUs to be, without a profile, and what these have of memory; of nodes that differ
                            # the slowest counts as 1, and the least memory for all
    speed: {9: 0.8}         # relative speed of single GPUs, numbered node by node; or a list of all
    memory_gib: 80          # of each GPU; without it and a device plans know no limit of memory
    host_gib: 1024          # of each node, for training; without it that of the nodes is not looked at
    """

    nodes: int | tuple[int, ...] | None = None
    gpus: int | None = None
    hosts: tuple[str, ...] = ()
    nics: str = ""
    islands: str = ""
    numa: tuple[int, ...] = ()
    island_gbps: float = 0.0
    device: str | tuple[str, ...] = ""
    speed: Mapping[str, float] | tuple[float, ...] = ()
    memory_gib: float = 0.0
    host_gib: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes is None:
            raise ValueError("a cluster file must hold nodes: a list of GPUs per node, or a number with gpus:.")
        gpus = sum(self.nodes) if isinstance(self.nodes, tuple) else self.nodes * (self.gpus or 0)
        if gpus > MOST_GPUS:
            raise ValueError(f"a cluster file describes {gpus:,} GPUs; plans are for {MOST_GPUS:,} at most.")
        if not self.counts or min(self.counts) < 1:
            nodes = list(self.nodes) if isinstance(self.nodes, tuple) else self.nodes
            raise ValueError(
                f"nodes {nodes} with gpus {self.gpus} is not a number of GPUs for each node; write nodes: [8, 8] or "
                f"nodes: 2 and gpus: 8."
            )
        for name, given in (("nics", self.nics), ("islands", self.islands), ("numa", self.numa)):
            if given and len(given) != max(self.counts):
                shown = given if isinstance(given, str) else list(given)
                raise ValueError(f"{name} {shown!r} names {len(given)} GPUs; the largest node has {max(self.counts)}.")
        if self.hosts and (len(self.hosts) != len(self.counts) or len(set(self.hosts)) != len(self.hosts)):
            raise ValueError(
                f"hosts {list(self.hosts)} must be {len(self.counts)} different names, one for each of nodes."
            )
        if isinstance(self.device, tuple) and len(self.device) != len(self.counts):
            raise ValueError(
                f"device {list(self.device)} names the GPUs of {len(self.device)} nodes, and there are "
                f"{len(self.counts)}. Give one name for all of them, or one for each."
            )
        for name in self.devices if self.device else ():
            if device_speed(name) is None:
                raise ValueError(
                    f"device {name!r} is in no table of devices; the nearest is {nearest_device(name)}. Give the name "
                    f"that nvidia-smi -L shows, or leave device out and give memory_gib: plans then assume an H100's "
                    f"FLOPs until heddle profile has measured the GPU."
                )
        check_numbers(
            "cluster",
            self,
            memory_gib=between(0, 1 << 20),
            host_gib=between(0, 1 << 20),
            island_gbps=between(0, 1 << 20),
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

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each node; empty names where none is said."""
        return self.device if isinstance(self.device, tuple) else (self.device,) * len(self.counts)

    def _factors(self) -> Sequence[tuple[str, float]]:
        if isinstance(self.speed, Mapping):
            return list(self.speed.items())
        return [(str(worker), factor) for worker, factor in enumerate(self.speed)]

    def cluster(self, precision: ProductPrecision = "bfloat16") -> Cluster:
        """The cluster with devices as fast as their products in this precision; the slowest counts as 1."""
        tables = [device_speed(name) for name in self.devices]
        known = [table for table in tables if table is not None]
        slowest = min((table.peak_tflops(precision) for table in known), default=0.0)
        speeds = [
            table.peak_tflops(precision) / slowest if table and not self.speed else 1.0
            for table, count in zip(tables, self.counts, strict=True)
            for _ in range(count)
        ]
        for worker, factor in self._factors():
            speeds[int(worker)] = factor
        told = self.nics or self.islands or self.numa
        return Cluster(
            nodes=self.counts,
            hosts=self.hosts,
            places=places_in(self.counts, self.nics, self.islands, self.numa) if told else (),
            island_gbps=self.island_gbps,
            device="+".join(sorted(set(filter(None, self.devices)))),
            speed=tuple(speeds) if self.speed or set(speeds) != {1.0} else (),
            memory_gib=self.memory_gib or min((table.memory_gib for table in known), default=0.0),
            host_gib=self.host_gib,
        )


def cluster_of(config: RunConfig) -> Cluster:
    """What a preview plans for: `workers.cluster`, else one node of `workers.max`. Raises ConfigError."""
    if not config.workers.cluster:
        return Cluster(nodes=(config.workers.max,))
    return read_cluster(config.workers.cluster, config.train.products)


def given_cluster(config: RunConfig) -> Cluster | None:
    """`workers.cluster` of a run; None where it names none. Raises ConfigError, also where it has too few GPUs for
    `workers.max`."""
    if not config.workers.cluster:
        return None
    found = read_cluster(config.workers.cluster, config.train.products)
    if config.workers.max > found.num_workers:
        raise ConfigError(
            f"workers.max is {config.workers.max}, and workers.cluster {config.workers.cluster} has "
            f"{found.num_workers} GPUs. Lower workers.max, or describe all nodes."
        )
    return found


def read_cluster(spec: str, precision: ProductPrecision = "bfloat16") -> Cluster:
    """`2x8`, or a YAML file, of GPUs that multiply in this precision. Raises ConfigError."""
    path = Path(spec)
    if path.suffix not in (".yaml", ".yml"):
        try:
            return Cluster.parse(spec)
        except PlanError as error:
            raise ConfigError(str(error)) from None
    if not path.is_file():
        raise ConfigError(f"cluster file {path} does not exist; give one that does, or NODESxGPUS such as 2x8.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"cluster file {path} is not UTF-8 text.") from None
    return build(ClusterFile, parse(text, path.name)).cluster(precision)
