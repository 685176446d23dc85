"""The sections of a run's settings that belong to the program: `run`, `sample` and `validation`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from app.settings.prompt_line import PromptLine, named
from data.config import SourceConfig, check_weights
from ops.config import FlowConfig, ForcingSchedule
from ops.counted import counted
from ops.ranges import SEED, above, between, check_numbers

LongPrompts = Literal["cut", "refuse"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "ray"]

_LONGEST_NAME = 230  # bytes: a file name has at most 255, and locks are named after their run (`app/run/lock.py`)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """Where a run writes: all its files lie under `dir`/`name`."""

    name: str
    dir: str = "runs"

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or set("/\\") & set(self.name):
            raise ValueError(f"run.name {self.name!r} must be one plain folder name.")
        if (length := len(os.fsencode(self.name))) > _LONGEST_NAME:
            raise ValueError(
                f"run.name {self.name[:20]!r}... is {length} bytes long; files are named after it, so it takes at most "
                f"{_LONGEST_NAME}."
            )
        if "://" in self.dir:
            raise ValueError(f"run.dir {self.dir!r} is a URI; a run folder is a local or shared one. Give its path.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Pictures made during and after training, with the EMA weights where there are any."""

    # A clip is made of each; or the name of a text file with one on each line. A prompt may end with options of its
    # own, instead of the settings below: --w, --h, --f, --d (seed), --s, --l (guidance), --fs, --n (negative), --i
    prompts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()  # image to video: the first frame for each prompt, or one for all
    last_images: tuple[str, ...] = ()  # the last frame, for transformers that take one; as many
    negative_prompt: str = ""  # what guidance moves away from
    # Steps between samples during training, a multiple of checkpoint.every; 0: only by heddle sample. They are of the
    # first checkpoint at or after each multiple of it: where storage is slow a checkpoint may be some steps late.
    every: int = 0
    first: bool = False  # with every: also by the weights that the run begins with, into samples/first.*
    # Share of the run's time that samples and held-out losses (`validation`) may take during training, beside the gaps
    # that plans leave idle.
    share: float = 0.05
    steps: int = 20  # of the sampler: of Euler, or DDIM where the transformer was trained by diffusion
    # Instead of steps: the time of each, falling from at most train.flow.num_train_timesteps, for weights that were
    # distilled for a few (LTX-Video 0.9.7 distilled: [1000, 993, 987, 981, 975, 909, 725, 0.03])
    timesteps: tuple[float, ...] = ()
    # flow shift of samples, for weights that are trained with one and sampled with another (HunyuanVideo-1.5 of 480p: 3
    # and 5); unset: as in training
    flow_shift: float | None = None
    guidance_scale: float = 3.0  # 1 switches it off; weights with guidance_embeds are given it instead
    guidance_scale_2: float | None = None  # of the expert for low noise, where there are two; unset: the same
    frames: int = 17
    height: int = 64
    width: int = 64
    fps: float = 8.0  # frames per second; leave it out where the transformer has a frame_rate, which counts
    seed: int = 0
    # Of autoencoders that make the last denoising step (LTX-Video from 0.9.1 on): the time that the decoder gets, from
    # 0 to 1, and the share of noise in the latents that it gets; unset: as large. Its authors advise 0.05 and
    # 0.025
    decode_timestep: float = 0.0
    decode_noise_scale: float | None = None
    forcing: ForcingSchedule | None = None
    # Of prompts with more tokens than model.text.max_length: cut what is beyond, with a note, or end before the start
    long_prompts: LongPrompts = "cut"

    def __post_init__(self) -> None:
        if any(time <= after for time, after in pairwise(self.timesteps)):
            raise ValueError(f"sample.timesteps {list(self.timesteps)} must fall, as noise does. Sort them.")
        for name, pictures in (("images", self.images), ("last_images", self.last_images)):
            if len(pictures) not in (0, 1, len(self.prompts)):
                raise ValueError(
                    f"sample.{name} names {counted(len(pictures), 'picture')} for "
                    f"{counted(len(self.prompts), 'prompt')}; give one for each, "
                    f"or one for all."
                )
        check_numbers(
            "sample",
            self,
            every=between(0),
            share=between(0, 1e6),
            steps=between(1, 100_000),
            timesteps=above(0, 1e6),
            flow_shift=above(0, 1e6),
            guidance_scale=between(0, 1e6),
            guidance_scale_2=between(0, 1e6),
            frames=between(1, 100_000),
            height=between(1, 1 << 16),
            width=between(1, 1 << 16),
            fps=above(0, 1000),
            seed=between(0, SEED),
            decode_timestep=between(0, 1),
            decode_noise_scale=between(0, 1),
        )
        if self.flow_shift is not None and self.timesteps:
            raise ValueError(
                f"sample.flow_shift is {self.flow_shift:g}, and sample.timesteps are not shifted. Leave one of the two "
                f"out."
            )

    @property
    def is_live(self) -> bool:
        """Samples are made while the run trains."""
        return bool(self.every and self.prompts)

    def of_prompt(self, number: int) -> SampleConfig:
        """The settings of one prompt alone, with the options on its line in their places. Raises ValueError where these
        do not go together."""
        line = PromptLine.of(self.prompts[number], named(number, self.prompts[number]))
        own = {
            name: value
            for name in ("width", "height", "frames", "steps", "flow_shift", "guidance_scale", "negative_prompt")
            if (value := getattr(line, name)) is not None
        }
        if line.steps is not None:
            own["timesteps"] = ()
        if line.guidance_scale is not None:
            own["guidance_scale_2"] = None  # the same
        return replace(
            self,
            prompts=(line.text,),
            images=(line.image,) if line.image else _its(self.images, number),
            last_images=(line.last_image,) if line.last_image else _its(self.last_images, number),
            seed=self.seed if line.seed is None else line.seed,
            **own,  # by their fields' names
        )

    def flow_of(self, trained: FlowConfig) -> FlowConfig:
        """The flow by which samples are made: that of the training, but for a shift of their own."""
        if self.flow_shift is None:
            return trained
        return replace(trained, flow_shift=self.flow_shift, token_shift=None)


