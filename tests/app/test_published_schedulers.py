"""A published pipeline is sampled by the very scheduler that its folder names, or that one is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from app.sampling.clips import ClipChanges, ClipSettings, clip_requests
from app.sampling.model import saved_model
from app.sampling.sample import run
from ops.comm.collectives import Group
from ops.flow.sampling import initial_noise, sample_latents
from ops.packed.patches import patchify, unpatchify
from ops.typed import ConfigError
from tests.app import test_two_experts
from tests.families import test_cogvideox, test_latte, test_ltx, test_mochi, test_wan
from tests.ops.test_sampling import on_bag

UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}
LTX = {"base_image_seq_len": 1024, "base_shift": 0.95, "max_shift": 2.05, "use_dynamic_shifting": True}
COGVIDEOX = {
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "snr_shift_scale": 1.0,
    "timestep_spacing": "trailing",
    "clip_sample": False,
}


@dataclass(frozen=True)
class Case:
    """A small pipeline, the scheduler that is put into its folder, and how Diffusers' pipeline is called."""

    publish: Callable[[Path], Path]
    scheduler: str
    settings: Mapping[str, Any]
    call: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int, int] = (5, 32, 48)  # frames, height, width
    noise: tuple[int, int, int, int] = (4, 2, 4, 6)
    guidance: float = 4.0
    frames_first: bool = False  # in the latents of the pipeline
    tokens: bool = False  # the pipeline's latents are tokens
    length: str = "num_frames"  # what the pipeline calls the number of frames


COG_5B = partial(test_cogvideox.publish, dit=test_cogvideox.KINDS["5b"])
COG = {"size": (13, 32, 48), "noise": (4, 4, 4, 6), "frames_first": True, "call": {"max_sequence_length": 12}}
CASES = {
    "wan-unipc": Case(test_wan.publish, "UniPCMultistepScheduler", UNIPC),
    "wan-unipc of order 3": Case(test_wan.publish, "UniPCMultistepScheduler", {**UNIPC, "solver_order": 3}),
    "wan-euler": Case(test_wan.publish, "FlowMatchEulerDiscreteScheduler", {"shift": 5.0}),
    "wan-dpm": Case(
        test_wan.publish, "DPMSolverMultistepScheduler", {**UNIPC, "solver_order": 2, "algorithm_type": "dpmsolver++"}
    ),
    "two experts": Case(
        test_two_experts.publish,
        "UniPCMultistepScheduler",
        {**UNIPC, "flow_shift": 3.0},
        call={"guidance_scale_2": 1.5},
    ),
    "ltx": Case(
        test_ltx.publish,
        "FlowMatchEulerDiscreteScheduler",
        {**LTX, "shift_terminal": 0.1},
        call={"frame_rate": 25},
        size=(9, 32, 64),
        noise=(8, 3, 2, 4),
        tokens=True,
    ),
    "cogvideox-dpm": Case(COG_5B, "CogVideoXDPMScheduler", COGVIDEOX, **COG),
    "cogvideox-leading": Case(COG_5B, "CogVideoXDDIMScheduler", {**COGVIDEOX, "timestep_spacing": "leading"}, **COG),
    "latte-leading": Case(
        test_latte.publish,
        "DDIMScheduler",
        {"beta_schedule": "linear", "clip_sample": False, "timestep_spacing": "leading", "steps_offset": 1},
        noise=(4, 5, 4, 6),
        guidance=1.0,  # with guidance its pipeline wants both prompts to have equal rows
        length="video_length",
    ),
}


def put_scheduler(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Another scheduler in the folder of a pipeline, as Diffusers saves it."""
    getattr(diffusers, name)(**settings).save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", name]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


Sampled = Callable[[Group | None, Group | None], Tensor]


def sampler_of(folder: Path, case: Case, changes: ClipChanges | None = None) -> Sampled:
    """(group, half of it) -> what `heddle sample` makes before it decodes: five steps, seed 3."""
    saved = saved_model(folder, device="cpu")
    frames, height, width = case.size
    asked = replace(
        changes or ClipChanges(),
        **{"frames": frames, "height": height, "width": width, "seed": 3, "steps": 5},
        guidance_scale=case.guidance,
        guidance_scale_2=case.call.get("guidance_scale_2"),
    )
    settings = ClipSettings.of(saved.config, saved.scheduler).changed(asked)
    told, model = saved.encode(["a dot"], negative=""), saved.load()
    requests, negative = clip_requests(model, told, settings), told.negative.text

    def sampled(group: Group | None, half: Group | None) -> Tensor:
        return sample_latents(
            model.dit, requests, negative, model.geometry, settings.sampler, group, low=model.low, half=half
        )[0]

    return sampled


def latent_of(folder: Path, case: Case, changes: ClipChanges | None = None) -> Tensor:
    return sampler_of(folder, case, changes)(None, None)


def pipeline_latent(folder: Path, case: Case) -> Tensor:
    """The same by Diffusers' own pipeline, [C, t, h, w]."""
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    noise, (frames, height, width) = initial_noise(3, case.noise), case.size
    given = noise.transpose(0, 1) if case.frames_first else patchify(noise, (1, 1, 1)) if case.tokens else noise
    made = pipe(
        prompt="a dot",
        negative_prompt="",
        height=height,
        width=width,
        num_inference_steps=5,
        guidance_scale=case.guidance,
        latents=given[None],
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
        **{case.length: frames},
        **case.call,
    ).frames[0]
    if case.tokens:
        channels, *grid = case.noise
        return unpatchify(made, tuple(grid), (1, 1, 1), channels)  # type: ignore[arg-type]
    return made.transpose(0, 1) if case.frames_first else made


@pytest.mark.parametrize("name", CASES)
def test_the_clip_of_a_published_pipeline_is_that_of_its_own_scheduler(name: str, tmp_path: Path) -> None:
    """And another one than by the steps of a run's own samples."""
    case = CASES[name]
    folder = put_scheduler(case.publish(tmp_path / "base"), case.scheduler, case.settings)
    ours, theirs = latent_of(folder, case), pipeline_latent(folder, case)
    largest = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, atol=1e-4 * largest, rtol=0)
    saved = saved_model(folder, device="cpu")
    assert saved.scheduler is not None and saved.scheduler.name == case.scheduler


