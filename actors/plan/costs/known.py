"""What is known of a model's cascades: points of a file and of a run, and the cost models that are fitted to them.

What a run measures of a point (`live`) counts instead of what a file says of it (`measured`); points of the file that
did not run, and what the cost model says, are corrected by what was found at the points that did (`Drift`).
"""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from actors.plan.costs.compiling import BothWays
from actors.plan.costs.drift import Drift
from actors.plan.costs.exchange import CallLatency, ExchangePoint
from actors.plan.costs.fetching import ON_DEVICE, FetchedWeights
from actors.plan.costs.fit import LEAST_POINTS, Fit, model_from
from actors.plan.costs.flops import PRIORS
from actors.plan.costs.forms import FORMS_OF, JOINT, Load, TextCost
from actors.plan.costs.halved import HalvedHeads
from actors.plan.costs.handoff import Handoff, HandoffEstimate, HandoffPoint
from actors.plan.costs.max_frames import MaxFrames
from actors.plan.costs.needs import Needs
from actors.plan.costs.point import MOST_POINTS, LivePoint, PointKey, Samples
from actors.plan.costs.remainder import RemainderPoint
from actors.plan.costs.setting import ProfiledSetting
from actors.plan.costs.slices import SlicedBlocks
from actors.plan.costs.spanning import OVERLAP, BagSpread, SpanningPoint
from actors.plan.costs.topology import CrossIsland, CrossNode
from actors.plan.costs.update import UpdateCosts
from actors.plan.types import MODULES, Module
from ops.counted import counted
from ops.degrees import exchanged
from ops.geometry import Geometry, PixelShape
from ops.models.base.tiling import Tiling
from ops.spatial_temporal.choice import SliceRates

log = logging.getLogger(__name__)

_DOUBT = 0.3  # weight of "the fit is right" beside the points that ran, each of which has at most 1
_NUMBER = re.compile(r"-?\d[\d.]*")
_MOST_LOADS = 4 * MOST_POINTS  # that are kept
_LEAST = 0.1  # of the seconds of a cascade over nodes: what it would take on one at least, however noisy they are


