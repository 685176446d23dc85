"""Sampling with classifier-free guidance, on packed sequences and any bag of workers: Euler steps of the flow, DDIM, or
those of a scheduler of Diffusers.

    requests = [SampleRequest(text=text.encode(["a red disc"])[0], frames=17, height=64, width=96, seed=0)]
    latents = sample_latents(dit, requests, text.encode([""])[0], geometry, SamplerConfig(), group)
    video = vae.decode(latents[0][None])[0]                                        # uint8 [T, H, W, 3]

A request's result depends on its own seed alone, not on its neighbours in the batch or on the degree (to rounding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.config import Diffusion, ForcingSchedule, Spacing, TokenShift
from ops.flow.objective import ddim_steps, generator, shift
from ops.flow.schedulers import ScheduledClip, Scheduler
from ops.geometry import Geometry
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.packed.patches import patchify, unpatchify
from ops.packed.uploads import brought, upload, upload_numbers
from ops.precision import half_products

_STRAIGHT = 0.025  # of the way to the clean sample, made in steps of one size


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """How a clip is made from noise."""

    steps: int = 20
    guidance_scale: float = 3.0  # 1: the prompt alone, one forward per step instead of two
    guidance_scale_2: float | None = None  # below the boundary of two experts; None: the same
    flow_shift: float = 3.0  # as in training
    token_shift: TokenShift | None = None  # instead of flow_shift, as in training
    num_train_timesteps: int = 1000
    autocast: bool = False  # bfloat16 products, as in training
    # As schedulers that know the times of a training alone: evenly spaced sigmas begin one of its steps below 1, and
    # times are whole numbers
    whole_times: bool = False
    spacing: Spacing = "even"
    scheduler: Scheduler | None = None  # by whose steps a clip is made; None: by Euler's, or DDIM's
    passes_sigmas: bool = True  # to `scheduler`, spaced as named; False: it spaces them itself
    timesteps: tuple[float, ...] = ()  # of every one of `steps`, falling, without a shift; (): spaced as named
    forcing: ForcingSchedule | None = None  # for weights that know a level for each latent frame; None: all at once

    def __post_init__(self) -> None:
        if not self.timesteps:
            sigma_schedule(self.steps, 1.0, spacing=self.spacing)  # raises ValueError for too few steps
            return
        falling = all(time > after for time, after in pairwise((*self.timesteps, 0.0)))
        if not falling or self.timesteps[0] > self.num_train_timesteps or len(self.timesteps) != self.steps:
            raise ValueError(
                f"timesteps {list(self.timesteps)} of {self.steps} steps must fall from at most "
                f"{self.num_train_timesteps} and stay above 0, one for each step."
            )

    @property
    def is_guided(self) -> bool:
        """Whether a step needs a second forward, of weights that do not take guidance as an input."""
        return self.guidance_scale != 1 or self.guidance_scale_2 not in (None, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One clip to make. `text` [L, text_dim] is its prompt's embedding.

    Image to video: `condition` [tokens, Q] is what stands after the noisy features of each token, `image`
    [image tokens, image_dim] the embedding of the first frame. Or `first` [tokens of a frame, P] are the tokens of the
    first latent frame, which the transformer gets as they are. A `hint_share` of `hint` [tokens of a frame, P] is mixed
    into the noise of every latent frame.
    """

    text: Tensor
    frames: int
    height: int
    width: int
    seed: int
    condition: Tensor | None = None
    image: Tensor | None = None
    first: Tensor | None = None
    hint: Tensor | None = None
    hint_share: float = 0.0
    pooled: Tensor | None = None  # [pooled_dim]: the second text encoder's vector of the prompt
    negative: Tensor | None = None  # [L, text_dim]: what guidance moves this clip away from; None: that of all clips


@dataclass(frozen=True, slots=True)
class LowNoiseExpert:
    """The transformer that takes over when the noise level falls below `boundary`."""

    dit: nn.Module
    boundary: float


def initial_noise(seed: int, shape: tuple[int, ...], window: int = 0) -> Tensor:
    """The noise a request starts from, in each of its windows: fp32 on the CPU, equal on every device and rank."""
    return torch.from_numpy(generator(seed, window, "", "sample").standard_normal(shape, dtype="float32"))


