"""Profile files: read with one clear sentence per mistake, and written so that they are read back."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.plan.costs.profile import MODEL_HEADS, RESIDUALS, Handoff, Key, MaxFrames, Profile
from actors.plan.costs.topology import CrossNode
from actors.plan.types import MODULES, PlanError
from ops.geometry import Geometry


def read_profile(source: str | Path | Mapping[str, Any]) -> Profile:
    """The profile of a file or of an object that is parsed already. Raises PlanError."""
    name = "profile"
    if isinstance(source, Mapping):
        data: Any = source
    else:
        name = f"profile {source}"
        data = read_json(source, "profile")
    if not isinstance(data, Mapping):
        raise PlanError(f'{name} is not a JSON object; write one with "latency", a list of measured points.')
    measured, peaks = _latency(data.get("latency", []), name)
    if not measured:
        raise PlanError(f'{name} has no "latency" entries, so nothing can be priced. Measure at least one point.')
    heads = data.get("num_heads", MODEL_HEADS.get(str(data.get("model", ""))))
    degrees = _degrees(data.get("degrees", {}), heads, name)
    limits = data.get("limits") or {}
    memory = data.get("memory") or {}
    return Profile(
        model=str(data.get("model", "unknown")),
        device=str(data.get("device", "unknown")),
        source=str(data.get("source", "")),
        degrees=degrees,
        measured=measured,
        peak_gib=peaks,
        gpu_memory_gib=_optional_positive(limits.get("gpu_memory_gib"), "limits.gpu_memory_gib", name),
        max_frames=_max_frames(limits.get("max_frames", []), name),
        extrapolate=bool(data.get("extrapolate", True)),
        cross_node=_cross_node(data.get("cross_node") or {}, name),
        handoff=_handoff(data.get("handoff") or {}, name),
        geometry=_geometry(data.get("geometry") or {}),
        num_heads=heads,
        residual=_residual(data.get("residual", "none"), name),
        memory=(float(memory["states_gib"]), float(memory["gib_per_token"])) if memory else None,
    )


def read_json(path: str | Path, what: str) -> Any:
    """Parse a JSON file; PlanError names file and place of a mistake."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise PlanError(f"{what} {path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{what} {path} cannot be read: {error}.") from None
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{what} {path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None


def whole(value: object, field: str, where: str, minimum: int = 1) -> int:
    """A whole number of at least `minimum`, or PlanError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or int(value) != value
        or value < minimum
    ):
        raise PlanError(f"{where}: {field} is {value!r}; it must be a whole number of at least {minimum}.")
    return int(value)


def _latency(entries: object, name: str) -> tuple[dict[Key, float], dict[Key, float]]:
    if not isinstance(entries, list):
        raise PlanError(f'{name}: "latency" must be a list of measured points.')
    measured: dict[Key, float] = {}
    peaks: dict[Key, float] = {}
    for number, entry in enumerate(entries):
        where = f"{name}: latency entry {number}"
        if not isinstance(entry, Mapping):
            raise PlanError(f"{where} is {entry!r}; it must be an object with module, batch, degree and seconds.")
        module = entry.get("module")
        if module not in MODULES:
            raise PlanError(f"{where} has the unknown module {module!r}. Use one of {', '.join(MODULES)}.")
        minimum = 0 if module == "text" else 1
        shape = [
            whole(entry.get(key, 0 if module == "text" else None), key, where, minimum)
            for key in ("frames", "height", "width")
        ]
        key = (module, whole(entry.get("batch"), "batch", where), *shape, whole(entry.get("degree"), "degree", where))
        seconds = entry.get("seconds")
        if (
            not isinstance(seconds, int | float)
            or isinstance(seconds, bool)
            or not math.isfinite(seconds)
            or seconds <= 0
        ):
            raise PlanError(
                f"{where} ({module} {shape[0]}f degree {key[5]}) has seconds {seconds!r}; "
                f"they must be a positive number."
            )
        measured[key] = float(seconds)
        peak = _optional_positive(entry.get("peak_gib"), "peak_gib", where)
        if peak is not None:
            peaks[key] = peak
    return measured, peaks


def _degrees(entries: object, heads: int | None, name: str) -> dict[str, tuple[int, ...]]:
    if not isinstance(entries, Mapping):
        raise PlanError(f'{name}: "degrees" must map each module to a list of degrees.')
    degrees = {}
    for module, values in entries.items():
        if module not in MODULES:
            raise PlanError(f'{name}: "degrees" names the unknown module {module!r}. Use one of {", ".join(MODULES)}.')
        if not isinstance(values, list) or not values:
            raise PlanError(f"{name}: degrees.{module} is {values!r}; it must be a list such as [1, 2, 4].")
        degrees[module] = tuple(sorted({whole(value, f"degrees.{module}", name) for value in values}))
    for degree in degrees.get("dit", ()):
        if heads is not None and heads % degree:
            legal = [k for k in range(1, heads + 1) if heads % k == 0]
            raise PlanError(
                f"{name}: dit degree {degree} does not divide the {heads} attention heads. Use one of {legal}."
            )
    return degrees


def _optional_positive(value: object, field: str, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise PlanError(f"{where}: {field} is {value!r}; it must be a positive number.")
    return float(value)


def _max_frames(entries: Any, name: str) -> tuple[MaxFrames, ...]:
    fields = ("degree", "height", "width", "batch", "frames")
    try:
        return tuple(
            MaxFrames(module=str(entry["module"]), **{key: whole(entry[key], key, name) for key in fields})
            for entry in entries
        )
    except (KeyError, TypeError) as error:
        raise PlanError(f"{name}: every limits.max_frames entry needs module, {', '.join(fields)} ({error}).") from None


def _cross_node(data: Mapping[str, Any], name: str) -> CrossNode:
    values = {}
    for key in ("penalty", "decay"):
        value = data.get(key, 0.0)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise PlanError(f"{name}: cross_node.{key} is {value!r}; it must be a number of at least 0.")
        values[key] = float(value)
    return CrossNode(**values, rails_per_node=str(data.get("rails_per_node", "")))


def _handoff(data: Mapping[str, Any], name: str) -> Handoff:
    values = {}
    for key in ("latency_s", "gib_per_s"):
        value = data.get(key, 0.0)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise PlanError(f"{name}: handoff.{key} is {value!r}; it must be a number of at least 0.")
        values[key] = float(value)
    return Handoff(**values)


def _residual(value: object, name: str) -> str:
    """What multiplies the VAE's fit. XGBoost is an extra of the installation: only profiles that name it need it."""
    if value not in RESIDUALS:
        raise PlanError(f"{name}: residual is {value!r}; use one of {', '.join(RESIDUALS)}.")
    if value == "xgboost" and importlib.util.find_spec("xgboost") is None:
        raise PlanError(
            f"{name}: residual is 'xgboost', and that package is not installed. Install Heddle with its "
            f"extra (pip install -e '.[xgboost]'), or set residual to 'none'."
        )
    return str(value)


def _geometry(data: Mapping[str, Any]) -> Geometry:
    default = Geometry()
    return Geometry(
        vae_stride=tuple(data.get("vae_stride", default.vae_stride)),
        patch=tuple(data.get("patch", default.patch)),
        causal=bool(data.get("causal", default.causal)),
    )


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
