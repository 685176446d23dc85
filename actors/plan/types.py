"""Types of planning: item, cascade, cluster, plan. Plain data; no torch, no Ray."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, Protocol

from ops.geometry import PixelShape
from ops.sending import sent_often

Module = Literal["text", "vae", "dit"]
ENCODED: tuple[Module, ...] = ("text", "vae")  # modules whose results a DiT cascade takes, and a cache keeps
USABLE = 0.96  # of a device's memory: the rest is lost to fragments of the allocator and workspaces of libraries
MODULES: tuple[Module, ...] = (*ENCODED, "dit")
MOST_GPUS = 65_536  # of a cluster that is planned for: more is a slip, and would take all memory and hours


class PlanError(ValueError):
    """No legal plan exists, or a plan breaks a rule. The message names the item and the smallest remedy."""


def refuse_below(least: int, record: object, *names: str) -> None:
    """Raises ValueError for the first of these fields of a record that is below `least`."""
    for name in names:
        if (value := getattr(record, name)) < least:
            raise ValueError(f"{name} is {value!r}; it must be at least {least}.")


def refuse_unless_positive(record: object, *names: str) -> None:
    """Raises ValueError for the first of these fields of a record that is 0 or below; None says nothing."""
    for name in names:
        if (value := getattr(record, name)) is not None and value <= 0:
            raise ValueError(f"{name} is {value!r}; it must be a positive number.")


def refuse_degrees(degrees: Iterable[int]) -> None:
    """Raises PlanError for the first that no bag can have."""
    for degree in degrees:
        if degree < 1:
            raise PlanError(f"degree {degree} must be at least 1.")


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One bucket batch of a step: `batch` clips of equal shape. Made by the feeder, cut by a planner."""

    id: str
    batch: int
    frames: int
    height: int
    width: int
    text_tokens: int = 0  # mean per sample
    expert: int = 0  # of several transformers, the number of the one that is trained on it; a DiT cascade is of one
    cached: tuple[Module, ...] = ()  # encode results that already exist: no cascade is planned for them

    @property
    def shape(self) -> PixelShape:
        return self.frames, self.height, self.width


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Samples [first, first + count) of an item."""

    item: str
    first: int
    count: int


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class Cascade:
    """One unit of text, vae or dit work on a fixed set of workers. Made by a strategy, executed by these workers.

    `workers` is in rank order of the bag; `degree == len(workers)`. `step` is the step of its items, which may be
    later than the step during which it runs (encode cascades that fill gaps). A packed cascade has several parts.
    """

    id: str
    module: Module
    step: int
    parts: tuple[Part, ...]
    degree: int
    workers: tuple[int, ...]
    start_s: float
    end_s: float

    @property
    def item(self) -> str:
        return "+".join(part.item for part in self.parts)

    @property
    def batch(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlace:
    """Where a worker's GPU sits in its node. What nobody knows is None or empty."""

    index: int | None = None  # in its node, by PCI address, as nvidia-smi counts
    count: int = 0  # of GPUs in its node; 0: not known
    pci: str = ""  # address, such as 0000:18:00.0
    bridges: tuple[str, ...] = ()  # between it and the CPU, the host bridge first
    numa: int | None = None  # memory node
    island: str = ""  # GPUs of a node that name the same one reach each other over NVLink
    rail: str = ""  # network of its NIC, by a letter: A is that of the node's first NIC that a GPU uses
    nic: str = ""  # the NIC that it uses, such as mlx5_0
    nic_hops: int = 0  # how far that is, as `hops_between`

    @property
    def known(self) -> bool:
        """Whether anything is."""
        return self != GpuPlace()

    def __str__(self) -> str:
        """As people read it: `gpu 3, numa 0, island A, rail B (mlx5_1)`."""
        nic = f" ({self.nic})" if self.nic else ""
        told = (
            ("gpu", self.index),
            ("numa", self.numa),
            ("island", self.island or None),
            ("rail", f"{self.rail}{nic}" if self.rail else None),
        )
        return ", ".join(f"{name} {value}" for name, value in told if value is not None)


UNKNOWN_PLACE = GpuPlace()


class PciPlace(Protocol):
    """A device on PCIe: the bridges between it and the CPU, the host bridge first, and its memory node."""

    @property
    def bridges(self) -> tuple[str, ...]: ...
    @property
    def numa(self) -> int | None: ...


