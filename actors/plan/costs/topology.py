"""Where a bag's workers sit: nodes, NVLink islands, PCIe, NIC rails; and the cost of spanning nodes or islands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from actors.plan.types import UNKNOWN_PLACE, Cluster, GpuPlace, hops_between, refuse_below

_APART = 0.3  # overlaps of rails that say how the penalty falls with them
_OTHER_ISLAND = 5  # beyond the farthest of PCIe's classes
_MOST_KNOWN = 100_000  # answers that are kept


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
        """Seconds more of a bag whose members send `rows` rows to `peers` peers each, without a common rail."""
        return self.row_s * rows + self.peer_s * peers

    def fall(self, overlap: float) -> float:
        """What is left of the seconds at this overlap of rails, as a share."""
        return math.exp(-self.decay * overlap)

    def factor(self, overlap: float) -> float:
        """How many times as long a bag takes that is not priced by what it sends."""
        return 1.0 + self.penalty * self.fall(overlap)


def cross_of(found: Sequence[tuple[float, float, int]], known: CrossNode) -> CrossNode:
    """The law that follows from measured bags over nodes: (overlap of their rails, seconds over those on one node, how
    many).

    Overlaps that are not far apart show no decay; the known one stays then.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossIsland:
    """What a bag inside a node takes longer because it uses more NVLink islands than it has to: seconds for every row
    that a member sends or, where they are 0, a share of what it takes."""

    penalty: float = 0.0
    row_s: float = 0.0

    def __post_init__(self) -> None:
        refuse_below(0, self, "penalty", "row_s")


class Topology:
    """A cluster as flat lists, for inner loops: node, rail and neighbours of every worker, workers of every node."""

    def __init__(self, cluster: Cluster, cross_node: CrossNode) -> None:
        self.cluster = cluster
        self.cross = cross_node
        self.num_workers = cluster.num_workers
        self.node = [node for node, count in enumerate(cluster.nodes) for _ in range(count)]
        first = [sum(cluster.nodes[:node]) for node in range(len(cluster.nodes))]
        self.workers = [list(range(first[node], first[node] + count)) for node, count in enumerate(cluster.nodes)]
        places = cluster.places or (UNKNOWN_PLACE,) * self.num_workers
        self.rail = _rails(places, [w - first[node] for w, node in enumerate(self.node)], cross_node.rails_per_node)
        self.nic_hops = [place.nic_hops for place in places]
        self.islands = [_islands(places, workers) for workers in self.workers]
        self.has_islands = any(len(islands) > 1 for islands in self.islands)
        self.near = [_Neighbours(places, workers) for workers in self.workers]
        self.alike = all(near.alike for near in self.near)  # nobody of a node is nearer to anybody than to others
        self.speed = list(cluster.speed) or [1.0] * self.num_workers
        self.uniform = len(set(self.speed)) <= 1
        self.largest = max(cluster.nodes, default=0)  # bag that a node can hold
        self.least_fall = cross_node.fall(1.0)  # what is left of the seconds for spanning nodes on common rails
        self._places: dict[tuple[int, ...], tuple[float, bool, float]] = {}

    def seconds(self, workers: Sequence[int], alone: float, over_nodes: float, over_islands: float = 0.0) -> float:
        """Seconds of a cascade on these workers that takes `alone` on one node, in as few NVLink islands as hold it, at
        normal speed; `over_nodes` more over nodes without a common rail, `over_islands` more in a node's islands
        without need."""
        key = tuple(sorted(workers))
        known = self._places.get(key)
        if known is None:
            spans = self.spans(key)
            fall = self.cross.fall(self.overlap(key)) if spans else 0.0
            strays = self.has_islands and not spans and self.strays(key)
            known = fall, strays, min(self.speed[w] for w in key)
            if len(self._places) > _MOST_KNOWN:
                self._places.clear()
            self._places[key] = known
        return (alone + known[0] * over_nodes + (over_islands if known[1] else 0.0)) / known[2]

    def spans(self, workers: Sequence[int]) -> bool:
        """Whether workers are of several nodes."""
        first = self.node[workers[0]]
        return any(self.node[w] != first for w in workers)

    def strays(self, workers: Sequence[int]) -> bool:
        """Whether workers of one node are in more of its NVLink islands than have to be."""
        islands = self.islands[self.node[workers[0]]]
        if len(islands) < 2:
            return False
        used, left, least = sum(not island.isdisjoint(workers) for island in islands), len(workers), 0
        for island in islands:  # the largest first
            least += left > 0
            left -= len(island)
        return used > least

    def overlap(self, workers: Sequence[int]) -> float:
        """|rails common to all nodes of the bag| / the largest number of rails it uses on one node."""
        per_node: dict[int, set[str]] = {}
        for worker in workers:
            per_node.setdefault(self.node[worker], set()).add(self.rail[worker])
        sets = list(per_node.values())
        return len(set.intersection(*sets)) / max(len(rails) for rails in sets)

    def apart(self, workers: Sequence[int]) -> int:
        """How far workers of one node are from each other, over all pairs; 0 inside an NVLink island, over nodes, and
        where nobody knows."""
        near = self.near[self.node[workers[0]]]
        return 0 if near.alike or self.spans(workers) else near.apart(workers)


