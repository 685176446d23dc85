"""Profile: what a cascade costs on a device. Measured points as they stand, the rest from a fitted or FLOP model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from actors.plan.costs.fit import Fit, model_from
from actors.plan.costs.flops import flop_coefficients
from actors.plan.costs.forms import FORMS_OF, Load
from actors.plan.costs.handoff import HandoffEstimate
from actors.plan.costs.topology import CrossNode
from actors.plan.types import MODULES, Module, PlanError, refuse_below
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.config import ImageConfig, TextConfig, VAEConfig
from ops.models.wan.config import WanConfig

log = logging.getLogger(__name__)

PointKey = tuple[str, int, int, int, int, int]  # module, batch, frames, height, width, degree

# Attention heads of published models: a degree that does not divide them cannot run (Ulysses splits heads).
MODEL_HEADS = {
    "wan2.1-1.3b": 12,
    "wan2.1-14b": 40,
    "hunyuan-video-13b": 24,
    "flux.1": 24,
    "open-sora-v2": 24,
    "cogvideox-2b": 30,
    "cogvideox-5b": 48,
}
OBSERVE_WEIGHT = 0.3  # weight of a new measurement in the running mean of its point
RESIDUALS = ("none", "xgboost")  # what a profile's `residual` may name: trees on what the VAE's fit leaves
HEAVY_FRACTION = 0.98  # of the device's memory that a cascade may use
# A 13B-sized transformer on an H100: only its proportions matter, a profile's points set the level.
PRIORS = flop_coefficients(
    WanConfig(num_layers=60, num_heads=24, head_dim=128, ffn_dim=12288, gradient_checkpointing=True),
    400.0,
    vae_flops_per_pixel=2e6,
    text_flops_per_token=1e10,
    launch_s=2e-5,
    exchange_gbps=100.0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxFrames:
    """A measured limit: more than `frames` at this shape and degree run out of memory."""

    module: str
    degree: int
    height: int
    width: int
    batch: int
    frames: int

    def __post_init__(self) -> None:
        refuse_below(1, self, "degree", "height", "width", "batch", "frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """Cost of moving latents to a bag that shares no worker with the producer."""

    latency_s: float = 0.0
    gib_per_s: float = 0.0  # 0: the volume costs nothing

    def __post_init__(self) -> None:
        refuse_below(0, self, "latency_s", "gib_per_s")


@dataclass(kw_only=True, slots=True)
class Profile:
    """Latency and memory of one model on one device. Only `observe` and `observe_handoff` change it."""

    model: str = "unknown"
    device: str = "unknown"
    source: str = ""
    degrees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    measured: dict[PointKey, float] = field(default_factory=dict)
    peak_gib: dict[PointKey, float] = field(default_factory=dict)
    gpu_memory_gib: float | None = None
    max_frames: tuple[MaxFrames, ...] = ()
    extrapolate: bool = True
    residual: str = "none"  # one of RESIDUALS
    cross_node: CrossNode = field(default_factory=CrossNode)
    handoff: Handoff = field(default_factory=Handoff)
    geometry: Geometry = field(default_factory=Geometry)
    num_heads: int | None = None
    models: dict[str, Fit] = field(default_factory=dict)  # of the modules whose missing points can be priced
    memory: tuple[float, float] | None = None  # DiT: GiB of states, GiB per token of one worker
    notes: list[str] = field(default_factory=list)  # poor fits and the like, for the report
    live: dict[PointKey, tuple[float, int, int]] = field(default_factory=dict)  # observed seconds, count, text tokens
    _fits: dict[str, Fit] = field(default_factory=dict)
    _handoffs: HandoffEstimate = field(default_factory=HandoffEstimate)
    _cache: dict[tuple[Module, int, int, int, int, int], tuple[tuple[int, float], ...]] = field(default_factory=dict)

    @classmethod
    def from_flops(
        cls,
        dit: DiTConfig,
        vae: VAEConfig | None = None,
        text: TextConfig | None = None,
        geometry: Geometry | None = None,
        image: ImageConfig | None = None,
        *,
        tflops: float = 0.03,
        gpu_memory_gib: float | None = None,
        vae_flops_per_pixel: float | None = None,
        text_flops_per_token: float | None = None,
        launch_s: float = 2e-4,
        exchange_gbps: float = 1.0,
        degrees: Sequence[int] = (),
        max_degree: int = 64,
        device: str = "cpu",
    ) -> Profile:
        """A profile without any measurement: every point comes from the FLOP model and improves with `observe`.

        The defaults fit a CPU core with small models. Legal DiT degrees are the divisors of the heads.
        """
        vae, text = vae or VAEConfig(), text or TextConfig()
        if vae_flops_per_pixel is None:
            vae_flops_per_pixel = 200.0 if vae.kind == "haar" else 2e5
        if text_flops_per_token is None:
            text_flops_per_token = 24.0 * text.d_model**2 * text.num_layers
        if dit.in_channels > dit.out_channels:
            vae_flops_per_pixel *= 2  # the first frame, followed by grey, is encoded as a clip of its own
        allowed = tuple(k for k in range(1, min(dit.num_heads, max_degree) + 1) if dit.num_heads % k == 0)
        refuse_degrees(degrees, dit.num_heads)
        fits = flop_coefficients(
            dit,
            tflops,
            vae_flops_per_pixel=vae_flops_per_pixel,
            text_flops_per_token=text_flops_per_token,
            image_flops=24.0 * image.d_model**2 * image.num_layers * image.tokens if image else 0.0,
            launch_s=launch_s,
            exchange_gbps=exchange_gbps,
        )
        return cls(
            model=dit.architecture,
            device=device,
            source="FLOP model",
            models=fits,
            num_heads=dit.num_heads,
            degrees={"text": (1,), "vae": (1,), "dit": tuple(degrees) or allowed},
            geometry=geometry or Geometry(patch=dit.patch),
            gpu_memory_gib=gpu_memory_gib,
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
        tokens = self.tokens(frames, height, width)
        return Load(
            batch=batch,
            frames=frames,
            height=height,
            width=width,
            text_tokens=text_tokens,
            tokens=tokens,
            degree=degree,
        )

    def price(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float | None:
        """Seconds on one node at normal speed, or None where the profile cannot say."""
        key = (module, batch, frames, height, width, degree)
        seconds = self.measured.get(key)
        if seconds is not None:
            return seconds
        if module == "text":
            seconds = self.measured.get(("text", batch, 0, 0, 0, degree))
            if seconds is not None:
                return seconds
        seen = self.live.get(key)
        if seen is not None:
            return seen[0]
        if not self.extrapolate:
            return None
        model = self.model_of(module)
        if model is None:
            return None
        load = self.load_of(module, batch, frames, height, width, degree, text_tokens)
        return max(model.predict(load), 1e-9)

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

    def modes(
        self, module: Module, batch: int, frames: int, height: int, width: int, text_tokens: int = 0
    ) -> tuple[tuple[int, float], ...]:
        """(degree, seconds) of every legal degree, ascending."""
        cache_key = (module, batch, frames, height, width, text_tokens)
        found = self._cache.get(cache_key)
        if found is None:
            found = tuple(
                (k, s)
                for k in self._candidate_degrees(module)
                if (s := self.price(module, batch, frames, height, width, k, text_tokens)) is not None
                and self.fits(module, batch, frames, height, width, k, text_tokens)
            )
            self._cache[cache_key] = found
        return found

    def legal_degrees(
        self, module: Module, batch: int, frames: int, height: int, width: int, text_tokens: int = 0
    ) -> tuple[int, ...]:
        return tuple(k for k, _ in self.modes(module, batch, frames, height, width, text_tokens))

    def memory_gib(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> float | None:
        """Peak GiB on one worker: measured, or Mem_states + B S Mem_token / k for the DiT (Arachne Eq. 8)."""
        peak = self.peak_gib.get((module, batch, frames, height, width, degree))
        if peak is None and module == "dit" and self.memory is not None:
            tokens = self.tokens(frames, height, width) + text_tokens
            peak = self.memory[0] + batch * tokens * self.memory[1] / degree
        return peak

    def fits(
        self, module: Module, batch: int, frames: int, height: int, width: int, degree: int, text_tokens: int = 0
    ) -> bool:
        """Whether the cascade stays within the device's memory and the measured frame limits."""
        for limit in self.max_frames:
            if (
                limit.module == module
                and limit.degree >= degree
                and height * width >= limit.height * limit.width
                and batch >= limit.batch
                and frames > limit.frames
            ):
                return False
        if self.gpu_memory_gib is None:
            return True
        peak = self.memory_gib(module, batch, frames, height, width, degree, text_tokens)
        return peak is None or peak <= self.gpu_memory_gib * HEAVY_FRACTION

    def handoff_seconds(self, batch: int, frames: int, height: int, width: int) -> float:
        """Delay of a consumer that holds none of the producer's workers. Latents: 16 channels of 4 bytes per token."""
        if self.handoff.gib_per_s <= 0:
            return self.handoff.latency_s
        stride_t, stride_h, stride_w = self.geometry.vae_stride
        gib = batch * frames * height * width / (stride_t * stride_h * stride_w) * 64 / 2**30
        return self.handoff.latency_s + gib / self.handoff.gib_per_s

    def model_of(self, module: Module) -> Fit | None:
        """The model that prices missing points; fitted to the measured points on first use."""
        if module in self._fits:
            return self._fits[module]
        chosen = self._fit(module)
        if chosen is not None:
            self._fits[module] = chosen
        return chosen

    # -- learning ---------------------------------------------------------------------------------------------------

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
    ) -> None:
        """Learn from an executed cascade (closed loop): its point follows the measurements, its model is refitted.

        Raises ValueError for a duration that is not a positive number.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"observed {module} seconds {seconds} must be positive and finite.")
        key = (module, batch, frames, height, width, degree)
        before = self.measured.get(key)
        if before is not None:  # a point of a file moves slowly towards what is measured
            self.measured[key] = before + OBSERVE_WEIGHT * (seconds - before)
        else:
            mean, count, _ = self.live.get(key, (seconds, 0, text_tokens))
            # The first run of a shape pays for warm-up; later ones count more than it.
            weight = max(OBSERVE_WEIGHT, 1.0 / (count + 1)) if count != 1 else 0.8
            self.live[key] = (mean + weight * (seconds - mean), count + 1, text_tokens)
        self._fits.pop(module, None)
        self._cache.clear()

    def observe_handoff(self, num_bytes: int, seconds: float) -> None:
        """Learn from an encode result that came from another worker: seconds from its end to the consumer's start."""
        self._handoffs.add(num_bytes, seconds)
        cascades = sorted(
            [mean for key, (mean, _, _) in self.live.items() if key[0] == "dit"]
            or [s for key, s in self.measured.items() if key[0] == "dit"]
        )
        cost = self._handoffs.cost(cascades[len(cascades) // 2] if cascades else 0.0)
        if cost is not None:
            self.handoff = Handoff(latency_s=cost[0], gib_per_s=cost[1])

    # -- inside -----------------------------------------------------------------------------------------------------

    def _candidate_degrees(self, module: Module) -> tuple[int, ...]:
        """The profile's degrees of the module; without such a list, those that were measured."""
        return self.degrees.get(module) or tuple(sorted({key[5] for key in self.measured if key[0] == module})) or (1,)

    def points(self, module: Module) -> tuple[list[Load], list[float]]:
        """Measured and observed points of a module, as cost models take them."""
        rows = [(key, seconds, 0) for key, seconds in self.measured.items()]
        rows += [(key, mean, text) for key, (mean, _, text) in self.live.items()]
        loads, seconds_list = [], []
        for (name, batch, frames, height, width, degree), seconds, text in rows:
            if name == module and (module == "text" or frames > 0):
                loads.append(self.load_of(module, batch, frames, height, width, degree, text))
                seconds_list.append(seconds)
        return loads, seconds_list

    def _fit(self, module: Module) -> Fit | None:
        prior = self.models.get(module)
        loads, seconds = self.points(module)
        if not loads:
            return prior
        residual = self.residual == "xgboost" and not self.live  # refits of a run stay linear
        found, notes = model_from(module, prior or PRIORS[module], loads, seconds, self.device, residual)
        for note in notes:
            self._note(note)
        return found

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            log.info(note)


def refuse_degrees(degrees: Iterable[int], num_heads: int | None) -> None:
    """Raises PlanError for the first that cannot run: Ulysses splits the heads evenly."""
    for degree in degrees:
        if degree < 1:
            raise PlanError(f"degree {degree} must be at least 1.")
        if num_heads is not None and num_heads % degree:
            legal = [k for k in range(1, num_heads + 1) if num_heads % k == 0]
            raise PlanError(f"degree {degree} does not divide the {num_heads} attention heads. Use some of {legal}.")


assert set(FORMS_OF) == set(MODULES), "every module needs a cost model"
