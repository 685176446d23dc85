"""`workers.cluster`: what a file says of the nodes, laid over what the workers of a generation report. Pure.

A file's nodes have host names, or none. Without names each node of the run is matched with the first node of the file
that has as many GPUs and is not matched yet, and stays matched as long as it has workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.plan.types import UNKNOWN_PLACE, Cluster, GpuPlace
from ops.counted import counted


class ClusterMismatch(ValueError):
    """A file's cluster and the workers contradict each other: value, rule and remedy in one sentence."""


_REMEDY = "Correct the file, or leave workers.cluster empty: a run then takes what its workers tell"


class GivenCluster:
    """The cluster that a cluster file describes. Made with None, it changes nothing."""

    def __init__(self, given: Cluster | None) -> None:
        self._given = given
        self._number: dict[str, int] = {}  # node -> its number in the file

    def over(self, found: Cluster, homes: Sequence[str]) -> Cluster:
        """The workers that are there, with places, speeds and bandwidths from the file. What the file leaves out of a
        place stays as the worker reports it. `homes` are the names of the nodes of `found`, in order. Raises
        ClusterMismatch."""
        given = self._given
        if given is None:
            return found
        if len(homes) > len(given.nodes):
            raise ClusterMismatch(
                f"workers.cluster describes {counted(len(given.nodes), 'node')}, and workers are on {len(homes)}. "
                f"{_REMEDY}."
            )
        numbers = self._numbers(found, homes)
        first = [sum(given.nodes[:number]) for number in range(len(given.nodes))]
        place_of = found.places or (UNKNOWN_PLACE,) * found.num_workers
        places, speeds, worker = [], [], 0
        for node, number in enumerate(numbers):
            for position in range(found.nodes[node]):
                told = place_of[worker]
                index = position if told.index is None else told.index
                if index >= given.nodes[number]:
                    raise ClusterMismatch(_too_many(given, number, found, node, index))
                wanted = first[number] + index
                places.append(_placed(told, given.places[wanted] if given.places else UNKNOWN_PLACE))
                speeds.append(given.speed[wanted] if given.speed else 1.0)
                worker += 1
        return replace(
            found,
            places=tuple(places) if any(place.known for place in places) else (),
            island_gbps=given.island_gbps,
            speed=tuple(speeds) if any(speed != 1.0 for speed in speeds) else (),
        )

    def _numbers(self, found: Cluster, homes: Sequence[str]) -> list[int]:
        """The number of every node in the file."""
        assert self._given is not None
        known = {home: number for home, number in self._number.items() if home in homes}
        first = 0
        for node, home in enumerate(homes):
            gpus = found.places[first].count if found.places else 0
            first += found.nodes[node]
            if home not in known:
                host = found.hosts[node] if found.hosts else ""
                known[home] = self._taken(host, gpus, found.nodes[node], set(known.values()))
        self._number = known
        return [known[home] for home in homes]

    def _taken(self, host: str, gpus: int, workers: int, used: set[int]) -> int:
        """The file's node for a new one with `gpus` GPUs (0: not known), of which `workers` have a worker."""
        given = self._given
        assert given is not None
        if given.hosts and host not in given.hosts:
            raise ClusterMismatch(
                f"workers.cluster names the hosts {', '.join(given.hosts)}, and workers are on {host}. {_REMEDY}."
            )
        numbers = [given.hosts.index(host)] if given.hosts else [n for n in range(len(given.nodes)) if n not in used]
        for number in numbers:
            if given.nodes[number] == gpus or (not gpus and given.nodes[number] >= workers):
                return number
        sizes = " and ".join(str(given.nodes[number]) for number in numbers)
        has = counted(gpus, "GPU") if gpus else counted(workers, "worker")
        left = f"a node {host}" if given.hosts else "other nodes" if used else "nodes"
        raise ClusterMismatch(
            f"workers.cluster describes {left} of {sizes} GPUs, and {host or 'a node'} has {has}. {_REMEDY}."
        )


def _placed(told: GpuPlace, given: GpuPlace) -> GpuPlace:
    return replace(
        told,
        numa=told.numa if given.numa is None else given.numa,
        island=given.island or told.island,
        rail=given.rail or told.rail,
        nic="" if given.rail else told.nic,
        nic_hops=0 if given.rail else told.nic_hops,
    )


def _too_many(given: Cluster, number: int, found: Cluster, node: int, index: int) -> str:
    host = found.hosts[node] if found.hosts else f"node {node}"
    return (
        f"workers.cluster describes a node of {counted(given.nodes[number], 'GPU')}, and {host} has a worker on its "
        f"{index + 1}. {_REMEDY}."
    )
