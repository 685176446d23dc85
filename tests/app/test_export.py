"""`heddle export`: a folder that Diffusers loads, with the trained weights; nothing is left when it is not equal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from safetensors.torch import load_file, save_file

from actors.config import TrainConfig
from actors.state import checkpoint_files as checkpoint
from app.export import export, parity
from app.export.host_memory import needed_bytes
from app.sampling.clips import ClipChanges, ClipSettings, clip_requests, clips_of
from app.sampling.model import saved_model
from app.sampling.sample import default_out
from app.settings.config import RunConfig
from app.settings.sections import RunSection, SampleConfig
from app.validation.checkpoint import validate
from data.config import BucketsConfig, DataConfig
from data.tools.synthetic import SynthConfig, synthesize
from ops.flow.sampling import SampleRequest, initial_noise, sample_latents, sigma_schedule
from ops.models import lora_files
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.float8 import in_8_bits
from ops.models.folders import dit_json, resolve
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.load import build_dit, build_text, check_factors
from ops.models.lora import lora_scale, merged
from ops.models.lora_files import write_factors
from ops.models.text_pair import split
from ops.models.wan.config import WanConfig
from ops.shards import ShardState
from ops.typed import ConfigError
from tests.families import test_cogvideox, test_flux, test_hunyuan15, test_kandinsky, test_ltx2, test_stdit3
from tests.families.kit import SmallPipeline
from tests.families.registry import CASES
from tests.families.test_wan import DIT, publish


def haar_run(**dit: Any) -> RunConfig:
    modules = ModelConfig(dit=replace(DIT, **dit), vae=VAEConfig(channels=4), text=TextConfig(d_model=16, num_layers=1))
    return RunConfig(run=RunSection(name="tiny"), model=modules)


def pipeline_run(base: Path, **dit: Any) -> RunConfig:
    """A run that fine-tunes a published pipeline."""
    path = str(base)
    return RunConfig(
        run=RunSection(name="tiny"),
        model=ModelConfig(
            dit=WanConfig(path=path, **dit), vae=VAEConfig(kind="diffusers", path=path), text=TextConfig(path=path)
        ),
    )


def trained(config: RunConfig, seed: int) -> torch.nn.Module:
    """The model of a run after some training: its trainable parameters moved by draws of `seed`."""
    resolved, _ = resolve(config.model)
    module = build_dit(resolved.dit, config.train.seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module


def write_checkpoint(run: Path, config: RunConfig, filled: float | None = None, step: int = 7) -> Path:
    """A checkpoint of a run, whose folder is returned; every weight is `filled`, if that is given."""
    folder = checkpoint.step_folder(run / "checkpoints", step)
    checkpoint.begin(folder)
    arrays, module = {}, None
    for name, seed in [("master", 1), ("ema", 2)]:
        module = trained(config, seed)
        arrays[name] = torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad]).numpy()
    assert module is not None
    total = len(arrays["ema"])
    if filled is not None:
        arrays = {name: np.full_like(array, filled) for name, array in arrays.items()}
    checkpoint.write_shard(folder, ShardState(updates=step, lo=0, hi=total, total=total, arrays=arrays))
    parameters = [{"name": n, "shape": list(p.shape)} for n, p in module.named_parameters() if p.requires_grad]
    checkpoint.seal(folder, {"step": step, "parameters": parameters, "config": config.to_yaml()})
    return run


def assert_loads(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    model = WanTransformer3DModel.from_pretrained(folder)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_demo_run_exports_the_ema_or_the_trained_weights(tmp_path: Path) -> None:
    config = haar_run()
    run = write_checkpoint(tmp_path / "run", config)
    exported = export.run(run, tmp_path / "out")
    assert exported.components["transformer"] == "EMA weights of step-7"
    assert_loads(tmp_path / "out" / "transformer", trained(config, 2).state_dict())
    plain = export.run(run, tmp_path / "plain", ema=False)
    assert plain.components["transformer"] == "trained weights of step-7"
    assert_loads(tmp_path / "plain" / "transformer", trained(config, 1).state_dict())
    assert any("haar codec" in note for note in exported.notes)
    assert 0 <= exported.largest_difference < parity.TOLERANCE
    assert not list(tmp_path.glob(".*.part"))


def test_of_a_run_that_trained_some_layers_the_others_are_those_that_it_began_with(tmp_path: Path) -> None:
    config = haar_run(train_only=("blocks.1.attn2", "proj_out"))
    run = write_checkpoint(tmp_path / "run", config)
    export.run(run, tmp_path / "out")
    first, found = build_dit(config.model.dit, config.train.seed).state_dict(), trained(config, 2).state_dict()
    moved = {name for name, tensor in found.items() if not torch.equal(tensor, first[name])}
    assert moved and all(name.startswith(("blocks.1.attn2.", "proj_out.")) for name in moved)
    assert_loads(tmp_path / "out" / "transformer", found)


def test_factors_that_were_trained_beside_8_bits_are_merged_into_the_wide_weights(tmp_path: Path) -> None:
    wide = haar_run(lora_rank=2)
    small = haar_run(lora_rank=2, frozen_dtype="float8")
    for name, config in (("wide", wide), ("small", small)):
        export.export(write_checkpoint(tmp_path / f"{name}-run", config), tmp_path / name)
    for file in ("transformer/diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors"):
        of_wide, of_small = (load_file(tmp_path / name / file) for name in ("wide", "small"))
        assert of_wide.keys() == of_small.keys()
        assert all(torch.equal(of_small[name], tensor) for name, tensor in of_wide.items())
    sampled = saved_model(tmp_path / "small-run", device="cpu").load().dit
    assert in_8_bits(sampled), "clips of a checkpoint are those of the function that was trained"
    assert not in_8_bits(saved_model(tmp_path / "small", device="cpu").load().dit)


def test_demo_pipeline_loads_without_a_vae_and_makes_latents(tmp_path: Path) -> None:
    export.export(write_checkpoint(tmp_path / "run", haar_run()), tmp_path / "out")
    assert_loads(tmp_path / "out" / "transformer", trained(haar_run(), 2).state_dict())
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", vae=None)
    latents = pipeline(
        prompt="a red disc",
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=1,
        max_sequence_length=16,
        output_type="latent",
    ).frames
    assert latents.shape == (1, 4, 2, 4, 4)
    assert torch.isfinite(latents).all()


def test_fine_tuned_pipeline_is_complete_and_shares_frozen_files(tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    config = pipeline_run(base)
    exported = export.export(write_checkpoint(tmp_path / "run", config), tmp_path / "out")
    assert [note.split(":")[0] for note in exported.notes] == [
        "this run trained without padding, and WanPipeline pads the prompt and the negative prompt with zeros",
        "hard-linked files are the same files as their originals",
    ]
    weights = Path("vae", "diffusion_pytorch_model.safetensors")
    assert (tmp_path / "out" / weights).samefile(base / weights)
    pipeline = WanPipeline.from_pretrained(tmp_path / "out")
    frames = pipeline(
        prompt="a red disc",
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=1,
        max_sequence_length=16,
        output_type="np",
    ).frames
    assert frames.shape == (1, 5, 16, 16, 3)
    assert_loads(tmp_path / "out" / "transformer", trained(config, 2).state_dict())


@pytest.mark.parametrize("pad_to", [0, 16])
def test_exported_pipeline_makes_the_latents_of_our_sampler(pad_to: int, tmp_path: Path) -> None:
    """With guidance and many steps, and the text given as the note of the export says."""
    base = publish(tmp_path / "base")
    config = pipeline_run(base)
    config = replace(config, model=replace(config.model, text=replace(config.model.text, max_length=16, pad_to=pad_to)))
    run = write_checkpoint(tmp_path / "run", config)
    exported = export.export(run, tmp_path / "out")
    model = saved_model(run).load()
    prompt, negative = build_text(model.config.model.text).encode(["a red disc", ""])
    requests = [SampleRequest(text=prompt, frames=5, height=32, width=48, seed=3)]
    settings = replace(ClipSettings.of(model.config).sampler, steps=6, guidance_scale=5.0)
    (ours,) = sample_latents(model.dit, requests, negative, model.geometry, settings)
    pipeline = WanPipeline.from_pretrained(tmp_path / "out")
    if pad_to:
        text: dict[str, Any] = {"prompt": "a red disc", "negative_prompt": "", "max_sequence_length": pad_to}
        assert f"max_sequence_length={pad_to}" in exported.notes[0]
    else:
        text = {"prompt_embeds": prompt[None], "negative_prompt_embeds": negative[None]}
        assert "prompt_embeds and negative_prompt_embeds" in exported.notes[0]
    theirs = pipeline(
        **text,
        height=32,
        width=48,
        num_frames=5,
        guidance_scale=5.0,
        num_inference_steps=6,
        output_type="latent",
        latents=initial_noise(3, (4, 2, 4, 6))[None],
    ).frames[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_hunyuan_sigmas_are_those_of_its_pipeline() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, 7)[:-1])  # what HunyuanVideoPipeline passes
    np.testing.assert_allclose(scheduler.sigmas.numpy(), sigma_schedule(6, 7.0), atol=1e-6)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 2])
def test_an_exported_folder_can_be_sampled(rank: int, tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", haar_run(lora_rank=rank))
    export.export(run, tmp_path / "out")
    first, second = saved_model(run), saved_model(tmp_path / "out")
    settings = replace(ClipSettings.of(first.config), frames=5, height=16, width=16)
    settings = replace(settings, sampler=replace(settings.sampler, steps=2))
    clip, same = (dict(clips_of(saved, ["a red disc"], settings))[0] for saved in (first, second))
    assert abs(clip.astype(int) - same.astype(int)).max() <= 1
    assert default_out(tmp_path / "out", ["a"]) == Path("samples/out-a-0eb5b8.mp4")


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 2])
def test_an_exported_folder_has_the_held_out_loss_of_its_checkpoint_and_no_step(
    rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthesize(tmp_path / "data", SynthConfig(clips=2, images=1, shards=1, koala=False))
    data = DataConfig(buckets=BucketsConfig(table=("1x32x48", "9x32x48")))
    run = write_checkpoint(tmp_path / "run", replace(haar_run(lora_rank=rank), data=data))
    export.export(run, tmp_path / "out")
    held_out = (str(tmp_path / "data" / "shards" / "00000.tar"),)
    first, second = (validate(path, held_out, draws=2, device="cpu") for path in (run, tmp_path / "out"))
    assert second.loss == pytest.approx(first.loss, rel=1e-4) and second.clips == first.clips
    said = capsys.readouterr().out.splitlines()
    begun = [line for line in said if re.fullmatch(r"measuring \d held-out clips? at 2 noise levels each", line)]
    told = [line for line in said if line.startswith("held-out loss")]
    assert len(begun) == 2 and said.index(begun[0]) < said.index(told[0])
    assert told[0] == first.describe() and told[1].startswith(f"held-out loss of {tmp_path / 'out'}: "), told


def test_the_config_of_an_export_has_the_numbers_of_the_model(tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    export.export(write_checkpoint(tmp_path / "run", pipeline_run(base)), tmp_path / "out")
    model = RunConfig.load(tmp_path / "out" / "heddle.yaml").model
    assert (model.dit.num_layers, model.dit.num_heads, model.dit.text_dim, model.vae.channels) == (2, 2, 16, 4)


def test_base_gives_the_rest_of_the_pipeline(tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    run = write_checkpoint(tmp_path / "run", pipeline_run(base))
    export.export(run, tmp_path / "out", base=base, dtype="bfloat16")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index == json.loads((base / "model_index.json").read_text())
    assert json.loads((tmp_path / "out" / "scheduler" / "scheduler_config.json").read_text())["shift"] == 5.0
    stored = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_lora_run_is_merged_and_keeps_its_factors(tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    config = pipeline_run(base, lora_rank=2, lora_alpha=4.0)
    export.export(write_checkpoint(tmp_path / "run", config), tmp_path / "out")
    module = trained(config, 2)
    assert_loads(tmp_path / "out" / "transformer", merged(module.state_dict(), lora_scale(config.model.dit)))
    factors = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    name = "blocks.0.attn1.to_q.lora_A.weight"
    assert torch.equal(factors[f"transformer.{name}"], module.state_dict()[name])
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir() if file.is_file()}) == 1


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({}, "float32"), ({"lora_dora": True}, "bfloat16"), ({"lora_targets": ("to_q", "ffn.*")}, "float16")],
)
def test_lora_only_writes_the_files_of_a_whole_export_and_no_other(
    settings: dict[str, Any], dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = publish(tmp_path / "base")
    run = write_checkpoint(tmp_path / "run", pipeline_run(base, lora_rank=2, lora_alpha=4.0, **settings))
    export.export(run, tmp_path / "whole", dtype=dtype)
    weights = base / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:64])  # nothing of them is read
    assert "exporting" not in capsys.readouterr().out  # the command alone talks
    alone = export.run(run, tmp_path / "alone", dtype=dtype, lora_only=True, ema=True)
    begun = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("exporting "))
    assert begun.startswith("exporting 0.0 M weights of factors of ") and begun.endswith(f" as {dtype}, then comparing")
    names = {"pytorch_lora_weights.safetensors"}
    names |= set() if settings.get("lora_dora") else {"comfyui_lora_weights.safetensors"}
    assert {file.name for file in (tmp_path / "alone").iterdir()} == names == set(alone.components)
    assert all(f"{dtype}, of EMA weights of step-7" in what for what in alone.components.values())
    for name in names:
        one, other = (load_file(tmp_path / folder / name) for folder in ("whole", "alone"))
        assert one.keys() == other.keys() and {t.dtype for t in other.values()} == {getattr(torch, dtype)}
        assert all(torch.equal(tensor, one[key]) for key, tensor in other.items())
    plain = export.export(run, tmp_path / "plain", lora_only=True, ema=False)
    assert all("trained weights of step-7" in what for what in plain.components.values())


def test_factors_that_a_dtype_cannot_hold_or_that_are_none_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    config = haar_run(lora_rank=2)
    run = write_checkpoint(tmp_path / "run", config, filled=1e6)
    with pytest.raises(ValueError, match=r"lora_A.weight holds 1e\+06, and float16 ends at 6.55e\+04. Write it in bf"):
        export.export(run, tmp_path / "out", dtype="float16", lora_only=True)
    export.export(run, tmp_path / "wide", dtype="bfloat16", lora_only=True)
    broken = write_checkpoint(tmp_path / "broken", config, filled=float("nan"))
    with pytest.raises(ValueError, match=r"holds numbers that are not finite\. Take an earlier checkpoint"):
        export.export(broken, tmp_path / "out", lora_only=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "run", "wide"]


def test_a_file_of_factors_that_came_out_otherwise_is_found(tmp_path: Path) -> None:
    config = replace(DIT, lora_rank=2)
    state = {n: p.detach() for n, p in trained(haar_run(lora_rank=2), 1).named_parameters() if p.requires_grad}
    write_factors(tmp_path, config, state, "", torch.float32)
    name = "blocks.0.attn1.to_q.lora_B.weight"
    file = tmp_path / "pytorch_lora_weights.safetensors"
    read = {key.removeprefix("transformer."): tensor for key, tensor in load_file(file).items()}
    lora_files.compare(file, state, read, torch.float32, 1.0)
    for other in ({**read, name: read[name] * 1.001}, {key: tensor for key, tensor in read.items() if key != name}):
        with pytest.raises(ValueError, match=rf"{re.escape(name)} differs after reading it back"):
            lora_files.compare(file, state, other, torch.float32, 1.0)
    del state[name]
    with pytest.raises(ValueError, match=f"the checkpoint lacks {re.escape(name)}"):
        write_factors(tmp_path, config, state, "", torch.float32)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_host_with_too_little_memory_is_refused_before_anything_is_written(rank: int, tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", haar_run(lora_rank=rank))
    needed = needed_bytes(haar_run(lora_rank=rank).model.dit)
    remedy = r"write the factors alone, which takes none of it \(--lora-only\), or export" if rank else "export"
    with pytest.raises(ConfigError, match=rf"needs 1.5 GiB of host memory.* can spare 1.0 GiB: {remedy} on a host"):
        export.export(run, tmp_path / "out", room_bytes=1 << 30)
    with pytest.raises(ConfigError, match="needs"):
        export.export(run, tmp_path / "out", room_bytes=needed - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    export.export(run, tmp_path / "out", room_bytes=needed)
    if rank:
        export.export(run, tmp_path / "alone", room_bytes=0, lora_only=True)


def test_a_whole_export_needs_its_transformer_in_fp32_and_a_little_more() -> None:
    size = 14_288_491_584 * 4  # Wan2.1-14B
    dit = WanConfig(num_layers=40, num_heads=40, head_dim=128, ffn_dim=13824, freq_dim=256, text_dim=4096)
    assert size < needed_bytes(replace(dit, lora_rank=32)) == needed_bytes(dit) < 1.2 * size


def test_factors_go_on_from_an_export_on_the_weights_that_they_were_trained_on(tmp_path: Path) -> None:
    base, out = publish(tmp_path / "base"), tmp_path / "out"
    config = pipeline_run(base, lora_rank=2, lora_alpha=4.0)
    export.export(write_checkpoint(tmp_path / "run", config), out)
    dit = replace(resolve(config.model)[0].dit, lora_from=str(out))
    check_factors(dit)
    begun = build_dit(dit, 0).state_dict()
    found, exported = merged(begun, lora_scale(dit)), merged(trained(config, 2).state_dict(), lora_scale(dit))
    torch.testing.assert_close(found, exported)
    for weights in (out, out / "transformer"):  # have them merged already: they would count twice
        with pytest.raises(ValueError, match=r"model\.dit\.lora_from \S+ holds factors that the weights of .* twice"):
            check_factors(replace(dit, path=str(weights)))
    with pytest.raises(ValueError, match="count twice"):
        check_factors(replace(dit, path=str(out), lora_from=str(out / "pytorch_lora_weights.safetensors")))


def test_hunyuan_transformer_is_compared_by_its_own_class(tmp_path: Path) -> None:
    dit = HunyuanConfig(
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        head_dim=32,
        ffn_dim=4 * 64,
        rope_theta=256.0,
        **{name: getattr(DIT, name) for name in ("num_heads", "text_dim", "in_channels", "out_channels")},
    )
    config = haar_run()
    config = replace(config, model=replace(config.model, dit=dit))
    exported = export.export(write_checkpoint(tmp_path / "run", config), tmp_path / "out")
    assert any("two text encoders" in note for note in exported.notes)
    assert 0 < exported.largest_difference < parity.TOLERANCE


def hunyuan_run(**settings: Any) -> RunConfig:
    """A run with a random pair of text encoders."""
    dit = HunyuanConfig(
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        head_dim=32,
        ffn_dim=4 * 64,
        rope_theta=256.0,
        guidance_embeds=True,
        **{name: getattr(DIT, name) for name in ("num_heads", "text_dim", "in_channels", "out_channels")},
        **settings,
    )
    text = TextConfig(kind="hunyuan", d_model=16, num_heads=2, num_layers=1, pooled_dim=8, max_length=16)
    config = haar_run()
    return replace(config, model=replace(config.model, dit=dit, text=text))


def hunyuan_latent(run: Path) -> torch.Tensor:
    model = saved_model(run).load()
    settings = replace(ClipSettings.of(model.config).sampler, steps=4, guidance_scale=6.0)
    encoded, vectors = split(build_text(model.config.model.text).encode(["a red disc"]), model.config.model.text)
    assert vectors is not None
    request = SampleRequest(text=encoded[0], pooled=vectors[0], frames=5, height=32, width=48, seed=3)
    return sample_latents(model.dit, [request], encoded[0], model.geometry, settings)[0]


def hunyuan_clip(pipeline: Any, template: dict[str, object]) -> torch.Tensor:
    return pipeline(
        prompt="a red disc",
        prompt_template=template,
        max_sequence_length=16,
        height=32,
        width=48,
        num_frames=5,
        guidance_scale=6.0,
        num_inference_steps=4,
        output_type="latent",
        latents=initial_noise(3, (4, 2, 4, 6))[None],
        return_dict=False,
    )[0][0]


def template_of(notes: Sequence[str]) -> dict[str, object]:
    """What an export says of how its pipeline is to be called."""
    (note,) = [note for note in notes if "prompt_template=" in note]
    template, crop = re.search(r'"template": "(.*)", "crop_start": (\d+)}', note).groups()  # type: ignore[union-attr]
    return {"template": template, "crop_start": int(crop)}


def test_a_hunyuan_run_with_its_own_text_exports_a_whole_pipeline(tmp_path: Path) -> None:
    """Loaded by its class without a part missing, and called as the note says, it makes the latents of our sampler."""
    run = write_checkpoint(tmp_path / "run", hunyuan_run())
    exported = export.export(run, tmp_path / "out")
    assert not any("two text encoders" in note for note in exported.notes)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", vae=None)
    ours, theirs = hunyuan_latent(run), hunyuan_clip(pipeline, template_of(exported.notes))
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


PIPELINES = {name: cases.pipeline for name, cases in CASES.items() if cases.pipeline}
LAYOUTS = {  # of one family, which its usual pipeline does not have
    f"cogvideox {kind}": replace(
        PIPELINES["cogvideox"],
        publish=partial(test_cogvideox.publish, dit=test_cogvideox.KINDS[kind]),
        model=test_cogvideox.settings,
        scheduler="DDIM, SNR shift 1",
    )
    for kind in ("5b", "1.5")
}


USUAL = [("wan", 0), ("hunyuan15", 0), ("ltx2", 0), ("cogvideox", 2)]  # families and ranks of their factors
OTHERS = [(name, 0) for name in (*PIPELINES, *LAYOUTS)] + [(name, 2) for name in PIPELINES]
OTHERS = [one for one in OTHERS if one not in USUAL]


def run_on(pipeline: SmallPipeline, base: Path, **dit: Any) -> RunConfig:
    """A run that fine-tunes the published pipeline."""
    train = TrainConfig(flow=pipeline.flow)
    return RunConfig(run=RunSection(name="tiny"), model=pipeline.model(base, **dit), train=train)


def latent_of(run: Path, request: Mapping[str, Any]) -> torch.Tensor:
    """What `heddle sample` makes before it decodes."""
    saved = saved_model(run)
    size = {key: request[key] for key in ("frames", "height", "width")}
    settings = ClipSettings.of(saved.config).changed(
        ClipChanges(**size, steps=3, guidance_scale=request["guidance_scale"], seed=3)
    )
    told, model = saved.encode([request["prompt"]], negative=""), saved.load()
    (asked,), negative = clip_requests(model, told, settings), told.negative
    found = sample_latents(
        model.dit, [asked], negative.text, model.geometry, settings.sampler, negative_pooled=negative.vector
    )
    return found[0]


@pytest.mark.parametrize(
    ("family", "rank"),
    [*USUAL, *(pytest.param(*one, marks=pytest.mark.long) for one in OTHERS)],
)
def test_an_exported_pipeline_makes_our_clip(family: str, rank: int, tmp_path: Path) -> None:
    """Trained weights, or factors merged into those that they began with; the scheduler, and the text."""
    pipeline = {**PIPELINES, **LAYOUTS}[family]
    base = pipeline.publish(tmp_path / "base")
    run = write_checkpoint(tmp_path / "run", run_on(pipeline, base, lora_rank=rank))
    exported = export.export(run, tmp_path / "out")
    assert exported.components["scheduler"] == pipeline.scheduler
    assert any(pipeline.note in note for note in exported.notes) or not pipeline.note
    ours = latent_of(run, pipeline.request)
    theirs = pipeline.clip(DiffusionPipeline.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)
    before = pipeline.clip(DiffusionPipeline.from_pretrained(base))
    assert (before - theirs).abs().max() > 0.01 * theirs.abs().max()


def test_mochi_s_pipeline_is_told_what_an_empty_prompt_was_in_training(tmp_path: Path) -> None:
    pipeline = PIPELINES["mochi"]
    run = write_checkpoint(tmp_path / "run", run_on(pipeline, pipeline.publish(tmp_path / "base")))
    export.export(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["force_zeros_for_empty_prompt"] is True


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 2])
def test_stdit3_is_written_in_the_layout_of_open_sora(rank: int, tmp_path: Path) -> None:
    """Without an index of a pipeline or a scheduler, which Diffusers would need; the folder is sampled from here. The
    fixed rows of no caption and the frequencies of RoPE are as published."""
    base = test_stdit3.publish(tmp_path / "base")
    model = test_stdit3.settings(base, lora_rank=rank, frame_rate=8.0)
    config = RunConfig(run=RunSection(name="tiny"), model=model, data=DataConfig(fps=8.0))
    run, out = write_checkpoint(tmp_path / "run", config), tmp_path / "out"
    exported = export.run(run, out)
    assert exported.largest_difference is None and "Open-Sora's own layout" in exported.notes[0]
    assert {entry.name for entry in out.iterdir()} == {
        *("transformer", "vae", "text_encoder", "tokenizer", "heddle.yaml"),
        *(("pytorch_lora_weights.safetensors",) if rank else ()),
    }
    before = load_file(base / "transformer" / "model.safetensors")
    after = load_file(out / "transformer" / "model.safetensors")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    kept = {"rope.freqs", "y_embedder.y_embedding"}
    assert (
        same >= kept and (rank or same == kept) and any(name.endswith("attn.qkv.weight") for name in set(after) - same)
    )
    fields = json.loads((out / "transformer" / "config.json").read_text())
    assert fields == json.loads((base / "transformer" / "config.json").read_text())
    size = ClipChanges(frames=3, height=16, width=32, steps=2)
    clips = [
        dict(clips_of(saved, ["a dot"], ClipSettings.of(saved.config).changed(size)))[0]
        for saved in (saved_model(run, device="cpu"), saved_model(out, device="cpu"))
    ]
    assert clips[0].shape == (3, 16, 32, 3) and np.abs(clips[0].astype(int) - clips[1]).max() <= 1
    other = {**after, "spatial_blocks.0.mlp.fc1.bias": after["spatial_blocks.0.mlp.fc1.bias"] + 1}
    save_file(other, out / "transformer" / "model.safetensors")
    with pytest.raises(
        checkpoint.CheckpointError, match=r"spatial_blocks\.0\.mlp\.fc1\.bias differs after reading it back"
    ):
        parity.compare_files(out / "transformer", after)
    plain = replace(resolve(model)[0].dit, lora_rank=0, path=None)
    parity.compare_config(out / "transformer", plain)
    with pytest.raises(checkpoint.CheckpointError, match=r"config\.json describes another transformer"):
        parity.compare_config(out / "transformer", replace(plain, num_layers=3))


def test_frequencies_of_rope_stay_as_they_are_beside_rounded_weights(tmp_path: Path) -> None:
    """Open-Sora multiplies them by the number of a frame: bf16 would be two radians off after 256 of them."""
    base = test_stdit3.publish(tmp_path / "base")
    model = test_stdit3.settings(base, frame_rate=8.0)
    config = RunConfig(run=RunSection(name="tiny"), model=model, data=DataConfig(fps=8.0))
    export.run(write_checkpoint(tmp_path / "run", config), tmp_path / "out", dtype="bfloat16")
    before = load_file(base / "transformer" / "model.safetensors")["rope.freqs"]
    after = load_file(tmp_path / "out" / "transformer" / "model.safetensors")
    assert after.pop("rope.freqs").dtype == torch.float32 and after["y_embedder.y_embedding"].dtype == torch.bfloat16
    assert torch.equal(load_file(tmp_path / "out" / "transformer" / "model.safetensors")["rope.freqs"], before)


def takes_factors(name: str) -> bool:
    """Whether Diffusers' pipeline of the family reads them."""
    family = FAMILIES[name]
    return hasattr(getattr(diffusers, family.pipeline_class(family.settings())), "load_lora_weights")


