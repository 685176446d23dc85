"""`heddle sample --from`: a published pipeline is sampled as its own files and its family say, without a run."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest

from app.sampling.clips import ClipChanges, ClipSettings, clips_of
from app.sampling.model import saved_model
from app.sampling.published import published_notes, published_run
from app.sampling.sample import run
from ops.config import FlowConfig, TokenShift
from ops.flow.sampling import SamplerConfig, SampleRequest, sample_latents
from ops.models.base.family import PipelineFiles, PublishedUse, shift_of
from ops.models.families import FAMILIES
from ops.models.folders import dit_json, resolve
from ops.models.load import build_dit, build_text, build_vae
from ops.models.wan.config import WanConfig
from ops.typed import ConfigError
from tests.families import test_latte, test_stdit3, test_stdit3_autoencoder
from tests.families.registry import CASES

PIPELINES = {name: cases.pipeline for name, cases in CASES.items() if cases.pipeline and cases.pipeline.sampled}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("published")
    return {name: pipeline.publish(made / name) for name, pipeline in PIPELINES.items()}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_is_the_model_that_a_run_on_it_would_have(name: str, folders: dict[str, Path]) -> None:
    """Text, transformer, VAE and objective as the settings that its own pipeline is compared with."""
    saved, sampled = saved_model(folders[name], device="cpu"), PIPELINES[name].sampled
    assert sampled is not None
    assert (saved.config.model, saved.geometry) == resolve(sampled(folders[name]))
    assert saved.config.train.autocast == "none"


def test_a_transformer_of_open_sora_beside_the_parts_of_another_pipeline_is_sampled_as_open_sora_does(
    tmp_path: Path,
) -> None:
    """Its own noise levels, not those of a scheduler, which the folder need not have; what its clips are is printed."""
    folder = test_stdit3.publish(tmp_path / "open-sora")
    saved = saved_model(folder, device="cpu")
    config, geometry = saved.config, saved.geometry
    assert config.model == resolve(test_stdit3.settings(folder))[0] and config.model.text.empty == "none"
    assert config.train.flow == FlowConfig(token_shift=TokenShift(law="root", base_tokens=1024))
    sampler = ClipSettings.of(config).sampler
    assert (sampler.steps, sampler.guidance_scale, sampler.token_shift) == (30, 7.0, config.train.flow.token_shift)
    assert "speak the latents of its own video autoencoder" in published_notes(folder)[0]
    size = ClipChanges(frames=3, height=16, width=32, steps=2, seed=3)
    ((_, made),) = clips_of(saved, ["a dot"], ClipSettings.of(config).changed(size))
    model = test_stdit3.settings(folder)
    text, negative = build_text(resolve(model)[0].text).encode(["a dot", ""])
    assert len(negative) == 0
    request = SampleRequest(text=text, frames=3, height=16, width=32, seed=3)
    sampler = SamplerConfig(steps=2, guidance_scale=7.0, flow_shift=math.sqrt(3 * 1 * 2 / 1024))
    (latent,) = sample_latents(build_dit(resolve(model)[0].dit, 0), [request], negative, geometry, sampler)
    assert np.array_equal(made, build_vae(model.vae).decode(latent[None])[0].numpy())


def test_a_folder_of_open_sora_with_its_own_autoencoder_is_sampled(tmp_path: Path) -> None:
    """The published parts together: its transformer speaks the latents of its own autoencoder, chunk by chunk."""
    folder = test_stdit3.publish(tmp_path / "open-sora")
    shutil.rmtree(folder / "vae")
    test_stdit3_autoencoder.save(folder)
    saved = saved_model(folder, device="cpu")
    assert saved.geometry.token_grid(51, 16, 32) == (15, 4, 8)
    assert not any("latents of its own" in note for note in published_notes(folder))
    changes = ClipChanges(frames=21, height=8, width=12, steps=2, seed=3)
    ((_, made),) = clips_of(saved, ["a dot"], ClipSettings.of(saved.config).changed(changes))
    text, negative = build_text(saved.config.model.text).encode(["a dot", ""])
    request = SampleRequest(text=text, frames=21, height=8, width=12, seed=3)
    sampler = replace(ClipSettings.of(saved.config).sampler, steps=2)
    (latent,) = sample_latents(build_dit(saved.config.model.dit, 0), [request], negative, saved.geometry, sampler)
    assert latent.shape == (4, 6, 4, 6) and made.shape == (21, 8, 12, 3)
    assert np.array_equal(made, build_vae(saved.config.model.vae).decode(latent[None])[0].numpy())
    with pytest.raises(ConfigError, match=r"clips of 20 x 8 x 12 .* cannot be made: 20 frames: a VAE of chunks of 17"):
        run(folder, ["a dot"], tmp_path / "x.mp4", changes=replace(changes, frames=20), device="cpu")


def test_its_clip_is_the_sampler_s_and_a_file(folders: dict[str, Path], tmp_path: Path) -> None:
    """The command's own function, with its defaults but for the size, beside modules that are built one by one."""
    size = ClipChanges(frames=5, height=16, width=32, steps=2, seed=3)
    file, _ = run(folders["latte"], ["a dot"], tmp_path / "x.mp4", changes=size, device="cpu")
    with av.open(str(file)) as video:
        assert len(list(video.decode(video=0))) == 5
    saved = saved_model(folders["latte"], device="cpu")
    ((_, made),) = clips_of(saved, ["a dot"], ClipSettings.of(saved.config).changed(size))
    resolved, geometry = resolve(test_latte.settings(folders["latte"]))
    text, negative = build_text(resolved.text).encode(["a dot", ""])
    request = SampleRequest(text=text, frames=5, height=16, width=32, seed=3)
    sampler = SamplerConfig(steps=2, guidance_scale=7.5)
    (latent,) = sample_latents(build_dit(resolved.dit, 0), [request], negative, geometry, sampler)
    assert np.array_equal(made, build_vae(resolved.vae).decode(latent[None])[0].numpy())


