"""Memory of a training step on one GPU, as plans take it: the project's own code on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from app.bench.gpu.models import with_layers
from ops.config import OptimizerConfig
from ops.models.base.config import DiTConfig
from ops.packed.packing import Sequence as PackedSequence

FEW, MORE = 2, 3  # blocks of the models that stand for a deep one, whose blocks are all alike


def step_bytes(config: DiTConfig, clips: Sequence[PackedSequence]) -> float:
    """Peak of a step of these clips, weights in bf16: states, what blocks keep, and what one of them needs.

    Linear in the number of blocks, for models of one kind of block."""
    few, more = (_counted(with_layers(config, layers), tuple(clips)) for layers in (FEW, MORE))
    return few + (config.num_layers - FEW) * (more - few) / (MORE - FEW)


def blocks_that_fit(config: DiTConfig, clips: Sequence[PackedSequence], free: float) -> int:
    """The number of blocks whose step of these clips fits into `free` bytes, at most that of the model."""
    one, two = (step_bytes(with_layers(config, layers), clips) for layers in (1, 2))
    return max(0, min(config.num_layers, 1 + int((free - one) // (two - one))))


def kept_bytes(config: DiTConfig, clips: Sequence[PackedSequence]) -> float:
    """What blocks keep of attention beside `step_bytes` where it is kept, in half precision."""
    return config.kept_bytes(element_bytes=2) * sum(clip.tokens for clip in clips)


@cache
def _counted(config: DiTConfig, clips: tuple[PackedSequence, ...]) -> int:
    from ops.models.forecast import Precision, pass_bytes, states_bytes

    precision = Precision(parameters=torch.bfloat16, cuda=True)
    states, _ = states_bytes(replace(config, attention="auto"), OptimizerConfig(), 1, precision)
    peak, _ = pass_bytes(config, clips, 1, precision)
    return states + peak
