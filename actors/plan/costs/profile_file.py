"""What a profile file holds, checked as it is read: measured points, limits, and settings of the cost model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from actors.plan.costs.exchange import ExchangePoint
from actors.plan.costs.handoff import HandoffPoint
from actors.plan.costs.profile import Handoff, MaxFrames, PointKey, ProfiledSetting
from actors.plan.costs.spanning import SpanningPoint
from actors.plan.costs.topology import CrossIsland, CrossNode
from actors.plan.costs.update import UpdateCosts
from actors.plan.types import MODULES, Module, refuse_below, refuse_unless_positive
from ops.geometry import Geometry
from ops.models.families import PUBLISHED_HEADS


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyPoint:
    """One measured point. A text encoder has no frames, height and width."""

    module: Module
    batch: int
    frames: int = 0
    height: int = 0
    width: int = 0
    degree: int
    seconds: float
    peak_gib: float | None = None
    count: int = 0  # cascades of a run that it is the mean of; 0: measured by a benchmark
    text_tokens: int = 0  # mean of a sample, where it is known

    def __post_init__(self) -> None:
        refuse_below(0, self, "count", "text_tokens")
        refuse_below(1, self, "batch", "degree", *(() if self.module == "text" else ("frames", "height", "width")))
        refuse_unless_positive(self, "seconds", "peak_gib")

    @property
    def key(self) -> PointKey:
        return self.module, self.batch, self.frames, self.height, self.width, self.degree


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileLimits:
    """What the device cannot hold."""

    gpu_memory_gib: float | None = None
    max_frames: tuple[MaxFrames, ...] = ()

    def __post_init__(self) -> None:
        refuse_unless_positive(self, "gpu_memory_gib")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileMemory:
    """Memory of the DiT on one worker."""

    states_gib: float
    gib_per_token: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileFile:
    """A profile as it is written. Other keys, such as fits and notes, are passed over."""

    model: str = "unknown"
    device: str = "unknown"
    source: str = ""
    setting: ProfiledSetting | None = None  # for which a run or a measurement made it; other runs refuse it
    degrees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_heads: int | None = None  # of the model's name unless given
    latency: tuple[LatencyPoint, ...] = ()
    limits: ProfileLimits = field(default_factory=ProfileLimits)
    extrapolate: bool = True
    residual: Literal["none", "xgboost"] = "none"
    cross_node: CrossNode = field(default_factory=CrossNode)
    cross_island: CrossIsland = field(default_factory=CrossIsland)
    handoff: Handoff = field(default_factory=Handoff)
    update: UpdateCosts = field(default_factory=UpdateCosts)
    exchanges: tuple[ExchangePoint, ...] = ()
    exchange_s: float = 0.0
    handoffs: tuple[HandoffPoint, ...] = ()
    over_nodes: tuple[SpanningPoint, ...] = ()
    geometry: Geometry = field(default_factory=Geometry)
    memory: ProfileMemory | None = None

    def __post_init__(self) -> None:
        refuse_below(0, self, "exchange_s")
        if not self.latency:
            raise ValueError('no "latency" entries, so nothing can be priced. Measure at least one point.')
        for module, degrees in self.degrees.items():
            if module not in MODULES:
                raise ValueError(f"degrees names the unknown module {module!r}. Use one of {', '.join(MODULES)}.")
            if not degrees or min(degrees) < 1:
                raise ValueError(f"degrees.{module} is {list(degrees)}; it must be a list such as [1, 2, 4].")
        if self.residual == "xgboost" and importlib.util.find_spec("xgboost") is None:
            raise ValueError(  # an extra of the installation: only profiles that name it need it
                "residual is 'xgboost', and that package is not installed. Install Heddle with its extra "
                "(pip install -e '.[xgboost]'), or set residual to 'none'."
            )

    @property
    def heads(self) -> int | None:
        return PUBLISHED_HEADS.get(self.model) if self.num_heads is None else self.num_heads