@torch.no_grad()
def sample_latents(
    dit: nn.Module,
    requests: Sequence[SampleRequest],
    negative: Tensor,
    geometry: Geometry,
    config: SamplerConfig,
    group: Group | None = None,
    progress: Callable[[int], None] | None = None,
    low: LowNoiseExpert | None = None,
    negative_pooled: Tensor | None = None,
    half: Group | None = None,
) -> list[Tensor]:
    """Latents [C, t, h, w] of each request, fp32 (fp64 with such weights) on the transformer's device, whole on every
    rank of the bag.

    All requests are packed into one batch. Collective: every rank of `group` calls it with equal arguments.
    `negative` [L, text_dim] is what guidance moves away from, usually the embedding of the empty prompt, and
    `negative_pooled` its vector where requests have one. Weights that take guidance as an input get its scale and
    need no negative. `half` are the ranks of `group` before or after its middle, to which this one belongs: the first
    half computes with the prompt while the other does with the negative; without guidance it is not used. With `low`,
    `dit` is for the noise levels from its boundary on. Raises ValueError when clips of a batch cross it in other steps.
    """
    if not requests:
        return []
    group = group or Group.solo()
    weight = next(dit.parameters())
    device, dtype = weight.device, torch.promote_types(weight.dtype, torch.float32)
    grids = [geometry.token_grid(request.frames, request.height, request.width) for request in requests]
    guidance = Guidance.of(dit, requests, grids, negative, negative_pooled, config, group, half)
    layout, own = guidance.prompt.layout, guidance.group
    channels = int(dit.config.out_channels)  # type: ignore[union-attr, arg-type]
    start = upload([_noise_tokens(request, geometry, channels).to(dtype) for request in requests], device)
    x = layout.local(start)
    steps: _OwnSteps | _SchedulerSteps
    if config.scheduler is None:
        steps = _OwnSteps(config, layout, dit.config.diffusion, x)  # type: ignore[union-attr, arg-type]
    else:
        clips = [
            scheduled(config, config.scheduler, request, length)
            for request, length in zip(requests, layout.lengths, strict=True)
        ]
        steps = _SchedulerSteps(clips, start, grids, geometry.patch, layout, own)
    for index in range(len(steps)):
        timesteps = steps.times(index)
        chosen = _expert(dit, low, timesteps, config)
        second = config.guidance_scale_2 if low is not None and chosen is low.dit else None
        scale = config.guidance_scale if second is None else second
        x = steps.step(index, x, guidance.velocity(chosen, x, timesteps, scale))
        if progress is not None:
            progress(index + 1)
    whole = [unpatchify(rows, grid, geometry.patch, channels) for rows, grid in zip(whole_rows(x, layout, own), grids)]
    # without the frames that filled up the first patch
    return [
        latent[:, -geometry.latent_grid(one.frames, one.height, one.width)[0] :] for latent, one in zip(whole, requests)
    ]


