"""What a new run begins with by `train.init_from`: a checkpoint of the same transformer, chosen once, before the start.

A run's folder means its latest checkpoint. The new run keeps which one that was in its config.yaml, so that all its
workers, and a new controller before its first checkpoint, read the same. A resume, which has a state, reads none.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from actors.state.checkpoint_files import CheckpointError, damage, load, newest_step, trained_parameters
from app.inputs.checkpoints import checkpoint_folder, first_apart, run_config, steps_of
from app.settings.config import RunConfig
from app.settings.resume import kind_of
from app.settings.run_folder import CONFIG, run_dir
from ops.counted import counted
from ops.models.folders import resolve
from ops.typed import ConfigError

_CONDITIONS = ("frame_rate", "trained_guidance", "frozen_dtype")  # of model.dit, which may be other ones
_MOST_NAMED = 6  # settings in a message


def with_first_state(config: RunConfig, folder: Path | None = None) -> tuple[RunConfig, str]:
    """The config with one checkpoint in `train.init_from`, and what to tell of it; "" where nothing is taken over.
    `folder`: of a run that is resumed. Raises ConfigError, one sentence, for a checkpoint that is not there or not
    whole, and for one of another transformer."""
    given = config.train.init_from
    if not given:
        return config, ""
    if folder is not None and (folder / CONFIG).is_file():
        kept = RunConfig.load(folder / CONFIG).train.init_from
        if kept and _means(Path(given), Path(kept)):
            config = replace(config, train=replace(config.train, init_from=kept))
        if newest_step(folder) != -1:  # one is enough to know; where storage does not say, the run has a state
            return config, ""
        given = config.train.init_from or given
    checkpoint = checkpoint_folder(Path(given))
    if folder is None and run_dir(config).resolve() in checkpoint.resolve().parents:
        raise ConfigError(
            f"train.init_from {given} lies in the folder of this very run, which begins empty. Give the run another "
            f"run.name."
        )
    try:
        if checkpoint == Path(given) and (why := damage(checkpoint)):  # one that was looked for is whole
            raise ConfigError(f"train.init_from {checkpoint} is damaged: {why}. Use another checkpoint of the run.")
        parts = _checked(config, checkpoint)
    except PermissionError as error:
        raise ConfigError(
            f"train.init_from {checkpoint} cannot be read: {error}. Have it readable, or use another checkpoint."
        ) from None
    config = replace(config, train=replace(config.train, init_from=str(checkpoint)))
    return config, f"step 0 begins with the {parts} of {checkpoint}, after {counted(steps_of(checkpoint), 'step')}"


def _means(given: Path, kept: Path) -> bool:
    """Whether a path is that checkpoint, or the run that it is of."""
    return given.resolve() in (kept.resolve(), *list(kept.resolve().parents)[:2])


def _checked(config: RunConfig, checkpoint: Path) -> str:
    """What is taken over of the checkpoint. Raises ConfigError where this run cannot go on from it."""
    try:
        meta, shards = load(checkpoint)
        theirs = run_config(meta, checkpoint)
    except CheckpointError as error:
        raise ConfigError(f"train.init_from: {error}") from None
    ours = resolve(config.model)[0]
    _check_transformer(config, theirs, checkpoint)
    if apart := first_apart(meta.get("parameters", []), trained_parameters(ours)):
        raise ConfigError(
            f"train.init_from {checkpoint} trained other weights than this run: {apart}. Use the settings of model.dit "
            f"that it was trained with."
        )
    _check_frozen(config, theirs, checkpoint)
    if not config.train.init_moments:
        return "weights alone"
    kinds = theirs.train.optimizer.kind, config.train.optimizer.kind
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"train.init_from {checkpoint} has moments of {kinds[0]}, and train.optimizer.kind is {kinds[1]}. Set "
            f"train.init_moments: false, which takes the weights alone, or the same kind."
        )
    averaged = config.train.optimizer.ema_decay > 0 and "ema" in shards[0].arrays
    return "weights, moments and EMA" if averaged else "weights and moments"


def _check_transformer(config: RunConfig, theirs: RunConfig, checkpoint: Path) -> None:
    """By the settings of both. Where the folders of the other run's model cannot be read any more its names and shapes
    say the rest."""
    mine, other = config.model.dit, theirs.model.dit
    if mine.architecture != other.architecture:
        raise ConfigError(
            f"train.init_from {checkpoint} is of architecture {other.architecture}, and model.dit.architecture is "
            f"{mine.architecture}. Use a checkpoint of the same family."
        )
    if bool(mine.lora_rank) != bool(other.lora_rank):
        what = ("factors", "the weights themselves")
        one, two = what if other.lora_rank else what[::-1]
        raise ConfigError(
            f"train.init_from {checkpoint} trained {one}, and this run trains {two} (model.dit.lora_rank "
            f"{other.lora_rank} there, {mine.lora_rank} here). heddle export --checkpoint {checkpoint} --to FOLDER "
            f"makes whole weights of it: set model.dit.path to FOLDER, and leave init_from out."
        )
    try:
        here, there = (resolve(one.model)[0].dit for one in (config, theirs))
    except (OSError, ValueError):
        return
    apart = [
        f"{name} {getattr(there, name)} there, {getattr(here, name)} here"
        for name in (one.name for one in fields(here))
        if _counts(name) and getattr(here, name) != getattr(there, name)
    ]
    if apart:
        more = f" and {len(apart) - _MOST_NAMED} more" if len(apart) > _MOST_NAMED else ""
        raise ConfigError(
            f"train.init_from {checkpoint} is of another transformer than model.dit: "
            f"{'; '.join(apart[:_MOST_NAMED])}{more}. Use the settings that it was trained with."
        )


def _counts(name: str) -> bool:
    """Whether a setting of model.dit says which function the transformer is, or what of it is trained."""
    return kind_of(f"model.dit.{name}") == "function" and name not in _CONDITIONS


def _check_frozen(config: RunConfig, theirs: RunConfig, checkpoint: Path) -> None:
    """Weights that no checkpoint holds are drawn by the seed, where no folder has them."""
    dit, seeds = config.model.dit, (theirs.train.seed, config.train.seed)
    if not dit.path and (dit.lora_rank or dit.train_only) and seeds[0] != seeds[1]:
        raise ConfigError(
            f"train.init_from {checkpoint} was trained beside frozen weights that train.seed {seeds[0]} drew, and "
            f"train.seed is {seeds[1]}. Set it to {seeds[0]}."
        )
