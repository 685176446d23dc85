"""Which node a new worker is asked for: nodes are filled before the next is begun.

A bag inside a node talks over NVLink or memory; eight workers dealt over two nodes as four and four have no bag of
eight inside one. Ray's own strategies deal, or fill a node only half.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from actors.refs import RayNode

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


def node_with_room(nodes: Iterable[RayNode], taken: Iterable[str], need: Need) -> str | None:
    """The node for one more worker of this run; None if none has room for it.

    `nodes` as Ray lists them, `taken` the node of each worker there is or is asked
    for. The node that holds the most workers of this run comes first, then the one with the most room. What other runs
    use is not known here, so it is a wish (`where`).
    """
    held: dict[str, int] = {}
    for node in taken:
        held[node] = held.get(node, 0) + 1
    best: tuple[tuple[int, int, str], str] | None = None
    for node_facts in nodes:
        node = node_facts["NodeID"]
        mine, capacity = held.get(node, 0), need.capacity(node_facts["Resources"])
        if not node_facts["Alive"] or mine >= capacity:
            continue
        rank = (-mine, -capacity, node)
        if best is None or rank < best[0]:
            best = rank, node
    return best[1] if best else None


def where(node: str | None) -> dict[str, object]:
    """Ray's actor options: on this node if it is free at that time, else on any that is."""
    if node is None:
        return {"scheduling_strategy": "SPREAD"}
    return {"label_selector": {"ray.io/node-id": node}, "fallback_strategy": [{"label_selector": {}}]}