FILES = [(name, "pytorch_lora_weights.safetensors") for name in PIPELINES if takes_factors(name)]
FILES += [(name, "comfyui_lora_weights.safetensors") for name in ("wan", "skyreels", "ltx", "ltx2")]
KINDS = [*((*of, False) for of in FILES), *((*of, True) for of in FILES if of[1].startswith("pytorch"))]
BY_DEFAULT = [
    ("wan", "pytorch_lora_weights.safetensors", True),
    ("wan", "comfyui_lora_weights.safetensors", False),
    ("cogvideox", "pytorch_lora_weights.safetensors", False),
    ("ltx2", "pytorch_lora_weights.safetensors", False),
]


@pytest.mark.parametrize(
    ("family", "file", "dora"),
    [*BY_DEFAULT, *(pytest.param(*kind, marks=pytest.mark.long) for kind in KINDS if kind not in BY_DEFAULT)],
)
def test_lora_factors_load_into_the_pipeline_they_were_trained_from(
    family: str, file: str, dora: bool, tmp_path: Path
) -> None:
    published = PIPELINES[family]
    base = published.publish(tmp_path / "base")
    run = write_checkpoint(tmp_path / "run", run_on(published, base, lora_rank=2, lora_alpha=3.0, lora_dora=dora))
    export.export(run, tmp_path / "out")
    begun = DiffusionPipeline.from_pretrained(base).transformer
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")  # for the scheduler of our steps
    pipeline.transformer.load_state_dict(begun.state_dict())
    before = published.clip(pipeline)
    pipeline.load_lora_weights(tmp_path / "out", weight_name=file)
    theirs = published.clip(pipeline)
    ours = latent_of(run, published.request)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)
    assert (before - theirs).abs().max() > 0.01 * theirs.abs().max()


