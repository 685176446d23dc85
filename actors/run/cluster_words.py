"""The cluster of a generation in words, for the event that says what plans count on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from actors.messages import WorkerInfo
from actors.plan.types import Cluster, GpuPlace
from actors.records.events import ClusterSeen
from ops.counted import counted

NCCL_NAMES = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME")  # which cards NCCL uses: named also where nobody sets them


def seen(cluster: Cluster, infos: Sequence[WorkerInfo], from_file: bool) -> ClusterSeen | None:
    """The event with the places of these workers' GPUs, in order of ranks; None where no place is known."""
    if not cluster.places:
        return None
    nodes: dict[str, str] = {}
    first = 0
    for number, count in enumerate(cluster.nodes):
        host = cluster.hosts[number] if cluster.hosts else f"node {number}"
        nodes[host if host not in nodes else f"{host} ({number})"] = node_words(cluster.places[first : first + count])
        first += count
    return ClusterSeen(nodes=nodes, nccl=nccl_of(infos), from_file=from_file)


def node_words(places: Sequence[GpuPlace]) -> str:
    """GPUs of a node, a letter or number for each: `8 GPUs, NVLink AAAAAAAA, numa 00001111, rails AABBCCDD`."""
    index = [place.index for place in places]
    whole = index == list(range(places[0].count or len(places)))
    numbers = "" if whole or None in index else f" ({' '.join(map(str, index))})"
    told = [
        f"{counted(len(places), 'GPU')}{numbers}",
        f"NVLink {_row([place.island for place in places]) or 'unknown'}",
        f"numa {_row(['' if place.numa is None else str(place.numa) for place in places]) or 'unknown'}",
        f"rails {_row([place.rail for place in places]) or 'unknown'}",
    ]
    if cards := dict.fromkeys(place.nic for place in places if place.nic):
        told.append(f"cards {' '.join(cards)}")
    return ", ".join(told)


def nccl_of(infos: Sequence[WorkerInfo]) -> dict[str, str]:
    """What environments set of NCCL: the value that all workers have, or all values that some have."""
    values: dict[str, set[str]] = {name: set() for name in NCCL_NAMES}
    for info in infos:
        for name, value in info.nccl:
            values.setdefault(name, set()).add(value)
    named = {name for info in infos for name, _ in info.nccl}
    everywhere = {name for name in named if all(any(name == own for own, _ in info.nccl) for info in infos)}
    return {
        name: " or ".join(sorted(found) + ["unset"] * (name in named and name not in everywhere))
        for name, found in sorted(values.items())
    }


def _row(letters: Sequence[str]) -> str:
    """One letter of each; "" where none is known, "-" for each that is not."""
    if not any(letters):
        return ""
    return ("" if all(len(one) < 2 for one in letters) else " ").join(one or "-" for one in letters)
