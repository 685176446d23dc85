"""LTX-Video from 0.9.1 on: folders and exports make the clips of Diffusers' pipelines, decoded as these do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTXConditionPipeline, LTXPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.ltx import pipeline_ltx, pipeline_ltx_condition
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from app.cli import app
from app.export import export
from app.sampling.clips import ClipChanges, ClipSettings, clip_requests, first_frames, make_clips
from app.sampling.model import saved_model
from app.sampling.published import published_run
from app.sampling.sample import run
from app.settings.config import RunConfig
from app.settings.notes import notes, sample_notes
from app.settings.resume import Change, is_refused
from app.settings.sections import RunSection, SampleConfig
from data.config import DataConfig
from ops.config import FlowConfig
from ops.flow.noise import NoiseKey, normal
from ops.flow.sampling import initial_noise, sample_latents
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import resolve
from ops.models.ltx.config import LTXConfig
from ops.packed.patches import patchify
from ops.typed import ConfigError, as_plain
from tests.app.test_export import write_checkpoint
from tests.app.test_published_schedulers import put_scheduler
from tests.families import test_ltx

EULER = "FlowMatchEulerDiscreteScheduler"
NOISE = (8, 3, 2, 4)  # of clips of 9x32x64
SIZE = ClipChanges(frames=9, height=32, width=64, seed=3, steps=4, guidance_scale=2.0)
TOLD = replace(SIZE, decode_timestep=0.05, decode_noise_scale=0.025)


def changed(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def publish(folder: Path, version: str = "0.9.5") -> Path:
    """With latents that are not scaled, as published: the pipelines scale those of clips alone."""
    changed(test_ltx.publish(folder, version) / "vae" / "config.json", scaling_factor=1.0)
    return folder


def run_on(base: Path, flow: FlowConfig) -> RunConfig:
    """A run that fine-tunes all weights of a folder."""
    path = str(base)
    model = ModelConfig(
        dit=LTXConfig(path=path),
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=256, cleaned=False),
    )
    config = RunConfig(run=RunSection(name="tiny"), model=model, data=DataConfig(fps=25.0))
    return replace(config, train=replace(config.train, flow=flow))


def made(folder: Path, asked: ClipChanges, picture: Path | None = None) -> tuple[Tensor, np.ndarray]:
    """What `heddle sample` makes: the latent, and the clip."""
    saved = saved_model(folder, device="cpu")
    settings = ClipSettings.of(saved.config, saved.scheduler).changed(asked)
    first = first_frames(saved.config, ["a dot"], settings, [picture] if picture else [], "--image")
    told, model = saved.encode(["a dot"], "", first), saved.load()
    requests, negative = clip_requests(model, told, settings, first), told.negative.text
    (latent,) = sample_latents(model.dit, requests, negative, model.geometry, settings.sampler)
    (clip,) = make_clips(model, told, settings, first)
    return latent, clip


def of_pipeline(folder: Path, asked: ClipChanges, monkeypatch: pytest.MonkeyPatch, **call: Any) -> list[Any]:
    """The same by Diffusers' pipeline, which draws our noise: that it begins with, and that of its decode."""
    index = json.loads((folder / "model_index.json").read_text())
    conditional = index["_class_name"] == "LTXConditionPipeline"
    pipe = (LTXConditionPipeline if conditional else LTXPipeline).from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    decoding = normal(NoiseKey.of(3, 0, "decode"), 0, int(np.prod(NOISE))).view(1, *NOISE)
    begin = initial_noise(3, NOISE)[None]
    found = []
    for output in ("latent", "np"):
        drawn = iter([begin.clone(), decoding] if conditional else [decoding])
        module = pipeline_ltx_condition if conditional else pipeline_ltx
        monkeypatch.setattr(module, "randn_tensor", lambda *shape, drawn=drawn, **how: next(drawn))
        shown = pipe(
            prompt="a dot",
            negative_prompt="",
            frame_rate=25,
            height=asked.height,
            width=asked.width,
            num_frames=asked.frames,
            num_inference_steps=asked.steps,
            guidance_scale=asked.guidance_scale,
            decode_timestep=asked.decode_timestep or 0.0,
            decode_noise_scale=asked.decode_noise_scale,
            output_type=output,
            **({} if conditional else {"latents": patchify(begin[0], (1, 1, 1))[None]}),
            **call,
        ).frames[0]
        found.append(shown)
    return found