def test_lora_factors_load_into_a_hunyuan_pipeline(tmp_path: Path) -> None:
    config = hunyuan_run(lora_rank=2, lora_alpha=3.0)
    run = write_checkpoint(tmp_path / "run", config)
    exported = export.export(run, tmp_path / "out")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", vae=None)
    begun = build_dit(replace(resolve(config.model)[0].dit, lora_rank=0), config.train.seed)
    pipeline.transformer.load_state_dict(begun.state_dict())
    template = template_of(exported.notes)
    before = hunyuan_clip(pipeline, template)
    pipeline.load_lora_weights(tmp_path / "out", weight_name="pytorch_lora_weights.safetensors")
    theirs = hunyuan_clip(pipeline, template)
    torch.testing.assert_close(hunyuan_latent(run), theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)
    assert (before - theirs).abs().max() > 0.01 * theirs.abs().max()


def test_a_flux_run_from_nothing_exports_a_whole_pipeline(tmp_path: Path) -> None:
    """With the random pair of text encoders, called as the note says."""
    text = TextConfig(kind="flux", d_model=16, num_heads=2, num_layers=1, pooled_dim=12, max_length=16)
    config = haar_run()
    dit = replace(test_flux.DIT, text_dim=16, pooled_dim=12)
    config = replace(config, model=replace(config.model, dit=dit, vae=VAEConfig(channels=4, temporal=1), text=text))
    run = write_checkpoint(tmp_path / "run", config)
    exported = export.export(run, tmp_path / "out")
    assert any(note.endswith("call the pipeline with max_sequence_length=16.") for note in exported.notes)
    theirs = test_flux.picture(DiffusionPipeline.from_pretrained(tmp_path / "out", vae=None), 16)
    ours = latent_of(run, PIPELINES["flux"].request)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


