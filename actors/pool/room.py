"""Which node a new worker is asked for: nodes are filled before the next is begun.

A bag inside a node talks over NVLink or memory; eight workers dealt over two nodes as four and four have no bag of
eight inside one. Ray's own strategies deal, or fill a node only half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from actors.refs import RayNode
from data.engines.placement import NODE_LABEL, elsewhere

_SLACK = 1e-6  # fractions of a core add up to a whole one


@dataclass(frozen=True, slots=True)
class Need:
    """What Ray reserves for one worker."""

    cpus: float
    gpus: float

    def capacity(self, resources: Mapping[str, float]) -> int:
        """How many workers have room there."""
        shares = [
            resources.get(name, 0.0) / amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount > 0
        ]
        return int(min(shares, default=0.0) + _SLACK)


def nodes_with_room(
    nodes: Iterable[RayNode], taken: Iterable[str], need: Need, count: int, last: Collection[str] = ()
) -> list[str | None]:
    """The nodes for `count` more workers of this run, in order; None for those for which none has room.

    `nodes` as Ray lists them, `taken` the node of each worker there is or is asked for. The node that holds the most
    workers of this run is filled first, then the one with the most room; those of `last` after all others. What other
    runs use is not known here, so it is a wish (`where`). One look at the nodes for all: a thousand workers on 128
    nodes would take a thousand.
    """
    held = Counter(taken)
    ranked: list[tuple[bool, int, int, str]] = []
    for facts in nodes:
        node, capacity = facts["NodeID"], need.capacity(facts["Resources"])
        if facts["Alive"] and held[node] < capacity:
            ranked.append((node in last, -held[node], -capacity, node))
    free = (node for _, mine, capacity, node in sorted(ranked) for _ in range(mine - capacity))
    return [next(free, None) for _ in range(count)]


def where(node: str | None, shunned: Sequence[str] = ()) -> dict[str, object]:
    """Ray's actor options: on this node if it is free at that time, else on any that is, but for those that are
    shunned."""
    others = elsewhere(shunned)
    if node is None:
        return {"scheduling_strategy": "SPREAD"} | ({"label_selector": others} if others else {})
    return {"label_selector": {NODE_LABEL: node}, "fallback_strategy": [{"label_selector": others or {}}]}
