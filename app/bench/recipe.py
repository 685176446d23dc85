"""What loops beside Heddle train: the model, clips, order, noise and loss of one run file, from Heddle's libraries.

A loop differs from another in what it does with several processes, which is the rest of its file:

    recipe = Recipe(config)
    for step in recipe.steps(100):
        for micro in step:                        # one bucket batch
            batch = decode_job(micro.job)
            loss = recipe.loss(dit, micro, recipe.latents(batch.video), recipe.words(batch.captions))
            loss.backward()                       # over all bucket batches of the step: the gradient of its mean loss
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from app.settings.config import RunConfig
from data.dataset.dataset import Dataset
from data.decode import decode_job
from data.types import Batch, DecodeJob
from ops.comm.collectives import Group
from ops.flow.noise import NoiseKey, rows
from ops.flow.objective import objective_of
from ops.flow.train_pass import packed_loss
from ops.models.folders import resolve
from ops.models.load import build_dit, build_text, build_vae
from ops.models.text_pair import split
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.packed.patches import patchify
from ops.typed import ConfigError
from ops.update.optimizer import ema_decay_at


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One bucket batch of a step: what to decode, and what names the noise of each of its samples."""

    step: int
    job: DecodeJob
    keys: tuple[str, ...]
    weight: float  # of one sample: 1 / samples of the whole step


class Recipe:
    """Equal in every process that builds it from the same file: weights, order of the clips, noise."""

    def __init__(self, config: Path) -> None:
        torch.set_num_threads(1)
        self.config = RunConfig.load(config)
        model, self.geometry = resolve(self.config.model)
        if self.config.train.optimizer.kind != "adamw":
            raise ConfigError("heddle bench peers trains by AdamW alone. Set train.optimizer.kind to adamw.")
        if any(source.loss_weight != 1 for source in self.config.data.sources):
            raise ConfigError("heddle bench peers weighs all samples alike. Leave data.sources loss_weight out.")
        if self.config.train.loss_weight != "sample":
            raise ConfigError("heddle bench peers weighs all samples alike. Set train.loss_weight to sample.")
        self.train, self.text_config, self.diffusion = self.config.train, model.text, model.dit.diffusion
        self.dit = build_dit(model.dit, self.train.seed).train()
        self.vae, self.text = build_vae(model.vae), build_text(model.text)

    def steps(self, count: int) -> list[list[MicroBatch]]:
        """The bucket batches of the first steps, in the order in which Heddle numbers them."""
        dataset = Dataset.open(self.config.data, self.geometry, self.train.seed)
        return [self.step(dataset, number) for number in range(count)]

    def step(self, dataset: Dataset, number: int) -> list[MicroBatch]:
        """The bucket batches of one step."""
        return [
            MicroBatch(
                step=number,
                job=item.job,
                keys=tuple(sample.draw for sample in item.samples),
                weight=1.0 / dataset.step(number).num_samples,
            )
            for item in dataset.step(number).items
        ]

    def optimizer(self) -> torch.optim.AdamW:
        settings = self.train.optimizer
        return torch.optim.AdamW(
            self.dit.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def latents(self, video: np.ndarray) -> Tensor:
        """uint8 [B, T, H, W, 3] -> latents [B, C, t, h, w]."""
        return self.vae.encode(torch.from_numpy(video))

    @torch.no_grad()
    def words(self, captions: Sequence[str]) -> list[Tensor]:
        """One [L, dim] per caption, and after it `TextConfig.tail` rows of a second encoder's vector."""
        return self.text.encode(list(captions))

    def loss(
        self, dit: nn.Module, micro: MicroBatch, latents: Tensor, words: list[Tensor], group: Group | None = None
    ) -> Tensor:
        """The share of a bucket batch in the mean loss of its step; with `group`, the part of this rank of the group,
        over which each sequence is cut."""
        group = group or Group.solo()
        objective, patch = objective_of(self.diffusion, self.train.flow), self.geometry.patch
        words, pooled = split(words, self.text_config)
        grid = tuple(size // part for size, part in zip(latents.shape[2:], patch, strict=True))
        sequences = [PackedSequence(grid=grid, text_tokens=len(text)) for text in words]  # type: ignore[arg-type]
        layout = Layout(sequences, group.size, group.rank)
        seed, tokens, width = self.train.seed, math.prod(grid), latents.shape[1] * math.prod(patch)
        levels = [objective.draw(seed, micro.step, key, tokens, (0.0, 1.0)) for key in micro.keys]
        noisy, target = [], []
        for index, (latent, key, level) in enumerate(zip(latents, micro.keys, levels, strict=True)):
            part = layout.chunk(index)
            clean, noise = patchify(latent, patch)[part], rows(NoiseKey.of(seed, micro.step, key), part, width)
            noisy.append(objective.noisy(level, clean, noise))
            target.append(objective.target(level, clean, noise))
        times, told = objective.times(torch.tensor(levels)), Conditions(pooled=pooled)
        predicted = dit(torch.cat(noisy), times, torch.cat(words), layout, group, told)
        return packed_loss(predicted, torch.cat(target), layout, torch.full((len(words),), micro.weight))


class Average:
    """The moving average of the weights, as samplers use them."""

    def __init__(self, recipe: Recipe) -> None:
        self._config = recipe.train.optimizer
        self._live: list[Tensor] = list(recipe.dit.parameters())
        self._average = [p.detach().clone() for p in self._live]
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self._updates += 1
        torch._foreach_lerp_(self._average, self._live, 1.0 - ema_decay_at(self._config, self._updates))


class Clips(TorchDataset[Batch]):
    """The batches of one rank, for a DataLoader whose workers decode."""

    def __init__(self, jobs: Sequence[DecodeJob]) -> None:
        self._jobs = jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, index: int) -> Batch:
        batch = decode_job(self._jobs[index])
        batch.video = batch.video.copy()  # the decoder's memory is used again for the next batch
        return batch


def line_writer(path: Path, pids: Sequence[int]) -> Callable[[int, float], None]:
    """Writes what the comparison reads of a loop: the processes that train, then a line for every finished step."""
    path.write_text(json.dumps({"pids": list(pids)}) + "\n")

    def write(step: int, loss: float) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "loss": loss}) + "\n")

    return write
