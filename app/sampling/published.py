"""A published pipeline of Diffusers as the run that `heddle sample` takes its settings from.

What its files say counts: the transformer's class and numbers, what else the pipeline holds, its scheduler. What they
do not say is a fact of the family: rows of text (`Family.recipe`), size of clips and guidance
(`Family.published`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from actors.config import TrainConfig
from app.settings.config import RunConfig
from app.settings.sections import RunSection, SampleConfig
from ops.config import FlowConfig
from ops.flow.schedulers import Scheduler
from ops.models.base.family import Family, Json, TrainingRecipe, shift_of
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.files import read_json
from ops.models.folders import class_of
from ops.models.recipe import EXPORTED, pipeline_files
from ops.typed import ConfigError

_OF_DYNAMIC_SHIFT = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type")
_GUIDER = "ClassifierFreeGuidance"
_FIRST_FRAMES = 0.2  # of a run whose weights take first frames; sampling asks only whether there is one


def is_pipeline(path: Path) -> bool:
    """Whether `path` is the folder of a pipeline that Heddle did not export."""
    return (path / "model_index.json").is_file() and not (path / EXPORTED).exists()


def published_run(folder: Path, autocast: bool) -> RunConfig:
    """A run whose modules are those of the folder, not resolved, and whose samples are as its own pipeline makes them.

    Raises ConfigError for a pipeline whose transformer no family has, and for one that was trained for another
    diffusion than its family computes.
    """
    index = read_json(folder / "model_index.json")
    fields = _part(folder, index, "transformer", "config.json")
    family = _family_of(fields)
    if family is None:
        raise ConfigError(f"{folder} has a {class_of(fields)}; clips are made with {_classes()}.")
    scheduler = {} if family.own_code else _part(folder, index, "scheduler", "scheduler_config.json")
    fields = {**family.class_defaults, **fields}
    try:
        recipe, published = family.recipe(pipeline_files(folder, fields)), family.published(index, fields)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from None
    first_frame = _FIRST_FRAMES if published.first_frame else 0.0
    path = str(folder.resolve())
    dit = family.settings(path=path, **recipe.dit, **published.dit)
    text = TextConfig(path=path, **recipe.text)  # type: ignore[arg-type]
    has_images = (folder / "image_encoder" / "config.json").is_file()
    sees_images = dit.starts_from_image and has_images and not text.sees_picture
    return RunConfig(
        run=RunSection(name=folder.resolve().name),
        model=ModelConfig(
            dit=dit,
            vae=VAEConfig(kind="diffusers", path=path),
            text=text,
            image=ImageConfig(path=path) if sees_images else None,
        ),
        train=TrainConfig(
            autocast="bfloat16" if autocast else "none",
            flow=_flow(recipe, scheduler, first_frame),
        ),
        sample=SampleConfig(**(dict(published.clips) | _guidance(folder, index))),  # type: ignore[arg-type]
    )


def _guidance(folder: Path, index: Json) -> dict[str, object]:
    """The scale that a pipeline has in a part of its own, as a setting of `sample`; {} where it has none. Raises
    ConfigError for guidance of another kind."""
    name = (index.get("guider") or [None, None])[1]
    if name is None:
        return {}
    if name != _GUIDER:
        raise ConfigError(f"{folder} has the guider {name}; clips are made with {_GUIDER}.")
    fields = {"guidance_scale": 7.5, **_part(folder, index, "guider", "guider_config.json")}  # the class's default
    for key, usual in {"guidance_rescale": 0.0, "start": 0.0, "stop": 1.0}.items():
        if (value := fields.get(key, usual)) != usual:
            raise ConfigError(
                f"{folder}/guider/guider_config.json: {key} {value}, which is not done. Set it to {usual:g}."
            )
    if not fields.get("enabled", True):
        return {"guidance_scale": 1.0}
    # the original formulation counts from the prediction with the prompt, not from the one without
    return {"guidance_scale": float(fields["guidance_scale"]) + bool(fields.get("use_original_formulation"))}


def _flow(recipe: TrainingRecipe, scheduler: Json, first_frame: float) -> FlowConfig:
    """The times and the shift of the scheduler; without a shift there that of the training. Diffusion reads none."""
    shift = shift_of(scheduler) or recipe.flow
    times = scheduler.get("num_train_timesteps", 1000)
    return FlowConfig(first_frame=first_frame, num_train_timesteps=times, **shift)  # type: ignore[arg-type]


def published_notes(folder: Path) -> list[str]:
    """What of its own pipeline's sampling is not done."""
    family = _family_of(read_json(folder / "transformer" / "config.json"))
    return family.notes(str(folder)) if family and family.own_code else []


def published_scheduler(folder: Path, config: RunConfig) -> Scheduler | None:
    """The scheduler of a pipeline, of which `config` is the `published_run`, where its steps are not those of a run's
    own samples. Raises ConfigError for one by which its clips cannot be made."""
    family = FAMILIES[config.model.dit.architecture]
    if family.own_code:
        return None
    fields = read_json(folder / "scheduler" / "scheduler_config.json")
    named = read_json(folder / "model_index.json").get("scheduler") or [None, fields.get("_class_name")]
    found, own = Scheduler(name=str(named[1]), settings=fields), family.scheduler(config.model.dit, config.train.flow)
    offered = family.schedulers or (own.name,)
    if found.name not in offered:
        raise ConfigError(
            f"{folder} has the scheduler {found.name}; clips of its {family.diffusers_class} are made with "
            f"{' or '.join(offered)}."
        )
    try:
        settings = found.all_settings()
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{folder}/scheduler: {error}") from None
    times = {"num_train_timesteps": config.train.flow.num_train_timesteps}
    own_settings = replace(own, settings={**times, **own.settings}).all_settings() if own.name == found.name else {}
    if settings == own_settings:
        return None
    dit = config.model.dit
    own_steps = not family.schedulers or dit.sampled_unshifted  # no others are made
    fault = _other_steps(settings, own_settings, family) if own_steps else ""
    if fault := fault or _scheduler_fault(settings, family, is_flow=dit.diffusion is None):
        raise ConfigError(f"{folder}/scheduler/scheduler_config.json: {fault}")
    return None if own_steps else found


def _other_steps(settings: Json, own: Json, family: Family) -> str:
    """What makes these settings of a scheduler another schedule than the family's own; "" where nothing does."""
    unread = () if settings.get("use_dynamic_shifting") else _OF_DYNAMIC_SHIFT
    other = [f"{key} {value}" for key, value in settings.items() if own.get(key) != value and key not in unread]
    if not other:
        return ""
    return f"{', '.join(other)}, with which clips of a {family.diffusers_class} are not made. Leave these settings out."


def _scheduler_fault(settings: Json, family: Family, is_flow: bool) -> str:
    """Why clips cannot be made with these settings, all of a scheduler's; "" where they can."""
    if settings.get("stochastic_sampling"):
        return "stochastic_sampling adds noise in every step, which is not done. Set it to false."
    if str(kind := settings.get("algorithm_type", "")).startswith("sde"):
        return f"algorithm_type {kind} adds noise in every step, which is not done. Set it to {str(kind)[4:]}."
    if settings.get("use_dynamic_shifting") and not family.shifts_by_tokens:
        return "use_dynamic_shifting needs a shift for each clip, which its pipeline does not give. Set it to false."
    flow = settings.get("prediction_type", "flow_prediction") == "flow_prediction"
    if is_flow and not (flow and settings.get("use_flow_sigmas", True)):
        return "its transformer predicts a flow: set prediction_type to flow_prediction and use_flow_sigmas to true."
    return ""


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