def test_a_hunyuan15_run_from_nothing_exports_a_whole_pipeline(tmp_path: Path) -> None:
    """With the random pair of text encoders, set up as the notes say; its class asks for an autoencoder."""
    text = TextConfig(kind="hunyuan15", d_model=16, num_heads=2, num_layers=1, pooled_dim=12, max_length=16)
    config = haar_run()
    dit = replace(test_hunyuan15.DIT, text_dim=16, glyph_dim=12)
    config = replace(config, model=replace(config.model, dit=dit, vae=VAEConfig(channels=4), text=text))
    run = write_checkpoint(tmp_path / "run", config)
    exported = export.export(run, tmp_path / "out")
    assert any("vae=AutoencoderKLHunyuanVideo15(latent_channels=4, spatial_" in note for note in exported.notes)
    (note,) = [note for note in exported.notes if "system_message" in note]
    system, crop, most = re.search(r"message to '(.*)', its .* to (\d+) and .* to (\d+)", note).groups()  # type: ignore[union-attr]
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", vae=test_hunyuan15.vae())
    pipeline.system_message, pipeline.prompt_template_encode_start_idx = system, int(crop)
    pipeline.tokenizer_max_length = int(most)
    ours, theirs = latent_of(run, PIPELINES["hunyuan15"].request), test_hunyuan15.clip(pipeline)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


