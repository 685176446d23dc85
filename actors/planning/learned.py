"""What a run has learned of its costs, kept in its folder: saved beside checkpoints, taken up by a resume."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from actors.plan.costs.profile import Profile, ProfiledSetting
from actors.plan.costs.profile_json import LEARNED, read_profile, write_profile
from actors.plan.types import PlanError
from ops.models.config import ModelConfig

log = logging.getLogger(__name__)


def setting_of(model: ModelConfig, device: str) -> ProfiledSetting:
    """What costs of this model on workers with this device hold for."""
    dit = model.dit
    name = f"{dit.architecture} {sum(dit.block_counts)}x{dit.dim}"
    if dit.spatial_temporal and dit.deals_heads:
        name += " by Ulysses"
    kind = "cpu" if device in ("", "cpu") else "cuda"
    if (dtype := model.vae.dtype_on(kind)) != replace(model.vae, dtype="auto").dtype_on(kind):
        name += f", VAE in {dtype}"
    return ProfiledSetting(model=name, device=device, attention=dit.attention)


def save_learned(profile: Profile, setting: ProfiledSetting, run_dir: Path) -> None:
    """Write what was learned, whole or not at all. A profile that has learned nothing writes nothing."""
    if not (profile.live or profile.spanning):
        return
    profile.setting = setting
    path = run_dir / LEARNED
    torn = path.with_name(f"{LEARNED}.torn")
    write_profile(profile, torn)
    os.replace(torn, path)


def take_up(profile: Profile, setting: ProfiledSetting, run_dir: Path) -> str:
    """Go on with what an earlier start of this run has learned. Returns why it is refused, or "": of another model,
    device or attention backend, or no profile at all."""
    path = run_dir / LEARNED
    if not path.is_file():
        return ""
    try:
        learned = read_profile(path)
        refuse_other(learned, setting, str(path))
    except PlanError as error:
        return str(error)
    profile.take_up(learned)
    return ""


def refuse_other(profile: Profile, setting: ProfiledSetting, path: str) -> None:
    """Raises PlanError where a profile says that it holds for something else. An empty value of `setting` is not
    known, and files that say nothing of it hold for what their user thinks."""
    found = profile.setting
    if found is None:
        return
    for name in ("model", "device", "attention"):
        have, want = getattr(found, name), getattr(setting, name)
        same = _same_device(have, want) if name == "device" else have == want
        if have and want and not same:
            raise PlanError(
                f"profile {path} is of {name} {have!r}; this run has {want!r}. Measure it with heddle profile, or "
                f"leave planner.profile out: then the run learns it."
            )


def _same_device(one: str, other: str) -> bool:
    """Whether two names may be those of one device, as its driver names it and as Ray does: the latter has one word of
    it, up to its first small letter ("H100", and "G" of a GeForce). "cuda" is a GPU that nobody has named.

    >>> _same_device("NVIDIA H200", "H200"), _same_device("NVIDIA H200", "H20"), _same_device("H20", "cuda")
    (True, False, True)
    """
    if "cuda" in (one, other):
        return "cpu" not in (one, other)
    words, others = (set(re.findall(r"[A-Za-z0-9]+", name)) for name in (one, other))
    return words <= others | set(map(_capitals, others)) or others <= words | set(map(_capitals, words))


def _capitals(word: str) -> str:
    return word[: len(word) - len(word.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))]