def _its(pictures: tuple[str, ...], number: int) -> tuple[str, ...]:
    """The picture of a prompt, of one for each or one for all."""
    return pictures[number : number + 1] if len(pictures) > 1 else pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """The loss of clips that are not trained on, at checkpoints, by the EMA weights where there are any. It takes its
    share of the run's time from `sample.share`."""

    sources: tuple[SourceConfig, ...] = ()  # as data.sources, in the same buckets
    every: int = 0  # steps between losses, a multiple of checkpoint.every, as sample.every; 0: none
    first: bool = True  # with every: also that of the weights that the run begins with, as "after 0 steps"
    clips: int = 64  # the first of a fixed shuffle; all where there are fewer
    draws: int = 4  # noise levels of each clip, the same every time

    def __post_init__(self) -> None:
        check_numbers("validation", self, every=between(0), clips=between(1, 1_000_000), draws=between(1, 1000))
        weights = [source.weight for source in self.sources]
        if any(weights):
            check_weights(weights, "validation.sources")
        if made := next((source.path for source in self.sources if source.synthetic), ""):
            raise ValueError(
                f"validation.sources path {made!r} is synthetic: what is made is the set that the demo trains on. Make "
                f"another with `heddle data synth --seed`, and leave synthetic out."
            )
        if weighed := next((source for source in self.sources if source.loss_weight != 1), None):
            raise ValueError(
                f"validation.sources loss_weight is {weighed.loss_weight:g}, and held-out losses are means over clips "
                f"that all count alike. Leave it out."
            )
        if self.every and not self.sources:
            raise ValueError(
                f"validation.every is {self.every} and validation.sources is empty; give a source that is not among "
                f"data.sources, or set validation.every: 0."
            )
