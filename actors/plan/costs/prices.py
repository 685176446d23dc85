"""What a cascade takes: seconds of a bag, of a bag over nodes or islands, memory, waits; and the end of a step.

A packed cascade, of samples that differ, runs their kernels together, and launches them once; the price of each part
alone has the launches in it (the constant of its cost model). Plans, what a run learns from a pack, and simulated
clusters all take its seconds from here. Example: parts of 3 s and 2 s with launches of 0.5 s each take 4.5 s in one
cascade. However wrong a constant is, no pack is quicker than its dearest part: what is left out of a part is at most
all of it. Weights that are fetched are copied once for a pack, too (`FetchedWeights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from actors.plan.costs.forms import FORMS
from actors.plan.costs.known import KnownCosts
from actors.plan.costs.needs import Footprint, footprint
from actors.plan.costs.point import Samples
from actors.plan.costs.remainder import remainder_of
from actors.plan.costs.spanning import BagSpread
from actors.plan.costs.topology import Topology
from actors.plan.types import Item, Module, PlanError
from ops.units import GIB

_MOST_PRICES = 100_000  # that are kept: thousands of cascades of a step are of the same few sizes


@dataclass(kw_only=True, slots=True)
class CascadePrices(KnownCosts):
    """Measured points as they stand, the rest from a fitted or FLOP model. Parts of a pack are of different shapes:
    equal ones are priced as a batch."""

    def has(self, module: Module) -> bool:
        """Whether the module is scheduled at all: it has points, be it of bags over nodes alone, or a model."""
        return module in self.models or bool(self._measured_degrees(module))

    def candidate_degrees(self, module: Module) -> tuple[int, ...]:
        """The profile's degrees of the module; without that list, those that were measured."""
        return self.degrees.get(module) or tuple(sorted(self._measured_degrees(module))) or (1,)

    def _measured_degrees(self, module: Module) -> set[int]:
        over_nodes = (*(key for key, _ in self.spanning), *(point.key for point in self.over_nodes))
        return {key[5] for key in (*self.measured, *over_nodes) if key[0] == module}

    def price(self, module: Module, part: Samples, degree: int) -> float | None:
        """Seconds on one node at normal speed, or None where the profile cannot say."""
        asked = (module, part, degree)
        if asked not in self._prices:
            if len(self._prices) > _MOST_PRICES:
                self._prices.clear()
            self._prices[asked] = self._price(module, part, degree)
        return self._prices[asked]

    def _price(self, module: Module, part: Samples, degree: int) -> float | None:
        key = part.key(module, degree)
        seen = self.live.get(key) or self.on_one_node(key)
        if seen is not None:
            return seen.seconds * self.by_text(key, seen.text_tokens, part.text_tokens)
        load = self.load_of(module, part, degree)
        held = key
        if module == "text" and key not in self.measured:
            held = Samples.of(part.count, (0, 0, 0)).key(module, degree)
        seconds = self.of_file(held) if held in self.measured else None
        if seconds is None and self.over_nodes:
            seconds = self.over_nodes_only(key)
        if seconds is not None:
            by_text = self.by_text(key, self.text_tokens.get(held, 0), part.text_tokens)
            return seconds * by_text * self.file_drift(module).factor(load)
        if not self.extrapolate:
            return None
        model = self.model_of(module)
        if model is None:
            return None
        return max(self.modelled(module, model, load) * self.model_drift(module, model).factor(load), 1e-9)

    def seconds(self, module: Module, part: Samples, degree: int) -> float:
        """As `price`, but raises PlanError for a point that it cannot price."""
        seconds = self.price(module, part, degree)
        if seconds is None:
            raise PlanError(
                f"the profile has no latency of {module} for batch {part.count}, {part.frames}f "
                f'{part.height}x{part.width} at degree {degree}. Measure it, or set "extrapolate": true.'
            )
        return seconds

    def penalty(self, module: Module, part: Samples, degree: int) -> float:
        """Seconds that a bag over nodes takes more, at normal speed and without a common rail (`CrossNode.fall` says
        what is left with some): by what its members send or, where that is not known, as a share of its price."""
        if degree == 1:
            return 0.0
        if module == "dit" and self.cross_node.by_rows:
            load = self.load_of(module, part, degree)
            return self.cross_node.sending(load.sent, degree - 1)
        share = self.cross_node.penalty
        seconds = self.price(module, part, degree) if share else None
        return share * seconds if seconds is not None else 0.0

    def detour(self, module: Module, part: Samples, degree: int, island_gbps: float = 0.0) -> float:
        """Seconds that a bag inside a node takes more in more NVLink islands than it has to use: as the profile says,
        or by what its members send where a GPU sends `island_gbps` GB/s to another island. 0 where nobody knows."""
        if degree == 1:
            return 0.0
        if module == "dit" and (row_s := self.island_row_s(island_gbps)):
            return row_s * self.load_of(module, part, degree).sent
        share = self.cross_island.penalty
        seconds = self.price(module, part, degree) if share else None
        return share * seconds if seconds is not None else 0.0

    def island_row_s(self, island_gbps: float) -> float:
        """Seconds that a row takes more on its way to another island, as the profile says, or at this bandwidth than
        the cost model says it does inside one. 0 where nobody knows."""
        if self.cross_island.row_s:
            return self.cross_island.row_s
        model = self.model_of("dit")
        if not (island_gbps and self.row_bytes and model):
            return 0.0
        inside = self.exchange_s or dict(zip(FORMS[model.form].names, model.coefficients)).get("comm", 0.0)
        return max(0.0, self.row_bytes / (1e9 * island_gbps) - inside)

    def once(self, module: Module, part: Samples, degree: int) -> float:
        """Seconds of its price that a cascade would not take again beside others of its pack: the share that the
        module's cost model says, and what it waits for copies of weights; 0 where nobody knows, or without a price."""
        launches = self._launches(module, part, degree)
        if module != "dit" or not self.fetched.num_bytes:
            return launches
        price, computed = self.price(module, part, degree), self.computed(module, part, degree)
        return launches + (price - computed if price is not None and computed is not None else 0.0)

    def computed(self, module: Module, part: Samples, degree: int) -> float | None:
        """Its price without what it waits for copies of weights: by the model where these may hide what it computes.
        None where it has no price."""
        price = self.price(module, part, degree)
        model = self.model_of(module)
        if price is None or model is None or module != "dit" or not self.fetched.hide(price):
            return price
        load = self.load_of(module, part, degree)
        return min(price, model.predict(load) * self.model_drift(module, model).factor(load))

    def _launches(self, module: Module, part: Samples, degree: int) -> float:
        model = self.model_of(module)
        if model is None:
            return 0.0
        load = self.load_of(module, part, degree)
        fixed = model.once(load)
        if not fixed > 0:
            return 0.0
        computed = self.computed(module, part, degree)
        return min(fixed / model.predict(load), 1.0) * computed if computed is not None else 0.0

    def penalty_once(self, module: Module, part: Samples, degree: int) -> float:
        """As `once`, of `penalty`: what a bag over nodes takes more for every peer, however little it sends to them."""
        if degree == 1:
            return 0.0
        if module == "dit" and self.cross_node.by_rows:
            return self.cross_node.sending(0.0, degree - 1)
        share = self.cross_node.penalty
        return share * self.once(module, part, degree) if share else 0.0

    def again(self, module: Module, parts: Sequence[Samples], degree: int, spanned: BagSpread | None = None) -> float:
        """Seconds that these parts take one by one and not together; `spanned` of a bag over nodes."""
        if len(parts) == 1:
            return 0.0
        if module == "dit" and self.fetched.num_bytes:
            inside = self._again_beside_copies(parts, degree)
        else:
            inside = _again([self.once(module, part, degree) for part in parts])
        if spanned is None:
            return inside
        more = _again([self.penalty_once(module, part, degree) for part in parts])
        return inside + self.cross_node.fall(spanned.overlap) * more

    def _again_beside_copies(self, parts: Sequence[Samples], degree: int) -> float:
        """As `again`, for parts of a transformer whose weights are fetched, on one node."""
        prices = [self.price("dit", part, degree) or 0.0 for part in parts]
        computed = sum(self.computed("dit", part, degree) or 0.0 for part in parts)
        launches = _again([self._launches("dit", part, degree) for part in parts])
        return sum(prices) - max(*prices, self.fetched.beside(computed - launches))

    def together(self, module: Module, parts: Sequence[Samples], degree: int) -> float:
        """Seconds of one cascade of these parts on one node at normal speed. PlanError where one has no price."""
        alone = sum(self.seconds(module, part, degree) for part in parts)
        return alone - self.again(module, parts, degree)

    def penalty_together(self, module: Module, parts: Sequence[Samples], degree: int) -> float:
        """Seconds that it takes more over nodes without a common rail."""
        more = sum(self.penalty(module, part, degree) for part in parts)
        if len(parts) == 1:
            return more
        return more - _again([self.penalty_once(module, part, degree) for part in parts])

    def detour_together(self, module: Module, parts: Sequence[Samples], degree: int, island_gbps: float = 0.0) -> float:
        """Seconds that it takes more in more NVLink islands of a node than it has to use."""
        more = sum(self.detour(module, part, degree, island_gbps) for part in parts)
        share = self.cross_island.penalty
        if len(parts) == 1 or not share or (module == "dit" and self.island_row_s(island_gbps)):
            return more
        return more - share * _again([self.once(module, part, degree) for part in parts])

    def on(self, topology: Topology, module: Module, parts: Sequence[Samples], workers: Sequence[int]) -> float:
        """Seconds of one cascade of these parts on exactly these workers."""
        degree, over_nodes, over_islands = len(workers), 0.0, 0.0
        if topology.spans(workers):
            over_nodes = self.penalty_together(module, parts, degree)
        elif topology.has_islands:
            over_islands = self.detour_together(module, parts, degree, topology.cluster.island_gbps)
        return topology.seconds(workers, self.together(module, parts, degree), over_nodes, over_islands)

    def modes(self, module: Module, part: Samples, room_gib: float = math.inf) -> tuple[tuple[int, float], ...]:
        """(degree, seconds) of every degree that is legal where a worker has `room_gib` for a cascade, ascending. A bag
        of spatial-temporal layers has no more members than there are frames, or positions in one."""
        cache_key = (module, part, room_gib)
        found = self._cache.get(cache_key)
        if found is None:
            most = math.inf
            if module == "dit" and self.sliced is not None:
                token_frames = self.tokens(part.frames, 1, 1)
                most = max(token_frames, self.tokens(*part.shape) // token_frames)
            found = tuple(
                (k, s)
                for k in self.candidate_degrees(module)
                if k <= most and (s := self.price(module, part, k)) is not None and self.fits(module, part, k, room_gib)
            )
            self._cache[cache_key] = found
        return found

    def legal_degrees(self, module: Module, part: Samples) -> tuple[int, ...]:
        return tuple(k for k, _ in self.modes(module, part))

    def footprint(self, module: Module, samples: Sequence[Samples], degree: int) -> Footprint:
        """The size of a cascade of these samples, as `needs` knows it."""
        return footprint(module, samples, degree, self.tokens, self.needs)

    def may_try(self, module: Module, one: Samples, degree: int, room_gib: float) -> bool:
        """Whether one sample may run at this degree although one ran out of memory there."""
        priced = degree in self.candidate_degrees(module) and self.price(module, one, degree) is not None
        found = self.footprint(module, [one], degree)
        return priced and found.line in self.needs.limits and self.needs.may_try(found, room_gib)

    def fits(self, module: Module, part: Samples, degree: int, room_gib: float = math.inf) -> bool:
        """Whether the cascade stays within the room of a worker, as far as that is known, and below every limit."""
        if not self.needs.fits(self.footprint(module, [part], degree), room_gib):
            return False
        return not any(limit.forbids(part.key(module, degree)) for limit in self.max_frames)

    def wait_for_inputs(self, item: Item, count: int, bag: Set[int], producers: Iterable[int]) -> float:
        """Seconds that encode results of `count` samples take to a bag: none if it holds one of their workers."""
        return self.handoff_seconds(item, count) if bag.isdisjoint(producers) else 0.0

    def handoff_seconds(self, item: Item, count: int) -> float:
        """Delay of a consumer that holds none of the producer's workers, by the size of latents in fp32."""
        stride_t, stride_h, stride_w = self.geometry.vae_stride
        places = count * item.frames * item.height * item.width / (stride_t * stride_h * stride_w)
        return self.handoff.seconds(places * 4 * self.latent_channels / GIB)

    def update_seconds(self, workers: int, nodes: int = 1) -> float:
        """Seconds of the end of a step, after its last backward pass; 0 where nobody has measured it."""
        return self.update.seconds(workers, nodes) or 0.0

    def remainder_seconds(self, workers: int, nodes: int = 1) -> float:
        """Seconds of a step beside its cascades and its end; 0 where no run has measured it."""
        return remainder_of(self.remainders, workers, nodes)


def _again(once: Sequence[float]) -> float:
    """What parts take in sum beside the one that takes most: the seconds that their pack does not have again."""
    return sum(once) - max(once)