@pytest.mark.parametrize(
    ("scheduler", "shift"),
    [
        ({"flow_shift": 5.0, "use_flow_sigmas": True}, 5.0),  # UniPC, of Wan
        ({"shift": 7.0}, 7.0),  # FlowMatchEuler, of HunyuanVideo
        ({"shift": 1.0, "use_dynamic_shifting": False}, 1.0),
    ],
)
def test_the_shift_is_the_scheduler_s(scheduler: dict[str, Any], shift: float) -> None:
    assert shift_of(scheduler) == {"flow_shift": shift, "token_shift": None} and shift_of({}) == {}


def test_a_dynamic_shift_is_a_line_over_tokens() -> None:
    fields = {"use_dynamic_shifting": True, "base_image_seq_len": 1024, "base_shift": 0.95, "max_shift": 2.05}
    line = TokenShift(base_tokens=1024, max_tokens=4096, base=0.95, max=2.05)
    assert shift_of(fields) == {"token_shift": line}


def test_hunyuans_image_to_video_is_told_apart_by_its_transformer() -> None:
    """By the defaults of its own pipeline."""
    defaults = inspect.signature(diffusers.HunyuanVideoImageToVideoPipeline.__call__).parameters
    fields = {"image_condition_type": "latent_concat"}
    found, recipe = (
        FAMILIES["hunyuan"].published({}, fields),
        FAMILIES["hunyuan"].recipe(PipelineFiles(transformer=fields)),
    )
    assert (recipe.text["kind"], found.dit) == ("hunyuan_i2v", {"first_frame": "latent_concat"})
    assert recipe.text["max_length"] == defaults["max_sequence_length"].default
    names = {"num_frames": "frames", "num_inference_steps": "steps"}
    for name in ("height", "width", "num_frames", "num_inference_steps", "guidance_scale"):
        assert found.clips[names.get(name, name)] == defaults[name].default, name
    distilled = FAMILIES["hunyuan"].published({}, {"image_condition_type": "token_replace"})
    assert distilled.clips == {**found.clips, "guidance_scale": 6.0}, (
        "as the pipeline's example, for weights that take it"
    )