@dataclass(kw_only=True, slots=True)
class KnownCosts:
    """Points of one model on one device. `CascadePrices` reads them, `Profile` changes them."""

    model: str = "unknown"
    device: str = "unknown"
    source: str = ""
    setting: ProfiledSetting | None = None  # None: it does not say
    both_ways: BothWays | None = None  # blocks compiled and as written, where that was measured
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
    latent_channels: int = 16  # of what is handed over
    update: UpdateCosts = field(default_factory=UpdateCosts)
    remainders: tuple[RemainderPoint, ...] = ()  # of a run's steps, beside cascades and end
    exchanges: tuple[ExchangePoint, ...] = ()  # as measured
    handoffs: tuple[HandoffPoint, ...] = ()  # as measured
    over_nodes: tuple[SpanningPoint, ...] = ()  # as measured
    exchange_s: float = 0.0  # of the DiT's all-to-alls, by the measured ones: the coefficient `comm`; 0: not measured
    element_bytes: int = 4  # of what its bags send, as `exchange_s` counts them
    exchange_calls: float = 0.0  # how many of them a cascade makes; 0: not known
    geometry: Geometry = field(default_factory=Geometry)
    # Of the DiT: at a degree that does not divide them some are shared. None: unknown, or heads are not dealt out.
    num_heads: int | None = None
    tiling: Tiling = field(default_factory=Tiling)  # of the VAE
    sliced: SlicedBlocks | None = None  # of a DiT that bags run by spatial-temporal parallelism
    halved: HalvedHeads | None = None  # of a DiT whose bags deal out heads; None: unknown, they travel whole
    text_cost: TextCost = JOINT  # of the DiT; of a file alone it is not known
    fetched: FetchedWeights = ON_DEVICE  # what passes of the DiT copy from host memory
    models: dict[str, Fit] = field(default_factory=dict)  # of the modules whose missing points can be priced
    proportions: Fit | None = None  # the DiT's own FLOP model, where points alone set the level; None: HunyuanVideo's
    needs: Needs = field(default_factory=Needs)  # of cascades, beside the states
    notes: list[str] = field(default_factory=list)  # poor fits and the like, for the report
    live: dict[PointKey, LivePoint] = field(default_factory=dict)  # on one node; the one that ran last comes last
    spanning: dict[tuple[PointKey, BagSpread], LivePoint] = field(default_factory=dict)  # over nodes; the same
    seen_handoffs: HandoffEstimate = field(default_factory=HandoffEstimate)  # measured ones, and those of a run
    runs: dict[PointKey, tuple[int, int]] = field(default_factory=dict)  # of a run's file: count, text tokens
    _drifts: dict[tuple[str, str], Drift] = field(default_factory=dict)
    _fits: dict[str, Fit] = field(default_factory=dict)
    _file_fits: dict[str, Fit] = field(default_factory=dict)
    _loads: dict[tuple[PointKey, int], Load] = field(default_factory=dict)  # of points with their text tokens
    _loads_by: tuple[object, ...] = ()  # what these were made by
    _spreads: dict[PointKey, list[BagSpread]] | None = None  # over nodes; None: not looked up since one ran
    _rates: SliceRates | None = None
    _calls: CallLatency | None = None
    _updates: dict[tuple[int, int], LivePoint] = field(default_factory=dict)  # of this run, by workers and nodes
    _remainders: dict[tuple[int, int], LivePoint] = field(default_factory=dict)  # of this run, by workers and nodes
    # of `CascadePrices.modes`
    _cache: dict[tuple[Module, Samples, float], tuple[tuple[int, float], ...]] = field(default_factory=dict)
    _prices: dict[tuple[Module, Samples, int], float | None] = field(default_factory=dict)  # of `CascadePrices.price`

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Video tokens of a clip, rounded up: cost models also price shapes that the VAE would have to crop."""
        st, sh, sw = self.geometry.vae_stride
        pt, ph, pw = self.geometry.patch
        latent = (frames - 1) // st + 1 if self.geometry.causal else max(frames // st, 1)
        return -(-latent // pt) * -(-height // (sh * ph)) * -(-width // (sw * pw))

    def load_of(self, module: Module, part: Samples, degree: int) -> Load:
        load = self._plain_load(part, degree)
        if module == "vae":
            return replace(load, dealt=self.tiling.dealt(part.count, part.shape, degree))
        if module != "dit" or degree == 1:
            return load
        if self.sliced is not None:
            return self.sliced.sliced(load, self.slice_rates())
        if self._calls is None and self.exchanges:
            self._calls = CallLatency.of(self.exchanges)
        sent = exchanged(self.num_heads, degree) if self.num_heads else 1.0
        call_s = self._calls.seconds(degree) if self._calls is not None else 0.0
        exposed = self.halved.exposed(load) if self.halved is not None else 1.0
        return replace(load, exchanged=sent, exposed=exposed, call_s=call_s, by_ulysses=True)

    def _plain_load(self, part: Samples, degree: int) -> Load:
        return Load(
            batch=part.count,
            frames=part.frames,
            height=part.height,
            width=part.width,
            text_tokens=part.text_tokens,
            tokens=self.tokens(*part.shape),
            degree=degree,
            token_frames=self.tokens(part.frames, 1, 1),
            text=self.text_cost,
        )

    def load(self, key: PointKey, text_tokens: int) -> Load:
        return self.load_of(key[0], Samples.of_key(key, text_tokens), key[5])

    def _loads_of(self, points: Sequence[tuple[PointKey, int]]) -> list[Load]:
        """Loads of points with their text tokens. They are kept, as few points of a run change in a step and making
        2,000 anew takes longer than a fit to them."""
        made_by: tuple[object, ...] = (
            self.geometry,
            self.tiling,
            self.num_heads,
            self.text_cost,
            self.halved,
            self.exchanges,
        )
        if self.sliced is not None and any(key[0] == "dit" for key, _ in points):
            made_by += (self.sliced, self.slice_rates())
        if made_by != self._loads_by or len(self._loads) > _MOST_LOADS:
            self._loads, self._loads_by = {}, made_by
        loads = self._loads
        for point in points:
            if point not in loads:
                loads[point] = self.load(*point)
        return [loads[point] for point in points]

    def slice_rates(self) -> SliceRates:
        """What blocks and exchanges of spatial-temporal layers take, by the points of one device, else by those of bags
        on one node: what bags choose their slices by. A plan takes it along, so that all ranks choose alike."""
        assert self.sliced is not None, "only bags of spatial-temporal transformers are sliced"
        if self._rates is None:
            known = self._known("dit", spanning=False)  # what bags over nodes take is learned beside these rates
            alone = [one for one in known if one[0][5] == 1] or known
            loads = [self._plain_load(Samples.of_key(key, text), key[5]) for key, _, text in alone]
            seconds = [seconds for _, seconds, _ in alone]
            self._rates = self.sliced.rates(loads, seconds, self.device, self.exchanges, self.exchange_s)
        return self._rates

    def model_of(self, module: Module) -> Fit | None:
        """The model that prices missing points; fitted to the measured points on first use."""
        if module in self._fits:
            return self._fits[module]
        chosen = self._fit(module)
        if chosen is not None:
            self._fits[module] = chosen
        return chosen

    def _model_of_file(self, module: Module) -> Fit | None:
        """The model of the file's points alone, as it was before a run."""
        if module not in self._file_fits:
            keys = sorted(key for key in self.measured if key[0] == module and (module == "text" or key[2] > 0))
            loads = [self._load_of_file(key, self.text_tokens.get(key, 0)) for key in keys]
            prior = self.models.get(module) or self._proportions_of(module)
            seconds = [self.measured[key] for key in keys]
            self._file_fits[module] = model_from(module, prior, loads, seconds, self.device, False)[0]
        return self._file_fits[module]

    def _load_of_file(self, key: PointKey, text_tokens: int) -> Load:
        """As the model of the file's points takes it: without slices, as their rates are by points that it corrects."""
        if key[0] == "dit" and self.sliced is not None:
            return self._plain_load(Samples.of_key(key, text_tokens), key[5])
        return self.load(key, text_tokens)

    def _fit(self, module: Module) -> Fit | None:
        prior = self.models.get(module)
        loads, seconds = self.points(module)
        told = [one for one in zip(loads, seconds, strict=True) if module != "dit" or not self.fetched.hide(one[1])]
        if told or prior is not None:  # where all have waited and nothing else is known, they set the level
            loads, seconds = [load for load, _ in told], [took for _, took in told]
        if not loads:
            return prior
        residual = self.residual == "xgboost" and not self.live  # refits of a run stay linear
        exchange = (self.exchange_s, self.exchange_calls) if module == "dit" else (0.0, 0.0)
        if prior is None:
            prior = self._proportions_of(module)
        found, notes = model_from(module, prior, loads, seconds, self.device, residual, *exchange)
        if len(loads) < LEAST_POINTS and not self.live:  # of a run they soon are enough
            notes.append(
                f"{module}: {counted(len(loads), 'measured point')} fit no model, which takes "
                f"{LEAST_POINTS}; the FLOP model is scaled to {'them' if len(loads) > 1 else 'it'}."
            )
        self._note(module, notes)
        return found

    def _proportions_of(self, module: Module) -> Fit:
        """What points of a file are held against where they are few."""
        if module != "dit":
            return PRIORS[module]
        return self.sliced.prior if self.sliced is not None else self.proportions or PRIORS[module]

    def _note(self, module: Module, notes: Sequence[str]) -> None:
        """Replace the notes on the module's fit. Those that say something new, numbers apart, are logged."""
        told = {_NUMBER.sub("", note) for note in self.notes}
        for note in notes:
            if _NUMBER.sub("", note) not in told:
                log.info(note)
        self.notes = [note for note in self.notes if not note.startswith(f"{module}: ")] + list(notes)

    def points(self, module: Module) -> tuple[list[Load], list[float]]:
        """Measured and observed points of a module, as cost models take them: those of a file as far as they still
        hold."""
        rows = self._known(module)
        return self._loads_of([(key, text) for key, _, text in rows]), [seconds for _, seconds, _ in rows]

    def _known(self, module: Module, spanning: bool = True) -> list[tuple[PointKey, float, int]]:
        """(point, seconds, text tokens) of what was measured and observed; also of bags over nodes. In order of the
        points, as fits leave out every tenth: a resume, which reads them from a file, prices as the run before it."""
        ran = self.ran() if spanning else self.live
        rows = [(key, point.seconds, point.text_tokens) for key, point in ran.items() if key[0] == module]
        known = {key for key, _, _ in rows}
        for key in self.measured:
            if key[0] == module and key not in known:
                rows.append((key, self.held(key), self.text_tokens.get(key, 0)))
        return sorted(row for row in rows if module == "text" or row[0][2] > 0)

    def ran(self) -> dict[PointKey, LivePoint]:
        """Every point that ran, as on one node."""
        return self.live | {key: point for module in MODULES for key, point in self._spanning_only(module).items()}

    def known_counts(self, module: Module, shape: PixelShape) -> set[int]:
        """Numbers of samples of this shape that were measured or ran in one cascade, on one node or over several."""
        over_nodes = (*(key for key, _ in self.spanning), *(point.key for point in self.over_nodes))
        return {k[1] for k in (*self.measured, *self.live, *over_nodes) if k[0] == module and k[2:5] == shape}

    def held(self, key: PointKey) -> float:
        """Seconds of a measured point, as far as what ran since lets it stand."""
        load = self._plain_load(Samples.of_key(key, self.text_tokens.get(key, 0)), key[5])
        return self.of_file(key) * self.file_drift(key[0]).factor(load)

    def of_file(self, key: PointKey) -> float:
        """Seconds of a measured point, beside the copies of a pass."""
        bare = key[0] == "dit" and not self.fetched.in_points and key not in self.runs
        return self.fetched.beside(self.measured[key]) if bare else self.measured[key]

    def _spanning_only(self, module: Module) -> dict[PointKey, LivePoint]:
        keys = {key for key, _ in self.spanning if key[0] == module and key not in self.live}
        return {key: point for key in keys if (point := self.on_one_node(key)) is not None}

    def on_one_node(self, key: PointKey) -> LivePoint | None:
        """What a point that ran over nodes only would take on one."""
        if self._spreads is None:
            self._spreads = {}
            for other, spanned in self.spanning:
                self._spreads.setdefault(other, []).append(spanned)
        if key not in self._spreads:
            return None
        found = [(spanned, self.spanning[key, spanned]) for spanned in self._spreads[key]]
        spanned, point = max(found, key=lambda one: one[1].count)
        return point.over(point.seconds / self._alone(key, point.seconds, spanned.overlap, point.text_tokens))

    def over_nodes_only(self, key: PointKey) -> float | None:
        """What a point of the file that was measured over nodes only would take on one."""
        found = [self._alone(key, one.seconds, OVERLAP, one.text_tokens) for one in self.over_nodes if one.key == key]
        return statistics.median(found) if found else None

    def _alone(self, key: PointKey, seconds: float, overlap: float, text_tokens: int) -> float:
        """What a cascade that takes so long over nodes would take on one."""
        if key[0] != "dit" or not self.cross_node.by_rows:
            return seconds / self.cross_node.factor(overlap)
        more = self.cross_node.fall(overlap) * self.cross_node.sending(self.load(key, text_tokens).sent, key[5] - 1)
        return max(seconds - more, _LEAST * seconds)

    def by_text(self, key: PointKey, measured_with: int, wanted: int, of_file: bool = False) -> float:
        """Factor from a point's seconds with `measured_with` text tokens of a sample to those with `wanted`, by the
        module's model or by that of the file's points alone; 1 where either number is unknown."""
        if key[0] == "vae" or not (measured_with and wanted) or measured_with == wanted:
            return 1.0
        model = self._model_of_file(key[0]) if of_file else self.model_of(key[0])
        if model is None:
            return 1.0
        load = self._load_of_file if of_file else self.load
        before, after = (self.modelled(key[0], model, load(key, text)) for text in (measured_with, wanted))
        return after / before if before > 0 else 1.0

    def modelled(self, module: Module, model: Fit, load: Load) -> float:
        """Seconds of a load by a model of what is computed: of the DiT, beside the copies of its weights."""
        seconds = model.predict(load)
        return self.fetched.beside(seconds) if module == "dit" else seconds

    def file_drift(self, module: Module) -> Drift:
        """The drift of the file's points, by those of them that ran."""
        if (module, "file") not in self._drifts:
            both = sorted(key for key in self.live if key[0] == module and key in self.measured)
            loads = [self._plain_load(Samples.of_key(key, self.live[key].text_tokens), key[5]) for key in both]
            ratios = [
                self.live[key].seconds
                / self.of_file(key)
                / self.by_text(key, self.text_tokens.get(key, 0), self.live[key].text_tokens, of_file=True)
                for key in both
            ]
            self._drifts[module, "file"] = Drift(loads, ratios, doubt=0.0)
        return self._drifts[module, "file"]

    def model_drift(self, module: Module, model: Fit) -> Drift:
        """The drift of the cost model, by all points that ran."""
        if (module, "model") not in self._drifts:
            seen = sorted(key for key in self.live if key[0] == module and (module == "text" or key[2]))
            loads = self._loads_of([(key, self.live[key].text_tokens) for key in seen])
            ratios = [
                self.live[key].seconds / max(self.modelled(module, model, load), 1e-9)
                for load, key in zip(loads, seen, strict=True)
            ]
            self._drifts[module, "model"] = Drift(loads, ratios, doubt=_DOUBT)
        return self._drifts[module, "model"]

    def points_changed(self, module: Module) -> None:
        """Drop what was derived from the module's points."""
        self._fits.pop(module, None)
        self._rates, self._calls, self._spreads = None, None, None
        self._drifts = {key: drift for key, drift in self._drifts.items() if key[0] != module}
        self._cache.clear()
        self._prices.clear()


assert set(FORMS_OF) == set(MODULES), "every module needs a cost model"
