"""Profile: what a cascade costs on a device. Measured points as they stand, the rest from a fitted or FLOP model."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import cast

from actors.plan.costs.drift import Drift
from actors.plan.costs.exchange import CallLatency, ExchangePoint
from actors.plan.costs.fit import LEAST_POINTS, Fit, model_from
from actors.plan.costs.flops import PRIORS, exchange_seconds, flop_costs, text_cost
from actors.plan.costs.forms import FORMS, FORMS_OF, JOINT, Load, TextCost
from actors.plan.costs.handoff import Handoff, HandoffEstimate, HandoffPoint, estimate_of
from actors.plan.costs.max_frames import MaxFrames
from actors.plan.costs.needs import Footprint, Needs, Samples, footprint
from actors.plan.costs.point import LivePoint, PointKey
from actors.plan.costs.remainder import RemainderPoint, remainder_of
from actors.plan.costs.setting import ProfiledSetting
from actors.plan.costs.slices import SlicedBlocks
from actors.plan.costs.spanning import OVERLAP, BagSpread, SpanningPoint, SpreadCascade, cross_of_spread
from actors.plan.costs.topology import CrossIsland, CrossNode
from actors.plan.costs.update import UpdateCosts, UpdatePoint
from actors.plan.types import MODULES, Item, Module, PlanError, refuse_degrees
from ops.degrees import MOST_DEGREE, exchanged
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.base.tiling import Tiling
from ops.models.config import ImageConfig, TextConfig, VAEConfig
from ops.spatial_temporal.choice import SliceRates

log = logging.getLogger(__name__)

_DOUBT = 0.3  # of what a fit leaves, carried to other points: at this distance from all of them the fit counts alone
_SURE = 0.1  # share of its doubt that a point keeps however often it was measured
_LEAST = 0.1  # of a cascade over nodes that is not for spanning them: noise cannot make the rest nothing
_ABSURD = 20.0  # times longer or shorter than what a known point takes: a stopped process or a wrong clock
_KNOWN = 3  # observations that make a point known, and absurd ones in a row that are believed after all


@dataclass(kw_only=True, slots=True)
class Profile:
    """Latency and memory of one model on one device. `measure`, `observe...` and `exceed` change it.

    What a run measures of a point (`live`) counts instead of what a file says of it (`measured`); points of the file
    that did not run, and what the cost model says, are corrected by what was found at the points that did (`Drift`).
    """

    model: str = "unknown"
    device: str = "unknown"
    source: str = ""
    setting: ProfiledSetting | None = None  # None: it does not say
    degrees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    measured: dict[PointKey, float] = field(default_factory=dict)
    spread: dict[PointKey, float] = field(default_factory=dict)  # of measured runs: longest less shortest over median
    text_tokens: dict[PointKey, int] = field(default_factory=dict)  # of a sample of measured points, where known
    max_frames: tuple[MaxFrames, ...] = ()
    extrapolate: bool = True
    residual: str = "none"  # or xgboost: trees on what the VAE's fit leaves
    cross_node: CrossNode = field(default_factory=CrossNode)
    cross_island: CrossIsland = field(default_factory=CrossIsland)
    row_bytes: float = 0.0  # that a row of the DiT's bags takes, which a member sends, in training; 0: not known
    handoff: Handoff = field(default_factory=Handoff)
    update: UpdateCosts = field(default_factory=UpdateCosts)
    remainders: tuple[RemainderPoint, ...] = ()  # of a run's steps, beside cascades and end
    exchanges: tuple[ExchangePoint, ...] = ()  # as measured
    handoffs: tuple[HandoffPoint, ...] = ()  # as measured
    over_nodes: tuple[SpanningPoint, ...] = ()  # as measured
    exchange_s: float = 0.0  # of the DiT's all-to-alls, by the measured ones: the coefficient `comm`; 0: not measured
    exchange_calls: float = 0.0  # how many of them a cascade makes; 0: not known
    geometry: Geometry = field(default_factory=Geometry)
    # Of the DiT: at a degree that does not divide them some are shared. None: unknown, or heads are not dealt out.
    num_heads: int | None = None
    tiling: Tiling = field(default_factory=Tiling)  # of the VAE
    sliced: SlicedBlocks | None = None  # of a DiT that bags run by spatial-temporal parallelism
    text_cost: TextCost = JOINT  # of the DiT; of a file alone it is not known
    models: dict[str, Fit] = field(default_factory=dict)  # of the modules whose missing points can be priced
    needs: Needs = field(default_factory=Needs)  # of cascades, beside the states
    notes: list[str] = field(default_factory=list)  # poor fits and the like, for the report
    live: dict[PointKey, LivePoint] = field(default_factory=dict)  # on one node
    spanning: dict[tuple[PointKey, BagSpread], LivePoint] = field(default_factory=dict)  # over nodes
    seen_handoffs: HandoffEstimate = field(default_factory=HandoffEstimate)  # measured ones, and those of a run
    runs: dict[PointKey, tuple[int, int]] = field(default_factory=dict)  # of a run's file: count, text tokens
    _drifts: dict[tuple[str, str], Drift] = field(default_factory=dict)
    _fits: dict[str, Fit] = field(default_factory=dict)
    _file_fits: dict[str, Fit] = field(default_factory=dict)
    _rates: SliceRates | None = None
    _calls: CallLatency | None = None
    _updates: dict[tuple[int, int], LivePoint] = field(default_factory=dict)  # of this run, by workers and nodes
    _remainders: dict[tuple[int, int], LivePoint] = field(default_factory=dict)  # the same
    _cache: dict[tuple[Module, int, int, int, int, int, float], tuple[tuple[int, float], ...]] = field(
        default_factory=dict
    )

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
        degrees: Sequence[int] = (),
        max_degree: int = MOST_DEGREE,
        device: str = "cpu",
    ) -> Profile:
        """A profile without any measurement: every point comes from the FLOP model and improves with `observe`.

        The defaults fit a CPU core with small models. DiT degrees are the usual ones (`DiTConfig.degrees`).
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
        )
        return cls(
            model=dit.architecture,
            device=device,
            source="FLOP model",
            models=fits,
            num_heads=heads,
            row_bytes=exchange_seconds(dit, 1.0),
            sliced=SlicedBlocks.of(dit, fits["dit"]),
            text_cost=text_cost(dit),
            degrees={"text": (1,), "vae": (1,), "dit": tuple(degrees) or dit.degrees(max_degree)},
            geometry=geometry or Geometry(patch=dit.patch),
            tiling=tiling or Tiling(),
        )

    # -- asking -----------------------------------------------------------------------------------------------------

    def has(self, module: Module) -> bool:
        """Whether the module is scheduled at all: it has points or a model."""
        return module in self.models or any(key[0] == module for key in self.measured)

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Video tokens of a clip, rounded up: cost models also price shapes that the VAE would have to crop."""
        st, sh, sw = self.geometry.vae_stride
        pt, ph, pw = self.geometry.patch
        latent = (frames - 1) // st + 1 if self.geometry.causal else max(frames // st, 1)
        return -(-latent // pt) * -(-height // (sh * ph)) * -(-width // (sw * pw))

    def load_of(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int
    ) -> Load:
        load = self._plain_load(batch, frames, height, width, degree, text_tokens)
        if module == "vae":
            return replace(load, dealt=self.tiling.dealt(batch, (frames, height, width), degree))
        if module != "dit" or degree == 1:
            return load
        if self.sliced is not None:
            return self.sliced.sliced(load, self.slice_rates())
        if self._calls is None and self.exchanges:
            self._calls = CallLatency.of(self.exchanges)
        sent = exchanged(self.num_heads, degree) if self.num_heads else 1.0
        call_s = self._calls.seconds(degree) if self._calls is not None else 0.0
        return replace(load, exchanged=sent, call_s=call_s, by_ulysses=True)

    def slice_rates(self) -> SliceRates:
        """What blocks and exchanges of spatial-temporal layers take, by the points of one device, else by those of bags
        on one node: what bags choose their slices by. A plan takes it along, so that all ranks choose alike."""
        assert self.sliced is not None, "only bags of spatial-temporal transformers are sliced"
        if self._rates is None:
            known = self._known("dit", spanning=False)  # what bags over nodes take is learned beside these rates
            alone = [one for one in known if one[0][5] == 1] or known
            loads = [self._plain_load(*key[1:], text) for key, _, text in alone]
            seconds = [seconds for _, seconds, _ in alone]
            self._rates = self.sliced.rates(loads, seconds, self.device, self.exchanges, self.exchange_s)
        return self._rates

    def _plain_load(self, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int) -> Load:
        tokens = self.tokens(frames, height, width)
        return Load(
            batch=batch,
            frames=frames,
            height=height,
            width=width,
            text_tokens=text_tokens,
            tokens=tokens,
            degree=degree,
            token_frames=self.tokens(frames, 1, 1),
            text=self.text_cost,
        )

    def price(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float | None:
        """Seconds on one node at normal speed, or None where the profile cannot say."""
        key = (module, batch, frames, height, width, degree)
        seen = self.live.get(key) or self._on_one_node(key)
        if seen is not None:
            return seen.seconds * self._by_text(key, seen.text_tokens, text_tokens)
        load = self.load_of(module, batch, frames, height, width, degree, text_tokens)
        held = ("text", batch, 0, 0, 0, degree) if module == "text" and key not in self.measured else key
        seconds = self.measured.get(held)
        if seconds is None and self.over_nodes:
            seconds = self._measured_over_nodes(key)
        if seconds is not None:
            by_text = self._by_text(key, self.text_tokens.get(held, 0), text_tokens)
            return seconds * by_text * self._file_drift(module).factor(load)
        if not self.extrapolate:
            return None
        model = self.model_of(module)
        if model is None:
            return None
        return max(model.predict(load) * self._model_drift(module, model).factor(load), 1e-9)

    def _by_text(self, key: PointKey, measured_with: int, wanted: int, of_file: bool = False) -> float:
        """What a point that was measured with `measured_with` text tokens of a sample is to be multiplied by for as
        many as are wanted, by the module's model, or by that of the file's points alone; 1 where either is not
        known."""
        if key[0] == "vae" or not (measured_with and wanted) or measured_with == wanted:
            return 1.0
        module = cast(Module, key[0])
        model = self._model_of_file(module) if of_file else self.model_of(module)
        before = model.predict(self._load(key, measured_with)) if model is not None else 0.0
        return model.predict(self._load(key, wanted)) / before if model is not None and before > 0 else 1.0

    def seconds(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float:
        """As `price`, but raises PlanError for a point that it cannot price."""
        seconds = self.price(module, batch, frames, height, width, degree, text_tokens)
        if seconds is None:
            raise PlanError(
                f"the profile has no latency of {module} for batch {batch}, {frames}f {height}x{width} at "
                f'degree {degree}. Measure it, or set "extrapolate": true.'
            )
        return seconds

    def penalty(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float:
        """Seconds that a bag over nodes takes more, at normal speed and without a common rail (`CrossNode.fall` says
        what is left with some): by what its members send or, where that is not known, as a share of its price."""
        if degree == 1:
            return 0.0
        if module == "dit" and self.cross_node.by_rows:
            load = self.load_of(module, batch, frames, height, width, degree, text_tokens)
            return self.cross_node.sending(load.sent, degree - 1)
        share = self.cross_node.penalty
        seconds = self.price(module, batch, frames, height, width, degree, text_tokens) if share else None
        return share * seconds if seconds is not None else 0.0

    def detour(
        self,
        module: Module,
        batch: int,
        frames: int,
        height: int,
        width: int,
        degree: int,
        text_tokens: int = 0,
        island_gbps: float = 0.0,
    ) -> float:
        """Seconds that a bag inside a node takes more in more NVLink islands than it has to use: as the profile says,
        or by what its members send where a GPU sends `island_gbps` GB/s to another island. 0 where nobody knows."""
        if degree == 1:
            return 0.0
        if module == "dit" and (row_s := self.cross_island.row_s or self._island_row_s(island_gbps)):
            return row_s * self.load_of(module, batch, frames, height, width, degree, text_tokens).sent
        share = self.cross_island.penalty
        seconds = self.price(module, batch, frames, height, width, degree, text_tokens) if share else None
        return share * seconds if seconds is not None else 0.0

    def modes(
        self,
        module: Module,
        batch: int,
        frames: int,
        height: int,
        width: int,
        text_tokens: int = 0,
        room_gib: float = math.inf,
    ) -> tuple[tuple[int, float], ...]:
        """(degree, seconds) of every degree that is legal where a worker has `room_gib` for a cascade, ascending. A bag
        of spatial-temporal layers has no more members than there are frames, or positions in one."""
        cache_key = (module, batch, frames, height, width, text_tokens, room_gib)
        found = self._cache.get(cache_key)
        if found is None:
            most = math.inf
            if module == "dit" and self.sliced is not None:
                token_frames = self.tokens(frames, 1, 1)
                most = max(token_frames, self.tokens(frames, height, width) // token_frames)
            found = tuple(
                (k, s)
                for k in self.candidate_degrees(module)
                if k <= most
                and (s := self.price(module, batch, frames, height, width, k, text_tokens)) is not None
                and self.fits(module, batch, frames, height, width, k, text_tokens, room_gib)
            )
            self._cache[cache_key] = found
        return found

    def legal_degrees(
        self,
        module: Module,
        batch: int,
        frames: int,
        height: int,
        width: int,
        text_tokens: int = 0,
        room_gib: float = math.inf,
    ) -> tuple[int, ...]:
        return tuple(k for k, _ in self.modes(module, batch, frames, height, width, text_tokens, room_gib))

    def footprint(self, module: Module, samples: Sequence[Samples], degree: int) -> Footprint:
        """The size of a cascade of these samples, as `needs` knows it."""
        return footprint(module, samples, degree, self.tokens, self.needs)

    def may_try(self, module: Module, item: Item, degree: int, room_gib: float) -> bool:
        """Whether one sample may run at this degree although one ran out of memory there."""
        clip = Samples(count=1, frames=item.frames, height=item.height, width=item.width, text_tokens=item.text_tokens)
        priced = (
            degree in self.candidate_degrees(module)
            and self.price(module, 1, item.frames, item.height, item.width, degree, item.text_tokens) is not None
        )
        found = self.footprint(module, [clip], degree)
        return priced and found.line in self.needs.limits and self.needs.may_try(found, room_gib)

    def fits(
        self,
        module: Module,
        batch: int,
        frames: int,
        height: int,
        width: int,
        degree: int,
        text_tokens: int = 0,
        room_gib: float = math.inf,
    ) -> bool:
        """Whether the cascade stays within the room of a worker, as far as that is known, and below every limit."""
        clips = Samples(count=batch, frames=frames, height=height, width=width, text_tokens=text_tokens)
        if not self.needs.fits(self.footprint(module, [clips], degree), room_gib):
            return False
        return not any(limit.forbids(module, batch, frames, height, width, degree) for limit in self.max_frames)

    def wait_for_inputs(self, item: Item, count: int, bag: Set[int], producers: Iterable[int]) -> float:
        """Seconds that encode results of `count` samples take to a bag: none if it holds one of their workers."""
        return self.handoff_seconds(item, count) if bag.isdisjoint(producers) else 0.0

    def handoff_seconds(self, item: Item, count: int) -> float:
        """Delay of a consumer that holds none of the producer's workers. Latents: 16 channels of 4 bytes per token."""
        stride_t, stride_h, stride_w = self.geometry.vae_stride
        gib = count * item.frames * item.height * item.width / (stride_t * stride_h * stride_w) * 64 / 2**30
        return self.handoff.seconds(gib)

    def update_seconds(self, workers: int, nodes: int = 1) -> float:
        """Seconds of the end of a step, after its last backward pass; 0 where nobody has measured it."""
        return self.update.seconds(workers, nodes) or 0.0

    def remainder_seconds(self, workers: int, nodes: int = 1) -> float:
        """Seconds of a step beside its cascades and its end; 0 where no run has measured it."""
        return remainder_of(self.remainders, workers, nodes)

    def model_of(self, module: Module) -> Fit | None:
        """The model that prices missing points; fitted to the measured points on first use."""
        if module in self._fits:
            return self._fits[module]
        chosen = self._fit(module)
        if chosen is not None:
            self._fits[module] = chosen
        return chosen

    # -- learning ---------------------------------------------------------------------------------------------------

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
        self._forget(cast(Module, key[0]))
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
        self._forget("vae")

    def count_exchange(self, exchange_s: float, calls: float = 0.0) -> None:
        """The all-to-alls of the DiT have been measured, of which a cascade makes `calls`."""
        self.exchange_s, self.exchange_calls = exchange_s, calls
        self._forget("dit")

    def observe(
        self,
        module: Module,
        batch: int,
        frames: int,
        height: int,
        width: int,
        degree: int,
        seconds: float,
        text_tokens: int = 0,
        *,
        spanned: BagSpread | None = None,
    ) -> None:
        """Learn from an executed cascade (closed loop): its point follows the measurements, its model is refitted.

        `seconds` at normal speed of its workers; `spanned` of a bag over nodes, None on one. Raises ValueError, and
        learns nothing, for a duration that is not a positive number or that cannot be true: 20 times what the point has
        taken so far, unless it comes three times in a row.
        """
        what = f"{module} of {batch} x {frames}f {height}x{width} at degree {degree}"
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{what} took {seconds} s; a duration must be positive and finite. It is left out.")
        key = (module, batch, frames, height, width, degree)
        before = self._before(key, spanned)
        if before is not None and before.count >= _KNOWN and not 1 / _ABSURD < seconds / before.seconds < _ABSURD:
            if before.refused + 1 < _KNOWN:
                self._set(key, spanned, replace(before, refused=before.refused + 1))
                raise ValueError(
                    f"{what} took {seconds:.4g} s and {before.seconds:.4g} s before; a cascade does not change by a "
                    f"factor of {_ABSURD:g}. It is left out, and believed when it comes {_KNOWN} times in a row."
                )
            before = None
        first = LivePoint.of(seconds, 1, text_tokens)
        self._set(key, spanned, first if before is None else before.after(seconds, text_tokens))
        self._forget(module)
        if spanned is not None:
            self._learn_cross_node()

    def observe_packed(
        self,
        module: Module,
        parts: Sequence[tuple[int, int, int, int, int]],
        degree: int,
        seconds: float,
        *,
        spanned: BagSpread | None = None,
    ) -> None:
        """Learn from a cascade of several shapes, which is priced as the sum of them: each (batch, frames, height,
        width, text tokens) takes a part of the difference, the larger the less often it was measured. Raises as
        `observe`, and PlanError where a part has no price."""
        if len(parts) == 1:
            batch, frames, height, width, text = parts[0]
            self.observe(module, batch, frames, height, width, degree, seconds, text, spanned=spanned)
            return
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a packed {module} cascade took {seconds} s; a duration must be positive and finite.")
        prices = [self.seconds(module, *part[:4], degree, part[4]) for part in parts]
        if spanned is not None:
            more = [self.penalty(module, *part[:4], degree, part[4]) for part in parts]
            fall = self.cross_node.fall(spanned.overlap)
            prices = [price + fall * extra for price, extra in zip(prices, more, strict=True)]
        doubts = []
        for part, price in zip(parts, prices, strict=True):
            known = self._before((module, *part[:4], degree), spanned)
            doubts.append(price * max(_SURE, 1.0 / (1 + (known.count if known else 0))))
        error = seconds - sum(prices)
        for (batch, frames, height, width, text), price, doubt in zip(parts, prices, doubts, strict=True):
            # A part takes at least a fifth of its share, so that an error elsewhere cannot make it nothing.
            own = max(price + error * doubt / sum(doubts), 0.2 * price * seconds / sum(prices))
            self.observe(module, batch, frames, height, width, degree, own, text, spanned=spanned)

    def forget(self, key: PointKey, spanned: BagSpread | None = None) -> None:
        """Drop what was learned of a point, whose workers had another speed: the file or the model holds again."""
        if spanned is None:
            self.live.pop(key, None)
        else:
            self.spanning.pop((key, spanned), None)
        self._forget(cast(Module, key[0]))

    def take_up(self, learned: Profile) -> None:
        """Go on with what another profile has learned of the same costs."""
        for key, (count, text) in learned.runs.items():
            self.live[key] = LivePoint.of(learned.measured[key], count, text)
        self.spanning.update(learned.spanning)
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
            self._forget(module)

    def expect_needs(self, forecast: Needs) -> None:
        """Predict by this what cascades need of memory, until they have been measured."""
        self.needs.expect(forecast)
        self._cache.clear()

    def ran(self) -> dict[PointKey, LivePoint]:
        """Every point that ran, as on one node."""
        return self.live | {key: point for module in MODULES for key, point in self._spanning_only(module).items()}

    def held(self, key: PointKey) -> float:
        """Seconds of a measured point, as far as what ran since lets it stand."""
        load = self._plain_load(*key[1:], self.text_tokens.get(key, 0))
        return self.measured[key] * self._file_drift(cast(Module, key[0])).factor(load)

    def observe_need(self, found: Footprint, peak_gib: float) -> None:
        """Learn what a cascade needed beside the states."""
        self.needs.observe(found, peak_gib)
        self._cache.clear()

    def exceed(self, found: Footprint, missing_gib: float = 0.0) -> bool:
        """Learn that a cascade ran out of memory. Whether the next plan avoids it, or may try it once more."""
        self._cache.clear()
        return self.needs.exceed(found, missing_gib)

    def observe_handoff(self, num_bytes: int, seconds: float) -> None:
        """Learn from an encode result that came from another worker: seconds from its end to the consumer's start."""
        self.seen_handoffs.add(num_bytes, seconds)
        self._price_handoffs()

    def _price_handoffs(self) -> None:
        """Where they matter beside the cascades that are known."""
        cascades = sorted(
            [point.seconds for key, point in self.live.items() if key[0] == "dit"]
            or [s for key, s in self.measured.items() if key[0] == "dit"]
        )
        cost = self.seen_handoffs.cost(cascades[len(cascades) // 2] if cascades else 0.0)
        if cost is not None:
            self.handoff = cost

    def observe_update(self, workers: int, nodes: int, seconds: float) -> None:
        """Learn what the end of a step took on `workers` workers. Raises ValueError for what cannot have been
        measured."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"the end of a step took {seconds} s; a duration must be positive and finite.")
        place = (workers, nodes)
        before = self._updates.get(place)
        point = LivePoint.of(seconds) if before is None else before.after(seconds, 0)
        self._updates[place] = point
        found = UpdatePoint(workers=workers, nodes=nodes, seconds=point.seconds, count=point.count)
        self.update = self.update.with_point(found)

    def observe_remainder(self, workers: int, nodes: int, seconds: float) -> None:
        """Learn what a step on `workers` workers took beside its cascades and its end. Raises ValueError for what
        cannot have been measured."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a step took {seconds} s beside its cascades; a duration must be finite and at least 0.")
        place = (workers, nodes)
        before = self._remainders.get(place)
        point = LivePoint.of(seconds) if before is None else before.after(seconds, 0)
        self._remainders[place] = point
        found = RemainderPoint(workers=workers, nodes=nodes, seconds=point.seconds, count=point.count)
        others = [one for one in self.remainders if (one.workers, one.nodes) != place]
        self.remainders = tuple(sorted([*others, found], key=lambda one: (one.nodes, one.workers)))

    # -- inside -----------------------------------------------------------------------------------------------------

    def candidate_degrees(self, module: Module) -> tuple[int, ...]:
        """The profile's degrees of the module; without that list, those that were measured."""
        return self.degrees.get(module) or tuple(sorted({key[5] for key in self.measured if key[0] == module})) or (1,)

    def points(self, module: Module) -> tuple[list[Load], list[float]]:
        """Measured and observed points of a module, as cost models take them: those of a file as far as they still
        hold."""
        rows = self._known(module)
        return [self._load(key, text) for key, _, text in rows], [seconds for _, seconds, _ in rows]

    def _known(self, module: Module, spanning: bool = True) -> list[tuple[PointKey, float, int]]:
        """(point, seconds, text tokens) of what was measured and observed; also of bags over nodes."""
        ran = self.ran() if spanning else self.live
        rows = [(key, point.seconds, point.text_tokens) for key, point in ran.items() if key[0] == module]
        known = {key for key, _, _ in rows}
        for key in self.measured:
            if key[0] == module and key not in known:
                rows.append((key, self.held(key), self.text_tokens.get(key, 0)))
        return [row for row in rows if module == "text" or row[0][2] > 0]

    def _load(self, key: PointKey, text_tokens: int) -> Load:
        module, batch, frames, height, width, degree = key
        return self.load_of(cast(Module, module), batch, frames, height, width, degree, text_tokens)

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
            self.live[key] = point
        else:
            self.spanning[key, spanned] = point

    def _forget(self, module: Module) -> None:
        """Drop what was derived from the module's points."""
        self._fits.pop(module, None)
        self._rates, self._calls = None, None
        self._drifts = {key: drift for key, drift in self._drifts.items() if key[0] != module}
        self._cache.clear()

    def _on_one_node(self, key: PointKey) -> LivePoint | None:
        """What a point that ran over nodes only would take on one."""
        found = [(spanned, point) for (other, spanned), point in self.spanning.items() if other == key]
        if not found:
            return None
        spanned, point = max(found, key=lambda one: one[1].count)
        return point.over(point.seconds / self._alone(key, point.seconds, spanned.overlap, point.text_tokens))

    def _measured_over_nodes(self, key: PointKey) -> float | None:
        """What a point of the file that was measured over nodes only would take on one."""
        found = [self._alone(key, one.seconds, OVERLAP, one.text_tokens) for one in self.over_nodes if one.key == key]
        return statistics.median(found) if found else None

    def _alone(self, key: PointKey, seconds: float, overlap: float, text_tokens: int) -> float:
        """What a cascade that takes so long over nodes would take on one."""
        if key[0] != "dit" or not self.cross_node.by_rows:
            return seconds / self.cross_node.factor(overlap)
        more = self.cross_node.fall(overlap) * self.penalty("dit", *key[1:], text_tokens)
        return max(seconds - more, _LEAST * seconds)

    def _island_row_s(self, island_gbps: float) -> float:
        """Seconds that a row takes more at this bandwidth than the cost model says it does inside an island."""
        model = self.model_of("dit")
        if not (island_gbps and self.row_bytes and model):
            return 0.0
        inside = self.exchange_s or dict(zip(FORMS[model.form].names, model.coefficients)).get("comm", 0.0)
        return max(0.0, self.row_bytes / (1e9 * island_gbps) - inside)

    def _spread(
        self, key: PointKey, point: LivePoint, alone: float | None, overlap: float = OVERLAP
    ) -> SpreadCascade | None:
        """A cascade over nodes beside what it takes `alone` on one, else what the cost model says of that."""
        load, modelled = self._load(key, point.text_tokens), alone is None
        if alone is None:
            model = self.model_of(cast(Module, key[0]))
            alone = model.predict(load) if model is not None else 0.0
        return (
            None
            if alone <= 0
            else SpreadCascade(
                seconds=point.seconds,
                alone=alone,
                overlap=overlap,
                rows=load.sent if key[0] == "dit" else 0.0,
                peers=key[5] - 1,
                count=point.count,
                modelled=modelled,
            )
        )

    def _spanning_only(self, module: Module) -> dict[PointKey, LivePoint]:
        keys = {key for key, _ in self.spanning if key[0] == module and key not in self.live}
        return {key: point for key in keys if (point := self._on_one_node(key)) is not None}

    def _file_drift(self, module: Module) -> Drift:
        """The drift of the file's points, by those of them that ran."""
        if (module, "file") not in self._drifts:
            both = [key for key in self.live if key[0] == module and key in self.measured]
            loads = [self._plain_load(*key[1:], self.live[key].text_tokens) for key in both]
            ratios = [
                self.live[key].seconds
                / self.measured[key]
                / self._by_text(key, self.text_tokens.get(key, 0), self.live[key].text_tokens, of_file=True)
                for key in both
            ]
            self._drifts[module, "file"] = Drift(loads, ratios, doubt=0.0)
        return self._drifts[module, "file"]

    def _model_drift(self, module: Module, model: Fit) -> Drift:
        """The drift of the cost model, by all points that ran."""
        if (module, "model") not in self._drifts:
            seen = {key: point for key, point in self.live.items() if key[0] == module and (module == "text" or key[2])}
            loads = [self._load(key, point.text_tokens) for key, point in seen.items()]
            ratios = [point.seconds / max(model.predict(load), 1e-9) for load, point in zip(loads, seen.values())]
            self._drifts[module, "model"] = Drift(loads, ratios, doubt=_DOUBT)
        return self._drifts[module, "model"]

    def _learn_cross_node(self) -> None:
        """Learn from bags that ran over nodes, beside the same cascade on one node; where none did, beside its
        model."""
        pairs = [
            self._spread(key, point, self.live[key].seconds, spanned.overlap)
            for (key, spanned), point in self.spanning.items()
            if key in self.live
        ]
        if not pairs and self.live:
            pairs = [self._spread(key, point, None, spanned.overlap) for (key, spanned), point in self.spanning.items()]
        self._count_spread(pairs)

    def _count_spread(self, found: Iterable[SpreadCascade | None]) -> None:
        self.cross_node = cross_of_spread([one for one in found if one is not None], self.cross_node)
        self._cache.clear()

    def _model_of_file(self, module: Module) -> Fit | None:
        """The same as it was before a run."""
        if module not in self._file_fits:
            keys = [key for key in self.measured if key[0] == module and (module == "text" or key[2] > 0)]
            loads = [self._load(key, self.text_tokens.get(key, 0)) for key in keys]
            prior = self.models.get(module) or PRIORS[module]
            seconds = [self.measured[key] for key in keys]
            self._file_fits[module] = model_from(module, prior, loads, seconds, self.device, False)[0]
        return self._file_fits[module]

    def _fit(self, module: Module) -> Fit | None:
        prior = self.models.get(module)
        loads, seconds = self.points(module)
        if not loads:
            return prior
        residual = self.residual == "xgboost" and not self.live  # refits of a run stay linear
        exchange = (self.exchange_s, self.exchange_calls) if module == "dit" else (0.0, 0.0)
        if prior is None:
            prior = self.sliced.prior if self.sliced is not None and module == "dit" else PRIORS[module]
        found, notes = model_from(module, prior, loads, seconds, self.device, residual, *exchange)
        if len(loads) < LEAST_POINTS and not self.live:  # of a run they soon are enough
            notes.append(
                f"{module}: {len(loads)} measured point{'s' * (len(loads) > 1)} fit no model, which takes "
                f"{LEAST_POINTS}; the FLOP model is scaled to {'them' if len(loads) > 1 else 'it'}."
            )
        self._note(module, notes)
        return found

    def _note(self, module: Module, notes: Sequence[str]) -> None:
        """Notes on the fit of now, in place of those on earlier ones."""
        for note in notes:
            if note not in self.notes:
                log.info(note)
        self.notes = [note for note in self.notes if not note.startswith(f"{module}: ")] + list(notes)


assert set(FORMS_OF) == set(MODULES), "every module needs a cost model"
