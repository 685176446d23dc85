"""Profile files: read with one clear sentence per mistake, and written so that they are read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_file import ProfileFile, ProfileLimits
from actors.plan.types import MODULES, PlanError
from ops.typed import ConfigError, Names, as_plain, build, node_of, read_json

LEARNED = "profile.json"  # in the folder of a run: what it has learned


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
        text_tokens={point.key: point.text_tokens for point in file.latency if point.text_tokens},
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
                **({"text_tokens": profile.text_tokens[key]} if key in profile.text_tokens else {}),
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
