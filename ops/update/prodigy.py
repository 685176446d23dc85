"""Prodigy: Adam whose learning rate is an estimate d of how far the solution lies from the start, found while training.

(Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", 2024, arXiv 2306.06101, Algorithm
4, with the weights and names of its published implementation, prodigyopt.) With gradient g, weights p that began as p0,
d0 the first d, and rate = d learning_rate, an update is

    numerator = sqrt(beta2) numerator + d / d0 rate sum(g (p0 - p))         over all weights
    s         = sqrt(beta2) s         + d / d0 rate g
    moments as those of Adam, of d g
    d         = the largest so far of d_coef numerator / sum(|s|)
    p         = p - rate exp_avg / (sqrt(exp_avg_sq) + d adam_eps)          and decoupled weight decay before, by rate

The two sums are of all weights, and are made before any weight changes: an update passes over a range twice. They are
in fp64, and all ranks read the same ones, so d has the same bits everywhere, and how weights are cut over ranks changes
no more of it than the order of a sum does. No communication here, which is ops.update.sync.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.config import OptimizerConfig
from ops.shards import Distance

TAKEN_IN = ("master", "exp_avg", "exp_avg_sq", "s", "p0")  # arrays of the state that `take_in` is called with
_AT_ONCE = 1 << 23  # elements; what is computed on the way takes 32 MiB of a device


def first_distance(config: OptimizerConfig) -> Distance:
    """Before the first update."""
    return Distance(d=config.prodigy.d0, d_max=config.prodigy.d0, numerator=0.0)


def update_rate(config: OptimizerConfig, distance: Distance, lr: float, updates: int) -> float:
    """What the `updates`-th update (counted from 1) multiplies Adam's direction by."""
    rate = distance.d * lr
    if config.prodigy.use_bias_correction:
        beta1, beta2 = config.betas
        rate *= math.sqrt(1.0 - beta2**updates) / (1.0 - beta1**updates)
    return rate


def take_in(
    config: OptimizerConfig,
    *,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    s: Tensor,
    p0: Tensor,
    distance: Distance,
    rate: float,
    factor: float,
) -> Tensor:
    """Moments and `s` of a range [n] become those of the update whose gradient is `factor * grad`. Returns what the
    range adds to two sums, g (p0 - p) and |s|: [2] in fp64. `grad` is overwritten; weights stay as they are."""
    sums = torch.zeros(2, dtype=torch.float64, device=master.device)
    if not rate:  # a learning rate of 0 changes nothing at all
        return sums
    d, d0, (beta1, beta2) = distance.d, config.prodigy.d0, config.betas
    added = d / d0 * (d if config.prodigy.safeguard_warmup else rate)
    for p, g, first, second, summed, start in zip(
        *(array.split(_AT_ONCE) for array in (master, grad, exp_avg, exp_avg_sq, s, p0)), strict=True
    ):
        g.mul_(factor)
        first.mul_(beta1).add_(g, alpha=d * (1.0 - beta1))
        second.mul_(beta2).addcmul_(g, g, value=d * d * (1.0 - beta2))
        summed.mul_(math.sqrt(beta2)).add_(g, alpha=added)
        along = torch.sub(start, p).mul_(g).sum(dtype=torch.float64)
        sums += torch.stack([along, torch.linalg.vector_norm(summed, 1, dtype=torch.float64)])
    return sums


def next_distance(config: OptimizerConfig, distance: Distance, rate: float, along: float, length: float) -> Distance:
    """What is known after an update, by both sums over all weights; the same where there was no gradient yet."""
    if not rate or not length:
        return distance
    d, d0 = distance.d, config.prodigy.d0
    numerator = math.sqrt(config.betas[1]) * distance.numerator + d / d0 * rate * along
    found = config.prodigy.d_coef * numerator / length
    d_max = max(distance.d_max, found)
    if d == d0:
        d = max(d, found)
    return Distance(d=min(d_max, d * (config.prodigy.growth_rate or math.inf)), d_max=d_max, numerator=numerator)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProdigyStep:
    """How weights change by moments that are those of the update: `rate` is that of before it, `d` that after it."""

    rate: float
    d: float


def step_(config: OptimizerConfig, step: ProdigyStep, *, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """New weights of a range [n], in place."""
    for p, first, second in zip(*(array.split(_AT_ONCE) for array in (master, exp_avg, exp_avg_sq)), strict=True):
        p.mul_(1.0 - config.weight_decay * step.rate)
        p.addcdiv_(first, second.sqrt().add_(step.d * config.adam_eps), value=-step.rate)
