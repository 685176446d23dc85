"""Where a bag's workers sit: nodes, NIC rails, the cost of spanning nodes, and which workers to pick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.plan.types import Cluster, refuse_below

_APART = 0.3  # overlaps of rails that say how the penalty falls with them


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossNode:
    """A bag that spans nodes takes 1 + penalty * exp(-decay * overlap) times as long."""

    penalty: float = 0.0
    decay: float = 0.0
    rails_per_node: str = ""  # one letter per worker of a node; empty: the cluster's own, or one rail for all

    def __post_init__(self) -> None:
        refuse_below(0, self, "penalty", "decay")

    def factor(self, overlap: float) -> float:
        return 1.0 + self.penalty * math.exp(-self.decay * overlap)


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
        self.best_span = cross_node.factor(1.0)
        self._factors: dict[tuple[int, ...], float] = {}

    def factor(self, workers: Sequence[int]) -> float:
        """Slow-down of a bag: the cross-node factor of its rails, divided by the speed of its slowest worker."""
        key = tuple(sorted(workers))
        known = self._factors.get(key)
        if known is None:
            known = self.cross.factor(self.overlap(key)) if self.spans(key) else 1.0
            known /= min(self.speed[w] for w in key)
            if len(self._factors) > 100_000:
                self._factors.clear()
            self._factors[key] = known
        return known

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
