"""Learning-rate schedule, AdamW, what Muon and Prodigy add to weights, and EMA, on ranges of the flat vector: no
communication, which is ops.update.sync."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ops.config import OptimizerConfig
from ops.update.prodigy import ProdigyStep, step_


def lr_at(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (counted from 0): linear warm-up, then constant, cosine or linear decay.

    The decay reaches learning_rate * lr_min_ratio at total_steps and stays there. With `lr_decay_steps` it takes the
    last steps alone (warm-up, stable, decay: Hu et al. 2024, MiniCPM, section 4.2).
    """
    if step < config.lr_warmup_steps:
        return config.learning_rate * (step + 1) / config.lr_warmup_steps
    if config.lr_scheduler == "constant":
        return config.learning_rate
    begins = total_steps - config.lr_decay_steps if config.lr_decay_steps else config.lr_warmup_steps
    done = min(max(0.0, (step - begins) / max(1, total_steps - begins)), 1.0)
    left = 1.0 - done if config.lr_scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.lr_min_ratio + (1.0 - config.lr_min_ratio) * left)


def ema_decay_at(config: OptimizerConfig, updates: int) -> float:
    """Decay of the `updates`-th update (counted from 1), warmed up as in Diffusers' EMAModel.

    A constant 0.999 would leave the EMA of a run of some hundred steps close to the random start.
    """
    return min(config.ema_decay, (1.0 + updates) / (10.0 + updates))


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this global norm are multiplied by; as torch.nn.utils.clip_grad_norm_. 0 means no clipping."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientScale:
    """The norm of a step's summed gradient, and how it is scaled before it is used."""

    norm: float  # of all trained parts, as means over their samples and before clipping; NaN where no part is trained
    factors: tuple[float | None, ...]  # what each part's gradient is multiplied by; None: the part stays as it is


def gradient_scale(
    squares: Sequence[float], weights: Sequence[float], planned_weight: float, max_norm: float
) -> GradientScale:
    """By the sum of squares of each part, weighted as if all `planned_weight` samples of the step were good, and the
    weights of its good samples. A part is clipped by its own norm, as if it were trained alone."""
    shares = [planned_weight / weight if weight > 0 else None for weight in weights]
    norms = [None if s is None else math.sqrt(square) * s for square, s in zip(squares, shares, strict=True)]
    trained = [norm for norm in norms if norm is not None]
    return GradientScale(
        norm=math.hypot(*trained) if trained else math.nan,
        factors=tuple(
            None if share is None or norm is None else share * clip_factor(norm, max_norm)
            for share, norm in zip(shares, norms, strict=True)
        ),
    )


def adamw_(
    config: OptimizerConfig,
    *,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    updates: int,
    lr: float,
    factor: float,
) -> None:
    """The `updates`-th AdamW update of a range, in place, with gradient `factor * grad`. `grad` is overwritten.

    torch's fused kernel divides by a float32 `grad_scale` on the way, which saves a pass over memory; float64 state
    is scaled beforehand to keep its precision. Its numbers are made on the device: a copy of them would be a wait.
    """
    scale = None
    if factor != 1.0:
        if master.dtype == torch.float64:
            grad.mul_(factor)
        else:
            scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=grad.device)
    adamw(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(updates - 1), dtype=torch.float32, device=grad.device)],
        fused=True,
        grad_scale=scale,
        amsgrad=False,
        beta1=config.betas[0],
        beta2=config.betas[1],
        lr=lr,
        weight_decay=config.weight_decay,
        eps=config.adam_eps,
        maximize=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRange:
    """Elements [lo, hi) of the flat vector that change together in an update, the `updates`-th of them, by `factor`
    times their gradient. Of a matrix that Muon trains `rate` is what the learning rate is multiplied by; 0: AdamW, or
    Prodigy with its `step`."""

    lo: int
    hi: int
    factor: float
    updates: int
    rate: float = 0.0
    step: ProdigyStep | None = None

    def of(self, first: int, values: Tensor) -> Tensor:
        """What of it lies in `values`, which begin at element `first` of the flat vector."""
        return values[max(0, self.lo - first) : max(0, self.hi - first)]


def lying_in(trained: Sequence[TrainedRange], first: int, last: int) -> Iterator[TrainedRange]:
    """The `trained` ranges, in order and without overlap, that have an element in [first, last), which is not empty."""
    for index in range(bisect_right(trained, first, key=lambda one: one.hi), len(trained)):
        if trained[index].lo >= last:
            return
        yield trained[index]


def update_range(
    config: OptimizerConfig,
    lr: float,
    trained: TrainedRange,
    first: int,
    state: Mapping[str, Tensor],
    gradient: Tensor,
) -> None:
    """Update in place what of `trained` lies in these arrays, which begin at element `first` of the flat vector: AdamW,
    Muon of a gradient that has become orthogonal, or Prodigy by moments that have it already, and EMA where there is
    one."""
    master = trained.of(first, state["master"])
    if not len(master):
        return
    if trained.step is not None:
        first_moment, second_moment = (trained.of(first, state[name]) for name in ("exp_avg", "exp_avg_sq"))
        step_(config, trained.step, master=master, exp_avg=first_moment, exp_avg_sq=second_moment)
    elif trained.rate:
        master.mul_(1.0 - lr * config.weight_decay)
        master.add_(trained.of(first, gradient), alpha=-lr * trained.rate)
    else:
        adamw_(
            config,
            master=master,
            grad=trained.of(first, gradient),
            exp_avg=trained.of(first, state["exp_avg"]),
            exp_avg_sq=trained.of(first, state["exp_avg_sq"]),
            updates=trained.updates,
            lr=lr,
            factor=trained.factor,
        )
    if "ema" in state:
        trained.of(first, state["ema"]).lerp_(master, 1.0 - ema_decay_at(config, trained.updates))
