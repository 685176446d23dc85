"""Settings of training mathematics. Imports neither torch nor Ray, so configs load in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ops.ranges import above, between, check_numbers

TIMES = 1000  # of diffusion

Spacing = Literal["even", "linear_quadratic", "to_least"]
"""Spacing of the noise levels in sampling, before the shift. to_least: even, and the last step begins at the least
level of the training after the shift, as FlowMatchEuler has it where a pipeline passes no levels."""


FrameLevels = Literal["one", "independent", "rising"]
"""How the noise levels of a clip's latent frames are drawn."""


@dataclass(frozen=True, slots=True)
class Diffusion:
    """A transformer trained by diffusion over whole times 0 .. 999 instead of a flow.

    velocity: betas and zero terminal signal of CogVideoX. noise: betas evenly spaced from 0.0001 to 0.02 (Ho et al.
    2020, section 4).
    """

    predicts: Literal["velocity", "noise"] = "velocity"
    snr_shift: float = 1.0  # divides the ratio of signal to noise; velocity only

    def __str__(self) -> str:
        return f"SNR shift {self.snr_shift:g}" if self.predicts == "velocity" else "of predicted noise"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShift:
    """A flow shift that grows with the video tokens of a clip.

    line: exp of the line through (base_tokens, base) and (max_tokens, max), as FLUX.1's and LTX-Video's pipelines set
    it (Diffusers' `calculate_shift`). root: the square root of tokens / base_tokens (Esser et al. 2024, Eq. 23), which
    is Open-Sora 1.2's sqrt(height width / 512^2) sqrt(latent frames) with base_tokens 1024, whose tokens are 16x16
    pixels of a latent frame.
    """

    # line: exp of a line through two points, as FLUX.1's and LTX-Video's pipelines set it; root: the square root of
    # tokens / base_tokens, as Open-Sora 1.2
    law: Literal["line", "root"] = "line"
    base_tokens: int = 256  # at which the shift is exp(base) or, of a root, 1
    max_tokens: int = 4096  # at which it is exp(max); of a line alone, as the two below
    base: float = 0.5
    max: float = 1.15

    def __post_init__(self) -> None:
        check_numbers(
            "train.flow.token_shift",
            self,
            base_tokens=between(1),
            max_tokens=between(1),
            base=between(-10, 10),
            max=between(-10, 10),
        )
        if self.law == "line" and self.max_tokens <= self.base_tokens:
            raise ValueError(
                f"train.flow.token_shift.max_tokens {self.max_tokens} must be more than base_tokens {self.base_tokens}."
            )

    def at(self, tokens: int) -> float:
        """The flow shift of a clip of `tokens` tokens; far outside the line's ends it goes no further than e^10."""
        if self.law == "root":
            return math.sqrt(tokens / self.base_tokens)
        slope = (self.max - self.base) / (self.max_tokens - self.base_tokens)
        return math.exp(min(max(self.base + slope * (tokens - self.base_tokens), -10.0), 10.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """Flow matching: x_sigma = (1 - sigma) x + sigma noise, target noise - x."""

    # how noise levels are drawn, before the shift (Esser et al. 2024, section 3.1)
    weighting_scheme: Literal["uniform", "logit_normal", "mode"] = "logit_normal"
    logit_mean: float = 0.0  # of logit_normal: the mean of the logits; above 0: more noise
    logit_std: float = 1.0  # of logit_normal: their standard deviation
    mode_scale: float = 1.29  # of mode
    flow_shift: float = 3.0  # sigma' = shift sigma / (1 + (shift - 1) sigma); larger for longer sequences
    token_shift: TokenShift | None = None  # instead of flow_shift
    # probability that a clip's first latent frame is given clean: at time 0, without a loss. LTX-Video's trainer takes
    # 0.1 or, in some of its configs, 0.5; what Wan2.2's TI2V-5B was trained with is not published
    first_frame: float = 0.0
    # given frames get noise as well: of a level drawn evenly below the clip's own, and cut at this one. LTX-Video was
    # trained with small random ones (HaCohen et al. 2024, section 2.4), finetrainers cuts at 0.25; 0 gives them clean
    first_frame_noise: float = 0.0
    # diffusion forcing: the noise levels of a clip's latent frames. one: the same for all; independent: each draws its
    # own (Chen et al. 2024); rising: none is below that of the frame before it, as SkyReels-V2 was trained
    # (arXiv 2504.13074), by the rule of AR-Diffusion (`ops.flow.objective.draw_frame_sigmas`)
    frame_levels: FrameLevels = "one"
    num_train_timesteps: int = 1000  # the transformer is given sigma times this
    # least time that is trained, of num_train_timesteps, after the shift: the density is cut there, and keeps its form
    min_timestep: float = 0.0
    max_timestep: float | None = None  # the highest one; null: num_train_timesteps, which is pure noise

    def __post_init__(self) -> None:
        # the mode density folds back beyond 2 / (pi - 2), and below -1; logits beyond 20 are 0 and 1 in fp32
        check_numbers(
            "train.flow",
            self,
            logit_mean=between(-20, 20),
            logit_std=between(0, 20),
            mode_scale=between(-1, 1.75),
            flow_shift=above(0, 1e6),
            first_frame=between(0, 1),
            first_frame_noise=between(0, 1),
            num_train_timesteps=between(1),
            min_timestep=between(0),
            max_timestep=above(0, self.num_train_timesteps),
        )
        if self.levels[0] >= self.levels[1]:
            raise ValueError(
                f"train.flow.min_timestep is {self.min_timestep:g}, and no time lies between it and "
                f"{self.levels[1] * self.num_train_timesteps:g}. Set it below max_timestep."
            )
        if self.first_frame_noise and not self.first_frame:
            raise ValueError(
                f"train.flow.first_frame_noise is {self.first_frame_noise:g}, and no first frame is given: "
                f"train.flow.first_frame is 0. Set that above 0, or leave the noise out."
            )

    @property
    def levels(self) -> tuple[float, float]:
        """Least and highest noise level that is trained, from 0 to 1, after the shift."""
        highest = 1.0 if self.max_timestep is None else self.max_timestep / self.num_train_timesteps
        return self.min_timestep / self.num_train_timesteps, highest

    @property
    def by_frame(self) -> bool:
        """Whether each latent frame of a clip has a level of its own."""
        return self.frame_levels != "one"

    @property
    def knows_given_frames(self) -> bool:
        """Whether the transformer has seen first frames with less noise than the rest of their clips, so that samples
        may begin with a picture."""
        return self.first_frame > 0 or self.by_frame

    def shift_at(self, tokens: int) -> float:
        """The flow shift of a clip of `tokens` video tokens."""
        return self.token_shift.at(tokens) if self.token_shift else self.flow_shift


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcingSchedule:
    """How a clip is made by weights that know a noise level for each latent frame, in the words of Diffusers'
    SkyReelsV2DiffusionForcingPipeline: a long one window after window, frames all at once or block after block."""

    base_num_frames: int = 97  # of a window; SkyReels-V2's weights for 720P were trained with 121
    overlap_history: int = 17  # frames that a window takes over, as they are, from the one before; 37 is usual, too
    # the noise that the transformer sees on these in every step, as a time of 1000; 20 makes seams smoother
    addnoise_condition: float = 0.0
    # steps by which a block begins after the one before it, 5 as published; 0: all frames take theirs together
    ar_step: int = 0
    # latent frames of a block; above 1 a frame attends to its own block and those before it. 5 with ar_step 5
    causal_block_size: int = 1

    def __post_init__(self) -> None:
        check_numbers(
            "sample.forcing",
            self,
            base_num_frames=between(1, 100_000),
            overlap_history=between(1, 100_000),
            addnoise_condition=between(0, 1000),
            ar_step=between(0, 100_000),
            causal_block_size=between(1, 100_000),
        )
        if self.overlap_history >= self.base_num_frames:
            raise ValueError(
                f"sample.forcing.overlap_history {self.overlap_history} must be less than base_num_frames "
                f"{self.base_num_frames}: a window adds what it does not take over."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureNoise:
    """Normal noise on the pictures that the VAE encodes of clips which are made from them, in pixels from -1 to 1. Its
    level is exp of a normal number. CogVideoX' I2V was trained with a mean of -3 and a deviation of 0.5 (its trainers,
    SAT and finetrainers)."""

    mean: float = -3.0
    std: float = 0.5

    def __post_init__(self) -> None:
        check_numbers("train.picture_noise", self, mean=between(-20, 3), std=between(0, 5))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProdigyConfig:
    """How Prodigy finds d, by which it multiplies the learning rate; with `train.optimizer.kind: prodigy` alone. Names
    are those of the published implementation."""

    d0: float = 1e-6  # what d begins with; rarely in need of a change
    d_coef: float = 1.0  # what d is multiplied by; 0.5 to 2 is how the method is tuned
    growth_rate: float = 0.0  # by at most this factor d grows in a step, such as 1.02, a kind of warm-up; 0: by any
    use_bias_correction: bool = False  # Adam's; the first steps are smaller by it
    safeguard_warmup: bool = False  # with lr_warmup_steps: the small rates of the warm-up do not make d too large

    def __post_init__(self) -> None:
        check_numbers("train.optimizer.prodigy", self, d0=above(0, 1.0), d_coef=above(0, 100), growth_rate=between(0))
        if 0 < self.growth_rate <= 1:
            raise ValueError(
                f"train.optimizer.prodigy.growth_rate is {self.growth_rate:g}, and d would never grow. Set it above 1, "
                f"such as 1.02, or to 0 for no bound."
            )


USUAL_OF_KIND: Mapping[str, Mapping[str, object]] = {"prodigy": {"learning_rate": 1.0, "betas": (0.9, 0.999)}}
"""Settings of `train.optimizer` whose defaults depend on its kind: what a file that names neither gets."""
_NEAR_ONE = (0.1, 10.0)  # learning rates that Prodigy is given


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, Muon or Prodigy with warm-up and decay, global clipping and an EMA of the weights."""

    # muon: linear layers of the blocks are trained by Muon, by updates as large as AdamW's, so that its learning rates
    # and weight decay carry over; all else by AdamW. prodigy: Adam that finds its own learning rate
    kind: Literal["adamw", "muon", "prodigy"] = "adamw"
    learning_rate: float = 1e-4  # after the warm-up; of prodigy 1 by default, by which it multiplies the rate it finds
    betas: tuple[float, float] = (0.9, 0.95)  # of prodigy 0.9 and 0.999 by default
    adam_eps: float = 1e-8
    weight_decay: float = 0.01  # decoupled, of all trained weights
    max_grad_norm: float = 1.0  # 0 switches clipping off
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"  # how the rate falls
    lr_warmup_steps: int = 0  # steps of a linear rise, the first at learning_rate / lr_warmup_steps
    # the decay takes this number of steps at the end of the run, with a constant rate before them; 0: all steps after
    # the warm-up
    lr_decay_steps: int = 0
    lr_min_ratio: float = 0.0  # the decay ends at learning_rate times this
    ema_decay: float = 0.999  # at most (1 + updates) / (10 + updates), so that it forgets the beginning; 0: no EMA
    prodigy: ProdigyConfig = ProdigyConfig()

    def __post_init__(self) -> None:
        check_numbers(
            "train.optimizer",
            self,
            learning_rate=above(0, 10),
            adam_eps=above(0, 1.0),
            weight_decay=between(0, 1e6),
            max_grad_norm=between(0, 1e12),
            lr_warmup_steps=between(0),
            lr_decay_steps=between(0),
            lr_min_ratio=between(0, 1),
        )
        if self.kind == "prodigy" and not _NEAR_ONE[0] <= self.learning_rate <= _NEAR_ONE[1]:
            raise ValueError(
                f"train.optimizer.learning_rate is {self.learning_rate:g}; kind prodigy multiplies the rate that it "
                f"finds by it, so it must be from {_NEAR_ONE[0]:g} to {_NEAR_ONE[1]:g}. Set it to 1, or leave it out, "
                f"and tune train.optimizer.prodigy.d_coef."
            )
        if self.kind != "prodigy" and self.prodigy != ProdigyConfig():
            raise ValueError(
                f"train.optimizer.prodigy is of kind prodigy alone, and train.optimizer.kind is {self.kind}. Set kind "
                f"to prodigy, or leave train.optimizer.prodigy out."
            )
        if self.lr_decay_steps and self.lr_scheduler == "constant":
            raise ValueError(
                f"train.optimizer.lr_decay_steps is {self.lr_decay_steps}, and lr_scheduler constant does not decay. "
                f"Set lr_scheduler to linear or cosine, or leave lr_decay_steps out."
            )
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.optimizer.betas {list(self.betas)} must lie in [0, 1).")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"train.optimizer.ema_decay {self.ema_decay} must lie in [0, 1).")