def same(ours: tuple[Tensor, np.ndarray], theirs: list[Any], conditional: bool = True) -> None:
    latent, clip = ours
    wanted = theirs[0] if conditional else test_ltx.unpatchify(theirs[0], NOISE[1:], (1, 1, 1), 8)
    torch.testing.assert_close(latent, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
    assert np.abs(clip - theirs[1] * 255).max() < 1.5  # rounding to 8 bits
    assert clip.std() > 1


@pytest.mark.parametrize("asked", [SIZE, TOLD], ids=["by default", "with time and noise"])
def test_a_folder_of_the_later_weights_makes_the_clip_of_its_pipeline(
    asked: ClipChanges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text over 256 rows with a mask; the time and the noise of the decode as the pipelines have them by default, and
    as their authors advise."""
    base = publish(tmp_path / "base")
    saved = saved_model(base, device="cpu")
    assert saved.scheduler is None and saved.config.model.dit.causal_temporal_positioning  # type: ignore[attr-defined]
    assert (saved.config.model.text.max_length, saved.config.model.text.unmasked) == (256, 0)
    same(made(base, asked), of_pipeline(base, asked, monkeypatch))


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1"])
def test_a_folder_of_the_earlier_weights_is_decoded_as_its_pipeline_does(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 0.9.1's blocks draw themselves is left out: the pipeline takes no numbers for it."""
    base = publish(tmp_path / "base", version)
    changed(base / "vae" / "config.json", **({"decoder_inject_noise": [False] * 3} if version == "0.9.1" else {}))
    asked = TOLD if version == "0.9.1" else SIZE
    assert saved_model(base, device="cpu").config.model.text.unmasked == 128
    same(made(base, asked), of_pipeline(base, asked, monkeypatch, max_sequence_length=128), conditional=False)


def test_an_export_and_a_picture_make_the_clip_of_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first latent frame is the picture, at time 0; and a run that was trained with a flow shift is sampled
    without one, as the pipeline does whatever its scheduler says."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    drawn = np.random.default_rng(0).integers(0, 256, (2, 3, 3), dtype=np.uint8)
    pictures = [tmp_path / "a.png", tmp_path / "b.png"]
    for pixels, file in zip((drawn, 255 - drawn), pictures, strict=True):
        Image.fromarray(pixels).resize((64, 32), Image.Resampling.BICUBIC).save(file)
    base = publish(tmp_path / "base")
    flow = FlowConfig(first_frame=0.2, flow_shift=3.0)
    run_folder = write_checkpoint(tmp_path / "run", run_on(base, flow))
    done = export.export(run_folder, tmp_path / "out")
    assert any("pass image_cond_noise_scale=0.0" in note for note in done.notes)
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["_class_name"] == "LTXConditionPipeline"
    assert json.loads((tmp_path / "out" / "scheduler" / "scheduler_config.json").read_text())["shift"] == 1.0
    shown = {"image": Image.open(pictures[0]), "image_cond_noise_scale": 0.0}
    for folder in (base, tmp_path / "out"):
        ours = made(folder, TOLD, pictures[0])
        same(ours, of_pipeline(folder, TOLD, monkeypatch, **shown))
        other, _ = made(folder, TOLD, pictures[1])
        assert (other - ours[0])[:, 1:].abs().max() > 1e-3 * ours[0].abs().max()
    same(made(tmp_path / "out", SIZE), of_pipeline(tmp_path / "out", SIZE, monkeypatch))


def test_given_times_are_those_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of distilled weights, which need no guidance; by the pipeline's own argument."""
    base, times = publish(tmp_path / "base"), (1000.0, 993.0, 725.0, 0.03)
    asked = replace(TOLD, steps=None, guidance_scale=1.0, timesteps=times)
    ours = made(base, asked)
    same(ours, of_pipeline(base, replace(asked, steps=4), monkeypatch, timesteps=list(times)))
    assert (made(base, replace(SIZE, guidance_scale=1.0))[0] - ours[0]).abs().max() > 1e-2
    config = replace(run_on(base, FlowConfig()), sample=SampleConfig(timesteps=times))
    settings = ClipSettings.of(config)
    assert settings.sampler.steps == 4 and settings.changed(ClipChanges(steps=7)).sampler.timesteps == ()
    both = settings.changed(ClipChanges(steps=7, flow_shift=2.0)).sampler
    assert (both.steps, both.timesteps, both.flow_shift) == (7, (), 2.0)
    with pytest.raises(ValueError, match=r"--flow-shift is 2, and this run's sample\.timesteps are not shifted"):
        settings.changed(ClipChanges(flow_shift=2.0))
    for wrong in ((1001.0, 5.0), (5.0, 5.0), (5.0, 0.0)):
        with pytest.raises(ValueError, match="must fall from at most 1000 and stay above 0"):
            settings.changed(ClipChanges(timesteps=wrong))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sample: {timesteps: [5, 7]}", r"sample\.timesteps \[5\.0, 7\.0\] must fall"),
        ("sample: {timesteps: [1001, 7]}", "begins with 1001, and pure noise has the time 1000"),
        ("sample: {timesteps: [7, 0]}", r"sample\.timesteps is .*0"),
        ("model: {dit: {architecture: latte}}\nsample: {timesteps: [9, 7]}", "is sampled by DDIM, which has its own"),
    ],
)
def test_times_that_are_none_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        RunConfig.from_yaml(f"run: {{name: tiny}}\n{text}")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--timesteps", "1000,nan"], "falling numbers above 0"),
        (["--timesteps", "5,7"], "falling numbers above 0"),
        (["--timesteps", "9,7", "--steps", "2"], "one of the two"),
        (["--timesteps", "9,7", "--flow-shift", "2"], "are not shifted"),
    ],
)
def test_options_that_are_no_times_are_refused(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["sample", "--checkpoint", "runs/none", *options])
    assert result.exit_code == 2 and sentence in " ".join(result.output.split())


