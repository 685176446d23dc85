"""Whether a run fits the nodes of its Ray cluster, asked before a worker is started or anything is loaded."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actors.plan.types import Cluster
from app.inputs.memory import HostRoom, filled, view_memory
from app.settings.config import RunConfig
from ops.units import GIB

if TYPE_CHECKING:
    from actors.pool.device import WorkersDevice

log = logging.getLogger(__name__)

_ANSWER_S = 60.0  # the memory of a node that does not answer by then is seen when its workers have loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSizes:
    """What a node says of itself, in bytes."""

    host: str
    gpus: tuple[int, ...]
    room: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """A node that workers of this run may come to. `sizes`: None where it did not answer or, for CPUs, is not asked."""

    workers: int
    sizes: NodeSizes | None


def check_memory(config: RunConfig, device: WorkersDevice, fresh: bool = True) -> None:
    """Raises PlanError, with the changes that would help, when what is to be trained does not fit the GPUs of the
    cluster, or `workers.memory_gib`, or the nodes' own memory: on `workers.max` or on `workers.min` workers. Says
    nothing where nobody knows the size of a device. A run that is not `fresh` may have state in the nodes' memory
    already: it is looked at when its first generation forms."""
    from actors.planning.options import profile_of
    from actors.pool.workers import uses_gpu
    from ops.models.folders import resolve

    gpu = uses_gpu(config.workers)
    if not gpu and not config.workers.memory_gib:
        return
    config = replace(config, workers=replace(config.workers, device="cuda" if gpu else "cpu"))
    model, geometry = resolve(config.model)
    profile = profile_of(config.planner, model, geometry, device.name, config.train, device.measured)
    nodes = nodes_for(config, gpu)
    found = [size for node in nodes if node.sizes is not None for size in node.sizes.gpus]
    cluster = Cluster(
        nodes=filled([node.workers for node in nodes], config.workers.max),
        memory_gib=min(found, default=0) / GIB,
    )
    hosts = [
        HostRoom(
            name=node.sizes.host if node.sizes is not None else "",
            workers=node.workers,
            gib=node.sizes.room / GIB if node.sizes is not None else None,
        )
        for node in nodes
    ]
    view_memory(config, model, geometry, profile, cluster, hosts if fresh else ())


def nodes_for(config: RunConfig, gpu: bool) -> list[ClusterNode]:
    """The nodes with room for workers of this run, in the order in which they are filled; for GPUs with their sizes."""
    from actors.pool.room import Need
    from actors.ray_calls import nodes

    need = Need(config.workers.cpus_per_worker, 1.0 if gpu else 0.0)
    rooms = [(need.capacity(node["Resources"]), node["NodeID"]) for node in nodes() if node["Alive"]]
    rooms = sorted((-workers, node) for workers, node in rooms if workers)
    told = _asked([node for _, node in rooms]) if gpu else {}
    return [ClusterNode(workers=-workers, sizes=told.get(node)) for workers, node in rooms]


def node_sizes() -> NodeSizes:
    """What the node has on which this runs."""
    from ops.memory.node_room import gpu_sizes, node_room

    return NodeSizes(host=socket.gethostname(), gpus=tuple(gpu_sizes()), room=node_room())


def _asked(nodes: Sequence[str]) -> dict[str, NodeSizes]:
    """Answers by node, as far as they came in time."""
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.ray_calls import get, remote_of, wait

    ask = remote_of(node_sizes)
    asked = {
        ask.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(): node
        for node in nodes
    }
    done, _ = wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    found: dict[str, NodeSizes] = {}
    for reference in done:
        try:
            found[asked[reference]] = get(reference)
        except RayError as error:
            log.debug("node %s does not say what memory it has: %s", asked[reference], error)
    return found