@dataclass(frozen=True, slots=True)
class _Halves:
    """Two bags of one size: rank i of both holds the same rows, one with the prompt, the other with the negative."""

    own: Group
    whole: Group
    prompted: bool

    @staticmethod
    def of(whole: Group, own: Group) -> _Halves:
        if 2 * own.size != whole.size or whole.rank % own.size != own.rank:
            raise ValueError(
                f"rank {own.rank} of {own.size} is in no half of a group of {whole.size} in which it has rank "
                f"{whole.rank}. Give the ranks before or after its middle, in their order."
            )
        return _Halves(own, whole, whole.rank < own.size)

    def both(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """What both halves predict of this rank's rows: (with the prompt, with the negative)."""
        other = torch.empty_like(own)
        partner = (self.whole.rank + self.own.size) % self.whole.size
        rows = [len(own) if rank == partner else 0 for rank in range(self.whole.size)]
        self.whole.all_to_all(other, own, rows, rows)
        return (own, other) if self.prompted else (other, own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guidance:
    """How the velocity of a batch is predicted: with its prompts alone, or with them and with the negative, in two
    forwards of this rank or in one of each half of the bag."""

    prompt: _Prompts  # of this rank's first forward: the negative in the second half of a bag
    negative: _Prompts | None  # of its second one
    halves: _Halves | None
    group: Group  # the ranks that compute a forward together
    autocast: bool

    @staticmethod
    def of(
        dit: nn.Module,
        requests: Sequence[SampleRequest],
        grids: Sequence[tuple[int, int, int]],
        negative: Tensor,
        negative_pooled: Tensor | None,
        config: SamplerConfig,
        group: Group,
        half: Group | None,
        block_frames: int = 0,
    ) -> Guidance:
        """The arguments are those of `sample_latents`, with the token grid of each request. `block_frames`: each frame
        has a time of its own, and attends to its block of this number of frames and those before; 0: neither."""
        takes_scale = bool(dit.config.takes_guidance)  # type: ignore[union-attr]
        is_guided = config.is_guided and not takes_scale
        halves = _Halves.of(group, half) if is_guided and half is not None else None
        own = group if halves is None else halves.own
        device = next(dit.parameters()).device
        in_halves: bool | None = dit.config.in_halves  # type: ignore[union-attr, assignment]

        def with_prompt() -> _Prompts:
            vectors = [request.pooled for request in requests if request.pooled is not None]
            texts = [request.text for request in requests]
            scale = 1000.0 * config.guidance_scale if takes_scale else None
            return _Prompts.of(grids, requests, texts, vectors, scale, own, device, in_halves, block_frames)

        def with_negative() -> _Prompts:
            vectors = [] if negative_pooled is None else [negative_pooled] * len(requests)
            texts = [negative if request.negative is None else request.negative for request in requests]
            return _Prompts.of(grids, requests, texts, vectors, None, own, device, in_halves, block_frames)

        return Guidance(
            prompt=with_prompt() if halves is None or halves.prompted else with_negative(),
            # Two forwards instead of one of twice the length: a rank's rows depend on the place of a sequence in its
            # layout, and the two velocities of a row must meet on one rank.
            negative=with_negative() if is_guided and halves is None else None,
            halves=halves,
            group=own,
            autocast=config.autocast,
        )

    def velocity(self, dit: nn.Module, x: Tensor, timesteps: Tensor, scale: float) -> Tensor:
        """[n, P] for this rank's rows `x` [n, P]. With a negative: its velocity, and `scale` times what the prompt
        changes of it. Collective over the bag."""
        velocity = self._forward(dit, x, timesteps, self.prompt)
        if self.halves is not None:
            velocity, base = self.halves.both(velocity)
        elif self.negative is not None:
            base = self._forward(dit, x, timesteps, self.negative)
        else:
            return velocity
        return base + scale * (velocity - base)

    def _forward(self, dit: nn.Module, x: Tensor, timesteps: Tensor, prompts: _Prompts) -> Tensor:
        # Around each forward alone: beside a run it trains when `progress` returns, and a spatial-temporal transformer
        # chooses its slices by its mode, alike on all ranks of a bag.
        with evaluating(dit), half_products(x.device) if self.autocast else nullcontext():
            tokens = x if prompts.told is None else torch.cat([x, prompts.told], dim=1)
            velocity: Tensor = dit(tokens, timesteps, prompts.text, prompts.layout, self.group, prompts.conditions)
            return velocity.to(x.dtype)


def _expert(dit: nn.Module, low: LowNoiseExpert | None, timesteps: Tensor, config: SamplerConfig) -> nn.Module:
    if low is None:
        return dit
    below = (timesteps < low.boundary * config.num_train_timesteps).tolist()
    if any(below) != all(below):
        raise ValueError(
            "clips of one batch reach the low-noise expert in different steps, as their flow shift grows with their "
            "tokens. Sample clips of one size together."
        )
    return low.dit if all(below) else dit


class _OwnSteps:
    """Those of Euler or DDIM, on the rows that this rank has."""

    def __init__(self, config: SamplerConfig, layout: Layout, diffusion: Diffusion | None, x: Tensor) -> None:
        schedules = [steps_of(config, length, diffusion) for length in layout.lengths]
        (numbers,) = upload([torch.tensor(schedules, dtype=x.dtype)], x.device)  # [S, steps, 3]
        self._times, self._keep, self._change = numbers.permute(2, 1, 0).unbind()
        self._layout = layout

    def __len__(self) -> int:
        return len(self._times)

    def times(self, index: int) -> Tensor:
        return self._times[index]

    def step(self, index: int, x: Tensor, prediction: Tensor) -> Tensor:
        rows = self._layout.seq_index
        keep, change = self._keep[index][rows, None], self._change[index][rows, None]
        if self._layout.has_clean_frames:
            change = change * self._layout.noisy_rows[:, None]
        return keep * x + change * prediction


class _SchedulerSteps:
    """Those of Diffusers' schedulers, which see whole clips: every rank of the bag takes the same ones."""

    def __init__(
        self,
        clips: Sequence[ScheduledClip],
        start: Sequence[Tensor],
        grids: Sequence[tuple[int, int, int]],
        patch: tuple[int, int, int],
        layout: Layout,
        group: Group,
    ) -> None:
        self._clips, self._tokens, self._grids, self._patch = clips, list(start), grids, patch
        self._layout, self._group = layout, group
        given = [one.clean_frames * height * width for one, (_, height, width) in zip(layout.sequences, grids)]
        self._given = [tokens[:count] for tokens, count in zip(start, given, strict=True)]

    def __len__(self) -> int:
        return len(self._clips[0].times)

    def times(self, index: int) -> Tensor:
        like = self._tokens[0]
        return upload_numbers([[clip.times[index] for clip in self._clips]], like.dtype, like.device)[0]

    def step(self, index: int, x: Tensor, prediction: Tensor) -> Tensor:
        """`x` is what the step before gave back, or the rows of `start`."""
        del x
        predictions = whole_rows(prediction, self._layout, self._group)
        for number, (clip, grid) in enumerate(zip(self._clips, self._grids, strict=True)):
            rows, channels = self._tokens[number], self._tokens[number].shape[1] // math.prod(self._patch)
            latent, predicted = (unpatchify(one, grid, self._patch, channels) for one in (rows, predictions[number]))
            moved = patchify(clip.step(index, latent, predicted), self._patch)
            given = self._given[number]
            self._tokens[number] = torch.cat([given, moved[len(given) :]])
        return self._layout.local(self._tokens)


def scheduled(config: SamplerConfig, scheduler: Scheduler, request: SampleRequest, tokens: int) -> ScheduledClip:
    sigmas = sigma_schedule(config.steps, 1.0, spacing=config.spacing)[:-1] if config.passes_sigmas else None
    shift_of_clip = config.token_shift.at(tokens) if config.token_shift else config.flow_shift
    log_shift = math.log(shift_of_clip) if scheduler.shifts_by_tokens else None
    return ScheduledClip(scheduler, config.steps, request.seed, sigmas, log_shift)


def steps_of(config: SamplerConfig, tokens: int, diffusion: Diffusion | None) -> list[tuple[float, float, float]]:
    """The steps of a clip of `tokens` tokens, each as three numbers: the time, and x becomes keep * x + change *
    prediction."""
    if diffusion is not None:
        return [(step.time, step.keep, step.move) for step in ddim_steps(config.steps, diffusion)]
    if config.timesteps:
        sigmas = [time / config.num_train_timesteps for time in (*config.timesteps, 0.0)]
        return [
            (time, 1.0, after - sigma) for time, (sigma, after) in zip(config.timesteps, pairwise(sigmas), strict=True)
        ]
    flow_shift = config.token_shift.at(tokens) if config.token_shift else config.flow_shift
    trained = config.num_train_timesteps
    if config.whole_times:
        # of these numbers, as those schedulers have them: by others rounding leaves some times one below theirs
        clean = np.linspace(1, 1 / trained, config.steps + 1)[::-1].tolist()
        sigmas = [shift(1 - share, flow_shift) for share in clean]
    else:
        sigmas = sigma_schedule(config.steps, flow_shift, config.spacing, trained)
    times = [sigma * trained for sigma in sigmas]
    times = [math.floor(time) for time in times] if config.whole_times else times
    return [(time, 1.0, after - sigma) for time, (sigma, after) in zip(times, pairwise(sigmas))]


def sigma_schedule(steps: int, flow_shift: float, spacing: Spacing = "even", times: int = 1000) -> list[float]:
    """steps + 1 sigmas from 1 down to 0 for Euler sampling, spaced as named and then shifted like in training,
    which had this number of `times`."""
    if steps < 1:
        raise ValueError(f"{steps} sampling steps; at least 1 is needed.")
    if spacing == "to_least":
        done = _to_least(steps, shift(1 / times, flow_shift))
    else:
        done = [index / steps for index in range(steps + 1)] if spacing == "even" else _linear_then_quadratic(steps)
    return [shift(1 - share, flow_shift) for share in done]


def _to_least(steps: int, least: float) -> list[float]:
    """How far each step has come, from 0 to 1: all but the last are of one size and end at the level `least`."""
    size = (1 - least) / max(steps - 1, 1)
    return [*(size * index for index in range(steps)), 1.0]


def _linear_then_quadratic(steps: int) -> list[float]:
    """How far each step has come, from 0 to 1: half of the steps make the first 2.5 % in a straight line, the rest a
    parabola that goes on from there (Diffusers' `linear_quadratic_schedule`); a single step goes all the way."""
    if steps == 1:
        return [0.0, 1.0]
    straight = steps // 2
    slope = _STRAIGHT / straight
    bend = (1 - slope * steps) / (steps - straight) ** 2
    return [slope * index + bend * max(index - straight, 0) ** 2 for index in range(steps + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompts:
    """What the transformer gets in every step."""

    layout: Layout
    text: Tensor
    told: Tensor | None  # [n, Q]: after the noisy features of this rank's rows
    conditions: Conditions

    @staticmethod
    def of(
        grids: Sequence[tuple[int, int, int]],
        requests: Sequence[SampleRequest],
        texts: Sequence[Tensor],
        pooled: Sequence[Tensor],
        guidance: float | None,
        group: Group,
        device: torch.device,
        in_halves: bool | None,
        block_frames: int,
    ) -> _Prompts:
        told = [request.condition for request in requests if request.condition is not None]
        images = [request.image for request in requests if request.image is not None]
        sequences = [
            PackedSequence(
                grid,
                len(text),
                image_tokens=0 if request.image is None else len(request.image),
                clean_frames=0 if request.first is None or block_frames else given_frames(request, grid),
                frame_times=block_frames > 0,
            )
            for grid, text, request in zip(grids, texts, requests)
        ]
        place = (group.size, group.rank, device)
        causal = block_frames if block_frames > 1 else 0
        # texts come again in every step
        layout = Layout(sequences, *place, text_recurs=True, in_halves=in_halves, block_frames=causal)
        return _Prompts(
            layout=layout,
            text=torch.cat(brought(texts, device)),
            told=brought([layout.local(told)], device)[0] if told else None,
            conditions=Conditions(
                image=torch.cat(brought(images, device)) if images else None,
                pooled=torch.stack(brought(pooled, device)) if pooled else None,
                guidance=None if guidance is None else torch.full((len(texts),), guidance, device=device),
            ),
        )


def given_frames(request: SampleRequest, grid: tuple[int, int, int]) -> int:
    """Latent frames of the clip that the transformer gets as they are."""
    return 0 if request.first is None else len(request.first) // (grid[1] * grid[2])


def _noise_tokens(request: SampleRequest, geometry: Geometry, channels: int) -> Tensor:
    grid = geometry.token_grid(request.frames, request.height, request.width)
    shape = (channels, *(size * part for size, part in zip(grid, geometry.patch)))
    tokens = patchify(initial_noise(request.seed, shape), geometry.patch)
    if request.hint is not None:
        times = len(tokens) // len(request.hint)
        share = request.hint_share
        tokens = (1 - share) * tokens + share * request.hint.to(tokens).repeat(times, 1)
    if request.first is not None:
        tokens[: len(request.first)] = request.first.to(tokens)
    return tokens


def whole_rows(x: Tensor, layout: Layout, group: Group) -> list[Tensor]:
    """Every sequence's full rows on every rank: own rows into zeros, then one sum."""
    whole = [x.new_zeros(length, x.shape[1]) for length in layout.lengths]
    start = 0
    for index, rows in enumerate(whole):
        chunk = layout.chunk(index)
        rows[chunk] = x[start : start + chunk.stop - chunk.start]
        start += chunk.stop - chunk.start
    packed = torch.cat(whole)
    group.all_reduce(packed)
    return list(packed.split(list(layout.lengths)))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
