"""What a cascade of several shapes takes: the sum of its parts, less what they share and would each take alone.

A packed cascade runs the kernels of its samples together, and launches them once; the price of each part alone has the
launches in it (the constant of its cost model). Plans, what a run learns from a pack, and simulated clusters all take
their seconds from here. Example: parts of 3 s and 2 s with launches of 0.5 s each take 4.5 s in one cascade. However
wrong a constant is, no pack is quicker than its dearest part: what is left out of a part is at most all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.plan.costs.point import PartShape
from actors.plan.costs.prices import CascadePrices
from actors.plan.costs.spanning import BagSpread
from actors.plan.costs.topology import Topology
from actors.plan.types import Module


@dataclass(kw_only=True, slots=True)
class PackPrices(CascadePrices):
    """Prices of cascades whose samples differ. Parts are of different shapes: equal ones are priced as a batch."""

    def once(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float:
        """Seconds of its price that a cascade would not take again beside others of its pack: the share that the
        module's cost model says; 0 where it knows none, or no price."""
        model = self.model_of(module)
        if model is None:
            return 0.0
        load = self.load_of(module, batch, frames, height, width, degree, text_tokens)
        fixed = model.once(load)
        if not fixed > 0:
            return 0.0
        price = self.price(module, batch, frames, height, width, degree, text_tokens)
        return min(fixed / model.predict(load), 1.0) * price if price is not None else 0.0

    def penalty_once(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float:
        """The same of `penalty`: what a bag over nodes takes more for every peer, however little it sends to them."""
        if degree == 1:
            return 0.0
        if module == "dit" and self.cross_node.by_rows:
            return self.cross_node.sending(0.0, degree - 1)
        share = self.cross_node.penalty
        return share * self.once(module, batch, frames, height, width, degree, text_tokens) if share else 0.0

    def again(self, module: Module, parts: Sequence[PartShape], degree: int, spanned: BagSpread | None = None) -> float:
        """Seconds that these parts take one by one and not together; `spanned` of a bag over nodes."""
        if len(parts) == 1:
            return 0.0
        inside = _again([self.once(module, *part[:4], degree, part[4]) for part in parts])
        if spanned is None:
            return inside
        more = _again([self.penalty_once(module, *part[:4], degree, part[4]) for part in parts])
        return inside + self.cross_node.fall(spanned.overlap) * more

    def together(self, module: Module, parts: Sequence[PartShape], degree: int) -> float:
        """Seconds of one cascade of these parts on one node at normal speed. PlanError where one has no price."""
        alone = sum(self.seconds(module, *part[:4], degree, part[4]) for part in parts)
        return alone - self.again(module, parts, degree)

    def penalty_together(self, module: Module, parts: Sequence[PartShape], degree: int) -> float:
        """Seconds that it takes more over nodes without a common rail."""
        more = sum(self.penalty(module, *part[:4], degree, part[4]) for part in parts)
        if len(parts) == 1:
            return more
        return more - _again([self.penalty_once(module, *part[:4], degree, part[4]) for part in parts])

    def detour_together(
        self, module: Module, parts: Sequence[PartShape], degree: int, island_gbps: float = 0.0
    ) -> float:
        """Seconds that it takes more in more NVLink islands of a node than it has to use."""
        more = sum(self.detour(module, *part[:4], degree, part[4], island_gbps) for part in parts)
        share = self.cross_island.penalty
        if len(parts) == 1 or not share or (module == "dit" and self.island_row_s(island_gbps)):
            return more
        return more - share * _again([self.once(module, *part[:4], degree, part[4]) for part in parts])

    def on(self, topology: Topology, module: Module, parts: Sequence[PartShape], workers: Sequence[int]) -> float:
        """Seconds of one cascade of these parts on exactly these workers."""
        degree, over_nodes, over_islands = len(workers), 0.0, 0.0
        if topology.spans(workers):
            over_nodes = self.penalty_together(module, parts, degree)
        elif topology.has_islands:
            over_islands = self.detour_together(module, parts, degree, topology.cluster.island_gbps)
        return topology.seconds(workers, self.together(module, parts, degree), over_nodes, over_islands)


def _again(once: Sequence[float]) -> float:
    """What parts take in sum beside the one that takes most: the seconds that their pack does not have again."""
    return sum(once) - max(once)
