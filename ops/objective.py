"""What a transformer is trained to predict: how a clean sample becomes a noisy one, and the target beside it.

`FlowObjective` is that of most families. `DiffusionObjective` is diffusion: with velocity as the prediction (Salimans
and Ho 2022) and no signal at the last time (Lin et al. 2024), as CogVideoX has it, or with the noise (Ho et al. 2020),
as Latte has it. A level is the number that is drawn for a sample: sigma for the flow, the whole time of 0 .. 999 for
diffusion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from torch import Tensor

from ops.config import Diffusion, FlowConfig
from ops.flow import draw_sigma, generator

TIMES = 1000  # of diffusion
_BETAS = (0.00085, 0.012)  # of Stable Diffusion, evenly spaced in their square roots
_NOISE_BETAS = (0.0001, 0.02)  # of Ho et al. 2020, evenly spaced


class Objective(Protocol):
    """Every random number of a sample is a function of (seed, step, sample key) alone."""

    def draw(self, seed: int, step: int, key: str, tokens: int, sigmas: tuple[float, float]) -> float:
        """The level of the sample `key`, of so many tokens, at `step`; where there are two experts, within `sigmas`."""
        ...

    def noisy(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        """What the transformer is given; all of one shape."""
        ...

    def target(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        """What it is to predict."""
        ...

    def times(self, levels: Tensor) -> Tensor:
        """[S] -> what the transformer is told of the levels."""
        ...


@dataclass(frozen=True, slots=True)
class FlowObjective:
    """x_sigma = (1 - sigma) x + sigma noise; the prediction is noise - x."""

    flow: FlowConfig

    def draw(self, seed: int, step: int, key: str, tokens: int, sigmas: tuple[float, float]) -> float:
        return draw_sigma(self.flow, seed, step, key, tokens, sigmas)

    def noisy(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        return (1 - level) * clean + level * noise

    def target(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        return noise - clean

    def times(self, levels: Tensor) -> Tensor:
        return levels * self.flow.num_train_timesteps


@dataclass(frozen=True, slots=True)
class DiffusionObjective:
    """x_t = a x + b noise with a^2 + b^2 = 1; the prediction is a noise - b x, or the noise. Times are drawn evenly."""

    diffusion: Diffusion

    def draw(self, seed: int, step: int, key: str, tokens: int, sigmas: tuple[float, float]) -> float:
        return float(generator(seed, step, key).integers(TIMES))

    def noisy(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        a, b = self._parts(level)
        return a * clean + b * noise

    def target(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        if self.diffusion.predicts == "noise":
            return noise
        a, b = self._parts(level)
        return a * noise - b * clean

    def times(self, levels: Tensor) -> Tensor:
        return levels

    def _parts(self, level: float) -> tuple[float, float]:
        signal = signal_shares(self.diffusion)[int(level)]
        return math.sqrt(signal), math.sqrt(1 - signal)


def objective_of(diffusion: Diffusion | None, flow: FlowConfig) -> Objective:
    """That of a transformer whose settings say `DiTConfig.diffusion`."""
    return FlowObjective(flow) if diffusion is None else DiffusionObjective(diffusion)


@lru_cache(maxsize=8)
def signal_shares(diffusion: Diffusion) -> tuple[float, ...]:
    """The share of signal in the variance of a noisy sample at each time, Diffusers' `alphas_cumprod`. With velocity it
    falls to exactly 0 at the last."""
    if diffusion.predicts == "noise":
        return tuple(np.cumprod(1 - np.linspace(*_NOISE_BETAS, TIMES, dtype=np.float64)).tolist())
    snr_shift = diffusion.snr_shift
    low, high = (math.sqrt(beta) for beta in _BETAS)
    shares = np.cumprod(1 - np.linspace(low, high, TIMES, dtype=np.float64) ** 2)
    roots = np.sqrt(shares / (snr_shift + (1 - snr_shift) * shares))
    roots = (roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))
    return tuple((roots**2).tolist())


@dataclass(frozen=True, slots=True)
class DiffusionStep:
    """One step of DDIM (Song et al. 2021) without new noise: x becomes keep * x + move * prediction."""

    time: int
    keep: float
    move: float


def ddim_steps(count: int, diffusion: Diffusion) -> list[DiffusionStep]:
    """The steps from the last time to the clean sample, as those of CogVideoXDDIMScheduler (velocity) or DDIMScheduler
    (noise) with "trailing" spacing.

    Raises ValueError for a count outside 1 .. 1000.
    """
    if not 1 <= count <= TIMES:
        raise ValueError(f"{count} sampling steps; 1 to {TIMES} can be taken.")
    shares, steps = signal_shares(diffusion), []
    for time in (np.round(np.arange(TIMES, 0, -TIMES / count)).astype(int) - 1).tolist():
        now, after = shares[time], shares[time - TIMES // count] if time >= TIMES // count else 1.0
        if diffusion.predicts == "noise":
            keep = math.sqrt(after / now)  # of the estimate of the clean sample, (x - b prediction) / a
            steps.append(DiffusionStep(time, keep, math.sqrt(1 - after) - keep * math.sqrt(1 - now)))
            continue
        keep = math.sqrt((1 - after) / (1 - now))
        guess = math.sqrt(after) - math.sqrt(now) * keep  # what the estimate of the clean sample counts for
        steps.append(DiffusionStep(time, keep + guess * math.sqrt(now), -guess * math.sqrt(1 - now)))
    return steps
