"""What a run's workers make beside its steps, as far as its settings say, and the encoders that they need for it."""

from __future__ import annotations

from actors.plan.spared import Spared, from_cache
from actors.plan.types import Module
from app.settings.config import RunConfig
from app.settings.prompt_line import PromptLine


def spared(config: RunConfig) -> Spared:
    """What a cache spares the workers of this run."""
    return Spared.of(config.data.cache, beside=encoders_of_samples(config))


def encoders_of_samples(config: RunConfig) -> tuple[Module, ...]:
    """Modules that workers need for samples: their VAE decodes clips, and texts of prompts are in the cache of a run
    that takes its texts from it. Held-out losses of a run take all that it takes itself from there."""
    if not makes_samples(config):
        return ()
    return ("vae",) if "text" in from_cache(config.data.cache) else ("text", "vae")


def makes_samples(config: RunConfig) -> bool:
    """Whether the workers make samples. Those of one expert of two are made by a task of its own."""
    return config.sample.is_live and not config.model.dit.lacks_expert


def live_texts(config: RunConfig) -> tuple[str, ...]:
    """The texts of the samples that workers make: the prompts without their lines' options, then what guidance moves
    away from, also by those options."""
    if not makes_samples(config):
        return ()
    lines = [PromptLine.of(line) for line in config.sample.prompts]
    away = [
        config.sample.negative_prompt,
        *(line.negative_prompt for line in lines if line.negative_prompt is not None),
    ]
    return tuple(dict.fromkeys([*(line.text for line in lines), *away]))
