"""Sampling where the latent frames of a clip have noise levels of their own: window after window, block after block
(`ops.flow.forcing` says when), by weights that know a level for each frame.

    latents = sample_forced(dit, requests, negative, geometry, SamplerConfig(forcing=ForcingSchedule(ar_step=5)), group)

What is made is what Diffusers' SkyReelsV2DiffusionForcingPipeline makes of the same noise.

t latent frames, h w tokens of one, P width of a token row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.flow.forcing import WAITS, FrameWindow, block_steps, windows_of
from ops.flow.objective import generator
from ops.flow.sampling import (
    Guidance,
    SamplerConfig,
    SampleRequest,
    given_frames,
    initial_noise,
    scheduled,
    steps_of,
    whole_rows,
)
from ops.flow.schedulers import ScheduledClip
from ops.geometry import Geometry
from ops.packed.patches import patchify, unpatchify
from ops.packed.uploads import brought, upload, upload_numbers

_TIMES = 1000  # of `ForcingSchedule`, however many the training has
_WAITING = 0.999  # the noise level of which the transformer is given the time for a block that has not begun


@torch.no_grad()
def sample_forced(
    dit: nn.Module,
    requests: Sequence[SampleRequest],
    negative: Tensor,
    geometry: Geometry,
    config: SamplerConfig,
    group: Group | None = None,
    progress: Callable[[int], None] | None = None,
    negative_pooled: Tensor | None = None,
    half: Group | None = None,
) -> list[Tensor]:
    """As `ops.flow.sampling.sample_latents`, by `config.forcing`, for requests of one size. `progress` is called with
    the number of forwards that are done (`ops.flow.forcing.forwards`). Raises ValueError for windows that are not whole
    blocks, and for a first frame where blocks have several."""
    group = group or Group.solo()
    return _Forced(dit, requests, negative, negative_pooled, geometry, config, group, half).latents(progress)


def history_noise(seed: int, shape: tuple[int, ...], window: int, step: int) -> Tensor:
    """The noise on frames that a window has taken over, in its forward `step`: made as `initial_noise` is."""
    numbers = generator(seed, step, str(window), "history").standard_normal(shape, dtype="float32")
    return torch.from_numpy(numbers)


class _Forced:
    """Clips of one size whose latent frames have times of their own, window after window and block after block."""

    def __init__(
        self,
        dit: nn.Module,
        requests: Sequence[SampleRequest],
        negative: Tensor,
        negative_pooled: Tensor | None,
        geometry: Geometry,
        config: SamplerConfig,
        group: Group,
        half: Group | None,
    ) -> None:
        assert config.forcing is not None
        sizes = {(one.frames, one.height, one.width) for one in requests}
        if len(sizes) > 1 or geometry.patch[0] > 1:
            raise ValueError("clips of windows and blocks are of one size and of tokens of one latent frame each.")
        if config.forcing.causal_block_size > 1 and any(one.first is not None for one in requests):
            raise ValueError(
                f"a first frame is given, and causal_block_size {config.forcing.causal_block_size} would make it anew "
                f"with the rest of its block. Set it to 1."
            )
        self.grid = geometry.token_grid(*sizes.pop())
        self.dit, self.requests, self.config, self.schedule = dit, requests, config, config.forcing
        self._guided = (negative, negative_pooled, config, group, half, config.forcing.causal_block_size)
        self.geometry, self.channels = geometry, int(dit.config.out_channels)  # type: ignore[union-attr, arg-type]
        weight = next(dit.parameters())
        self.there = weight.device, torch.promote_types(weight.dtype, torch.float32)

    @property
    def history_share(self) -> float:
        """Share of noise in frames that a window has taken over."""
        return self.schedule.addnoise_condition / _TIMES

    def latents(self, progress: Callable[[int], None] | None) -> list[Tensor]:
        """[C, t, h, w] of each request."""
        made: list[Tensor] = []  # [t so far, h w, P] of each
        done = 0
        for number, window in enumerate(windows_of(self.schedule, self.grid[0], self.geometry.vae_stride[0])):
            steps = _Window(self, number, window, made)
            for index in range(len(steps.rows)):
                steps.forward(index)
                done += 1
                if progress is not None:
                    progress(done)
            made = [
                torch.cat([before[: window.first], frames])
                for before, frames in zip(made or [frames[:0] for frames in steps.frames], steps.frames, strict=True)
            ]
        patch = self.geometry.patch
        return [unpatchify(frames.flatten(0, 1), self.grid, patch, self.channels) for frames in made]

    def guidance(self, grid: tuple[int, int, int]) -> Guidance:
        """The guidance of a window."""
        negative, pooled, config, group, half, block = self._guided
        grids = [grid] * len(self.requests)
        return Guidance.of(self.dit, self.requests, grids, negative, pooled, config, group, half, block)


class _Window:
    """The clips of a batch in one window: `frames` [t, h w, P] of each, and what its forwards are (`rows`)."""

    def __init__(self, forced: _Forced, number: int, window: FrameWindow, made: Sequence[Tensor]) -> None:
        schedule, config = forced.schedule, forced.config
        self._forced, self._number = forced, number
        self._grid = (window.frames, *forced.grid[1:])
        self._size = schedule.causal_block_size
        self._guidance = forced.guidance(self._grid)
        self.frames = [self._noise(request.seed) for request in forced.requests]
        for index, request in enumerate(forced.requests):
            given = made[index][window.first :] if made else _first_of(request, self.frames[index])
            self.frames[index][: len(given)] = given
        first = 0 if made else given_frames(forced.requests[0], self._grid)
        self._history = window.history or first
        blocks, ready = window.frames // self._size, self._history // self._size
        tokens = math.prod(self._grid)
        self._clips = [[_solver(config, request, tokens) for _ in range(blocks)] for request in forced.requests]
        self.rows = block_steps(blocks, config.steps, schedule.ar_step, ready)

    def _noise(self, seed: int) -> Tensor:
        channels, patch = self._forced.channels, self._forced.geometry.patch
        shape = (channels, *(size * part for size, part in zip(self._grid, patch)))
        return self._framed(initial_noise(seed, shape, self._number))

    def _framed(self, latent: Tensor) -> Tensor:
        """[C, t, h, w] -> [t, h w, P]"""
        device, dtype = self._forced.there
        rows = patchify(latent, self._forced.geometry.patch)
        return upload([rows.view(-1, self._grid[1] * self._grid[2], rows.shape[1]).to(dtype)], device)[0]

    def forward(self, index: int) -> None:
        """One forward, and the steps that blocks take by it."""
        row, guidance = self.rows[index], self._guidance
        layout, config = guidance.prompt.layout, self._forced.config
        seen = [self._seen(frames, request.seed, index) for frames, request in zip(self.frames, self._forced.requests)]
        times = self._times(row)
        x = layout.local([frames.flatten(0, 1) for frames in seen])
        velocity = guidance.velocity(self._forced.dit, x, times, config.guidance_scale)
        for frames, predicted, blocks in zip(self.frames, whole_rows(velocity, layout, guidance.group), self._clips):
            velocities = predicted.view_as(frames)
            for number, (solver, step) in enumerate(zip(blocks, row, strict=True)):
                if 0 <= step < config.steps:
                    own = slice(number * self._size, (number + 1) * self._size)
                    # in place, as in that pipeline: UniPC, which looks back at the first sample, finds the second there
                    frames[own] = solver.step(step, frames[own], velocities[own])

    def _times(self, row: Sequence[int]) -> Tensor:
        """The time of each frame of each clip, one after the other."""
        config, (device, dtype) = self._forced.config, self._forced.there
        times = [*self._clips[0][0].times, 0.0]
        waiting = _WAITING * config.num_train_timesteps
        of_frames = [waiting if step == WAITS else times[step] for step in row for _ in range(self._size)]
        if share := self._forced.history_share:
            of_frames[: self._history] = [share * config.num_train_timesteps] * self._history
        return upload_numbers([of_frames * len(self.frames)], dtype, device)[0]

    def _seen(self, frames: Tensor, seed: int, index: int) -> Tensor:
        """With a little noise on the frames that are there from the beginning."""
        share = self._forced.history_share
        if not share or not self._history:
            return frames
        patch = self._forced.geometry.patch
        shape = (self._forced.channels, self._history, *(n * p for n, p in zip(self._grid[1:], patch[1:])))
        noise = self._framed(history_noise(seed, shape, self._number, index))
        seen = frames.clone()
        seen[: self._history] = frames[: self._history] * (1 - share) + noise * share
        return seen


def _first_of(request: SampleRequest, like: Tensor) -> Tensor:
    """The frames [n, h w, P] that a clip is given."""
    if request.first is None:
        return like[:0]
    (given,) = brought([request.first], like.device)
    return given.to(like).view(-1, *like.shape[1:])


class _EulerClip:
    """Euler's steps of one clip, or of some frames of it."""

    def __init__(self, config: SamplerConfig, tokens: int) -> None:
        self._steps = steps_of(config, tokens, None)
        self.times = [time for time, _, _ in self._steps]

    def step(self, index: int, latent: Tensor, prediction: Tensor) -> Tensor:
        """As `ScheduledClip.step`."""
        _, keep, change = self._steps[index]
        return keep * latent + change * prediction


def _solver(config: SamplerConfig, request: SampleRequest, tokens: int) -> _EulerClip | ScheduledClip:
    if config.scheduler is None:
        return _EulerClip(config, tokens)
    return scheduled(config, config.scheduler, request, tokens)
