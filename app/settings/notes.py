"""Settings that are legal but rarely meant."""

from __future__ import annotations

import importlib.util
from dataclasses import fields

from app.settings.config import RunConfig
from app.settings.prompts import prompt_notes
from app.settings.rules import check_decode
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.folders import resolved
from ops.models.recipe import recipe_notes


def notes(config: RunConfig) -> list[str]:
    """A sentence for each setting that is legal but rarely meant; shown before a run and by its dry run."""
    model = config.model
    found = _unused_numbers(config)
    if config.data.batch.target_s and not config.planner.profile:
        found.append(
            "data.batch.target_s sizes batches by times from FLOPs alone: without planner.profile no device "
            "was measured; `heddle profile` does it."
        )
    if (least := _least_tokens(model)) > config.data.batch.text_tokens:
        found.append(
            f"data.batch.text_tokens {config.data.batch.text_tokens} sizes batches for less text than every caption "
            f"has: model.text makes {least} rows of each. Set it to {least}."
        )
    if _caches_random_parts(config):
        found.append(
            "data.cache keeps latents, and data.start_frame random cuts another part out of a longer clip at each "
            "draw: it is encoded, and kept, anew. data.start_frame: fixed encodes each clip once, and 4 four parts of "
            "it; data.cache.latents: false keeps captions alone."
        )
    module = config.data.engine.decoder.partition(":")[0]
    if not _is_importable(module):
        found.append(
            f"data.engine.decoder is of the module {module}, which this machine does not have. Nodes that decode must."
        )
    if model.dit.path:
        fps = config.data.fps if any(table.has_videos for table in config.data.tables) else None
        found += recipe_notes(model.dit, model.text, config.train.flow, fps)
        found += FAMILIES[model.dit.architecture].notes(model.dit.path)
    return found


def sample_notes(config: RunConfig) -> list[str]:
    """The same of the prompts of samples that are made during training. Raises ConfigError for one that is too long
    where those are refused, and for settings of decoding that the autoencoder does not take."""
    sample = config.sample
    if not sample.is_live or (model := resolved(config.model)) is None:
        return []
    check_decode(config.model.vae, sample)
    return prompt_notes(sample.prompts, model.text, sample.long_prompts, sample.negative_prompt)


def _caches_random_parts(config: RunConfig) -> bool:
    """Whether a cache keeps latents of parts of clips that hardly come again."""
    cache, starts = config.data.cache, config.data.start_frame
    return bool(cache.path) and cache.latents and starts == "random" and not config.model.dit.images_only


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of what it lies in
        return False


def _least_tokens(model: ModelConfig) -> int:
    """Rows of text that every caption has; those of a first frame are known when folders have been read."""
    known = resolved(model) if model.text.sees_picture else None
    return (known or model).text.least_tokens


def _unused_numbers(config: RunConfig) -> list[str]:
    """Settings of the transformer without effect, since its folder says otherwise."""
    dit = config.model.dit
    if not dit.path or (model := resolved(config.model)) is None:
        return []
    true = model.dit
    if true.architecture != dit.architecture:
        return [
            f"model.dit.architecture is {dit.architecture}, and {dit.path} is {true.architecture}: settings that do "
            f"not go with it are found late. Set model.dit.architecture: {true.architecture}."
        ]
    own = FAMILIES[dit.architecture].settings()
    unused = []
    for name in (setting.name for setting in fields(dit) if setting.name != "path"):
        value = getattr(dit, name)
        if value not in (getattr(own, name), getattr(true, name, value)):
            unused.append(name)
    return [
        f"model.dit.{name} {getattr(dit, name)} is not used: {dit.path} has {getattr(true, name)}." for name in unused
    ]
