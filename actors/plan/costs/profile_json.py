"""Profile files: read with one clear sentence per mistake, and written so that they are read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from actors.plan.costs.point import LivePoint
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_file import ProfileFile, ProfileLimits
from actors.plan.costs.spanning import BagSpread
from actors.plan.types import MODULES, PlanError
from ops.typed import ConfigError, Names, as_plain, build, node_of, read_json

LEARNED = "profile.json"  # in the folder of a run: what it has learned


_OWN = ("degrees", "latency", "limits", "num_heads", "needs", "ran_over_nodes", "seen_handoffs")
_SAME = [f.name for f in fields(ProfileFile) if f.name not in _OWN]
_POINT = ("module", "batch", "frames", "height", "width", "degree")


def read_profile(source: str | Path | Mapping[str, Any]) -> Profile:  # JSON, whose values `build` checks
    """The profile of a file, of a run's folder, or of an object that is parsed already. Raises PlanError."""
    if not isinstance(source, Mapping) and (Path(source) / "config.yaml").is_file():
        source = Path(source) / LEARNED
        if not source.is_file():
            raise PlanError(f"{source} does not exist: the run has learned nothing yet; it is saved with checkpoints.")
    name = "profile" if isinstance(source, Mapping) else f"profile {source}"
    if not isinstance(source, Mapping) and not Path(source).exists():
        raise PlanError(f"{name} does not exist; `heddle profile --out {source}` makes it, or name none.")
    if not isinstance(source, Mapping) and Path(source).is_dir():
        raise PlanError(
            f"{name} is a folder without a run; give the file that heddle profile --out writes, or a run's."
        )
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
    profile = Profile(
        **{key: getattr(file, key) for key in _SAME if key not in ("element_bytes", "exchange_s")},
        degrees={module: tuple(sorted(set(degrees))) for module, degrees in file.degrees.items()},
        num_heads=file.heads,
        element_bytes=file.sends,
        exchange_s=file.exchange_seconds,
        measured={point.key: point.seconds for point in file.latency},
        runs={point.key: (point.count, point.text_tokens) for point in file.latency if point.count},
        spread={point.key: point.spread for point in file.latency if point.spread is not None},
        text_tokens={point.key: point.text_tokens for point in file.latency if point.text_tokens},
        spanning={
            (point.key, BagSpread.of(point.nodes, point.overlap)): LivePoint.of(
                point.seconds, point.count, point.text_tokens
            )
            for point in file.ran_over_nodes
        },
        max_frames=file.limits.max_frames,
        notes=_notes_on(data),
    )
    profile.needs.take_up(file.needs)
    for point in file.seen_handoffs:
        profile.seen_handoffs.add(point.num_bytes, point.seconds)
    return profile


def _notes_on(data: Mapping[str, Any]) -> list[str]:  # JSON that `build` has checked
    """What a file says that no plan follows any more."""
    points = data.get("latency", ())
    if data.get("memory") or any(point.get("peak_gib") is not None for point in points):
        return [
            "memory: this profile has peaks of whole devices, which say nothing of cascades beside other states; plans "
            "go by the forecast until a run or heddle profile has measured what cascades need."
        ]
    return []


def write_profile(profile: Profile, path: str | Path) -> None:
    Path(path).write_text(json.dumps(profile_json(profile), indent=1) + "\n")


def profile_json(profile: Profile) -> dict[str, object]:
    """What `read_profile` reads back; live points become latency entries, the one that ran last the last of them."""
    measured = {key: profile.held(key) for key in sorted(profile.measured) if key not in profile.live}
    points = measured | {key: point.seconds for key, point in profile.live.items()}
    runs = profile.runs | {key: (point.count, point.text_tokens) for key, point in profile.live.items()}
    held = {
        **{key: getattr(profile, key) for key in _SAME},
        "degrees": profile.degrees,
        "num_heads": profile.num_heads,
        "latency": [
            {
                **dict(zip(_POINT, key)),
                "seconds": seconds,
                **({"spread": profile.spread[key]} if key in profile.spread else {}),
                **({"text_tokens": profile.text_tokens[key]} if key in profile.text_tokens else {}),
                **({"count": runs[key][0], "text_tokens": runs[key][1]} if key in runs else {}),
            }
            for key, seconds in points.items()
        ],
        "ran_over_nodes": [
            {
                **dict(zip(_POINT, key)),
                "nodes": spanned.nodes,
                "overlap": spanned.overlap,
                "seconds": point.seconds,
                "count": point.count,
                "text_tokens": point.text_tokens,
            }
            for (key, spanned), point in profile.spanning.items()
        ],
        "seen_handoffs": [
            {"num_bytes": num_bytes, "seconds": seconds}
            for num_bytes, seconds in (profile.seen_handoffs.seen if profile.live else ())
            if num_bytes > 0 and seconds > 0
        ],
        "limits": ProfileLimits(max_frames=profile.max_frames),
        "needs": profile.needs.known(),
        "fits": {module: fit.to_json() for module in MODULES if (fit := profile.model_of(module)) is not None},
        "notes": profile.notes,
    }
    return {key: as_plain(value) for key, value in held.items() if value is not None}
