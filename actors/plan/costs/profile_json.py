"""Profile files: read with one clear sentence per mistake, and written so that they are read back."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from actors.plan.costs.profile import (
    MODEL_HEADS,
    Handoff,
    MaxFrames,
    PointKey,
    Profile,
    ProfiledSetting,
    refuse_degrees,
)
from actors.plan.costs.topology import CrossNode
from actors.plan.types import MODULES, Module, PlanError, refuse_below, refuse_unless_positive
from ops.geometry import Geometry
from ops.typed import ConfigError, Names, as_plain, build, node_of, read_json

LEARNED = "profile.json"  # in the folder of a run: what it has learned


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
    text_tokens: int = 0  # mean of a sample, where a run knows it

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
    """A profile as it is written. Other keys, such as the fits and notes that `profile_json` adds, are passed over."""

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
        refuse_degrees(self.degrees.get("dit", ()), self.heads)
        if self.residual == "xgboost" and importlib.util.find_spec("xgboost") is None:
            raise ValueError(  # an extra of the installation: only profiles that name it need it
                "residual is 'xgboost', and that package is not installed. Install Heddle with its extra "
                "(pip install -e '.[xgboost]'), or set residual to 'none'."
            )

    @property
    def heads(self) -> int | None:
        return MODEL_HEADS.get(self.model) if self.num_heads is None else self.num_heads


_SAME = [f.name for f in fields(ProfileFile) if f.name not in ("degrees", "latency", "limits", "memory", "num_heads")]


def read_profile(source: str | Path | Mapping[str, Any]) -> Profile:
    """The profile of a file, of a run's folder, or of an object that is parsed already. Raises PlanError."""
    if not isinstance(source, Mapping) and (Path(source) / "config.yaml").is_file():
        source = Path(source) / LEARNED
        if not source.is_file():
            raise PlanError(f"{source} does not exist: the run has learned nothing yet; it is saved with checkpoints.")
    name = "profile" if isinstance(source, Mapping) else f"profile {source}"
    try:
        data = source if isinstance(source, Mapping) else read_json(source, "profile")
    except ConfigError as error:
        raise PlanError(str(error)) from None
    if not isinstance(data, Mapping):
        raise PlanError(f'{name} is not a JSON object; write one with "latency", a list of measured points.')
    held = {key: value for key, value in data.items() if value is not None and value != {}}  # as good as nothing
    try:
        file = build(ProfileFile, node_of(held), Names(others=True))
    except ConfigError as error:
        raise PlanError(f"{name}: {error}") from None
    return Profile(
        **{key: getattr(file, key) for key in _SAME},
        degrees={module: tuple(sorted(set(degrees))) for module, degrees in file.degrees.items()},
        num_heads=file.heads,
        measured={point.key: point.seconds for point in file.latency},
        runs={point.key: (point.count, point.text_tokens) for point in file.latency if point.count},
        peak_gib={point.key: point.peak_gib for point in file.latency if point.peak_gib is not None},
        gpu_memory_gib=file.limits.gpu_memory_gib,
        max_frames=file.limits.max_frames,
        memory=(file.memory.states_gib, file.memory.gib_per_token) if file.memory is not None else None,
    )


def write_profile(profile: Profile, path: str | Path) -> None:
    Path(path).write_text(json.dumps(profile_json(profile), indent=1) + "\n")


def profile_json(profile: Profile) -> dict[str, Any]:
    """What `read_profile` reads back; live points become latency entries."""
    ran = profile.ran()
    points = {key: profile.held(key) for key in profile.measured} | {key: point.seconds for key, point in ran.items()}
    runs = profile.runs | {key: (point.count, point.text_tokens) for key, point in ran.items()}
    names = ("module", "batch", "frames", "height", "width", "degree")
    held = {
        **{key: getattr(profile, key) for key in _SAME},
        "degrees": profile.degrees,
        "num_heads": profile.num_heads,
        "latency": [
            {
                **dict(zip(names, key)),
                "seconds": seconds,
                "peak_gib": profile.peak_gib.get(key),
                **({"count": runs[key][0], "text_tokens": runs[key][1]} if key in runs else {}),
            }
            for key, seconds in sorted(points.items())
        ],
        "limits": ProfileLimits(gpu_memory_gib=profile.gpu_memory_gib, max_frames=profile.max_frames),
        "memory": profile.memory and dict(zip(("states_gib", "gib_per_token"), profile.memory)),
        "fits": {module: fit.to_json() for module in MODULES if (fit := profile.model_of(module)) is not None},
        "notes": profile.notes,
    }
    return {key: as_plain(value) for key, value in held.items() if value is not None}
