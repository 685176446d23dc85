"""`model.dit.compile: auto`: decided before the first step, kept in the run's config.yaml.

Compiled blocks differ from those as written by rounding, so one way holds for a whole run and for its resumes.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from actors.plan.costs.compiling import BothWays
from app.inputs.profiles import gpu_of, load_profile
from app.settings.config import RunConfig
from ops.models.config import ModelConfig


def with_compiling(config: RunConfig, folder: Path | None = None) -> tuple[RunConfig, str]:
    """The config with true or false for `auto`, and why; "" where it does not say `auto`. `folder`: of a run that is
    resumed, whose config.yaml has decided. Raises ConfigError for a profile that cannot be read."""
    if config.model.dit.compile != "auto":
        return config, ""
    kept = None if folder is None else _kept(folder)
    if kept is not None:
        return with_compile(config, kept), f"{_said(kept)}, as the run began"
    found, why = _decided(config)
    return with_compile(config, found), f"{_said(found)}: {why}"


def with_compile(config: RunConfig, compiled: bool) -> RunConfig:
    """The config with compiled blocks, or with blocks as written."""
    return replace(config, model=compiling(config.model, compiled))


def compiling(model: ModelConfig, compiled: bool) -> ModelConfig:
    """The model with compiled blocks, or with blocks as written."""
    return replace(model, dit=replace(model.dit, compile=compiled))


def as_written_because(config: RunConfig, model: ModelConfig, device: str) -> str:
    """Why blocks of this resolved model run as written on such a device (cpu or cuda), whatever a profile says; "" for
    no such reason."""
    if not model.dit.compiles:
        return f"blocks of architecture {model.dit.architecture} are not compiled"
    if config.train.memory.parameters == "node":
        return "blocks whose weights are fetched (train.memory.parameters: node) run as written"
    if device == "cpu" and config.workers.memory_gib:
        return "on a CPU with workers.memory_gib every operator is counted, and blocks run as written"
    return ""


def _decided(config: RunConfig) -> tuple[bool, str]:
    from ops.models.folders import resolve

    device = "cuda" if gpu_of(config) else "cpu"
    if why := as_written_because(config, resolve(config.model)[0], device):
        return False, why
    path = config.planner.profile
    if not path:
        return False, "there is no planner.profile that says how long cascades take both ways (heddle profile)"
    profile = load_profile(path)
    found, measured_on = profile.both_ways, "" if profile.setting is None else profile.setting.device
    if found is None:
        return False, f"profile {path} does not say how long cascades take both ways (heddle profile --fresh)"
    if measured_on and (measured_on == "cpu") != (device == "cpu"):
        return False, f"profile {path} is of device {measured_on}, and workers compute on {device}"
    if why := other_torch(found):
        return False, f"profile {path} has seconds of both ways by {why} (heddle profile --fresh)"
    return found.compiled, f"{found}, says {path}"


def other_torch(found: BothWays) -> str:
    """Where code of another version of torch was measured, which; else ""."""
    here = version("torch").partition("+")[0]
    return "" if found.torch == here else f"torch {found.torch}, and this is torch {here}"


def _kept(folder: Path) -> bool | None:
    """What a run has decided; None where nothing has begun."""
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    kept = RunConfig.load(path).model.dit.compile
    return None if kept == "auto" else kept


def _said(compiled: bool) -> str:
    return f"model.dit.compile: auto is {'true' if compiled else 'false'}"