def _rails(places: Sequence[GpuPlace], position: Sequence[int], letters: str) -> list[str]:
    """The rail that each worker itself names, else the letter of its GPU's place in the node; `position` where nobody
    knows its GPU."""
    if any(place.rail for place in places) or not letters:
        return [place.rail or "A" for place in places]
    own = [at if place.index is None else place.index for place, at in zip(places, position, strict=True)]
    return [letters[index % len(letters)] for index in own]


def _islands(places: Sequence[GpuPlace], workers: Sequence[int]) -> list[frozenset[int]]:
    """A node's NVLink islands, the largest first; none where nobody knows them."""
    if not all(places[w].island for w in workers):
        return []
    found: dict[str, list[int]] = {}
    for worker in workers:
        found.setdefault(places[worker].island, []).append(worker)
    return sorted(map(frozenset, found.values()), key=lambda island: (-len(island), min(island)))


@lru_cache(maxsize=1024)
def _hops(places: tuple[GpuPlace, ...]) -> tuple[tuple[int, ...], ...]:
    """[W, W] how far any two workers of a node are apart: 0 inside an NVLink island, else by the classes of PCIe, and
    more than any of those from one island to another."""

    def between(one: GpuPlace, other: GpuPlace) -> int:
        if one.island and one.island == other.island:
            return 0
        return hops_between(one, other) + (_OTHER_ISLAND if one.island and other.island else 0)

    return tuple(tuple(between(one, other) for other in places) for one in places)


class _Neighbours:
    """Workers of one node, and which of them are near which."""

    def __init__(self, places: Sequence[GpuPlace], workers: Sequence[int]) -> None:
        own = tuple(places[w] for w in workers)
        self._first = workers[0]
        self._apart = _hops(own) if any(place.known for place in own) else ()
        pairs = {hops for number, row in enumerate(self._apart) for hops in row[:number]}
        self.alike = len(pairs) <= 1  # any workers are as good as any others
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}

    def between(self, one: int, other: int) -> int:
        """How far two workers are apart."""
        return self._apart[one - self._first][other - self._first]

    def apart(self, workers: Sequence[int]) -> int:
        """The sum of how far two are apart over all pairs of these workers."""
        return sum(self.between(one, other) for one, other in combinations(workers, 2))

    def nearest(self, wished: Sequence[int], count: int, beside: tuple[int, ...] = ()) -> tuple[int, ...]:
        """`count` of the `wished`, with `beside` as near to each other as can be; of equally near ones, those that are
        wished first. From each of the wished, the nearest are added one after the other, and the best such set wins:
        the nearest of all where distances are nested, as islands and memory nodes are."""
        key = (count, tuple(wished), beside)
        if key not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._grown(key[1], count, beside)
        return self._known[key]

    def _grown(self, wished: tuple[int, ...], count: int, beside: tuple[int, ...]) -> tuple[int, ...]:
        rows = [self._apart[w - self._first] for w in wished]
        columns = [w - self._first for w in wished]
        base = [sum(row[w - self._first] for w in beside) for row in rows]
        best: tuple[int, list[int]] | None = None  # how far apart, and which, by place among the wished
        for seed in range(len(wished)):
            more, left, own, total = base, list(range(len(wished))), [], 0
            nearest = seed
            while True:
                total += more[nearest]
                own.append(nearest)
                left.remove(nearest)
                if len(own) == count or (best is not None and total > best[0]):
                    break
                row = rows[nearest]
                more = [so_far + row[column] for so_far, column in zip(more, columns)]
                nearest = min(left, key=more.__getitem__)
            if len(own) == count and (best is None or (total, sorted(own)) < best):
                best = total, sorted(own)
        assert best is not None, f"{count} of {len(wished)} workers"
        return tuple(sorted(wished[place] for place in best[1]))