def hops_between(one: PciPlace, other: PciPlace) -> int:
    """How far two devices of a node are apart, in the classes of `nvidia-smi topo`: 0 one PCIe switch (PIX), 1 several
    (PXB), 2 one host bridge (PHB), 3 one memory node (NODE), 4 two of them (SYS). 0 where nobody knows.

    A switch has two bridges on the way to each device: its upstream port, which they share, and a downstream port.
    """
    if one.bridges and other.bridges and one.bridges[0] == other.bridges[0]:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.bridges, other.bridges)))
        if common == 1:
            return 2
        return 0 if max(len(one.bridges), len(other.bridges)) - common <= 1 else 1
    if one.numa is None or other.numa is None:
        return 3 if one.bridges and other.bridges else 0
    return 3 if one.numa == other.numa else 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Workers, numbered node by node; `speed[w]`: 1 is normal. Detected by a run, or given by a file."""

    nodes: tuple[int, ...]  # workers on each node
    hosts: tuple[str, ...] = ()  # name of each node; empty: not known
    places: tuple[GpuPlace, ...] = ()  # of each worker; empty: nothing is known
    island_gbps: float = 0.0  # GB/s that a GPU sends to another NVLink island of its node; 0: not known
    speed: tuple[float, ...] = ()
    device: str = ""  # the GPUs as their driver names them, "+" between several; empty: not said
    memory_gib: float = 0.0  # of each worker's device; 0: unknown
    host_gib: float = 0.0  # of each node, for training; 0: unknown
    room_gib: tuple[float, ...] = ()  # memory of each worker that a cascade may use; empty: no limit is known

    def __post_init__(self) -> None:
        for name, found, wanted in (
            ("places", len(self.places), self.num_workers),
            ("hosts", len(self.hosts), len(self.nodes)),
        ):
            if found not in (0, wanted):
                raise ValueError(f"{name} of a cluster with nodes {list(self.nodes)} are {found}; expected {wanted}.")

    @property
    def num_workers(self) -> int:
        return sum(self.nodes)

    @property
    def least_room_gib(self) -> float:
        """A cascade that fits here fits on every worker."""
        return min(self.room_gib, default=math.inf)

    def node_of(self, worker: int) -> int:
        for node, count in enumerate(self.nodes):
            if worker < count:
                return node
            worker -= count
        raise PlanError(f"worker {worker} does not exist in a cluster of {self.num_workers}.")

    def part(self, first: int, count: int) -> Cluster:
        """Nodes [first, first + count) alone, as places of their bags: without what their workers have of memory."""
        nodes, start = self.nodes[first : first + count], sum(self.nodes[:first])
        places = self.places[start : start + sum(nodes)]
        speed = self.speed[start : start + sum(nodes)]
        return Cluster(nodes=nodes, places=places, speed=speed, island_gbps=self.island_gbps)

    @classmethod
    def parse(cls, spec: str) -> Cluster:
        """`"2x8"` is 2 nodes of 8. Raises PlanError for anything else."""
        match = re.fullmatch(r"\s*([1-9]\d*)\s*x\s*([1-9]\d*)\s*", spec)
        if match is None:
            raise PlanError(
                f"cluster {spec!r} is not NODESxGPUS, for example 2x8, nor a YAML file; a Ray cluster "
                "is named by RAY_ADDRESS."
            )
        nodes, gpus = int(match[1]), int(match[2])
        if nodes * gpus > MOST_GPUS:
            raise PlanError(f"cluster {spec!r} has {nodes * gpus:,} GPUs; plans are for {MOST_GPUS:,} at most.")
        return cls(nodes=(gpus,) * nodes)


def places_in(
    nodes: Sequence[int], rails: str = "", islands: str = "", numa: Sequence[int] = ()
) -> tuple[GpuPlace, ...]:
    """Places of all workers where every node has the same: a letter, or memory node, for each GPU of the largest."""
    return tuple(
        GpuPlace(
            index=gpu,
            rail=rails[gpu] if rails else "",
            island=islands[gpu] if islands else "",
            numa=numa[gpu] if numa else None,
        )
        for count in nodes
        for gpu in range(count)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The cascades of one step, in start order, with the predicted figures of the step."""

    step: int
    cascades: tuple[Cascade, ...]
    makespan_s: float
    lower_bound_s: float
    planning_s: float  # finding the plan took so long, on average over the steps planned together
    idle_ratio: float
    update_s: float = 0.0  # of its end, after the makespan; 0: nobody has measured it
    remainder_s: float = 0.0  # beside both: dispatch, calls, snapshots, asides; 0: no run has measured it

    @property
    def seconds(self) -> float:
        """Seconds from the end of the step before to its own, as far as it is known."""
        return self.makespan_s + self.update_s + self.remainder_s


@sent_often
@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyEncode:
    """An encode that an earlier step runs: it needs no cascade, only a handoff from these workers. `end_s`: it outlasts
    that step by this number of seconds, and keeps its workers busy until then. An item that was cut has one for every
    piece: `count` samples from `first` on; 0: all."""

    item: str
    module: Module
    workers: tuple[int, ...]
    end_s: float = 0.0
    first: int = 0
    count: int = 0

    def samples(self, item: Item) -> range:
        """Which of the item's samples it has encoded."""
        return range(self.first, self.first + (self.count or item.batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plans of consecutive steps. Times are absolute from the start of the first."""

    strategy: str
    steps: tuple[StepPlan, ...] = field(default_factory=tuple)
