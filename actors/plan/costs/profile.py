"""Profile: what cascades cost on a device, and how measurements change that.

What is known and the models fitted to it are in `known`, prices by them in `prices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from actors.plan.costs.fetching import FetchedWeights
from actors.plan.costs.flops import exchange_seconds, flop_costs, text_cost
from actors.plan.costs.halved import HalvedHeads
from actors.plan.costs.handoff import HandoffPoint, estimate_of
from actors.plan.costs.needs import Footprint, Needs
from actors.plan.costs.point import MOST_POINTS, LivePoint, PointKey, Samples
from actors.plan.costs.prices import CascadePrices
from actors.plan.costs.remainder import RemainderPoint
from actors.plan.costs.slices import SlicedBlocks
from actors.plan.costs.spanning import OVERLAP, BagSpread, SpanningPoint, SpreadCascade, cross_of_spread
from actors.plan.costs.update import UpdatePoint
from actors.plan.types import MODULES, Module, refuse_degrees
from ops.degrees import MOST_DEGREE
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.base.flops import TrainedPart
from ops.models.base.tiling import Tiling
from ops.models.config import ImageConfig, TextConfig, VAEConfig

_SURE = 0.1  # share of its doubt that a point keeps however often it was measured
_ABSURD = 20.0  # times longer or shorter than what a known point takes: a stopped process or a wrong clock
_KNOWN = 3  # observations that make a point known, and absurd ones in a row that are believed after all


@dataclass(kw_only=True, slots=True)
class Profile(CascadePrices):
    """Latency and memory of one model on one device. `measure`, `observe...` and `exceed` change it."""

    @classmethod
    def from_flops(
        cls,
        dit: DiTConfig,
        vae: VAEConfig | None = None,
        text: TextConfig | None = None,
        geometry: Geometry | None = None,
        image: ImageConfig | None = None,
        tiling: Tiling | None = None,
        *,
        tflops: float = 0.03,
        vae_flops_per_pixel: float | None = None,
        text_flops_per_token: float | None = None,
        launch_s: float = 2e-4,
        exchange_gbps: float = 1.0,
        host_gbps: float = math.inf,
        encoder_tflops: float | None = None,
        part: TrainedPart | None = None,
        element_bytes: int = 4,
        degrees: Sequence[int] = (),
        max_degree: int = MOST_DEGREE,
        device: str = "cpu",
    ) -> Profile:
        """A profile without any measurement: every point comes from the FLOP model and improves with `observe`.

        `host_gbps`: GB/s of copies from host memory. `encoder_tflops`: of encoders, where the transformer multiplies in
        another precision. `part`: what of the transformer is trained (None: `usual_part`). `element_bytes`: of what
        its bags send. The defaults fit a CPU core with small models. DiT degrees are the usual ones
        (`DiTConfig.degrees`).
        """
        heads = dit.num_heads if dit.deals_heads else None
        refuse_degrees(degrees)
        fits = flop_costs(
            dit,
            vae or VAEConfig(),
            text or TextConfig(),
            image,
            tflops=tflops,
            vae_flops_per_pixel=vae_flops_per_pixel,
            text_flops_per_token=text_flops_per_token,
            launch_s=launch_s,
            exchange_gbps=exchange_gbps,
            host_gbps=host_gbps,
            encoder_tflops=encoder_tflops,
            part=part,
            element_bytes=element_bytes,
        )
        return cls(
            model=dit.architecture,
            device=device,
            source="FLOP model",
            models=fits,
            num_heads=heads,
            row_bytes=exchange_seconds(dit, 1.0, element_bytes, part),
            element_bytes=element_bytes,
            latent_channels=dit.out_channels,
            sliced=SlicedBlocks.of(dit, fits["dit"], part or dit.usual_part),
            halved=HalvedHeads.of(dit, device),
            text_cost=text_cost(dit),
            degrees={"text": (1,), "vae": (1,), "dit": tuple(degrees) or dit.degrees(max_degree)},
            geometry=geometry or Geometry(patch=dit.patch),
            tiling=tiling or Tiling(),
        )

    def measure(
        self, key: PointKey, seconds: float, text_tokens: int | None = None, spread: float | None = None
    ) -> None:
        """Add a point as a file has it: measured apart from any run, with `text_tokens` text tokens of each sample.
        `spread` of its runs: longest less shortest over the median."""
        self.measured[key] = seconds
        if text_tokens is not None:
            self.text_tokens[key] = text_tokens
        if spread is not None:
            self.spread[key] = spread
        self._file_fits.pop(key[0], None)
        self.points_changed(key[0])
        if key[0] == "dit":  # what these are beside
            self.count_over_nodes()
            self.count_handoffs()

    def count_over_nodes(self, found: Iterable[SpanningPoint] = ()) -> None:
        """Add cascades measured over nodes; all of them say what a bag over nodes costs."""
        self.over_nodes = (*self.over_nodes, *found)
        if self.over_nodes:
            self._count_spread(
                self._spread(one.key, LivePoint.of(one.seconds, 1, one.text_tokens), self.measured.get(one.key))
                for one in self.over_nodes
            )

    def count_handoffs(self, found: Iterable[HandoffPoint] = ()) -> None:
        """Add handoffs that were timed apart from any run; all of them say what one costs."""
        self.handoffs = (*self.handoffs, *found)
        if self.handoffs:
            self.seen_handoffs = estimate_of(self.handoffs)
            self._price_handoffs()

    def use_residual(self, residual: str) -> None:
        """Have the VAE's fit completed by this from now on, one of RESIDUALS."""
        self.residual = residual
        self.points_changed("vae")

    def count_fetched(self, found: FetchedWeights) -> None:
        """Passes of the DiT copy these weights from host memory from now on."""
        self.fetched = found
        self.points_changed("dit")

    def count_exchange(self, exchange_s: float, calls: float = 0.0) -> None:
        """The all-to-alls of the DiT have been measured, of which a cascade makes `calls`."""
        self.exchange_s, self.exchange_calls = exchange_s, calls
        self.points_changed("dit")

    def observe(
        self,
        module: Module,
        part: Samples,
        degree: int,
        seconds: float,
        *,
        spanned: BagSpread | None = None,
    ) -> None:
        """Learn from an executed cascade (closed loop): its point follows the measurements, its model is refitted.

        `seconds` at normal speed of its workers; `spanned` of a bag over nodes, None on one. Raises ValueError, and
        learns nothing, for a duration that is not a positive number or that cannot be true: 20 times what the point has
        taken so far, unless it comes three times in a row. After those over nodes `learn_cross_node` is called, once.
        """
        what = f"{module} of {part.count} x {part.frames}f {part.height}x{part.width} at degree {degree}"
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{what} took {seconds} s; a duration must be positive and finite. It is left out.")
        key = part.key(module, degree)
        before = self._before(key, spanned)
        if before is not None and before.count >= _KNOWN and not 1 / _ABSURD < seconds / before.seconds < _ABSURD:
            if before.refused + 1 < _KNOWN:
                self._set(key, spanned, replace(before, refused=before.refused + 1))
                raise ValueError(
                    f"{what} took {seconds:.4g} s and {before.seconds:.4g} s before; a cascade does not change by a "
                    f"factor of {_ABSURD:g}. It is left out, and believed when it comes {_KNOWN} times in a row."
                )
            before = None
        first = LivePoint.of(seconds, 1, part.text_tokens)
        self._set(key, spanned, first if before is None else before.after(seconds, part.text_tokens))
        self.points_changed(module)

    def observe_packed(
        self,
        module: Module,
        parts: Sequence[Samples],
        degree: int,
        seconds: float,
        *,
        spanned: BagSpread | None = None,
        again: float | None = None,
        prices: Sequence[float] | None = None,
    ) -> None:
        """Learn from a cascade of several shapes, which is priced as `together` says: each takes a part of the
        difference, the larger the less often it was measured. `again` and `prices` are what `again` and `prices_of`
        say, where a caller has asked already. Raises as `observe`, and PlanError where a part has no price."""
        if len(parts) == 1:
            self.observe(module, parts[0], degree, seconds, spanned=spanned)
            return
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a packed {module} cascade took {seconds} s; a duration must be positive and finite.")
        if prices is None:
            prices = self.prices_of(module, parts, degree, spanned)
        doubts = []
        for part, price in zip(parts, prices, strict=True):
            known = self._before(part.key(module, degree), spanned)
            doubts.append(price * max(_SURE, 1.0 / (1 + (known.count if known else 0))))
        apart = seconds + (self.again(module, parts, degree, spanned) if again is None else again)
        error = apart - sum(prices)
        for part, price, doubt in zip(parts, prices, doubts, strict=True):
            # A part takes at least a fifth of its share, so that an error elsewhere cannot make it nothing.
            own = max(price + error * doubt / sum(doubts), 0.2 * price * apart / sum(prices))
            self.observe(module, part, degree, own, spanned=spanned)

    def learn_cross_node(self) -> None:
        """Learn from bags that ran over nodes, beside the same cascade on one node; where none did, beside its
        model. It goes through all of them: called for each cascade of a step it took longer than all else there."""
        pairs = [
            self._spread(key, point, self.live[key].seconds, spanned.overlap)
            for (key, spanned), point in self.spanning.items()
            if key in self.live
        ]
        if not pairs and self.live:
            pairs = [self._spread(key, point, None, spanned.overlap) for (key, spanned), point in self.spanning.items()]
        self._count_spread(pairs)

    def prices_of(
        self, module: Module, parts: Sequence[Samples], degree: int, spanned: BagSpread | None = None
    ) -> list[float]:
        """Seconds of each of these parts alone; `spanned` of a bag over nodes. PlanError where one has no price."""
        prices = [self.seconds(module, part, degree) for part in parts]
        if spanned is None:
            return prices
        fall = self.cross_node.fall(spanned.overlap)
        return [price + fall * self.penalty(module, part, degree) for price, part in zip(prices, parts, strict=True)]

    def forget(self, key: PointKey, spanned: BagSpread | None = None) -> None:
        """Drop what was learned of a point, whose workers had another speed: the file or the model holds again."""
        if spanned is None:
            self.live.pop(key, None)
        else:
            self.spanning.pop((key, spanned), None)
        self.points_changed(key[0])

    def take_up(self, learned: Profile) -> None:
        """Go on with what another profile has learned of the same costs."""
        for key, (count, text) in learned.runs.items():
            self.live[key] = LivePoint.of(learned.measured[key], count, text)
        self.spanning.update(learned.spanning)
        self._trim()
        self.cross_node, self.handoff = learned.cross_node, learned.handoff
        if learned.seen_handoffs.seen:
            self.seen_handoffs = learned.seen_handoffs
        self.needs.take_up(learned.needs.known())
        self.remainders = learned.remainders
        for one in learned.remainders:
            self._remainders[one.workers, one.nodes] = LivePoint.of(one.seconds, one.count)
        for point in learned.update.of_run(self.update.kind, self.update.weights).points:
            if point.count:
                self._updates[point.workers, point.nodes] = LivePoint.of(point.seconds, point.count)
                self.update = self.update.with_point(point)
        for module in MODULES:
            self.points_changed(module)

    def expect_needs(self, forecast: Needs) -> None:
        """Predict by this what cascades need of memory, until they have been measured."""
        self.needs.expect(forecast)
        self._cache.clear()

    def observe_need(self, found: Footprint, peak_gib: float) -> None:
        """Learn what a cascade needed beside the states."""
        self.needs.observe(found, peak_gib)
        self._cache.clear()

    def exceed(self, found: Footprint, missing_gib: float = 0.0) -> bool:
        """Learn that a cascade ran out of memory. Returns whether that teaches anything, as `Needs.exceed`."""
        self._cache.clear()
        return self.needs.exceed(found, missing_gib)

    def observe_handoff(self, num_bytes: int, seconds: float) -> None:
        """Learn from an encode result that came from another worker: seconds from its end to the consumer's start."""
        self.seen_handoffs.add(num_bytes, seconds)
        self._price_handoffs()

    def observe_update(self, workers: int, nodes: int, seconds: float) -> None:
        """Learn what the end of a step took on `workers` workers. Raises ValueError for what cannot have been
        measured."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"the end of a step took {seconds} s; a duration must be positive and finite.")
        place = (workers, nodes)
        point = _learned(self._updates, place, seconds)
        found = UpdatePoint(workers=workers, nodes=nodes, seconds=point.seconds, count=point.count)
        self.update = self.update.with_point(found)

    def observe_remainder(self, workers: int, nodes: int, seconds: float) -> None:
        """Learn what a step on `workers` workers took beside its cascades and its end. Raises ValueError for what
        cannot have been measured."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a step took {seconds} s beside its cascades; a duration must be finite and at least 0.")
        place = (workers, nodes)
        point = _learned(self._remainders, place, seconds)
        found = RemainderPoint(workers=workers, nodes=nodes, seconds=point.seconds, count=point.count)
        others = [one for one in self.remainders if (one.workers, one.nodes) != place]
        self.remainders = tuple(sorted([*others, found], key=lambda one: (one.nodes, one.workers)))

    def _before(self, key: PointKey, spanned: BagSpread | None) -> LivePoint | None:
        """What is known of a point before a measurement; a file counts as one."""
        if spanned is not None:
            return self.spanning.get((key, spanned))
        seen = self.live.get(key)
        if seen is None and key in self.measured:
            return LivePoint.of(self.measured[key])
        return seen

    def _set(self, key: PointKey, spanned: BagSpread | None, point: LivePoint) -> None:
        if spanned is None:
            self.live.pop(key, None)  # in the order in which they ran last
            self.live[key] = point
        else:
            self.spanning.pop((key, spanned), None)
            self.spanning[key, spanned] = point
        self._trim()

    def _trim(self) -> None:
        """Forget the points that ran longest ago, where there are too many: the file or the model holds again."""
        while len(self.live) > MOST_POINTS:
            self.forget(next(iter(self.live)))
        while len(self.spanning) > MOST_POINTS:
            self.forget(*next(iter(self.spanning)))

    def _price_handoffs(self) -> None:
        """Follow what was seen of handoffs, which cost nothing while they are short beside the cascades of the DiT."""
        cascades = sorted(
            [point.seconds for key, point in self.live.items() if key[0] == "dit"]
            or [s for key, s in self.measured.items() if key[0] == "dit"]
        )
        cost = self.seen_handoffs.cost(cascades[len(cascades) // 2] if cascades else 0.0)
        if cost is not None:
            self.handoff = cost

    def _count_spread(self, found: Iterable[SpreadCascade | None]) -> None:
        self.cross_node = cross_of_spread([one for one in found if one is not None], self.cross_node)
        self._cache.clear()
        self._prices.clear()

    def _spread(
        self, key: PointKey, point: LivePoint, alone: float | None, overlap: float = OVERLAP
    ) -> SpreadCascade | None:
        """Pair the time of a cascade that spans nodes with its time on one node: `alone` if measured, else the cost
        model's prediction. None if that is not known."""
        load, modelled = self.load(key, point.text_tokens), alone is None
        if alone is None:
            model = self.model_of(key[0])
            alone = self.modelled(key[0], model, load) if model is not None else 0.0
        if alone <= 0:
            return None
        return SpreadCascade(
            seconds=point.seconds,
            alone=alone,
            overlap=overlap,
            rows=load.sent if key[0] == "dit" else 0.0,
            peers=key[5] - 1,
            count=point.count,
            modelled=modelled,
        )


def _learned(points: dict[tuple[int, int], LivePoint], place: tuple[int, int], seconds: float) -> LivePoint:
    """The point of this place (workers, nodes) with one measurement more."""
    before = points.get(place)
    points[place] = LivePoint.of(seconds) if before is None else before.after(seconds)
    return points[place]
