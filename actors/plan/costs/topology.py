"""Where a bag's workers sit: nodes, NIC rails, the cost of spanning nodes, and which workers to pick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.plan.types import Cluster, refuse_below

_APART = 0.3  # overlaps of rails that say how the penalty falls with them


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossNode:
    """What a bag takes longer because it spans nodes: seconds for every row that a member sends and for each of its
    peers or, where both are 0, a share of what it takes on one node. All of it falls with the overlap of its rails."""

    penalty: float = 0.0  # the share, without a common rail
    decay: float = 0.0
    rails_per_node: str = ""  # one letter per worker of a node; empty: the cluster's own, or one rail for all
    row_s: float = 0.0  # without a common rail, too
    peer_s: float = 0.0

    def __post_init__(self) -> None:
        refuse_below(0, self, "penalty", "decay", "row_s", "peer_s")

    @property
    def by_rows(self) -> bool:
        """Whether a transformer's bags are priced by what they send."""
        return self.row_s > 0 or self.peer_s > 0

    def sending(self, rows: float, peers: int) -> float:
        """Seconds more of a bag whose members send so many rows to so many peers each, without a common rail."""
        return self.row_s * rows + self.peer_s * peers

    def fall(self, overlap: float) -> float:
        """What is left of the seconds at this overlap of rails, as a share."""
        return math.exp(-self.decay * overlap)

    def factor(self, overlap: float) -> float:
        """How many times as long a bag takes that is not priced by what it sends."""
        return 1.0 + self.penalty * self.fall(overlap)


def cross_of(found: Sequence[tuple[float, float, int]], known: CrossNode) -> CrossNode:
    """The law behind measured bags over nodes: (overlap of their rails, seconds over those on one node, how many).

    Overlaps that are not far apart tell no decay; the known one stays then.
    """
    excess = {o: max(_middle([(r, n) for at, r, n in found if at == o]) - 1.0, 0.0) for o in {o for o, _, _ in found}}
    low, high = min(excess), max(excess)
    decay = known.decay
    if high - low >= _APART and excess[low] > excess[high] > 0:
        decay = math.log(excess[low] / excess[high]) / (high - low)
    penalties = [(more * math.exp(decay * o), sum(n for at, _, n in found if at == o)) for o, more in excess.items()]
    return replace(known, penalty=_middle(penalties), decay=decay)


def _middle(weighted: Sequence[tuple[float, int]]) -> float:
    """Median of (value, weight)."""
    half, so_far = sum(weight for _, weight in weighted) / 2, 0
    for value, weight in sorted(weighted):
        so_far += weight
        if so_far >= half:
            return value
    raise AssertionError("no values")


class Topology:
    """A cluster as flat lists, for inner loops: node and rail of every worker, workers of every node."""

    def __init__(self, cluster: Cluster, cross_node: CrossNode) -> None:
        self.cluster = cluster
        self.cross = cross_node
        self.num_workers = cluster.num_workers
        self.node = [node for node, count in enumerate(cluster.nodes) for _ in range(count)]
        first = [sum(cluster.nodes[:node]) for node in range(len(cluster.nodes))]
        self.workers = [list(range(first[node], first[node] + count)) for node, count in enumerate(cluster.nodes)]
        rails = cluster.rails or cross_node.rails_per_node
        self.rail = [rails[(w - first[self.node[w]]) % len(rails)] if rails else "A" for w in range(self.num_workers)]
        self.speed = list(cluster.speed) or [1.0] * self.num_workers
        self.uniform = len(set(self.speed)) <= 1
        self.largest = max(cluster.nodes, default=0)  # bag that a node can hold
        self.least_fall = cross_node.fall(1.0)  # what is left of the seconds for spanning nodes on common rails
        self._places: dict[tuple[int, ...], tuple[float, float]] = {}

    def seconds(self, workers: Sequence[int], alone: float, more: float) -> float:
        """Of a cascade on these workers that takes `alone` seconds on one node at normal speed, and `more` over nodes
        without a common rail."""
        key = tuple(sorted(workers))
        known = self._places.get(key)
        if known is None:
            known = self.cross.fall(self.overlap(key)) if self.spans(key) else 0.0, min(self.speed[w] for w in key)
            if len(self._places) > 100_000:
                self._places.clear()
            self._places[key] = known
        return (alone + known[0] * more) / known[1]

    def spans(self, workers: Sequence[int]) -> bool:
        first = self.node[workers[0]]
        return any(self.node[w] != first for w in workers)

    def overlap(self, workers: Sequence[int]) -> float:
        """|rails common to all nodes of the bag| / the largest number of rails it uses on one node."""
        per_node: dict[int, set[str]] = {}
        for worker in workers:
            per_node.setdefault(self.node[worker], set()).add(self.rail[worker])
        sets = list(per_node.values())
        return len(set.intersection(*sets)) / max(len(rails) for rails in sets)
