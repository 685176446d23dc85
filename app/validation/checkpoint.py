"""`heddle validate`: the loss of held-out clips at a checkpoint, as a live run measures it.

    heddle validate --checkpoint runs/demo --source "held-out/{00000..00003}.tar"
    heddle validate --checkpoint models/wan --config runs/wan        # before the training: what a run began with

A run measures by its workers' own precision of weights; here a GPU has them as it multiplies (`weights_dtype`). Buckets
that this device has no memory for are left out, and not those that the run has left out: the two compare by bucket.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from actors.records.events import HeldOutMeasured
from app.device.choice import pick_device
from app.sampling.model import SavedModel, published_model, saved_model
from app.sampling.published import is_pipeline
from app.settings.config import RunConfig, check, from_here
from app.settings.run_folder import CONFIG
from app.validation.clips import held_out_clips
from app.validation.live import measured, why_none
from app.validation.work import HeldOutPart
from data.config import SourceConfig
from ops.counted import counted, loss_in_words
from ops.typed import ConfigError


def validate(
    checkpoint: Path,
    sources: tuple[str, ...] = (),
    *,
    config: Path | None = None,
    clips: int | None = None,
    draws: int | None = None,
    ema: bool = True,
    device: str = "auto",
) -> HeldOutMeasured:
    """Body of the command: what is not given is that of the run, or of the `config` of one, which a published pipeline
    needs. Prints what it finds, and returns it.

    Raises ConfigError where there is nothing to measure or no run to measure it as, DataError where no clip fits a
    bucket of the run, and what `saved_model` and `published_model` raise.
    """
    saved = _saved(checkpoint, config, ema=ema, device=device)
    saved = replace(saved, config=_of_command(saved.config, sources, clips, draws))
    settings = saved.config
    if not settings.validation.sources:
        raise ConfigError("the run has no validation.sources: give --source, the path of clips that it did not train.")
    chosen = held_out_clips(settings, saved.geometry)
    levels = counted(settings.validation.draws, "noise level")
    print(f"measuring {counted(len(chosen), 'held-out clip')} at {levels} each", flush=True)
    began, modules = time.monotonic(), saved.modules()
    work = HeldOutPart(
        train=settings.train,
        draws=settings.validation.draws,
        timeout_s=settings.data.engine.clip_timeout_s,
        clips=tuple(chosen),
    )
    done = work.run(modules, pick_device(device))
    if not done.losses and done.no_room:
        raise ConfigError(f"no held-out loss: {why_none(done)}")
    if not done.losses:
        raise ConfigError(f"none of {counted(len(chosen), 'clip')} could be decoded; `heddle data lint` says why.")
    seconds = time.monotonic() - began
    known = saved.trained is not None
    found = measured(saved.step if known else -1, done, chosen, seconds)
    print("\n".join([found.describe() if known else found.told(f" of {checkpoint}"), *_table(found)]))
    return found


def _saved(checkpoint: Path, config: Path | None, *, ema: bool, device: str) -> SavedModel:
    if not is_pipeline(checkpoint):
        if config is not None:
            raise ConfigError(
                f"--config {config} is for a published pipeline, and {checkpoint} has the settings of its own run. "
                f"Leave it out."
            )
        return saved_model(checkpoint, ema=ema, device=device)
    if config is None:
        raise ConfigError(
            f"{checkpoint} is a published pipeline, which names no buckets. Give --config, the folder or file of a run "
            f"that trains it: its buckets, flow and held-out clips count."
        )
    file = config / CONFIG if config.is_dir() else config
    return published_model(checkpoint, RunConfig.load(file), device=device)


def _of_command(config: RunConfig, sources: tuple[str, ...], clips: int | None, draws: int | None) -> RunConfig:
    validation = config.validation
    if sources:
        given = tuple(SourceConfig(path=path) for path in sources)
        validation = replace(validation, sources=given)
    validation = replace(validation, clips=clips or validation.clips, draws=draws or validation.draws)
    changed = from_here(replace(config, validation=validation))
    check(changed)
    return changed


def _table(found: HeldOutMeasured) -> list[str]:
    rows = [(f"noise {name}", loss) for name, loss in found.by_noise.items()] + list(found.by_bucket.items())
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {loss_in_words(loss)}" for name, loss in rows]
