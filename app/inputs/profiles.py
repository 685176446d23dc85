"""The profile that a plan takes its costs from: a file, or the one that a run's config leads to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import PlanError
from actors.planning.options import profile_of as run_profile_of
from actors.planning.options import tell_updates
from app.inputs.cluster import cluster_of
from app.settings.config import RunConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.typed import ConfigError


def load_profile(path: str | Path) -> Profile:
    """A profile file. Raises ConfigError."""
    return _as_config_error(lambda: read_profile(path), path)


def profile_of(config: RunConfig, model: ModelConfig, geometry: Geometry) -> Profile:
    """The profile that a run of this config plans with. Raises ConfigError."""
    device = gpu_of(config)
    profile = _as_config_error(
        lambda: run_profile_of(config.planner, model, geometry, device, config.train), config.planner.profile
    )
    if profile.update.points or profile.needs.limits:
        tell_updates(profile, config.train, model, device, config.workers.memory_gib)
    return profile


def gpu_of(config: RunConfig) -> str:
    """The name of the workers' GPU where `workers.cluster` says it or this machine has one, "cuda" where it is not
    known, "" of a CPU. Raises ConfigError for a cluster that cannot be read."""
    if config.workers.device == "cpu":
        return ""
    if device := cluster_of(config).device:
        return device
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return "cuda" if config.workers.device == "cuda" else ""


def _as_config_error(read: Callable[[], Profile], path: str | Path | None) -> Profile:
    """A bad file is a mistake of usage, not a workload without a legal plan."""
    try:
        return read()
    except (PlanError, ValueError) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read ({error.strerror or error}).") from None