def test_what_a_folder_is_follows_from_its_pipeline_and_its_autoencoder(tmp_path: Path) -> None:
    """0.9.5's own folder names LTXPipeline: its autoencoder tells it apart, where there is none its scheduler, which
    shifts nothing. A run on it may say how its positions count."""
    base = publish(tmp_path / "base")
    changed(base / "model_index.json", _class_name="LTXPipeline")
    assert is_causal(base)
    config = run_on(base, FlowConfig())
    assert not resolve(config.model)[0].dit.causal_temporal_positioning  # type: ignore[attr-defined]
    (note,) = [one for one in notes(config) if "were trained with" in one]
    assert "model.dit.causal_temporal_positioning true (here false)" in note and "model.text" not in note
    told = replace(config.model, dit=replace(config.model.dit, causal_temporal_positioning=True))  # type: ignore[call-arg]
    assert resolve(told)[0].dit.causal_temporal_positioning  # type: ignore[attr-defined]
    assert not [one for one in notes(replace(config, model=told)) if "were trained with" in one]
    for version in ("0.9.0", "0.9.1"):
        older = put_scheduler(publish(tmp_path / version, version), EULER, {})
        assert not is_causal(older), "a scheduler that shifts nothing makes no other weights of it"
    (base / "vae" / "config.json").unlink()
    assert is_causal(base)
    put_scheduler(base, EULER, {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05})
    assert not is_causal(base)
    put_scheduler(base, "UniPCMultistepScheduler", {"flow_shift": 1.0})
    assert not is_causal(base)


