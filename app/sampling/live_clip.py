"""One prompt of a checkpoint, made by a worker of the run (`actors.worker.aside`) with its own modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.config import TrainConfig
from actors.state.checkpoint_files import model_state
from actors.worker.aside import with_room
from actors.worker.loading import Modules
from app.drawing.video import mp4_of, sheet_frames
from app.sampling.clip_worker import MadeClip
from app.sampling.clips import ClipSettings, make_clips
from app.sampling.kept_texts import KeptTexts
from app.sampling.model import Model, by_noise
from app.sampling.prompts import encode_prompts
from app.settings.config import RunConfig
from app.settings.prompt_line import PromptLine
from ops.models.load import first_values
from ops.models.weights import check_state
from ops.update.flat_vector import trainable


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveClip:
    """One prompt of a checkpoint, as an aside."""

    folder: str  # of the checkpoint; "": the weights that the run begins with
    step: int
    round: int  # of the run: a checkpoint that is made again has another one
    number: int
    config: RunConfig
    first: tuple[np.ndarray, ...]  # the pictures that it is made from, if any
    texts: KeptTexts | None = None  # of a run that takes its texts from a cache

    @property
    def name(self) -> str:
        return f"step-{self.step} prompt {self.number} of round {self.round}"

    def weights(self, modules: Modules) -> Mapping[str, Tensor]:
        """Raises what `weights_of` raises."""
        return weights_of(self.folder, modules, self.config.train)

    def make(self, modules: Modules, device: torch.device, before: Callable[[str], None]) -> MadeClip:
        """Text, noise and decode are those of `heddle sample`, by the worker's own modules."""
        return with_room(partial(self._made, modules, device, before), before)

    def _made(self, modules: Modules, device: torch.device, before: Callable[[str], None]) -> MadeClip:
        high, low = by_noise(modules.config.dit, modules.dit)
        model = Model(
            dit=high,
            low=low,
            vae=modules.vae,
            geometry=modules.geometry,
            config=replace(self.config, model=modules.config),
            step=self.step,
            device=device,
        )
        lines = self.config.sample.prompts
        settings = ClipSettings.of(model.config).of_each(lines)[self.number]
        last = settings.forwards(model.geometry)
        before("prompt")
        prompts = (PromptLine.of(lines[self.number]).text,)
        told = encode_prompts(
            self.texts or modules.text,
            modules.image if self.first else None,
            modules.config,
            prompts,
            settings.negative_prompt,
            self.first,
        )
        # The decode is one piece: its tiles are too large to stay on a GPU while cascades run.
        (video,) = make_clips(
            model, told, settings, self.first, progress=lambda done: before("denoise" if done < last else "decode")
        )
        return MadeClip(mp4=mp4_of(video, settings.fps), shown=sheet_frames(video))


def weights_of(folder: str, modules: Modules, train: TrainConfig) -> dict[str, Tensor]:
    """What is trained, for the worker's own transformer: the EMA of a checkpoint where it has one; without a `folder`
    the weights that a run with these settings begins with, of `train.init_from` the EMA where the run takes it over, as
    its own checkpoints then have one. Raises what `model_state` and `first_values` raise. The run itself has just
    written the checkpoint, or read it at its start: its checksums are not read again beside the steps."""
    parameters, ema = dict(trainable(modules.dit)), True
    if not folder and train.init_from:
        folder, ema = train.init_from, train.init_moments and train.optimizer.ema_decay > 0
    if not folder:
        value = first_values(modules.config.dit, train.seed, next(iter(parameters.values())).dtype)
        return {name: value(name).detach().to(one.dtype) for name, one in parameters.items()}
    state = model_state(Path(folder), ema, verify=False)
    check_state(parameters, state, folder)
    return {name: state[name].to(parameters[name].dtype) for name in parameters}
