"""What the weights of a folder were trained with, and where the settings of a run differ from it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ops.config import FlowConfig, TokenShift
from ops.models.base.family import Family, Json, PipelineFiles, TrainingRecipe
from ops.models.config import TextConfig
from ops.models.families import FAMILIES, AnyDiT
from ops.models.files import read_json
from ops.models.folders import class_of, component, dit_config, pipeline_of
from ops.models.other_forms import OtherForm

EXPORTED = "heddle.yaml"  # beside the parts of an export: the settings of its run
_OF_TEXT = ("kind", "max_length", "pad_to", "unmasked", "cleaned", "empty")


def recipe_of(dit: AnyDiT) -> TrainingRecipe | None:
    """The recipe of the published weights in `dit.path`, by the files beside them; None for weights of no family, and
    for an export, which was trained as its run was.

    Raises FileNotFoundError where there are no weights, OtherForm for those in another form, and ValueError for those
    of another training than is computed.
    """
    assert dit.path is not None
    folder = component(dit.path, dit.part)
    pipeline = pipeline_of(folder)
    fields = read_json(folder / "config.json")
    family = next((one for one in FAMILIES.values() if one.diffusers_class == class_of(fields)), None)
    if family is None or (pipeline / EXPORTED).exists():
        return None
    files = pipeline_files(pipeline, fields)
    return replace(family.recipe(files), fps=_frame_rate(family, files, str(folder)))


def _frame_rate(family: Family, files: PipelineFiles, where: str) -> float | None:
    """Frames per second at which the weights' own pipeline shows clips, such as 16 for Wan2.1; None for pictures, and
    for a transformer that gets the rate of each clip."""
    dit = dit_config(files.transformer, family.settings(), where)
    if dit.images_only or dit.clip_rate is not None:
        return None
    rate = family.published(files.index, {**family.class_defaults, **files.transformer}).clips["fps"]
    return float(rate)  # type: ignore[arg-type]  # a setting of `sample`


def pipeline_files(folder: Path, transformer: Json) -> PipelineFiles:
    """What lies in the folder of a pipeline, or around weights that lie alone, beside the config of its transformer."""
    return PipelineFiles(
        index=_optional(folder / "model_index.json"),
        transformer=transformer,
        vae=_optional(folder / "vae" / "config.json"),
        scheduler=_optional(folder / "scheduler" / "scheduler_config.json"),
    )


def recipe_notes(dit: AnyDiT, text: TextConfig, flow: FlowConfig, fps: float | None) -> list[str]:
    """A sentence that names each setting in which a run differs from how its weights were trained, if one does. `fps`
    is `data.fps`; None: the run trains pictures alone."""
    try:
        recipe = recipe_of(dit) if dit.path else None
    except (FileNotFoundError, OtherForm):  # the start refuses such a folder with the reason
        return []
    except ValueError as error:
        return [f"{dit.path}: {error}"]
    found = list(_differences(recipe, dit, text, flow)) if recipe else []
    if recipe and fps is not None and recipe.fps not in (None, fps):
        found.append(("data.fps", recipe.fps, fps or "0, the rate of each clip"))
    if not found:
        return []
    settings = ", ".join(f"{key} {_written(wanted)} (here {_written(value)})" for key, wanted, value in found)
    return [
        f"the weights of {dit.path} were trained with {settings}; other settings show them what they have never seen."
    ]


def _differences(
    recipe: TrainingRecipe, dit: AnyDiT, text: TextConfig, flow: FlowConfig
) -> Iterator[tuple[str, object, object]]:
    """(setting, how the weights were trained, value here)"""
    usual = TextConfig(**recipe.text)  # type: ignore[arg-type]  # settings of this very class
    wanted = {"model.text": {name: getattr(usual, name) for name in _OF_TEXT}}
    wanted |= {"model.dit": dict(recipe.dit), "train.flow": dict(recipe.flow)}
    sections: dict[str, object] = {"model.text": text, "model.dit": dit, "train.flow": flow}
    for section, settings in wanted.items():
        for name, value in settings.items():
            here = getattr(sections[section], name, value)  # settings of another family are found late, with a note
            if here != value:
                yield f"{section}.{name}", value, here


def _written(value: object) -> str:
    """A value as a config has it."""
    if isinstance(value, TokenShift):
        ends = "" if value.law == "root" else f", max_tokens: {value.max_tokens}, base: {value.base}, max: {value.max}"
        return f"{{law: {value.law}, base_tokens: {value.base_tokens}{ends}}}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _optional(file: Path) -> Json:
    return read_json(file) if file.is_file() else {}