def is_causal(folder: Path) -> bool:
    dit = published_run(folder, autocast=False).model.dit
    return dit.causal_temporal_positioning  # type: ignore[no-any-return, attr-defined]


def test_a_resume_keeps_the_positions(tmp_path: Path) -> None:
    """Also where the weights come from a folder: its config.json does not say how they count."""
    tree = as_plain(run_on(tmp_path, FlowConfig()))
    for name, refused in (("causal_temporal_positioning", True), ("num_layers", False)):
        assert is_refused(Change(f"model.dit.{name}", 0, 1), tree, tree) == refused


@pytest.mark.parametrize(
    "settings",
    [{"shift": 3.0}, {"shift_terminal": 0.1}, {"use_dynamic_shifting": True}, {"stochastic_sampling": True}],
)
def test_a_scheduler_that_the_pipeline_would_not_follow_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    """It passes times beside which such a scheduler would have other noise levels."""
    base = put_scheduler(publish(tmp_path / "base"), EULER, settings)
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=rf"{name} {value}, with which clips of a LTXVideoTransformer3DModel are not"):
        saved_model(base, device="cpu")


def test_settings_of_a_shift_that_is_not_made_are_no_matter(tmp_path: Path) -> None:
    base = put_scheduler(publish(tmp_path / "base"), EULER, {"base_shift": 0.95, "max_shift": 2.05})
    assert saved_model(base, device="cpu").scheduler is None


def test_noise_of_a_decode_is_for_decoders_that_take_some(tmp_path: Path) -> None:
    base = publish(tmp_path / "base", "0.9.0")
    with pytest.raises(ConfigError, match=r"sample\.decode_timestep is 0\.05, and the decoder of model\.vae takes no"):
        run(base, ["a dot"], tmp_path / "x.mp4", changes=TOLD, device="cpu")
    with pytest.raises(ConfigError, match=r"--decode-noise-scale is 2; .*1"):
        run(base, ["a dot"], tmp_path / "x.mp4", changes=replace(SIZE, decode_noise_scale=2), device="cpu")
    with pytest.raises(ConfigError, match=r"sample\.decode_noise_scale is 0\.1, and the decoder"):
        RunConfig.from_yaml("run: {name: tiny}\nsample: {decode_noise_scale: 0.1}")
    with pytest.raises(ConfigError, match=r"sample\.decode_timestep is 2\.0; it must be at most 1"):
        RunConfig.from_yaml("run: {name: tiny}\nsample: {decode_timestep: 2.0}")
    sample = SampleConfig(prompts=("a dot",), every=1, decode_timestep=0.05)
    config = replace(run_on(base, FlowConfig()), sample=sample)
    with pytest.raises(ConfigError, match=r"sample\.decode_timestep is 0\.05"):
        sample_notes(config)
    assert not sample_notes(replace(config, model=run_on(publish(tmp_path / "later"), FlowConfig()).model))


def test_a_given_time_is_that_of_the_noise_too() -> None:
    """Where no share of noise is given beside it, as in the pipelines."""
    config = RunConfig(run=RunSection(name="tiny"), model=ModelConfig())
    settings = ClipSettings.of(replace(config, sample=SampleConfig(decode_timestep=0.1, decode_noise_scale=0.2)))
    shares = [
        settings.changed(ClipChanges(**given)).decode_noise(0).share  # type: ignore[arg-type]
        for given in ({}, {"decode_timestep": 0.05}, {"decode_noise_scale": 0.3})
    ]
    assert shares == [0.2, 0.05, 0.3]
    assert settings.decode_noise(0) != settings.decode_noise(1)
