"""What a profile file holds, checked as it is read: measured points, limits, and settings of the cost model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from actors.plan.costs.compiling import BothWays
from actors.plan.costs.exchange import ExchangePoint
from actors.plan.costs.handoff import Handoff, HandoffPoint
from actors.plan.costs.max_frames import MaxFrames
from actors.plan.costs.needs import KnownNeeds
from actors.plan.costs.point import PointKey
from actors.plan.costs.remainder import RemainderPoint
from actors.plan.costs.setting import ProfiledSetting
from actors.plan.costs.spanning import SpanningPoint
from actors.plan.costs.topology import CrossIsland, CrossNode
from actors.plan.costs.update import UpdateCosts
from actors.plan.types import MODULES, Module, refuse_below, refuse_unless_positive
from ops.geometry import Geometry
from ops.models.base.tiling import Tiling
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
    spread: float | None = None  # of the runs that it is the median of: longest less shortest, as a share of it
    count: int = 0  # cascades of a run that it is the median of; 0: measured by a benchmark
    text_tokens: int = 0  # mean of a sample, where it is known

    def __post_init__(self) -> None:
        refuse_below(0, self, "count", "text_tokens", *(() if self.spread is None else ("spread",)))
        refuse_below(1, self, "batch", "degree", *(() if self.module == "text" else ("frames", "height", "width")))
        refuse_unless_positive(self, "seconds")

    @property
    def key(self) -> PointKey:
        return self.module, self.batch, self.frames, self.height, self.width, self.degree


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadPoint(LatencyPoint):
    """One point of a run whose bag spanned nodes."""

    nodes: int
    overlap: float  # of the rails of its nodes

    def __post_init__(self) -> None:
        super(SpreadPoint, self).__post_init__()
        refuse_below(0, self, "overlap")
        refuse_below(2, self, "nodes")
        refuse_below(1, self, "count")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileLimits:
    """What the device cannot hold."""

    max_frames: tuple[MaxFrames, ...] = ()


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
    remainders: tuple[RemainderPoint, ...] = ()
    exchanges: tuple[ExchangePoint, ...] = ()
    exchange_s: float = 0.0
    element_bytes: int = 0  # by which exchange_s was found; 0: of a file from before bf16 counted as 2, by 4
    exchange_calls: float = 0.0
    handoffs: tuple[HandoffPoint, ...] = ()
    over_nodes: tuple[SpanningPoint, ...] = ()
    ran_over_nodes: tuple[SpreadPoint, ...] = ()
    seen_handoffs: tuple[HandoffPoint, ...] = ()  # the newest of a run
    geometry: Geometry = field(default_factory=Geometry)
    tiling: Tiling = field(default_factory=Tiling)  # of the VAE
    both_ways: BothWays | None = None  # blocks compiled and as written
    needs: KnownNeeds = field(default_factory=KnownNeeds)

    def __post_init__(self) -> None:
        refuse_below(0, self, "exchange_s", "exchange_calls", "element_bytes")
        # A file with needs alone is of a run that soon lacked memory: it has no seconds.
        if not (self.latency or self.ran_over_nodes or self.needs.kinds):
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
    def sends(self) -> int:
        """Bytes of a number that bags send."""
        return self.element_bytes or (2 if self.setting is not None and "bfloat16" in self.setting.precision else 4)

    @property
    def exchange_seconds(self) -> float:
        """`exchange_s` by what is sent."""
        return self.exchange_s if self.element_bytes else self.exchange_s * self.sends / 4

    @property
    def heads(self) -> int | None:
        return PUBLISHED_HEADS.get(self.model) if self.num_heads is None else self.num_heads