def test_a_kandinsky_run_from_nothing_exports_a_whole_pipeline(tmp_path: Path) -> None:
    """With the random pair of text encoders, set up as the notes say; its class counts sizes by an autoencoder."""
    text = TextConfig(kind="kandinsky", d_model=16, num_heads=2, num_layers=1, pooled_dim=12, max_length=16)
    config = haar_run()
    dit = replace(test_kandinsky.DIT, text_dim=16, pooled_dim=12)
    flow = replace(config.train.flow, flow_shift=5.0)
    train = replace(config.train, flow=flow)
    config = replace(config, model=replace(config.model, dit=dit, vae=VAEConfig(channels=4), text=text), train=train)
    run = write_checkpoint(tmp_path / "run", config)
    exported = export.export(run, tmp_path / "out")
    strides = "spatial_compression_ratio=8, temporal_compression_ratio=4"
    assert any(f"vae=AutoencoderKLHunyuanVideo(latent_channels=4, {strides}, ...)" in note for note in exported.notes)
    (note,) = [note for note in exported.notes if "prompt_template" in note]
    template, crop = re.search(r"prompt_template to '(.*)' and .* to (\d+); call it with .*=16\.", note).groups()  # type: ignore[union-attr]
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", vae=test_kandinsky.vae())
    assert type(pipeline).__name__ == "Kandinsky5T2VPipeline"
    pipeline.prompt_template, pipeline.prompt_template_encode_start_idx = template, int(crop)
    ours, theirs = latent_of(run, PIPELINES["kandinsky"].request), test_kandinsky.clip(pipeline)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


