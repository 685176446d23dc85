"""Forward and backward of one packed cascade and its loss, the same for a worker and for a prediction of what it needs,
and the forward alone for clips that are not trained on.

S sequences, n rows of this rank, P width of a token row, W of its latent columns (`latent_width`), E of a text token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.flow.noise import NoiseKey, rows
from ops.flow.objective import Objective
from ops.packed.conditions import NOTHING, Conditions
from ops.packed.packing import Layout
from ops.packed.uploads import upload_numbers
from ops.precision import half_products


@dataclass(frozen=True, kw_only=True, slots=True)
class PassClip:
    """One sequence of the pass: what this rank holds of it, and whose random numbers it gets."""

    rows: Tensor  # [n, P], this rank's rows: W columns of the clean latent, then those that the model gets as they are
    text: Tensor  # [text tokens, E], whole
    key: str  # of its sample
    weight: float  # share of the step's loss; 0 for a clip that did not decode


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSettings:
    """What is computed of the clips of a pass. Noise and level of a clip are drawn by its key, `seed` and `step`."""

    objective: Objective
    seed: int
    step: int
    sigmas: tuple[float, float] = (0.0, 1.0)  # between which levels are drawn: those of one of two experts
    latent_width: int  # columns of a row that are latent, the first ones
    dtype: torch.dtype  # of noise, target and loss
    autocast: bool  # products in bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """What a pass leaves beside the gradients."""

    loss: Tensor  # this rank's part, detached
    predicted: Tensor  # [n, W]
    target: Tensor  # [n, W]
    weights: Tensor  # [S]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutLoss:
    """The loss of one clip at one noise level."""

    level: float  # as the objective draws it; the mean over frames with a loss, where they have their own
    loss: float  # mean squared error over its tokens but those of clean frames


def train_pass(
    dit: nn.Module,
    clips: Sequence[PassClip],
    layout: Layout,
    group: Group,
    settings: PassSettings,
    conditions: Conditions = NOTHING,
    *,
    phase: Callable[[str], None] = lambda name: None,
    before_backward: Callable[[], None] = lambda: None,
) -> PassResult:
    """Adds this rank's part of the gradient to the parameters. Collective over the group. `phase` is called with
    "forward" and "backward" as they begin."""
    drawn = _draw(clips, layout, settings)
    phase("forward")
    predicted = _predict(dit, clips, drawn, layout, group, settings, conditions)
    loss = packed_loss(predicted, drawn.target, layout, drawn.weights)
    phase("backward")
    before_backward()
    loss.backward()
    return PassResult(loss=loss.detach(), predicted=predicted.detach(), target=drawn.target, weights=drawn.weights)


@torch.no_grad()
def held_out_pass(
    dit: nn.Module,
    clips: Sequence[PassClip],
    layout: Layout,
    group: Group,
    settings: PassSettings,
    conditions: Conditions = NOTHING,
) -> list[HeldOutLoss]:
    """The same forward without a gradient: the loss of every clip, whatever its weight, and the noise level that was
    drawn for it. Collective over the group, each rank of which gets its own part."""
    drawn = _draw(clips, layout, settings)
    predicted = _predict(dit, clips, drawn, layout, group, settings, conditions)
    losses = sequence_losses(predicted, drawn.target, layout, torch.ones_like(drawn.weights)).tolist()
    return [HeldOutLoss(level=level, loss=loss) for level, loss in zip(drawn.levels, losses, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn:
    """What chance makes of the clips of a pass."""

    levels: list[float]  # of each clip; where its frames have their own, their mean over those with a loss
    tokens: Tensor  # [n, P], noisy
    target: Tensor  # [n, W]
    times: Tensor  # [S], or of each frame of each sequence
    first_times: Tensor | None = None  # [S], of first frames that are given, where some have noise
    weights: Tensor  # [S]


def _draw(clips: Sequence[PassClip], layout: Layout, settings: PassSettings) -> _Drawn:
    return (_draw_frames if layout.has_frame_times else _draw_clips)(clips, layout, settings)


def _draw_clips(clips: Sequence[PassClip], layout: Layout, settings: PassSettings) -> _Drawn:
    """With one level for all frames of a clip but those that are given."""
    objective, seed, step, width = settings.objective, settings.seed, settings.step, settings.latent_width
    levels, first_levels, noisy, target = [], [], [], []
    for i, clip in enumerate(clips):
        level = objective.draw(seed, step, clip.key, layout.sequences[i].tokens, settings.sigmas)
        noise = rows(NoiseKey.of(seed, step, clip.key), layout.chunk(i), width, layout.device).to(settings.dtype)
        clean, told = clip.rows.split((width, clip.rows.shape[1] - width), dim=1)
        mixed = objective.noisy(level, clean, noise)
        first = objective.draw_first(seed, step, clip.key, level)
        given = max(layout.sequences[i].clean_tokens - layout.chunk(i).start, 0)
        mixed[:given] = objective.noisy(first, clean[:given], noise[:given]) if first else clean[:given]
        noisy.append(torch.cat([mixed, told], dim=1) if told.shape[1] else mixed)
        target.append(objective.target(level, clean, noise))
        levels.append(level)
        first_levels.append(first)
    numbers = [levels, first_levels, [clip.weight for clip in clips]]
    drawn, drawn_first, weights = upload_numbers(numbers, settings.dtype, layout.device)
    return _Drawn(
        levels=levels,
        tokens=torch.cat(noisy),
        target=torch.cat(target),
        times=objective.times(drawn),
        first_times=objective.times(drawn_first) if any(first_levels) else None,
        weights=weights,
    )


def _draw_frames(clips: Sequence[PassClip], layout: Layout, settings: PassSettings) -> _Drawn:
    """With a level for each frame of a clip; those that are given have their own as well."""
    objective, seed, step, width = settings.objective, settings.seed, settings.step, settings.latent_width
    levels, means, noises = [], [], []
    for i, (clip, sequence) in enumerate(zip(clips, layout.sequences, strict=True)):
        drawn = objective.draw_frames(seed, step, clip.key, sequence.tokens, sequence.grid[0])
        given, others = sequence.clean_frames, drawn[sequence.clean_frames :]
        first = objective.draw_first(seed, step, clip.key, min(others)) if given else 0.0
        levels += [first] * given + others
        means.append(sum(others) / len(others))
        noises.append(rows(NoiseKey.of(seed, step, clip.key), layout.chunk(i), width, layout.device))
    of_frames, weights = upload_numbers([levels, [clip.weight for clip in clips]], settings.dtype, layout.device)
    noise, all_rows = torch.cat(noises).to(settings.dtype), torch.cat([clip.rows for clip in clips])
    clean, told = all_rows.split((width, all_rows.shape[1] - width), dim=1)
    of_rows = of_frames[layout.time_index, None]
    mixed = objective.noisy(of_rows, clean, noise)
    return _Drawn(
        levels=means,
        tokens=torch.cat([mixed, told], dim=1) if told.shape[1] else mixed,
        target=objective.target(0.0, clean, noise),
        times=objective.times(of_frames),
        weights=weights,
    )


def _predict(
    dit: nn.Module,
    clips: Sequence[PassClip],
    drawn: _Drawn,
    layout: Layout,
    group: Group,
    settings: PassSettings,
    conditions: Conditions,
) -> Tensor:
    """[n, W] of the settings' dtype."""
    if drawn.first_times is not None:
        conditions = replace(conditions, first_times=drawn.first_times)
    with half_products(layout.device, settings.autocast):
        text = torch.cat([clip.text for clip in clips])
        predicted: Tensor = dit(drawn.tokens, drawn.times, text, layout, group, conditions)
    return predicted.to(settings.dtype)


def packed_loss(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """This rank's part of the loss of packed sequences: sum_s weights[s] * mean squared error of sequence s.

    prediction, target [n, c] are the local rows, weights [S] are 1 / (samples of the whole step) for an average; the
    mean runs over all tokens of s on all ranks of the bag but those of clean frames. So parts of ranks, bags and
    cascades only add up. At least fp32. With n = 0 it is a zero that backward accepts.
    """
    return _row_losses(prediction, target, layout, weights).sum()


@torch.no_grad()
def sequence_losses(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    """This rank's part of `packed_loss` by sequence, fp64 [S]; for reports only."""
    rows = _row_losses(prediction, target, layout, weights).double()
    sums = torch.zeros(len(weights), dtype=torch.float64, device=rows.device)
    return sums.index_add_(0, layout.seq_index, rows)


def _row_losses(prediction: Tensor, target: Tensor, layout: Layout, weights: Tensor) -> Tensor:
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    per_row = (weights.double() / (layout.token_counts * prediction.shape[-1])).to(dtype)[layout.seq_index]
    if layout.has_clean_frames:
        per_row = per_row * layout.noisy_rows
    error = (prediction.to(dtype) - target.to(dtype)).square().sum(dim=-1)
    return per_row * error
