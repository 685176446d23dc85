"""What a transformer is trained to predict: the noise level of a sample, what it is given, and the target beside it.

`FlowObjective` is flow matching, that of most families. `DiffusionObjective` is diffusion: with velocity as the
prediction (Salimans and Ho 2022) and no signal at the last time (Lin et al. 2024), as CogVideoX has it, or with the
noise (Ho et al. 2020), as Latte has it. A level is the number that is drawn for a sample: sigma for the flow, the whole
time of 0 .. 999 for diffusion.

Every random number of a sample is a function of (seed, step, sample key) alone, through the counter-based Philox: the
same on any worker, device, degree and order of work. Noise itself is drawn by `ops.flow.noise`. No torch inside.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ops.config import TIMES, Diffusion, FlowConfig, PictureNoise

if TYPE_CHECKING:
    from torch import Tensor

_BETAS = (0.00085, 0.012)  # of Stable Diffusion, evenly spaced in their square roots
_NOISE_BETAS = (0.0001, 0.02)  # of Ho et al. 2020, evenly spaced
_TRIES = 10_000
_HALVINGS = 60  # leave less than rounding does
_LEAST_SHARE = 1e-9  # of a density: of less fp64 knows too few places near 1
_NORMAL = NormalDist()
_LEAST_PLACE = 2.0**-53  # of a normal number: 8.2 deviations from the middle


class Objective(Protocol):
    """What a family's transformer is trained by."""

    def draw(self, seed: int, step: int, key: str, tokens: int, sigmas: tuple[float, float]) -> float:
        """The level of the sample `key`, of `tokens` tokens, at `step`; where there are two experts, within
        `sigmas`."""
        ...

    def draw_frames(self, seed: int, step: int, key: str, tokens: int, frames: int) -> list[float]:
        """The level of each of the `frames` latent frames of that sample, where frames have levels of their own."""
        ...

    def noisy(self, level: float | Tensor, clean: Tensor, noise: Tensor) -> Tensor:
        """What the transformer is given; all of one shape. Of a flow the level may be that of each row, [n, 1]."""
        ...

    def target(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        """What it is to predict."""
        ...

    def times(self, levels: Tensor) -> Tensor:
        """[S] -> the levels as the transformer takes them."""
        ...

    def draw_first(self, seed: int, step: int, key: str, level: float) -> float:
        """The level of the first frame of the sample `key` at `step`, if it is given: 0 is clean."""
        ...


@dataclass(frozen=True, slots=True)
class FlowObjective:
    """x_sigma = (1 - sigma) x + sigma noise; the prediction is noise - x."""

    flow: FlowConfig

    def draw(self, seed: int, step: int, key: str, tokens: int, sigmas: tuple[float, float]) -> float:
        return draw_sigma(self.flow, seed, step, key, tokens, sigmas)

    def draw_frames(self, seed: int, step: int, key: str, tokens: int, frames: int) -> list[float]:
        return draw_frame_sigmas(self.flow, seed, step, key, tokens, frames)

    def noisy(self, level: float | Tensor, clean: Tensor, noise: Tensor) -> Tensor:
        return (1 - level) * clean + level * noise

    def target(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        return noise - clean

    def times(self, levels: Tensor) -> Tensor:
        return levels * self.flow.num_train_timesteps

    def draw_first(self, seed: int, step: int, key: str, level: float) -> float:
        return draw_first_sigma(self.flow, seed, step, key, level)


@dataclass(frozen=True, slots=True)
class DiffusionObjective:
    """x_t = a x + b noise with a^2 + b^2 = 1; the prediction is a noise - b x, or the noise. Times are drawn evenly."""

    diffusion: Diffusion

    def draw(self, seed: int, step: int, key: str, tokens: int, sigmas: tuple[float, float]) -> float:
        return float(generator(seed, step, key).integers(TIMES))

    def draw_frames(self, seed: int, step: int, key: str, tokens: int, frames: int) -> list[float]:
        raise AssertionError("no family of diffusion has times by frame")

    def noisy(self, level: float | Tensor, clean: Tensor, noise: Tensor) -> Tensor:
        a, b = self._parts(float(level))
        return a * clean + b * noise

    def target(self, level: float, clean: Tensor, noise: Tensor) -> Tensor:
        if self.diffusion.predicts == "noise":
            return noise
        a, b = self._parts(level)
        return a * noise - b * clean

    def times(self, levels: Tensor) -> Tensor:
        return levels

    def draw_first(self, seed: int, step: int, key: str, level: float) -> float:
        return 0.0  # no family of diffusion has times by frame

    def _parts(self, level: float) -> tuple[float, float]:
        signal = signal_shares(self.diffusion)[int(level)]
        return math.sqrt(signal), math.sqrt(1 - signal)


def objective_of(diffusion: Diffusion | None, flow: FlowConfig) -> Objective:
    """That of a transformer whose settings say `DiTConfig.diffusion`."""
    return FlowObjective(flow) if diffusion is None else DiffusionObjective(diffusion)


def generator(seed: int, step: int, key: str, purpose: str = "flow") -> np.random.Generator:
    """An independent stream of numbers for each (seed, step, sample key, purpose)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{purpose}/{key}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def draw_sigma(
    config: FlowConfig, seed: int, step: int, key: str, tokens: int, sigmas: tuple[float, float] = (0.0, 1.0)
) -> float:
    """The noise level of the sample `key`, of `tokens` tokens, at `step`: in `config.levels`, after the shift.

    `sigmas` [low, high) are the levels of one expert: the result lies there as well. The density keeps its form inside
    them, so two experts together train on the levels that one transformer would. If all levels are trained, levels are
    drawn until one is the expert's; if `config.levels` cuts them, one draw from [0, 1) is mapped through the density
    that is left. Raises ValueError if none is.
    """
    numbers, (low, high) = generator(seed, step, key), sigmas
    if config.levels != (0.0, 1.0):
        return CutDensity.of(config, config.shift_at(tokens), sigmas).level_at(float(numbers.random()))
    for _ in range(_TRIES):
        sigma = shift(density(config, numbers), config.shift_at(tokens))
        if low <= sigma and (sigma < high or high == 1.0):
            return sigma
    raise ValueError(
        f"none of {_TRIES} noise levels of train.flow lay in [{low:g}, {high:g}), which an expert of model.dit is for. "
        f"Change train.flow.flow_shift or its density."
    )


def draw_frame_sigmas(config: FlowConfig, seed: int, step: int, key: str, tokens: int, frames: int) -> list[float]:
    """The noise level of each latent frame of the sample `key`, of `tokens` tokens, at `step`: in `config.levels`,
    after the shift.

    `independent` levels are each drawn from the density. `rising` ones never fall from frame to frame: one of the
    frames, chosen evenly, has a level of the density, and all rising sequences through it are equally likely. That is
    FoPP (Sun et al. 2025, AR-Diffusion, arXiv 2503.07418), which counts sequences of whole times that are drawn evenly;
    of many times these are the frames before as an ordered draw from below that time, those after from above it. Here
    the place of a level in the density stands for the time, so that any density and shift keep the rule. A clip of one
    frame has a level of the density either way.
    """
    numbers, cut = generator(seed, step, key, "frame levels"), CutDensity.of(config, config.shift_at(tokens))
    places = [float(place) for place in numbers.random(frames)]
    if config.frame_levels == "rising":
        chosen, place = int(numbers.integers(frames)), float(numbers.random())
        below = sorted(place * one for one in places[:chosen])
        above = sorted(place + (1 - place) * one for one in places[chosen + 1 :])
        places = [*below, place, *above]
    return [cut.level_at(place) for place in places]


@dataclass(frozen=True, slots=True)
class CutDensity:
    """The density of noise levels, after a shift, between two of them: with its form, over the share that lies there.

    Drawn by the place in that share and not by refusing draws outside, of which a narrow part would need millions.
    """

    flow: FlowConfig
    flow_shift: float
    low: float
    high: float  # not drawn itself unless it is 1
    first: float  # share of the whole density that lies below `low`
    last: float  # and below `high`

    @staticmethod
    @lru_cache(maxsize=256)  # of a shift by tokens there is one for each bucket
    def of(flow: FlowConfig, flow_shift: float, sigmas: tuple[float, float] = (0.0, 1.0)) -> CutDensity:
        """Between `flow.levels`, and within `sigmas`. Raises ValueError where next to nothing lies there."""
        low, high = max(flow.levels[0], sigmas[0]), min(flow.levels[1], sigmas[1])
        first, last = (
            sigma if sigma in (0.0, 1.0) else place_of(flow, shift(sigma, 1 / flow_shift)) for sigma in (low, high)
        )
        if low >= high or last - first < _LEAST_SHARE:
            times = [f"{sigma * flow.num_train_timesteps:g}" for sigma in flow.levels]
            of_expert = "" if sigmas == (0.0, 1.0) else f", in those of an expert ({sigmas[0]:g} to {sigmas[1]:g}),"
            raise ValueError(
                f"train.flow.min_timestep {times[0]} and max_timestep {times[1]} leave noise levels{of_expert} that "
                f"its density, shifted by {flow_shift:g}, next to never has. Widen them, or change the shift or the "
                f"density."
            )
        return CutDensity(flow, flow_shift, low, high, first, last)

    def level_at(self, place: float) -> float:
        """The shifted sigma below which a share `place`, from 0 to 1, of what is left lies."""
        sigma = shift(level_at(self.flow, self.first + (self.last - self.first) * place), self.flow_shift)
        return min(max(sigma, self.low), self.high if self.high == 1.0 else math.nextafter(self.high, 0.0))


def draw_expert(
    config: FlowConfig, seed: int, step: int, item: str, tokens: int, experts: Sequence[tuple[float, float]]
) -> int:
    """Which of these intervals of noise levels [low, high), that cover all, the clips of an item, of `tokens` tokens
    each, are trained at in this step: the one that a level drawn for the item lies in. Levels of its clips are then
    drawn within it (`draw_sigma`), so that over all steps a clip sees every level as often as with one transformer."""
    if len(experts) == 1:
        return 0
    level = draw_sigma(config, seed, step, f"expert of {item}", tokens)
    return next(number for number, (low, _) in enumerate(experts) if level >= low)


def is_first_frame_given(config: FlowConfig, seed: int, step: int, key: str) -> bool:
    """Whether the transformer gets the first latent frame of the sample `key` at `step` as it is."""
    return config.first_frame > 0 and generator(seed, step, key, "first frame").random() < config.first_frame


def draw_first_sigma(config: FlowConfig, seed: int, step: int, key: str, sigma: float) -> float:
    """The noise level of a first frame that is given, of a clip at the level `sigma`: a share of that, drawn evenly, at
    most `first_frame_noise`."""
    if not config.first_frame_noise:
        return 0.0
    share = generator(seed, step, key, "first frame's noise").random()
    return min(float(share) * sigma, config.first_frame_noise)


def draw_picture_sigma(noise: PictureNoise, seed: int, step: int, key: str) -> float:
    """The level of the noise on the pictures that the VAE is shown of the sample `key` at `step`, in pixels from -1 to
    1."""
    number = generator(seed, step, key, "picture's noise").standard_normal()
    return math.exp(noise.mean + noise.std * float(number))


def density(config: FlowConfig, numbers: np.random.Generator) -> float:
    """One unshifted sigma of the configured density (Esser et al. 2024, section 3.1)."""
    if config.weighting_scheme == "logit_normal":
        return float(1 / (1 + math.exp(-(config.logit_mean + config.logit_std * numbers.standard_normal()))))
    u = float(numbers.random())
    if config.weighting_scheme == "mode":
        return 1 - u - config.mode_scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
    return u


def level_at(config: FlowConfig, place: float) -> float:
    """The unshifted sigma below which a share `place`, from 0 to 1, of the configured density lies."""
    if config.weighting_scheme == "logit_normal":
        normal = _NORMAL.inv_cdf(min(max(place, _LEAST_PLACE), 1 - _LEAST_PLACE))
        return 1 / (1 + math.exp(-(config.logit_mean + config.logit_std * normal)))
    if config.weighting_scheme == "mode":
        return place - config.mode_scale * (math.sin(math.pi * place / 2) ** 2 - place)
    return place


def place_of(config: FlowConfig, sigma: float) -> float:
    """The share of the configured density that lies below this unshifted sigma in (0, 1): `level_at` backwards."""
    if config.weighting_scheme == "logit_normal":
        logit = math.log(sigma) - math.log1p(-sigma) - config.logit_mean
        return _NORMAL.cdf(logit / config.logit_std) if config.logit_std else float(logit > 0)
    if config.weighting_scheme == "mode":
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if level_at(config, middle) < sigma else (low, middle)
        return high
    return sigma


def shift(sigma: float, flow_shift: float) -> float:
    """Moves sigma towards noise: longer sequences need more of it to lose their signal."""
    return flow_shift * sigma / (1 + (flow_shift - 1) * sigma)


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
    # of 61 steps and others rounding leaves one more, just above 0, which would be at the time -1
    for time in (np.round(np.arange(TIMES, 0, -TIMES / count)[:count]).astype(int) - 1).tolist():
        now, after = shares[time], shares[time - TIMES // count] if time >= TIMES // count else 1.0
        if diffusion.predicts == "noise":
            keep = math.sqrt(after / now)  # of the estimate of the clean sample, (x - b prediction) / a
            steps.append(DiffusionStep(time, keep, math.sqrt(1 - after) - keep * math.sqrt(1 - now)))
            continue
        keep = math.sqrt((1 - after) / (1 - now))
        guess = math.sqrt(after) - math.sqrt(now) * keep  # what the estimate of the clean sample counts for
        steps.append(DiffusionStep(time, keep + guess * math.sqrt(now), -guess * math.sqrt(1 - now)))
    return steps
