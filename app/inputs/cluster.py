"""The cluster that a plan is for: `2x8`, or a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.plan.types import Cluster, PlanError
from ops.typed import ConfigError, build, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFile:
    """A cluster as a YAML file gives it.

    nodes: [8, 8, 4]        # GPUs of each node; or `nodes: 2` with `gpus: 8`
    nics: AABBCCDD          # NIC rail of each GPU of a node
    speed: {9: 0.8}         # relative speed of single GPUs, numbered node by node; or a list of all
    memory_gib: 80          # of each GPU; without it plans know no limit of memory
    host_gib: 1024          # of each node, for training; without it that of the nodes is not looked at
    """

    nodes: int | tuple[int, ...] | None = None
    gpus: int | None = None
    nics: str = ""
    speed: Mapping[str, float] | tuple[float, ...] = ()
    memory_gib: float = 0.0
    host_gib: float = 0.0

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
        if not 0 <= self.host_gib < 1 << 20:
            raise ValueError(
                f"host_gib {self.host_gib:g} is not the GiB of a node's memory; write for example 1024, or nothing."
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
            nodes=self.counts,
            rails=self.nics,
            speed=tuple(speeds) if self.speed else (),
            memory_gib=self.memory_gib,
            host_gib=self.host_gib,
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
        raise ConfigError(f"cluster file {path} does not exist; give one that does, or NODESxGPUS such as 2x8.")
    return build(ClusterFile, parse(path.read_text(encoding="utf-8"), path.name)).cluster()
