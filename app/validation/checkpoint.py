"""`heddle validate`: the loss of held-out clips at a checkpoint, as a live run measures it.

    heddle validate --checkpoint runs/demo --source "held-out/{00000..00003}.tar"

A run measures by its workers' own precision of weights; here a GPU has them as it multiplies (`weights_dtype`). Buckets
that this device has no memory for are left out, and not those that the run has left out: the two compare by bucket.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from actors.records.events import HeldOutMeasured
from app.device.choice import pick_device
from app.sampling.model import saved_model
from app.sampling.published import is_pipeline
from app.settings.config import RunConfig, check, from_here
from app.validation.clips import held_out_clips
from app.validation.live import measured, why_none
from app.validation.work import HeldOutPart
from data.config import SourceConfig
from ops.counted import counted
from ops.typed import ConfigError


def validate(
    checkpoint: Path,
    sources: tuple[str, ...] = (),
    *,
    clips: int | None = None,
    draws: int | None = None,
    ema: bool = True,
    device: str = "auto",
) -> HeldOutMeasured:
    """Body of the command: what is not given is that of the run. Prints what it finds, and returns it.

    Raises ConfigError where there is nothing to measure or the weights are of no run, DataError where no clip fits a
    bucket of the run, and what `saved_model` raises.
    """
    if is_pipeline(checkpoint):
        raise ConfigError(
            f"{checkpoint} is a published pipeline, which no run of Heddle has made: it names no buckets. Give a run's "
            f"folder, a checkpoint, or a folder of heddle export."
        )
    saved = saved_model(checkpoint, ema=ema, device=device)
    saved = replace(saved, config=_of_command(saved.config, sources, clips, draws))
    config = saved.config
    if not config.validation.sources:
        raise ConfigError("the run has no validation.sources: give --source, the path of clips that it did not train.")
    chosen = held_out_clips(config, saved.geometry)
    began, modules = time.monotonic(), saved.modules()
    work = HeldOutPart(
        train=config.train,
        draws=config.validation.draws,
        timeout_s=config.data.engine.clip_timeout_s,
        clips=tuple(chosen),
    )
    done = work.run(modules, pick_device(device))
    if not done.losses and done.no_room:
        raise ConfigError(f"no held-out loss: {why_none(done)}")
    if not done.losses:
        raise ConfigError(f"none of {counted(len(chosen), 'clip')} could be decoded; `heddle data lint` says why.")
    seconds = time.monotonic() - began
    step = saved.step if saved.trained is not None else -1
    found = measured(step, done, chosen, seconds)
    print("\n".join([found.describe(), *_table(found)]))
    return found


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
    return [f"  {name:<{width}}  {loss:.4f}" for name, loss in rows]