def test_an_ltx2_run_from_nothing_exports_a_pipeline_that_makes_our_clip_beside_silence(tmp_path: Path) -> None:
    """The branch for sound is zero, so the video attends to nothing of it; autoencoders are given to the call."""
    text = TextConfig(kind="ltx2", d_model=16, num_heads=2, num_layers=1, max_length=test_ltx2.ROWS)
    config = haar_run()
    vae = VAEConfig(temporal=4, spatial=16, channels=8)
    flow = replace(config.train.flow, token_shift=test_ltx2.LINE)
    model = replace(config.model, dit=test_ltx2.DIT, vae=vae, text=text)
    config = replace(config, model=model, train=replace(config.train, flow=flow))
    run = write_checkpoint(tmp_path / "run", config)
    exported = export.export(run, tmp_path / "out")
    assert any("makes our clips, and no sound" in note for note in exported.notes)
    assert any(f"max_sequence_length={test_ltx2.ROWS}" in note for note in exported.notes)
    assert any("pass image_crf=0" in note for note in exported.notes)
    parts = {"vae": test_ltx2.video_vae(), **test_ltx2.audio_parts()}
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out", **parts)
    ours, theirs = latent_of(run, PIPELINES["ltx2"].request), test_ltx2.clip(pipeline, alone=False)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


