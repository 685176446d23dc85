"""Wan2.2 A14B: one run trains one of two experts, or both; sampling and export join them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline, WanPipeline, WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from actors import ray_calls
from actors.aside_turns import TurnTask
from actors.config import TrainConfig
from actors.worker.loading import Modules
from app.drawing.video import mp4_of
from app.export import export
from app.sampling import live as live_samples
from app.sampling.clips import ClipChanges, ClipSettings, clips_of, make_clips
from app.sampling.live import LiveSamples
from app.sampling.model import saved_model
from app.sampling.sample import run
from app.settings.config import RunConfig
from app.settings.resume import Change, is_refused
from app.settings.rules import check_experts, check_sample
from app.settings.sections import RunSection, SampleConfig
from ops.config import FlowConfig
from ops.flow.sampling import initial_noise
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.experts import transformers
from ops.models.folders import check_weights, dit_json, resolve
from ops.models.load import build_dit, build_text, build_vae
from ops.models.wan.config import WanConfig
from ops.models.wan.family import FAMILY
from ops.typed import ConfigError
from tests.actors.chaos import DeviceAsides
from tests.actors.worker.test_aside import Short
from tests.app.test_export import trained, write_checkpoint

DIT = WanConfig(num_layers=1, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16)
SHOWN = SampleConfig(
    prompts=("a disc",), steps=4, frames=5, height=32, width=48, guidance_scale=4.0, guidance_scale_2=1.5
)


def publish(base: Path) -> Path:
    """A small pipeline of two experts as Diffusers itself saves it."""
    torch.manual_seed(0)
    fields = {key: value for key, value in dit_json(DIT.fitted(4, (4, 8, 8), 16, 0)).items() if not key.startswith("_")}
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    scheduler = FAMILY.scheduler(DIT, FlowConfig())
    WanPipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=encoder,
        vae=vae,
        transformer=WanTransformer3DModel(**fields),
        transformer_2=WanTransformer3DModel(**fields),
        scheduler=getattr(diffusers, scheduler.name)(**scheduler.settings),
        boundary_ratio=0.9,
    ).save_pretrained(base)
    return base


def run_of(base: Path, expert: str) -> RunConfig:
    path = str(base)
    model = ModelConfig(
        dit=WanConfig(path=path, expert=expert),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path),
    )
    return RunConfig(run=RunSection(name="tiny"), model=model, sample=SHOWN)


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_an_expert_is_read_from_its_folder_with_the_boundary_of_the_pipeline(tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    high, low = (resolve(run_of(base, expert).model)[0].dit for expert in ("high", "low"))
    assert (high.sigmas, low.sigmas) == ((0.9, 1.0), (0.0, 0.9))
    for config, part in ((high, "transformer"), (low, "transformer_2")):
        expected = WanTransformer3DModel.from_pretrained(base, subfolder=part)
        found = build_dit(config, 0).state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.state_dict().items())
    with pytest.raises(ValueError, match=r"is of two transformers.*Set model\.dit\.expert"):
        resolve(run_of(base, "none").model)
    assert is_refused(
        Change("model.dit.expert", "high", "low"),
        *[{"model": {"dit": {"path": str(base)}}}] * 2,
    ), "another expert is another training, also from the same folder"


@pytest.mark.parametrize("expert", ["high", "low"])
def test_an_exported_pipeline_makes_the_clip_of_heddle_sample(tmp_path: Path, expert: str) -> None:
    base = publish(tmp_path / "base")
    config = run_of(base, expert)
    write_checkpoint(tmp_path / "run", config)
    export.export(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["boundary_ratio"] == 0.9
    saved = saved_model(tmp_path / "run")
    ours, exported = saved.load(), saved_model(tmp_path / "out").load()
    assert ours.low is not None and exported.low is not None and ours.low.boundary == 0.9
    moved = weights(trained(config, 2))
    assert torch.equal(weights(ours.dit if expert == "high" else ours.low.dit), moved)
    for one, same in ((ours.dit, exported.dit), (ours.low.dit, exported.low.dit)):
        assert torch.equal(weights(one), weights(same))

    settings = ClipSettings.of(ours.config)
    told = saved.encode(["a disc"], "")
    (clip,) = make_clips(ours, told, settings)
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out")
    pipe.set_progress_bar_config(disable=True)
    text, negative = told.prompts[0].text, told.negative.text
    expected = pipe(
        prompt_embeds=text[None],
        negative_prompt_embeds=negative[None],
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=4,
        guidance_scale=4.0,
        guidance_scale_2=1.5,
        latents=initial_noise(0, (4, 2, 4, 6))[None],
        output_type="np",
    ).frames[0]
    assert np.abs(clip - expected * 255).max() < 1.5  # rounding to 8 bits
    same = settings.changed(ClipChanges(guidance_scale=4.0))
    assert same.sampler.guidance_scale_2 is None
    assert not np.array_equal(clip, make_clips(ours, told, same)[0]), "each has guidance of its own"
    alone = replace(ours, low=None)
    assert not np.array_equal(clip, make_clips(alone, told, settings)[0]), "the second one takes part"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_of_both_is_exported_whole_and_sampled_as_diffusers_does(tmp_path: Path, rank: int) -> None:
    base = publish(tmp_path / "base")
    config = run_of(base, "both")
    config = replace(config, model=replace(config.model, dit=replace(config.model.dit, lora_rank=rank)))
    published = build_dit(resolve(run_of(base, "both").model)[0].dit, 0)
    for part, expert in zip(("transformer", "transformer_2"), transformers(published), strict=True):
        expected = WanTransformer3DModel.from_pretrained(base, subfolder=part).state_dict()
        assert all(torch.equal(tensor, expert.state_dict()[name]) for name, tensor in expected.items())
    write_checkpoint(tmp_path / "run", config)
    done = export.export(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["boundary_ratio"] == 0.9
    assert {"transformer", "transformer_2"} <= set(done.components)
    saved, out = saved_model(tmp_path / "run"), saved_model(tmp_path / "out")
    ours, exported = saved.load(), out.load()
    assert ours.low is not None and exported.low is not None and ours.low.boundary == exported.low.boundary == 0.9
    settings, told = ClipSettings.of(ours.config), saved.encode(["a disc"], "")
    (clip,) = make_clips(ours, told, settings)
    ((_, again),) = clips_of(out, ["a disc"], ClipSettings.of(exported.config))
    assert np.abs(clip.astype(int) - again.astype(int)).max() <= 1
    pipe = DiffusionPipeline.from_pretrained(base if rank else tmp_path / "out")
    if rank:  # the factors, on the published pipeline, are what was merged
        for expert, second in (("high", False), ("low", True)):
            file = f"pytorch_lora_weights_{expert}.safetensors"
            assert f"comfyui_lora_weights_{expert}.safetensors" in done.components
            pipe.load_lora_weights(
                tmp_path / "out", weight_name=file, adapter_name=expert, load_into_transformer_2=second
            )
    pipe.set_progress_bar_config(disable=True)
    text, negative = told.prompts[0].text, told.negative.text
    expected = pipe(
        prompt_embeds=text[None],
        negative_prompt_embeds=negative[None],
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=4,
        guidance_scale=4.0,
        guidance_scale_2=1.5,
        latents=initial_noise(0, (4, 2, 4, 6))[None],
        output_type="np",
    ).frames[0]
    assert np.abs(clip - expected * 255).max() < 1.5  # rounding to 8 bits
    with pytest.raises(ConfigError, match="this run trained both experts"):
        saved_model(tmp_path / "run", other=tmp_path / "run").load()
    if rank:  # and they are what a run may begin with
        begun = replace(resolve(config.model)[0].dit, lora_from=str(tmp_path / "out"))
        for one, other in zip(build_dit(begun, 0).parameters(), trained(config, 2).parameters(), strict=True):
            torch.testing.assert_close(one, other)
        (tmp_path / "out" / "pytorch_lora_weights_low.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match="must be a folder that holds pytorch_lora_weights_high"):
            build_dit(begun, 0)


def test_a_second_expert_that_is_not_all_there_is_found_before_anything_is_built(tmp_path: Path) -> None:
    base = publish(tmp_path)
    torn = base / "transformer_2" / "diffusion_pytorch_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-10])
    check_weights(resolve(run_of(base, "high").model)[0])
    for expert in ("both", "low"):
        with pytest.raises(ValueError, match=r"transformer_2/.* is not a whole safetensors file"):
            check_weights(resolve(run_of(base, expert).model)[0])


def test_a_worker_of_both_makes_the_clip_of_heddle_sample_beside_its_run(tmp_path: Path) -> None:
    """By its own pair, whose weights are another step's and have the checkpoint's in their place: there is no room for
    both. Of a run of one expert its workers lack the other, and its samples are a task of their own."""
    base = publish(tmp_path / "base")
    config = run_of(base, "both")
    config = replace(config, sample=replace(SHOWN, every=4), checkpoint=replace(config.checkpoint, every=4))
    folder = write_checkpoint(tmp_path / "run", config)
    ((_, clip),) = clips_of(saved_model(folder, device="cpu"), ["a disc"], ClipSettings.of(config))
    model, geometry = resolve(config.model)
    modules = Modules(
        config=model,
        geometry=geometry,
        dit=trained(config, 7),
        vae=build_vae(model.vae),
        text=build_text(model.text),
    )
    before = weights(modules.dit)
    live = LiveSamples(config, tmp_path / "run")
    live.on_checkpoint(7)
    (aside,) = live.wanted()
    task = TurnTask(generation=1, step=9, aside=aside, gap_s=0.0, share=0.0, whole=True)
    done = DeviceAsides(modules, torch.device("cpu"), Short()).turn(task)
    assert not done.failed and done.made.mp4 == mp4_of(clip, config.sample.fps)  # type: ignore[attr-defined]
    assert torch.equal(weights(modules.dit), before)


def test_samples_of_a_run_of_one_expert_are_told_to_wait_where_its_workers_take_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = publish(tmp_path / "base")
    gpus = {"GPU": 8.0}
    monkeypatch.setattr(ray_calls, "resources", lambda free: gpus)
    for expert, most, told in (("both", 8, False), ("high", 7, False), ("high", 8, True)):
        config = run_of(base, expert)
        config = replace(
            config,
            sample=replace(SHOWN, every=4),
            workers=replace(config.workers, device="cuda", max=most),
        )
        caplog.clear()
        live = LiveSamples(config, tmp_path)
        live.note_what_waits()
        assert ("samples of this run are made when it has ended" in caplog.text) == told
        assert live.expected == (expert == "both")
        started: list[bool] = []
        monkeypatch.setattr(live, "_start_task", lambda started=started: started.append(True))
        monkeypatch.setattr(live_samples, "held_checkpoint", lambda checkpoint, at: checkpoint)
        live.on_checkpoint(3)
        assert (len(live.wanted()), len(started)) == ((1, 0) if expert == "both" else (0, 1))


def test_both_experts_need_a_pipeline_that_holds_two_alike(tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    low = base / "transformer_2" / "config.json"
    kept = low.read_text()
    low.write_text(kept.replace('"ffn_dim": 32', '"ffn_dim": 64'))
    with pytest.raises(ValueError, match="transformer_2 has other numbers than"):
        resolve(run_of(base, "both").model)
    low.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"has no transformer_2/, and model\.dit\.expert is both"):
        resolve(run_of(base, "both").model)
    deepspeed = TrainConfig(sync="deepspeed")
    with pytest.raises(ConfigError, match=r"train\.sync is deepspeed.*model\.dit\.expert is both"):
        check_experts(ModelConfig(dit=replace(DIT, expert="both")), deepspeed)


def test_two_runs_are_joined(tmp_path: Path) -> None:
    model = ModelConfig(dit=replace(DIT, expert="high"), vae=VAEConfig(channels=4), text=TextConfig(d_model=16))
    high = RunConfig(run=RunSection(name="high"), model=model, sample=SHOWN)
    low = replace(high, model=replace(model, dit=replace(model.dit, expert="low")))
    write_checkpoint(tmp_path / "high", high)
    write_checkpoint(tmp_path / "low", low)
    high_first = saved_model(tmp_path / "high", other=tmp_path / "low")
    one, two = high_first.load(), saved_model(tmp_path / "low", other=tmp_path / "high").load()
    assert one.low is not None and two.low is not None and one.low.boundary == two.low.boundary == 0.875
    settings = ClipSettings.of(one.config)
    told = high_first.encode(["a disc"], "")
    assert np.array_equal(*(make_clips(model, told, settings)[0] for model in (one, two)))

    with pytest.raises(ConfigError, match=r"trained the expert for noise levels 0\.875 to 1; give --other"):
        saved_model(tmp_path / "high").load()
    with pytest.raises(ConfigError, match=r"--other .*high trained noise levels 0\.875 to 1, and this run 0\.875 to 1"):
        saved_model(tmp_path / "high", other=tmp_path / "high").load()
    plain = replace(high, model=replace(model, dit=DIT), sample=replace(SHOWN, guidance_scale_2=None))
    write_checkpoint(tmp_path / "plain", plain)
    with pytest.raises(ConfigError, match="this run trained one transformer for all noise levels"):
        saved_model(tmp_path / "plain", other=tmp_path / "low").load()

    with pytest.raises(ConfigError, match=r"--guidance-scale-2 is 2, of the expert for low noise, and this is one tr"):
        run(tmp_path / "plain", ["a disc"], tmp_path / "x.mp4", changes=ClipChanges(guidance_scale_2=2.0))
    with pytest.raises(ConfigError, match=r"sample.guidance_scale_2 is 1.5, of the expert for low noise"):
        check_sample(SHOWN, plain.checkpoint, plain.model, plain.train.flow)

    done = export.export(tmp_path / "low", tmp_path / "out")
    assert any("transformer/ is missing, copy it from its export" in note for note in done.notes)
    assert (tmp_path / "out" / "transformer_2" / "config.json").is_file()
    assert not (tmp_path / "out" / "transformer").exists()
