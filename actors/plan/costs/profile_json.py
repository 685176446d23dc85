"""Profile files: read with one clear sentence per mistake, and written so that they are read back."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from actors.plan.costs.profile import MODEL_HEADS, Handoff, Key, MaxFrames, Profile
from actors.plan.costs.topology import CrossNode
from actors.plan.types import MODULES, Module, PlanError
from ops.geometry import Geometry
from ops.typed import ConfigError, Names, build, node_of, read_json


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

    def __post_init__(self) -> None:
        at_least_one(self, "batch", "degree", *(() if self.module == "text" else ("frames", "height", "width")))
        if self.seconds <= 0:
            raise ValueError(
                f"{self.module} {self.frames}f degree {self.degree} has seconds {self.seconds}; they must be a "
                f"positive number."
            )
        _positive("peak_gib", self.peak_gib)

    @property
    def key(self) -> Key:
        return self.module, self.batch, self.frames, self.height, self.width, self.degree


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileLimits:
    """What the device cannot hold."""

    gpu_memory_gib: float | None = None
    max_frames: tuple[MaxFrames, ...] = ()

    def __post_init__(self) -> None:
        _positive("gpu_memory_gib", self.gpu_memory_gib)
        for limit in self.max_frames:
            at_least_one(limit, "degree", "height", "width", "batch", "frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileMemory:
    """Memory of the DiT on one worker."""

    states_gib: float
    gib_per_token: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileFile:
    """A profile as it is written. Other keys, such as the fits and notes that `profile_json` adds, are passed over."""

    latency: tuple[LatencyPoint, ...] = ()
    model: str = "unknown"
    device: str = "unknown"
    source: str = ""
    degrees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_heads: int | None = None  # of the model's name unless given
    limits: ProfileLimits = field(default_factory=ProfileLimits)
    extrapolate: bool = True
    residual: Literal["none", "xgboost"] = "none"
    cross_node: CrossNode = field(default_factory=CrossNode)
    handoff: Handoff = field(default_factory=Handoff)
    geometry: Geometry = field(default_factory=Geometry)
    memory: ProfileMemory | None = None

    def __post_init__(self) -> None:
        if not self.latency:
            raise ValueError('no "latency" entries, so nothing can be priced. Measure at least one point.')
        for module, degrees in self.degrees.items():
            if module not in MODULES:
                raise ValueError(f"degrees names the unknown module {module!r}. Use one of {', '.join(MODULES)}.")
            if not degrees or min(degrees) < 1:
                raise ValueError(f"degrees.{module} is {list(degrees)}; it must be a list such as [1, 2, 4].")
        for degree in self.degrees.get("dit", ()):
            if self.heads is not None and self.heads % degree:
                legal = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
                raise ValueError(
                    f"dit degree {degree} does not divide the {self.heads} attention heads. Use one of {legal}."
                )
        for part, keys in ((self.cross_node, ("penalty", "decay")), (self.handoff, ("latency_s", "gib_per_s"))):
            for key in keys:
                if (value := getattr(part, key)) < 0:
                    raise ValueError(f"{key} is {value!r}; it must be a number of at least 0.")
        if self.residual == "xgboost" and importlib.util.find_spec("xgboost") is None:
            raise ValueError(  # an extra of the installation: only profiles that name it need it
                "residual is 'xgboost', and that package is not installed. Install Heddle with its extra "
                "(pip install -e '.[xgboost]'), or set residual to 'none'."
            )

    @property
    def heads(self) -> int | None:
        return MODEL_HEADS.get(self.model) if self.num_heads is None else self.num_heads

    def profile(self) -> Profile:
        """What the planner reads."""
        return Profile(
            model=self.model,
            device=self.device,
            source=self.source,
            degrees={module: tuple(sorted(set(degrees))) for module, degrees in self.degrees.items()},
            measured={point.key: point.seconds for point in self.latency},
            peak_gib={point.key: point.peak_gib for point in self.latency if point.peak_gib is not None},
            gpu_memory_gib=self.limits.gpu_memory_gib,
            max_frames=self.limits.max_frames,
            extrapolate=self.extrapolate,
            cross_node=self.cross_node,
            handoff=self.handoff,
            geometry=self.geometry,
            num_heads=self.heads,
            residual=self.residual,
            memory=(self.memory.states_gib, self.memory.gib_per_token) if self.memory is not None else None,
        )


def at_least_one(record: Any, *names: str) -> None:
    """Raises ValueError for the first of these whole numbers that is below 1."""
    for name in names:
        if (value := getattr(record, name)) < 1:
            raise ValueError(f"{name} is {value}; it must be a whole number of at least 1.")


def _positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{name} is {value!r}; it must be a positive number.")


_PARTS = ("limits", "memory", "cross_node", "handoff", "geometry")  # of these, null or {} is as good as nothing


def read_profile(source: str | Path | Mapping[str, Any]) -> Profile:
    """The profile of a file or of an object that is parsed already. Raises PlanError."""
    name = "profile" if isinstance(source, Mapping) else f"profile {source}"
    try:
        data = source if isinstance(source, Mapping) else read_json(source, "profile")
    except ConfigError as error:
        raise PlanError(str(error)) from None
    if not isinstance(data, Mapping):
        raise PlanError(f'{name} is not a JSON object; write one with "latency", a list of measured points.')
    held = {key: value for key, value in data.items() if value or key not in _PARTS}
    try:
        return build(ProfileFile, node_of(held), Names(others=True)).profile()
    except ConfigError as error:
        raise PlanError(f"{name}: {error}") from None


def write_profile(profile: Profile, path: str | Path) -> None:
    Path(path).write_text(json.dumps(profile_json(profile), indent=1) + "\n")


def profile_json(profile: Profile) -> dict[str, Any]:
    """What `read_profile` reads back; live points become latency entries."""
    points = {key: seconds for key, (seconds, _, _) in profile.live.items()} | profile.measured
    latency = [
        {
            "module": key[0],
            "batch": key[1],
            "frames": key[2],
            "height": key[3],
            "width": key[4],
            "degree": key[5],
            "seconds": seconds,
            "peak_gib": profile.peak_gib.get(key),
        }
        for key, seconds in sorted(points.items())
    ]
    data: dict[str, Any] = {
        "model": profile.model,
        "device": profile.device,
        "source": profile.source,
        "degrees": {module: list(degrees) for module, degrees in profile.degrees.items()},
        "latency": latency,
        "limits": {
            "gpu_memory_gib": profile.gpu_memory_gib,
            "max_frames": [
                {key: getattr(limit, key) for key in ("module", "degree", "height", "width", "batch", "frames")}
                for limit in profile.max_frames
            ],
        },
        "extrapolate": profile.extrapolate,
        "residual": profile.residual,
        "cross_node": {
            "penalty": profile.cross_node.penalty,
            "decay": profile.cross_node.decay,
            "rails_per_node": profile.cross_node.rails_per_node,
        },
        "handoff": {"latency_s": profile.handoff.latency_s, "gib_per_s": profile.handoff.gib_per_s},
        "geometry": {
            "vae_stride": list(profile.geometry.vae_stride),
            "patch": list(profile.geometry.patch),
            "causal": profile.geometry.causal,
        },
        "fits": {module: fit.to_json() for module in MODULES if (fit := profile.model_of(module)) is not None},
        "notes": list(profile.notes),
    }
    if profile.num_heads is not None:
        data["num_heads"] = profile.num_heads
    if profile.memory is not None:
        data["memory"] = {"states_gib": profile.memory[0], "gib_per_token": profile.memory[1]}
    return data
