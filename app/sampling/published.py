"""A published pipeline of Diffusers as the run that `heddle sample` takes its settings from.

What its files say counts: the transformer's class and numbers, what else the pipeline holds, the shift of its
scheduler. What they do not say (rows of text, size of clips, guidance) is a fact of the family (`Family.published`).
"""

from __future__ import annotations

from pathlib import Path

from actors.config import TrainConfig
from app.settings.config import RunConfig
from app.settings.sections import RunSection, SampleConfig
from ops.config import FlowConfig, TokenShift
from ops.models.base.family import Family, Json
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.files import read_json
from ops.models.folders import class_of
from ops.typed import ConfigError

_FIRST_FRAMES = 0.2  # of a run whose weights take first frames; sampling asks only whether there is one


def is_pipeline(path: Path) -> bool:
    """Whether `path` is the folder of a pipeline that Heddle did not export."""
    return (path / "model_index.json").is_file() and not (path / "heddle.yaml").exists()


def published_run(folder: Path, autocast: bool) -> RunConfig:
    """A run whose modules are those of the folder, not resolved, and whose samples are as its own pipeline makes them.

    Raises ConfigError for a pipeline whose transformer no family has, and for one that was trained for another
    diffusion than its family computes.
    """
    index = read_json(folder / "model_index.json")
    fields = _part(folder, index, "transformer", "config.json")
    family = _family_of(fields)
    scheduler = {} if family and family.own_code else _part(folder, index, "scheduler", "scheduler_config.json")
    if family is None:
        raise ConfigError(f"{folder} has a {class_of(fields)}; clips are made with {_classes()}.")
    try:
        published = family.published(index, fields, scheduler)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from None
    first_frame = _FIRST_FRAMES if published.first_frame else 0.0
    flow = FlowConfig(**published.flow) if published.flow else flow_of(scheduler, first_frame)  # type: ignore[arg-type]
    path = str(folder.resolve())
    dit = family.settings(path=path, **published.dit)
    sees_images = dit.starts_from_image and (folder / "image_encoder" / "config.json").is_file()
    return RunConfig(
        run=RunSection(name=folder.resolve().name),
        model=ModelConfig(
            dit=dit,
            vae=VAEConfig(kind="diffusers", path=path),
            text=TextConfig(path=path, **published.text),  # type: ignore[arg-type]
            image=ImageConfig(path=path) if sees_images else None,
        ),
        train=TrainConfig(
            autocast="bfloat16" if autocast else "none",
            flow=flow,
        ),
        sample=SampleConfig(**published.clips),  # type: ignore[arg-type]
    )


def flow_of(scheduler: Json, first_frame: float = 0.0) -> FlowConfig:
    """The shift of a published scheduler; without one (diffusion) the usual, which nothing reads."""
    times = scheduler.get("num_train_timesteps", 1000)
    if scheduler.get("use_dynamic_shifting"):
        line = TokenShift(
            base_tokens=scheduler.get("base_image_seq_len", 256),
            max_tokens=scheduler.get("max_image_seq_len", 4096),
            base=scheduler.get("base_shift", 0.5),
            max=scheduler.get("max_shift", 1.15),
        )
        return FlowConfig(token_shift=line, first_frame=first_frame, num_train_timesteps=times)
    shift = scheduler.get("flow_shift") or scheduler.get("shift") or 1.0
    return FlowConfig(flow_shift=shift, first_frame=first_frame, num_train_timesteps=times)


def published_notes(folder: Path) -> list[str]:
    """What of its own pipeline's sampling is not done."""
    family = _family_of(read_json(folder / "transformer" / "config.json"))
    if family and family.own_code:
        return family.notes(str(folder), 0)
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json")
    if end := scheduler.get("shift_terminal"):
        return [f"the scheduler of {folder} stretches its noise levels to end at {end}; here they end by their shift."]
    return []


def _family_of(fields: Json) -> Family | None:
    return next((family for family in FAMILIES.values() if family.diffusers_class == class_of(fields)), None)


def _classes() -> str:
    return ", ".join(family.diffusers_class for family in FAMILIES.values())


def _part(folder: Path, index: Json, part: str, file: str) -> Json:
    if not (folder / part / file).is_file():
        name = index.get("_class_name")
        raise ConfigError(
            f"{folder} is a {name} without {part}/{file}. Give the whole folder of a pipeline with one of {_classes()}."
        )
    return read_json(folder / part / file)