@pytest.mark.parametrize(("dtype", "stored"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_an_export_of_ltx2_has_the_sound_of_the_folder_that_was_trained_from(
    dtype: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """Weights, and the parts of its pipeline that no run computes with; a second run begins with the export."""
    pipeline = PIPELINES["ltx2"]
    base = pipeline.publish(tmp_path / "base")
    run = write_checkpoint(tmp_path / "run", run_on(pipeline, base, lora_rank=2))
    exported = export.export(run, tmp_path / "out", dtype=dtype)
    before, after = (
        load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors") for folder in (base, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    heard = [name for name in before if any(part in name for part in FAMILIES["ltx2"].kept)]
    assert heard and all(torch.equal(after[name], before[name].to(stored)) for name in heard)
    assert any(not torch.equal(after[name], before[name].to(stored)) for name in set(before) - set(heard))
    for part in ("audio_vae", "vocoder"):
        assert exported.components[part].endswith(f"from {base / part}")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["vocoder"] == ["ltx2", "LTX2Vocoder"] and index["processor"] == [None, None]
    again = write_checkpoint(tmp_path / "again", run_on(pipeline, tmp_path / "out"))
    export.export(again, tmp_path / "more")
    last = load_file(tmp_path / "more" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(last[name], after[name].float()) for name in heard)


@pytest.mark.parametrize("family", ["wan", "flux"])
def test_an_export_has_the_shift_of_samples(family: str, tmp_path: Path) -> None:
    """Not that of the training, where a run says one for its samples; of FLUX.1 instead of a line over tokens."""
    pipeline = PIPELINES[family]
    config = run_on(pipeline, pipeline.publish(tmp_path / "base"))
    run = write_checkpoint(tmp_path / "run", replace(config, sample=SampleConfig(flow_shift=11.0)))
    exported = export.export(run, tmp_path / "out")
    assert exported.components["scheduler"] == "Euler, flow shift 11"
    ours = latent_of(run, pipeline.request)
    theirs = pipeline.clip(DiffusionPipeline.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)
    as_trained = latent_of(write_checkpoint(tmp_path / "other", config), pipeline.request)
    assert (as_trained - ours).abs().max() > 0.01 * ours.abs().max()


def test_failed_comparison_leaves_nothing(tmp_path: Path) -> None:
    """Weights that have grown beyond all bounds: the outputs are no numbers, and no difference of them is small."""
    run = write_checkpoint(tmp_path / "run", haar_run(), filled=float("inf"))
    with pytest.raises(checkpoint.CheckpointError, match="forward pass differs from ours"):
        export.export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_weights_that_changed_on_the_way_are_found(tmp_path: Path) -> None:
    state = build_dit(DIT, 0).state_dict()
    export.write_folder(tmp_path / "t", state, dit_json(DIT))
    changed = {**state, "proj_out.bias": state["proj_out.bias"] + 1}
    parity.compare_files(tmp_path / "t", state)
    with pytest.raises(checkpoint.CheckpointError, match=r"proj_out\.bias differs after reading it back"):
        parity.compare_files(tmp_path / "t", changed)
    with pytest.raises(checkpoint.CheckpointError, match=r"more is missing after writing it"):
        parity.compare_files(tmp_path / "t", {**state, "more": state["proj_out.bias"]})
    parity.load_reference(tmp_path / "t", "WanTransformer3DModel")
    del changed["proj_out.bias"]
    export.write_folder(tmp_path / "less", changed, dit_json(DIT))
    with pytest.raises(checkpoint.CheckpointError, match=r"missing keys \['proj_out\.bias'\]"):
        parity.load_reference(tmp_path / "less", "WanTransformer3DModel")
    other = parity.load_reference(tmp_path / "t", "WanTransformer3DModel")
    with pytest.raises(checkpoint.CheckpointError, match="t: Diffusers' forward pass differs from ours"):
        parity.compare_forward(other, replace(DIT, eps=1.0), "t")


def test_wrong_requests_are_one_sentence(tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", haar_run())
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        export.export(run, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"has no model_index\.json"):
        export.export(run, tmp_path / "out", base=tmp_path)
    with pytest.raises(ConfigError, match="--dtype float8 is not known"):
        export.export(run, tmp_path / "out", dtype="float8")
    with pytest.raises(ConfigError, match=r"--lora-only writes the factors of a LoRA run, and \S+step-7 has none"):
        export.export(run, tmp_path / "out", lora_only=True)
    with pytest.raises(ConfigError, match=r"--base .* --lora-only writes none; leave one of the two out"):
        export.export(run, tmp_path / "out", base=tmp_path, lora_only=True)
    with pytest.raises(ConfigError, match="has a VAE of 4 channels, the run trained on latents of haar"):
        export.export(run, tmp_path / "out", base=publish(tmp_path / "base"))