def test_a_scheduler_whose_steps_are_those_of_a_run_s_samples_is_not_asked_for_them(tmp_path: Path) -> None:
    for publish in (test_ltx.publish, test_cogvideox.publish, test_latte.publish, test_mochi.publish):
        assert saved_model(publish(tmp_path / publish.__module__), device="cpu").scheduler is None


@pytest.mark.parametrize("name", ["wan-unipc", "cogvideox-dpm"])
def test_every_rank_of_a_bag_makes_the_clip_of_one_worker(name: str, tmp_path: Path) -> None:
    """Also where the scheduler adds noise, which is the same on all ranks."""
    case = CASES[name]
    folder = put_scheduler(case.publish(tmp_path / "base"), case.scheduler, case.settings)
    sampled = sampler_of(folder, case)
    alone = sampled(None, None)
    for degree, halves in ((2, False), (3, False), (2, True)):
        for (found,) in on_bag(degree, halves, lambda group, half: [sampled(group, half)]):
            torch.testing.assert_close(found, alone, atol=1e-5 * float(alone.abs().max()), rtol=0)


def test_a_given_flow_shift_is_that_of_the_scheduler(tmp_path: Path) -> None:
    """Instead of the folder's, also where that one follows the tokens of a clip."""
    for name, shift in (("wan-unipc", {"flow_shift": 2.0}), ("ltx", {"shift": 2.0, "use_dynamic_shifting": False})):
        case = CASES[name]
        folder = put_scheduler(case.publish(tmp_path / name), case.scheduler, case.settings)
        ours = latent_of(folder, case, ClipChanges(flow_shift=2.0))
        theirs = pipeline_latent(put_scheduler(folder, case.scheduler, {**case.settings, **shift}), case)
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("case", "scheduler", "settings", "sentence"),
    [
        (
            "wan-unipc",
            "DDIMScheduler",
            {},
            "has the scheduler DDIMScheduler; clips of its WanTransformer3DModel are made with UniPCMultistepScheduler "
            "or FlowMatchEulerDiscreteScheduler or DPMSolverMultistepScheduler",
        ),
        (
            "wan-unipc",
            "UniPCMultistepScheduler",
            {},
            "set prediction_type to flow_prediction and use_flow_sigmas to true",
        ),
        (
            "wan-unipc",
            "DPMSolverMultistepScheduler",
            {**UNIPC, "algorithm_type": "sde-dpmsolver++"},
            r"algorithm_type sde-dpmsolver\+\+ adds noise in every step, which is not done. Set it to dpmsolver\+\+\.",
        ),
        (
            "wan-euler",
            "FlowMatchEulerDiscreteScheduler",
            {"use_dynamic_shifting": True},
            "use_dynamic_shifting needs a shift for each clip",
        ),
        (
            "ltx",
            "FlowMatchEulerDiscreteScheduler",
            {**LTX, "stochastic_sampling": True},
            "stochastic_sampling adds noise in every",
        ),
        ("ltx", "UniPCMultistepScheduler", UNIPC, "are made with FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_a_scheduler_that_is_not_offered_is_named(
    case: str, scheduler: str, settings: Mapping[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = put_scheduler(CASES[case].publish(tmp_path / "base"), scheduler, settings)
    with pytest.raises(ConfigError, match=sentence):
        run(folder, ["a dot"], tmp_path / "x.mp4", device="cpu")


def test_settings_that_mochi_s_own_steps_do_not_have_are_named(tmp_path: Path) -> None:
    folder = test_mochi.publish(tmp_path / "base")
    settings = {"invert_sigmas": True, "shift_terminal": 0.1}
    put_scheduler(folder, "FlowMatchEulerDiscreteScheduler", settings)
    with pytest.raises(
        ConfigError, match=r"shift_terminal 0\.1, with which clips of a MochiTransformer3DModel are not"
    ):
        saved_model(folder, device="cpu")
