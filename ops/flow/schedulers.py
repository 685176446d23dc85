"""Diffusers' own schedulers: what an export names, and clips that are denoised by the one of a published pipeline.

    clip = ScheduledClip(Scheduler(name="UniPCMultistepScheduler", settings=fields), steps=30, seed=0)
    for index, time in enumerate(clip.times):
        latent = clip.step(index, latent, transformer(latent, time))

Nothing here imports torch or Diffusers before a scheduler is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_DRAWS_NOISE = "CogVideoXDPMScheduler"


class DiffusersScheduler(Protocol):
    """What all of Diffusers' schedulers have; what they are given differs."""

    config: Mapping[str, object]
    timesteps: Tensor

    def set_timesteps(self, *given: object, **named: object) -> None: ...

    def step(self, *given: object, **named: object) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduler:
    """A scheduler of Diffusers by the name of its class, and its settings."""

    name: str
    settings: Mapping[str, object]  # values of a JSON file; what is not here has the default of the class

    def build(self) -> DiffusersScheduler:
        """The scheduler itself. Raises ValueError or ImportError for settings that its class refuses."""
        import diffusers

        made: DiffusersScheduler = getattr(diffusers, self.name).from_config(dict(self.settings))
        return made

    def all_settings(self) -> dict[str, object]:
        """The settings with the defaults of the class."""
        return {key: value for key, value in self.build().config.items() if not key.startswith("_")}

    @property
    def shifts_by_tokens(self) -> bool:
        """Whether the flow shift is given with the number of steps, for each clip its own."""
        return bool(self.settings.get("use_dynamic_shifting"))

    def shifted(self, flow_shift: float) -> Scheduler:
        """The same scheduler with this flow shift for clips of any length."""
        name = "shift" if self.name == "FlowMatchEulerDiscreteScheduler" else "flow_shift"
        return replace(self, settings={**self.settings, name: flow_shift, "use_dynamic_shifting": False})


class ScheduledClip:
    """The steps of one clip by a scheduler of Diffusers, which may remember the steps before.

    `sigmas` are the noise levels before the shift, where a pipeline passes them to its scheduler, and `log_shift` the
    logarithm of the clip's flow shift, where the scheduler takes it with them. Noise that a scheduler adds in its steps
    is that of a pipeline with `torch.Generator().manual_seed(seed)`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steps: int,
        seed: int,
        sigmas: Sequence[float] | None = None,
        log_shift: float | None = None,
    ) -> None:
        import torch

        self._theirs = scheduler.build()
        if sigmas is None:
            self._theirs.set_timesteps(steps)
        else:
            self._theirs.set_timesteps(sigmas=list(sigmas), mu=log_shift)
        # else those with an index of their steps look the first one up by its time, which many small steps share
        if (begin_at := getattr(self._theirs, "set_begin_index", None)) is not None:
            begin_at(0)
        self._draws_noise = scheduler.name == _DRAWS_NOISE
        self._numbers = torch.Generator().manual_seed(seed)
        self._clean: Tensor | None = None  # what the step before took for the clean clip
        # with "trailing" spacing, 61 steps and others have one more, by rounding, at the time -1: back to noise
        self.times = [float(time) for time in self._theirs.timesteps[:steps]]

    def step(self, index: int, latent: Tensor, prediction: Tensor) -> Tensor:
        """The latent [C, t, h, w] after step `index`, of what the transformer predicted at `times[index]`. Steps are
        taken in their order, each once."""
        times = self._theirs.timesteps
        if not self._draws_noise:
            made = self._theirs.step(prediction[None], times[index], latent[None], return_dict=False)[0]
            return made[0].to(latent.dtype)
        before = times[index - 1] if index else None
        # time before channels, as in its pipeline, by which its noise lies
        latents, predictions = (one.transpose(0, 1)[None] for one in (latent, prediction))
        latents, self._clean = self._theirs.step(
            predictions, self._clean, times[index], before, latents, generator=self._numbers, return_dict=False
        )
        return latents[0].transpose(0, 1).to(latent.dtype)
