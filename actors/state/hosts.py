"""Memory of the nodes themselves: what training takes of it beside the processes, and whether a node has it. Pure.

A node has two versions of what its workers own of the state S, `2 S here / workers`, wherever the state itself lies,
and as many of what it copies for other nodes, `2 S min(copies, nodes - 1) / nodes`. That is at most 2 S, also while
ranges move. A third version lies there while a checkpoint is written of one, if there is room for it: it is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.config import SnapshotConfig
from actors.messages import WorkerInfo
from actors.plan.types import PlanError
from actors.state.pulling import AHEAD, PIECE
from ops.counted import counted
from ops.units import GIB
from ops.update.state_memory import TURNS

_COPYING = 2  # shards that a keeper copies at a time
_GRADIENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNeed:
    """GiB of one node, all its workers together."""

    state: float  # two versions of the optimizer state of its workers
    gradient: float  # that the node's workers share in it
    copies: float  # two versions of what is copied for other nodes
    store: float  # of the object store, in /dev/shm: pieces of copies on their way
    parameters: float = 0.0  # weights that lie there once for its GPUs
    encoders: float = 0.0  # that will lie there once for all workers, and are not loaded yet
    uploads: float = 0.0  # pinned, of what all workers send to their GPUs
    pinned: float = 0.0  # by gradients and updates on their way between all workers' GPUs and the host
    samples: float = 0.0  # weights of one clip that a worker makes beside the run (`aside_gib`)
    lora_files: float = 0.0  # of the task that writes those of checkpoints, on the controller's node

    @property
    def total(self) -> float:
        of_model = self.state + self.gradient + self.parameters + self.encoders + self.samples
        return of_model + self.lora_files + self.uploads + self.pinned + self.copies + self.store

    def describe(self) -> str:
        """The parts in words, for a person."""
        parts = {
            "two versions of the optimizer state": self.state,
            "copies for other nodes": self.copies,
            "gradient": self.gradient,
            "weights": self.parameters,
            "encoders": self.encoders,
            "weights of a sample": self.samples,
            "LoRA files": self.lora_files,
            "uploads": self.uploads,
            "gradients and updates on their way": self.pinned,
            "object store": self.store,
        }
        return ", ".join(f"{name} {gib:.2f}" for name, gib in parts.items() if gib)


def host_need(
    state_gib: float,
    bytes_per_weight: int,
    snapshot: SnapshotConfig,
    *,
    here: int,
    workers: int,
    nodes: int,
    node_gradient: bool,
    weights_gib: float = 0.0,
    encoders_gib: float = 0.0,
    uploads_gib: float = 0.0,
    pinned_gib: float = 0.0,
    samples_gib: float = 0.0,
    lora_files_gib: float = 0.0,
) -> HostNeed:
    """What a node with `here` of all workers needs, whose state in all is `state_gib`, at `bytes_per_weight`.
    `weights_gib` of parameters lie there for its GPUs, and so will `encoders_gib`. `uploads_gib` may be held
    by what each worker sends to its GPU, `pinned_gib` by its gradients and updates on their way (ops.update_room);
    `samples_gib` is what one aside takes (`aside_gib`), `lora_files_gib` what the task does that writes LoRA files."""
    copies = _copies(snapshot, nodes)
    return HostNeed(
        state=TURNS * state_gib * here / workers,
        gradient=state_gib * _GRADIENT_BYTES / bytes_per_weight if node_gradient else 0.0,
        copies=TURNS * copies * state_gib / nodes,
        store=store_gib(state_gib, bytes_per_weight, snapshot, here=here, workers=workers, nodes=nodes),
        parameters=weights_gib,
        encoders=encoders_gib,
        uploads=here * uploads_gib,
        pinned=here * pinned_gib,
        samples=samples_gib,
        lora_files=lora_files_gib,
    )


def store_gib(
    state_gib: float, bytes_per_weight: int, snapshot: SnapshotConfig, *, here: int, workers: int, nodes: int
) -> float:
    """GiB in the object store of a node at a time: pieces of shards that others copy, and of those that it copies."""
    piece = min(state_gib / workers, PIECE * bytes_per_weight / GIB)
    return AHEAD * piece * (here * _copies(snapshot, nodes) + _COPYING) if _copies(snapshot, nodes) else 0.0


def _copies(snapshot: SnapshotConfig, nodes: int) -> int:
    """Copies of each shard on other nodes with workers."""
    return min(snapshot.copies, nodes - 1) if snapshot.enabled else 0


def aside_gib(state_gib: float, bytes_per_weight: int, parameter_bytes: int, gpu: bool) -> float:
    """GiB of host memory that a worker takes while it makes a sample beside the run: the weights that it is made with
    and, beside a GPU without room for them, the trained ones in whose place they are."""
    return (2 if gpu else 1) * state_gib * parameter_bytes / bytes_per_weight


def asides_at_once(found: Iterable[tuple[str, HostNeed, float | None]]) -> int | None:
    """How many workers of a node may have an aside at a time, as one has been counted on each; None: any number.
    `found` as in `refuse_short_hosts`."""
    more = [int((room - need.total) / need.samples) for _, need, room in found if room is not None and need.samples]
    return 1 + min(more) if more else None


def needs_of_hosts(
    infos: Sequence[WorkerInfo],
    state_gib: float,
    bytes_per_weight: int,
    snapshot: SnapshotConfig,
    samples_gib: float = 0.0,
    lora_files_gib: float = 0.0,
) -> list[tuple[str, HostNeed, float | None]]:
    """(node, GiB it needs, GiB it can spare) for each node of these workers, before any worker has its state."""
    nodes = list(dict.fromkeys(info.node for info in infos))
    found: list[tuple[str, HostNeed, float | None]] = []
    for node in nodes:
        here = [info for info in infos if info.node == node]
        rooms = [info.host_room_gib for info in here if info.host_room_gib is not None]
        need = host_need(
            state_gib,
            bytes_per_weight,
            snapshot,
            here=len(here),
            workers=len(infos),
            nodes=len(nodes),
            node_gradient=_shares_host_memory(here[0]),
            weights_gib=max(info.host_weights_gib for info in infos),
            encoders_gib=max(info.host_encoders_gib for info in here),
            uploads_gib=max(info.uploads_gib for info in here),
            pinned_gib=max(info.pinned_gib for info in here),
            samples_gib=samples_gib,
            lora_files_gib=lora_files_gib,
        )
        found.append((f"node {here[0].host or node}", need, min(rooms, default=None)))
    return found


def _shares_host_memory(info: WorkerInfo) -> bool:
    """Whether the gradient of a worker's node lies in host memory. GPUs that add into one per node hold it themselves,
    if they can reach each other."""
    return info.gradients == "host" or (info.gradients == "node" and info.device == "cpu")


def refuse_short_stores(
    infos: Sequence[WorkerInfo], state_gib: float, bytes_per_weight: int, snapshot: SnapshotConfig
) -> None:
    """Raises PlanError with a sentence for each node whose object store does not hold what is on its way between nodes,
    or would hold it on disk: Ray leaves a /dev/shm that is smaller than the store."""
    short: list[str] = []
    nodes = list(dict.fromkeys(info.node for info in infos))
    for node in nodes:
        here = [info for info in infos if info.node == node]
        need = store_gib(state_gib, bytes_per_weight, snapshot, here=len(here), workers=len(infos), nodes=len(nodes))
        store, shared = here[0].store_gib, here[0].shared_gib
        name = f"node {here[0].host or node}"
        if store is not None and need > store:
            short.append(
                f"{name} has an object store of {store:.2f} GiB, and copies of the state of its "
                f"{counted(len(here), 'worker')} take {need:.2f} GiB of it. Start Ray there with "
                f"--object-store-memory={_with_room(need)} or more (and a /dev/shm as "
                f"large), lower snapshot.copies, or set snapshot.enabled: false."
            )
        elif store is not None and shared is not None and need > shared:
            short.append(
                f"{name} has a /dev/shm of {shared:.2f} GiB, less than its object store of {store:.2f} GiB, which "
                f"therefore lies on disk, and copies of the state of its {counted(len(here), 'worker')} take "
                f"{need:.2f} GiB. Enlarge it (docker run --shm-size={store:.0f}g, a memory volume on Kubernetes) "
                f"before Ray starts there."
            )
    if short:
        raise PlanError("\n".join(short))


def _with_room(gib: float) -> int:
    """Bytes for Ray, a quarter more than is needed: decoded clips and results lie there too."""
    return math.ceil(1.25 * gib * GIB)


def refuse_short_hosts(found: Iterable[tuple[str, HostNeed, float | None]]) -> None:
    """Raises PlanError with the sentences of `shortages`."""
    if short := shortages(found):
        raise PlanError("\n".join(short))


def shortages(found: Iterable[tuple[str, HostNeed, float | None]]) -> list[str]:
    """A sentence for each node that has too little; `found` has (node, what it needs, GiB that it has for that or
    None)."""
    return [
        f"{node} has {room:.1f} GiB of host memory for training, which takes {need.total:.1f} GiB of it "
        f"({need.describe()}). {_without_encoders(need)} memory or nodes, lower snapshot.copies, "
        f"{'set sample.every and validation.every to 0, ' if need.samples else ''}"
        f"{'set checkpoint.lora_files to off, ' if need.lora_files else ''}or train fewer weights "
        f"(model.dit.lora_rank)."
        for node, need, room in found
        if room is not None and need.total > room
    ]


def _without_encoders(need: HostNeed) -> str:
    """What to do first where encoders lie in host memory."""
    if not need.encoders:
        return "Add"
    return (
        f"Train from a cache that `heddle data cache` has filled (data.cache.only: true): without encoders it takes "
        f"at most {need.total - need.encoders:.1f} GiB. Or add"
    )