def test_wan_is_told_apart_by_what_its_folder_holds() -> None:
    def published(index: dict[str, Any], inside: int, outside: int) -> PublishedUse:
        return FAMILIES["wan"].published(index, {"in_channels": inside, "out_channels": outside})

    plain, image, five = published({}, 16, 16), published({}, 36, 16), published({"expand_timesteps": True}, 48, 48)
    experts = published({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, 16, 16)
    assert (plain.dit, image.dit, experts.dit) == ({}, {"first_frame": "channels"}, {"expert": "high"})
    assert not plain.first_frame and five.first_frame and five.clips["height"] == 704
    assert published({"transformer_2": [None, None]}, 16, 16).dit == {}
    # by the defaults of A14B's authors, for high and for low noise
    assert [experts.clips[key] for key in ("steps", "guidance_scale", "guidance_scale_2")] == [40, 4.0, 3.0]
    moving = published({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, 36, 16)
    assert [moving.clips[key] for key in ("steps", "guidance_scale", "guidance_scale_2")] == [40, 3.5, 3.5]
    assert moving.dit == {"first_frame": "channels", "expert": "high"} and "guidance_scale_2" not in plain.clips
    assert FAMILIES["wan"].recipe(PipelineFiles()).text == {"max_length": 512, "pad_to": 512}
    assert WanConfig(**image.dit).starts_from_image  # type: ignore[arg-type]


def test_a_pipeline_whose_transformer_leaves_out_its_numbers_is_the_one_of_its_class(tmp_path: Path) -> None:
    files = {"model_index.json": {}, "transformer/config.json": {"_class_name": "WanTransformer3DModel"}}
    for name, fields in (files | {"scheduler/scheduler_config.json": {"flow_shift": 5.0}}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(fields))
    found = published_run(tmp_path, False)
    assert found.model.dit == WanConfig(path=str(tmp_path)) and found.train.flow.flow_shift == 5.0


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.own_code is None])
def test_clips_are_as_the_pipeline_makes_them_when_it_is_told_a_prompt_alone(name: str) -> None:
    """By the defaults of its `__call__`, where they are numbers: two classes take their size from the transformer."""
    family = FAMILIES[name]
    fields = {**dit_json(family.settings()), "in_channels": 16, "out_channels": 16, "guidance_embeds": True}
    fields |= {"sample_size": 64}
    scheduler = dict(family.scheduler(family.settings(), FlowConfig()).settings)
    found, recipe = family.published({}, fields), family.recipe(PipelineFiles(transformer=fields, scheduler=scheduler))
    call = getattr(diffusers, family.pipeline_class(family.settings())).__call__
    defaults = {key: one.default for key, one in inspect.signature(call).parameters.items()}
    ours: dict[str, object] = {**found.clips, "max_sequence_length": recipe.text["max_length"]}
    names = {"num_frames": "frames", "video_length": "frames", "num_inference_steps": "steps", "frame_rate": "fps"}
    own = {names.get(key, key): value for key, value in defaults.items() if names.get(key, key) in ours and value}
    assert {"steps", *(() if family.has_guider else ("guidance_scale",))} <= set(own)
    if name == "kandinsky":  # its authors' configs say 256
        assert (own.pop("max_sequence_length"), ours["max_sequence_length"]) == (512, 256)
    assert {key: ours[key] for key in own} == own


def test_what_cannot_be_sampled_is_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ConfigError, match=r"is a StableDiffusionPipeline without transformer/config\.json"):
        published_run(other, False)
    (other / "transformer").mkdir()
    (other / "transformer" / "config.json").write_text('{"_class_name": "AllegroTransformer3DModel"}')
    with pytest.raises(ConfigError, match="has a AllegroTransformer3DModel; clips are made with WanTransformer3DModel"):
        published_run(other, False)
    (other / "transformer" / "config.json").write_text((folders["latte"] / "transformer/config.json").read_text())
    (other / "scheduler").mkdir()
    (other / "scheduler" / "scheduler_config.json").write_text('{"beta_end": 0.012}')
    with pytest.raises(ConfigError, match=r"its scheduler has \{'beta_end': 0.012\}"):
        published_run(other, False)
    assert published_notes(folders["latte"]) == []
    with pytest.raises(ConfigError, match="no prompt: give --prompt"):
        run(folders["latte"], [], tmp_path / "x.mp4", device="cpu")
