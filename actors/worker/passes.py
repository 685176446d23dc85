"""What a pass over clips computes, alike in training and for held-out losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from actors.worker.loading import Modules
from ops.flow.objective import is_first_frame_given, objective_of
from ops.flow.train_pass import PassSettings
from ops.models.first_frame import FirstFrame
from ops.packed.conditions import NOTHING, Conditions

if TYPE_CHECKING:
    from actors.config import TrainConfig
    from ops.config import FlowConfig


def clean_frames(
    frame: FirstFrame, flow: FlowConfig, seed: int, step: int, key: str, grid: tuple[int, int, int]
) -> int:
    """How many frames of a sample's token grid the transformer gets without noise: 1 where the first is given, else 0,
    as of an image, which has no other frame."""
    given = frame.given or is_first_frame_given(flow, seed, step, key)
    return int(given and grid[0] > 1)


def conditions_of(frame: FirstFrame, tails: Sequence[Tensor], pooled: Tensor | None) -> Conditions:
    """What a pass gets beside its text: images from the rows after those of the tokens, vectors [S, V]."""
    images = torch.cat([frame.image_of(tail) for tail in tails]) if frame.tail else None
    return NOTHING if images is None and pooled is None else Conditions(image=images, pooled=pooled)


def pass_settings(modules: Modules, train: TrainConfig, expert: int, seed: int, step: int) -> PassSettings:
    """What is computed of clips that fall to this expert, in training and for held-out losses."""
    model = modules.config
    return PassSettings(
        objective=objective_of(model.dit.diffusion, train.flow),
        seed=seed,
        step=step,
        sigmas=model.dit.experts[expert].sigmas,
        latent_width=model.vae.channels * math.prod(modules.geometry.patch),
        dtype=compute_dtype(modules.dit),
        autocast=train.autocast == "bfloat16",
    )


def compute_dtype(dit: nn.Module) -> torch.dtype:
    """Noise, targets and loss are at least fp32, whatever the parameters are."""
    return torch.promote_types(next(dit.parameters()).dtype, torch.float32)
