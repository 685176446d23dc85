"""Flow matching: x_sigma = (1 - sigma) x + sigma noise; the transformer predicts noise - x.

Every random number of a sample is a function of (seed, step, sample key) alone, through the counter-based Philox: the
same on any worker, device, degree and order of work. Noise itself is drawn by `ops.noise`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ops.config import FlowConfig, Spacing
from ops.packing import Layout

_TRIES = 10_000
_STRAIGHT = 0.025  # of the way to the clean sample, made in steps of one size


def generator(seed: int, step: int, key: str, purpose: str = "flow") -> np.random.Generator:
    """An independent stream of numbers for each (seed, step, sample key, purpose)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}/{key}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def draw_sigma(
    config: FlowConfig, seed: int, step: int, key: str, tokens: int, sigmas: tuple[float, float] = (0.0, 1.0)
) -> float:
    """The noise level of the sample `key`, of so many tokens, at `step`: in [0, 1], after the shift.

    With `sigmas` [low, high) it is the first of the draws that lies there: the density keeps its form, so that two
    experts together see what one transformer for all would see. Raises ValueError where none of many does.
    """
    numbers, (low, high) = generator(seed, step, key), sigmas
    for _ in range(_TRIES):
        sigma = shift(density(config, numbers), config.shift_at(tokens))
        if low <= sigma and (sigma < high or high == 1.0):
            return sigma
    raise ValueError(
        f"none of {_TRIES} noise levels of train.flow lay in [{low:g}, {high:g}), which an expert of model.dit is for. "
        f"Change train.flow.flow_shift or its density."
    )


def draw_expert(
    config: FlowConfig, seed: int, step: int, item: str, tokens: int, experts: Sequence[tuple[float, float]]
) -> int:
    """Which of these intervals of noise levels [low, high), that cover all, the clips of an item, of so many tokens
    each, are trained at in this step: the one that a level drawn for the item lies in. Levels of its clips are then
    drawn within it (`draw_sigma`), so that over all steps a clip sees every level as often as with one transformer."""
    if len(experts) == 1:
        return 0
    level = draw_sigma(config, seed, step, f"expert of {item}", tokens)
    return next(number for number, (low, _) in enumerate(experts) if level >= low)


def is_first_frame_given(config: FlowConfig, seed: int, step: int, key: str) -> bool:
    """Whether the transformer gets the first latent frame of the sample `key` at `step` as it is."""
    return config.first_frame > 0 and generator(seed, step, key, "first frame").random() < config.first_frame


def density(config: FlowConfig, numbers: np.random.Generator) -> float:
    """One unshifted sigma of the configured density (Esser et al. 2024, section 3.1)."""
    if config.weighting_scheme == "logit_normal":
        return float(1 / (1 + math.exp(-(config.logit_mean + config.logit_std * numbers.standard_normal()))))
    u = float(numbers.random())
    if config.weighting_scheme == "mode":
        return 1 - u - config.mode_scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
    return u


def shift(sigma: float, flow_shift: float) -> float:
    """Moves sigma towards noise: longer sequences need more of it to lose their signal."""
    return flow_shift * sigma / (1 + (flow_shift - 1) * sigma)


def sigma_schedule(steps: int, flow_shift: float, first: float = 1.0, spacing: Spacing = "even") -> list[float]:
    """steps + 1 sigmas from `first` down to 0 for Euler sampling, spaced as named and then shifted like in training."""
    if steps < 1:
        raise ValueError(f"{steps} sampling steps; at least 1 is needed.")
    done = [index / steps for index in range(steps + 1)] if spacing == "even" else _linear_then_quadratic(steps)
    return [shift(first * (1 - share), flow_shift) for share in done]


def _linear_then_quadratic(steps: int) -> list[float]:
    """How far each step has come, from 0 to 1: half of the steps make the first 2.5 % in a straight line, the rest a
    parabola that goes on from there (Diffusers' `linear_quadratic_schedule`)."""
    if steps < 2:
        raise ValueError(f"{steps} sampling step of linear and quadratic spacing; at least 2 are needed.")
    straight = steps // 2
    slope = _STRAIGHT / straight
    bend = (1 - slope * steps) / (steps - straight) ** 2
    return [slope * index + bend * max(index - straight, 0) ** 2 for index in range(steps + 1)]


def flow_loss(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """This rank's part of sum_s weights[s] * mean squared error of sequence s.

    prediction, target [n, c] are the local rows, weights [S] are 1 / (samples of the whole step) for an average; the
    mean runs over all tokens of s on all ranks of the bag but those of clean frames. So parts of ranks, bags and
    cascades only add up. At least fp32. With n = 0 it is a zero that backward accepts.
    """
    return _row_losses(prediction, target, layout, weights).sum()


@torch.no_grad()
def sequence_losses(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """This rank's part of `flow_loss` by sequence, fp64 [S] in host memory; for reports only."""
    rows = _row_losses(prediction, target, layout, weights).double()
    sums = torch.zeros(len(weights), dtype=torch.float64, device=rows.device)
    return sums.index_add_(0, layout.seq_index, rows).cpu()


def _row_losses(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    per_row = (weights.double() / (layout.token_counts * prediction.shape[-1])).to(dtype)[layout.seq_index]
    if layout.has_clean_frames:
        per_row = per_row * layout.noisy_rows
    error = (prediction.to(dtype) - target.to(dtype)).square().sum(dim=-1)
    return per_row * error
