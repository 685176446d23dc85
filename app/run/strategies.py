"""The same training by several strategies, one run after the other: the equal-loss experiment (Arachne, Section V).

    folders, code = train_each("demo.yaml", ["static", "cascade"], ["train.steps=100"])

Each strategy has a run of its own, in a folder NAME-STRATEGY beside that of the config's own run. Weights at the start,
clips, their order and noise follow from the config alone, so losses agree where plans are exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from actors.plan.spared import comes_whole
from app.inputs.batches import batch_limits
from app.run.apart import signal_code
from app.run.launch import train
from app.settings.config import RunConfig
from app.settings.files import run_name_override
from app.settings.run_folder import check_run_dir, run_dir
from app.settings.terminal import say
from ops.typed import ConfigError

FEWEST, MOST = 2, 4  # as many as `heddle compare` draws


def train_each(
    config_path: Path,
    strategies: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> tuple[list[Path], int]:
    """Train by each strategy in turn. Returns the folders, and the exit code of the run that ended early, or 0; that of
    a signal that a run got in its end, after which no other one starts.

    Nothing starts before all runs are known to be able to: raises ConfigError for strategies that are too few, too many
    or named twice, for a folder that is in use, and for settings with which the runs would not train the same.
    """
    if not FEWEST <= len(strategies) <= MOST:
        raise ConfigError(
            f"heddle compare --config takes --strategy {FEWEST} to {MOST} times; it is given {len(strategies)}."
        )
    if doubled := [name for name in strategies if strategies.count(name) > 1]:
        raise ConfigError(f"--strategy {doubled[0]} is given twice; give different strategies.")
    settings = {name: settings_of(config_path, name, overrides) for name in strategies}
    folders = []
    for own in settings.values():
        config = RunConfig.load(config_path, own)
        check_alike(config)
        check_run_dir(config, resume=resume, overwrite=overwrite)
        folders.append(run_dir(config))
    for number, (name, own) in enumerate(settings.items()):
        say(f"{name}: run {number + 1} of {len(settings)}, {folders[number]}", sys.stdout)
        if code := train(config_path, own, resume=resume, overwrite=overwrite) or signal_code():
            return folders, code
    return folders, 0


def settings_of(config_path: Path, strategy: str, overrides: Sequence[str]) -> list[str]:
    """Overrides of one of the runs."""
    name = RunConfig.load(config_path, overrides).run.name
    return [*overrides, f"planner.strategy={strategy}", run_name_override(f"{name}-{strategy}")]


def check_alike(config: RunConfig) -> None:
    """Raises ConfigError for settings by which an earlier run or its measured costs change what a later one trains or
    computes."""
    for name, limits in batch_limits(config).items():
        if limits.recalibrate == "on":
            key = name.replace("[", ".").replace("]", "")  # as --set has it
            raise ConfigError(
                f"{name}.recalibrate on sizes batches by the costs that each run measures, so the runs would train on "
                f"other batches. Compare with --set {key}.recalibrate=off."
            )
    cache = config.data.cache
    if cache.path and not comes_whole(cache):
        raise ConfigError(
            f"data.cache.path {cache.path!r}: the first run would encode for the others. Compare with --set "
            f"data.cache.only=false --set data.cache.path=''."
        )
