"""LTX-2's branch for video: its cases for the tests of all families; text, weights of the sound, a whole sampling."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from safetensors.torch import load_file, save_file
from transformers import ByT5Tokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from app.export.parity import their_velocity
from app.run import launch
from app.sampling.clips import ClipChanges, ClipSettings, clip_requests
from app.sampling.model import saved_model
from app.sampling.published import published_run
from app.settings.config import RunConfig
from ops.comm.collectives import Group
from ops.config import FlowConfig, TokenShift
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents
from ops.models.base.family import ParitySample
from ops.models.base.vae import DiffusersVAE
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import dit_config, resolve, vae_numbers
from ops.models.forecast import text_need, vae_need
from ops.models.load import build_dit, build_text, build_vae, check_factors, kept_weights, token_counter
from ops.models.ltx2.config import LTX2Config
from ops.models.ltx2.family import FAMILY
from ops.models.vae import vae_of
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify
from tests.families.kit import FamilyCases, OriginalNames, SmallPipeline, own_weights, small, their_class, whole
from tests.ops.channels_last import check_channels_last

torch.set_num_threads(1)
STRIDE, ROWS = (4, 16, 16), 24
DIT = LTX2Config(num_layers=2, num_heads=2, head_dim=16, ffn_dim=128, text_dim=16, frame_rate=12.0)
LINE = TokenShift(base_tokens=4, max_tokens=32, base=0.9, max=2.0)
CAPTIONS = ["a red disc", "", "  two blue squares\n", "a long caption that is cut at the end of its rows"]


def video_vae() -> AutoencoderKLLTX2Video:
    torch.manual_seed(0)
    made = AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(8, 16, 16),
        down_block_types=("LTX2VideoDownBlock3D",) * 3,
        downsample_type=("spatial", "temporal", "spatiotemporal"),
        layers_per_block=(1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True),
        decoder_block_out_channels=(8, 16),
        decoder_layers_per_block=(1, 1, 1),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        upsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_residual=(True, True),
        upsample_factor=(2, 2),
        decoder_causal=False,
        scaling_factor=0.5,
        spatial_compression_ratio=16,
        temporal_compression_ratio=4,
    )
    made.latents_mean.copy_(torch.linspace(-1, 1, 8))
    made.latents_std.copy_(torch.linspace(0.5, 2, 8))
    return made


def audio_parts() -> dict[str, Any]:
    return {
        "audio_vae": AutoencoderKLLTX2Audio(base_channels=128, ch_mult=(1, 1, 1), num_res_blocks=1),
        "vocoder": LTX2Vocoder(
            in_channels=128, hidden_channels=32, resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]]
        ),
    }


def gemma() -> Gemma3ForConditionalGeneration:
    torch.manual_seed(1)
    text = {
        "vocab_size": 384,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 1024,
        "sliding_window_pattern": 2,
        "initializer_range": 0.3,
        "bos_token_id": None,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    ).eval()


def connectors() -> LTX2TextConnectors:
    torch.manual_seed(2)
    parts = {"attention_head_dim": 8, "num_attention_heads": 2, "num_layers": 2, "num_learnable_registers": 8}
    told = {f"{part}_connector_{name}": value for part in ("video", "audio") for name, value in parts.items()}
    return LTX2TextConnectors(caption_channels=16, text_proj_in_factor=4, rope_type="split", **told)


def reference() -> LTX2VideoTransformer3DModel:
    """The class of Diffusers; attention that looks at places, so that a wrong one shows."""
    made = their_class(DIT.fitted(8, STRIDE, 16, 0))
    with torch.no_grad():
        for block in made.transformer_blocks:  # type: ignore[union-attr]
            block.attn1.norm_q.weight.mul_(20)
            block.attn1.norm_k.weight.mul_(20)
            block.attn1.to_v.weight.mul_(5)
    return made


def publish(folder: Path) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    scheduler = FAMILY.scheduler(DIT, FlowConfig(token_shift=LINE))
    LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, **scheduler.settings),
        vae=video_vae(),
        text_encoder=gemma(),
        tokenizer=ByT5Tokenizer(),
        connectors=connectors(),
        transformer=reference(),
        **audio_parts(),
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=replace(DIT, path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(kind="ltx2", path=path, max_length=ROWS),
    )


def as_published(folder: Path) -> ModelConfig:
    """What `heddle sample --from` makes of it."""
    tuned = settings(folder)
    dit = LTX2Config(path=tuned.dit.path)
    return replace(tuned, dit=dit, text=replace(tuned.text, max_length=1024))


@contextmanager
def isolated(pipeline: LTX2Pipeline) -> Iterator[None]:
    """Within this no modality attends to the other, as the pipeline has it for its guidance by modalities."""
    forward = pipeline.transformer.forward
    pipeline.transformer.forward = lambda *given, **named: forward(*given, **(named | {"isolate_modalities": True}))
    try:
        yield
    finally:
        del pipeline.transformer.forward


def clip(
    pipeline: LTX2Pipeline,
    steps: int = 3,
    alone: bool = True,
    rows: int = ROWS,
    rate: float = 12.0,
    latents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Its latents as the transformer has them: those that it gives are not normalised. Guided by the prompt alone."""
    noise = patchify(initial_noise(3, (8, 3, 2, 4)), (1, 1, 1))[None]
    ask = partial(
        pipeline,
        prompt="a red disc",
        negative_prompt="",
        max_sequence_length=rows,
        height=32,
        width=64,
        num_frames=9,
        frame_rate=rate,
        num_inference_steps=steps,
        guidance_scale=2.0,
        stg_scale=0.0,
        modality_scale=1.0,
        guidance_rescale=0.0,
        latents=noise if latents is None else latents,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    )
    if alone:
        with isolated(pipeline):
            made = ask().frames
    else:
        made = ask().frames
    vae = pipeline.vae
    found: torch.Tensor = LTX2Pipeline._normalize_latents(
        made, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    )
    return found[0]


CASES = FamilyCases(
    variants={
        "": small(LTX2Config, patch=(1, 1, 1)),
        "of a width that a sixth does not divide": small(LTX2Config, num_heads=4, head_dim=16, frame_rate=8.0),
        "of other strides and sound": small(LTX2Config, vae_stride=(4, 16, 16), audio_head_dim=6),
    },
    models={
        "": whole(LTX2Config(num_layers=2, num_heads=12, head_dim=4, ffn_dim=192)),
        "of all layers of its text": whole(
            LTX2Config(num_layers=2, num_heads=12, head_dim=4, ffn_dim=192), kind="ltx2"
        ),
    },
    whole_runs=("of all layers of its text",),
    presets={"ltx2-19b": 13.04},
    lora=("attn1.to_out.0", "attn2.to_k", "ff.net.2"),
    original=OriginalNames(
        renames=(
            (r"^(audio_)?proj_in", r"\1patchify_proj"),
            (r"^(audio_)?time_embed", r"\1adaln_single"),
            (r"^av_cross_attn_(video|audio)_scale_shift", r"av_ca_\1_scale_shift_adaln_single"),
            (r"^av_cross_attn_(?:video|audio)_(a2v|v2a)_gate", r"av_ca_\1_gate_adaln_single"),
            (r"(video|audio)_a2v_cross_attn_scale_shift_table", r"scale_shift_table_a2v_ca_\1"),
            (r"norm_([qk])\b", r"\1_norm"),
        ),
        config=small(LTX2Config, num_layers=2, head_dim=8, ffn_dim=64, text_dim=8),
        prefix="model.diffusion_model.",
    ),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        flow=FlowConfig(token_shift=LINE),
        request={"prompt": "a red disc", "frames": 9, "height": 32, "width": 64, "guidance_scale": 2.0},
        clip=clip,
        scheduler="Euler, flow shift 3",
        note="video without sound",
        sampled=as_published,
    ),
)


PACK = (((3, 4, 6), 900.5, 12.0, 5), ((1, 5, 3), 3.25, 24.0, 8), ((2, 2, 2), 500.0, 30.0, 11))


def test_packed_clips_equal_diffusers_one_by_one() -> None:
    """Forward and gradients, of every parameter: sizes, times, frame rates and texts of each clip's own, and in the
    last one a first frame that is given."""
    dit = DIT.fitted(8, STRIDE, 16, 0)
    theirs, model = reference(), build_dit(dit, 0)
    model.load_state_dict(own_weights(theirs, dit))
    numbers = torch.Generator().manual_seed(2)
    samples = [
        ParitySample(
            latent=torch.randn(8, *grid, generator=numbers),
            timestep=torch.tensor([time]),
            text=torch.randn(rows, 16, generator=numbers),
            clean_frames=int(index == len(PACK) - 1),
        )
        for index, (grid, time, _, rows) in enumerate(PACK)
    ]
    layout = Layout(
        [
            Sequence(grid, rows, clean_frames=sample.clean_frames, frame_rate=rate)
            for (grid, _, rate, rows), sample in zip(PACK, samples, strict=True)
        ]
    )
    tokens = torch.cat([patchify(sample.latent, dit.patch) for sample in samples])
    times, text = torch.cat([sample.timestep for sample in samples]), torch.cat([sample.text for sample in samples])
    packed = model(tokens, times, text, layout, Group.solo())
    expected = torch.cat(
        [
            patchify(their_velocity(theirs, dit.at_rate(rate), sample), dit.patch)
            for (_, _, rate, _), sample in zip(PACK, samples, strict=True)
        ]
    )
    torch.testing.assert_close(packed, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    packed.square().mean().backward()
    expected.square().mean().backward()
    wanted = dict(theirs.named_parameters())
    largest = max(float(weight.grad.abs().max()) for weight in wanted.values() if weight.grad is not None)
    for name, weight in model.named_parameters():
        assert weight.grad is not None and wanted[name].grad is not None, name
        torch.testing.assert_close(weight.grad, wanted[name].grad, atol=1e-5 * largest, rtol=1e-4, msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("ltx2") / "pipeline")


def test_rows_are_those_of_the_pipeline(folder: Path) -> None:
    """What its connectors make of a prompt for the video; of a caption, of none, with white space around it, and of one
    that is cut. A caption's rows do not depend on its batch."""
    model, _ = resolve(settings(folder))
    assert (model.text.d_model, model.text.num_layers, model.text.most_tokens, model.text.least_tokens) == (
        16,
        3,
        24,
        24,
    )
    encoder = build_text(model.text)
    pipe = LTX2Pipeline.from_pretrained(folder)
    with torch.no_grad():
        states, mask, _, _ = pipe.encode_prompt(
            CAPTIONS, do_classifier_free_guidance=False, max_sequence_length=ROWS, device="cpu"
        )
        wanted, _, shown = pipe.connectors(states, mask, padding_side="left")
    assert bool(shown.all())
    found = encoder.encode(CAPTIONS)
    for rows, expected, caption in zip(found, wanted, CAPTIONS, strict=True):
        torch.testing.assert_close(rows, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
        assert encoder.count(caption) == len(rows) == ROWS
        torch.testing.assert_close(encoder.encode([caption])[0], rows, atol=1e-6, rtol=0)
    assert (found[0] - found[2]).abs().max() > 0.1
    assert token_counter(model.text)(CAPTIONS[2]) == len(CAPTIONS[2].strip()) + 1


def test_a_decoder_without_its_head_and_eyes_makes_the_same_rows(folder: Path, tmp_path: Path) -> None:
    """The part of Gemma 3 that reads text, as Heddle's own exports hold it."""
    shutil.copytree(folder, tmp_path / "alone", ignore=shutil.ignore_patterns("text_encoder"))
    Gemma3ForConditionalGeneration.from_pretrained(folder / "text_encoder").model.language_model.save_pretrained(
        tmp_path / "alone" / "text_encoder"
    )
    models = [resolve(settings(path))[0].text for path in (folder, tmp_path / "alone")]
    assert torch.equal(*(build_text(text).encode(["a red disc"])[0] for text in models))


def test_connectors_of_another_decoder_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "text_encoder", tmp_path / "text_encoder")
    with pytest.raises(
        FileNotFoundError, match=r"needs both text encoders of the pipeline\. Download connectors/, too"
    ):
        resolve(settings(tmp_path))
    shutil.copytree(folder / "connectors", tmp_path / "connectors")
    file = tmp_path / "connectors" / "config.json"
    text = TextConfig(kind="ltx2", path=str(tmp_path), max_length=ROWS)
    with pytest.raises(ValueError, match="max_length 20 is not a multiple of the 8 registers"):
        resolve(ModelConfig(dit=DIT, text=replace(text, max_length=20)))
    with pytest.raises(
        ValueError, match="max_length 1032 is more than the 1024 tokens that layers of text_encoder/ see"
    ):
        resolve(ModelConfig(dit=DIT, text=replace(text, max_length=1032)))
    fields = json.loads(file.read_text())
    for other, said in (
        ({"text_proj_in_factor": 49}, "for 49 states of width 16, and text_encoder/ has 4 of width 16"),
        ({"per_modality_projections": True}, r"has per_modality_projections, as LTX-2\.3"),
    ):
        file.write_text(json.dumps(fields | other))
        with pytest.raises(ValueError, match=said):
            resolve(ModelConfig(dit=DIT, text=text))


def test_memory_of_decoder_and_connectors_is_foreseen(folder: Path) -> None:
    """Without the connector of the sound, of which nothing is loaded."""
    for config in (
        resolve(settings(folder))[0].text,
        TextConfig(kind="ltx2", max_length=16, d_model=16, num_heads=2, num_layers=2),
    ):
        need, encoder = text_need(config, 4, config.max_length, torch.float32), build_text(config)
        weights = sum(weight.numel() for weight in encoder.parameters())  # type: ignore[attr-defined]
        assert need.weights_gib == pytest.approx(4 * weights / 2**30) and need.peak_gib > 0
        assert not any("audio" in name for name, _ in encoder.second.named_parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_sampled_clip_is_the_one_of_the_pipeline_without_its_sound(steps: int, folder: Path) -> None:
    """Whole guided steps with the shift of its tokens. With sound, to which the video attends, it is another clip."""
    model, geometry = resolve(settings(folder))
    text, away = build_text(model.text).encode(["a red disc", ""])
    request = SampleRequest(text=text, frames=9, height=32, width=64, seed=3)
    config = SamplerConfig(steps=steps, guidance_scale=2.0, token_shift=LINE)
    (ours,) = sample_latents(build_dit(model.dit, 0).eval(), [request], away, geometry, config)
    pipe = LTX2Pipeline.from_pretrained(folder)
    wanted = clip(pipe, steps)
    largest = float(wanted.abs().max())
    torch.testing.assert_close(ours, wanted, atol=1e-4 * largest, rtol=0)
    assert (clip(pipe, steps, alone=False) - wanted).abs().max() > 1e-2 * largest


def test_weights_of_the_sound_are_those_of_the_folder_or_zero(folder: Path) -> None:
    """With zeros the class of Diffusers computes the branch for video alone, whatever it hears."""
    dit = resolve(settings(folder))[0].dit
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    kept, ours = kept_weights(dit), build_dit(dit, 0).state_dict()
    assert {*kept, *ours} == set(stored) and not {*kept} & {*ours}
    assert all(torch.equal(kept[name], stored[name]) for name in kept)
    zeros = kept_weights(replace(dit, path=None))
    assert {name: weight.shape for name, weight in zeros.items()} == {n: weight.shape for n, weight in kept.items()}
    theirs = reference().eval()
    numbers = torch.Generator().manual_seed(0)
    told: dict[str, Any] = {
        "hidden_states": torch.randn(1, 24, 8, generator=numbers),
        "audio_hidden_states": torch.randn(1, 5, 128, generator=numbers),
        "encoder_hidden_states": torch.randn(1, 6, 16, generator=numbers),
        "audio_encoder_hidden_states": torch.randn(1, 6, 16, generator=numbers),
        "timestep": torch.tensor([600.0]),
        "sigma": torch.tensor([600.0]),
        "num_frames": 3,
        "height": 2,
        "width": 4,
        "audio_num_frames": 5,
    }
    with torch.no_grad():
        alone, heard = theirs(**told, isolate_modalities=True).sample, theirs(**told).sample
        theirs.load_state_dict(zeros, strict=False)
        silent = theirs(**told).sample
    assert torch.equal(silent, alone) and (heard - alone).abs().max() > 1e-2 * alone.abs().max()


@pytest.mark.parametrize(
    ("lacking", "more", "said"),
    [
        (
            "audio_proj_out",
            "",
            r"transformer lacks audio_proj_out\.bias, audio_proj_out\.weight, which",
        ),
        (
            "-",
            "audio_attn1.to_gate_logits.weight",
            r"transformer holds audio_attn1\.to_gate_logits\.weight, which",
        ),
    ],
)
def test_a_folder_that_an_export_could_not_keep_whole_is_refused_before_a_run(
    lacking: str, more: str, said: str, folder: Path, tmp_path: Path
) -> None:
    """No pass computes with weights of the sound, so nothing else would miss them until the export."""
    shutil.copytree(folder, tmp_path / "pipeline")
    file = tmp_path / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = {name: weight for name, weight in load_file(file).items() if lacking not in name}
    save_file(weights | ({more: torch.ones(2)} if more else {}), file)
    dit = resolve(settings(tmp_path / "pipeline"))[0].dit
    config = RunConfig.from_yaml("run: {name: kept}")
    config = replace(config, model=settings(tmp_path / "pipeline"))
    for met in (lambda: launch._check_files(config), lambda: kept_weights(dit)):
        with pytest.raises(ValueError, match=said):
            met()


def test_connectors_without_all_of_their_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pipeline")
    file = tmp_path / "pipeline" / "connectors" / "diffusion_pytorch_model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if name != "text_proj_in.weight"}, file)
    text = resolve(settings(tmp_path / "pipeline"))[0].text
    with pytest.raises(ValueError, match=r"connectors lacks 1 of its weights, the first text_proj_in\.weight\."):
        build_text(text)


def test_factors_of_the_sound_are_refused_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    """Lightricks' trainer makes them by its usual config, whose names of layers match those of the sound, too."""
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    factors = {}
    for layer in (f"transformer_blocks.0.{name}.to_q" for name in ("attn1", "audio_attn1", "audio_to_video_attn")):
        rows, columns = stored[f"{layer}.weight"].shape
        factors[f"diffusion_model.{layer}.lora_A.weight"] = torch.ones(2, columns)
        factors[f"diffusion_model.{layer}.lora_B.weight"] = torch.ones(rows, 2)
    save_file(factors, tmp_path / "factors.safetensors")
    dit = resolve(settings(folder, lora_rank=2, lora_from=str(tmp_path / "factors.safetensors")))[0].dit
    with pytest.raises(ValueError, match=r"factors of \S*audio_attn1\.to_q, which is not computed here; .* or merge"):
        check_factors(dit)


def test_a_folder_is_resolved_to_its_numbers(folder: Path) -> None:
    model, geometry = resolve(settings(folder))
    assert replace(model.dit, path=None) == DIT.fitted(8, STRIDE, 16, 0)
    assert geometry.token_grid(9, 32, 64) == (3, 2, 4)
    published = dit_config({"_class_name": "LTX2VideoTransformer3DModel", "rope_type": "split"}, LTX2Config(), "here")
    assert (published.num_layers, published.dim, published.text_dim, published.ffn_dim) == (48, 4096, 3840, 16384)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gated_attn": True}, "has gated_attn True; only False is supported"),
        ({"use_prompt_embeddings": False}, "has use_prompt_embeddings False; only True is supported"),
        ({"rope_type": "interleaved"}, "has rope_type 'interleaved'; only 'split' is supported"),
        ({"cross_attention_dim": 2048}, "cross_attention_dim 2048 is not the transformer's width 4096"),
        ({"audio_num_attention_heads": 16}, "audio_num_attention_heads 16 and audio_cross_attention_dim 2048"),
    ],
)
def test_variants_that_are_not_computed_are_refused(fields: dict[str, object], said: str) -> None:
    """LTX-2.3 and later by what their transformers have more."""
    whole_config = {"_class_name": "LTX2VideoTransformer3DModel", "rope_type": "split", **fields}
    with pytest.raises(ValueError, match=said):
        dit_config(whole_config, LTX2Config(), "here")


def test_settings_that_no_weights_have_are_refused() -> None:
    with pytest.raises(ValueError, match="4 times the width"):
        replace(DIT, ffn_dim=100)
    with pytest.raises(ValueError, match="are 5 wide, which must be even"):
        replace(DIT, head_dim=10, ffn_dim=80)
    with pytest.raises(ValueError, match="a LTX2InContextPipeline: of LTX-2 text and a first frame to video"):
        DIT.of_pipeline({"_class_name": "LTX2InContextPipeline"})


def test_a_published_pipeline_is_sampled_by_its_own_scheduler(folder: Path) -> None:
    """As LTX2Pipeline is called by default, but for its sound."""
    config = published_run(folder, False)
    defaults = {name: one.default for name, one in inspect.signature(LTX2Pipeline.__call__).parameters.items()}
    assert (config.model.text.kind, config.model.text.max_length) == ("ltx2", defaults["max_sequence_length"])
    assert config.train.flow.token_shift == LINE and config.train.flow.knows_given_frames
    assert config.sample.guidance_scale == defaults["guidance_scale"]


def test_latents_are_normalised_by_the_buffers_of_the_vae(tmp_path: Path) -> None:
    model = video_vae()
    vae = vae_of(model, VAEConfig(kind="diffusers", path="-"), "cpu")
    assert isinstance(vae, DiffusersVAE) and vae.vae_stride == STRIDE
    video = torch.randint(0, 256, (1, 9, 32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pixels = video.float().div(127.5).sub(1.0).movedim(-1, 1)
    with torch.no_grad():
        plain = model.encode(pixels).latent_dist.mode()
        expected = LTX2Pipeline._normalize_latents(plain, model.latents_mean, model.latents_std, 0.5)
        latents = vae.encode(video)
        decoded = model.decode(plain).sample.movedim(1, -1)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)
    again = (decoded + 1).mul(127.5).round().clamp(0, 255)
    assert (vae.decode(latents).float() - again).abs().max() <= 1  # rounding to 8 bits
    model.save_pretrained(tmp_path / "vae")
    need = vae_need(VAEConfig(kind="diffusers", path=str(tmp_path)), 1, 9, 32, 48)
    assert need.peak_gib > 0 and need.weights_gib * 2**30 == 4 * sum(p.numel() for p in model.parameters())
    with pytest.raises(ValueError, match="with timestep_conditioning"):
        vae_numbers({"_class_name": "AutoencoderKLLTX2Video", "timestep_conditioning": True}, "vae")


def test_activations_with_channels_last_are_coded_alike() -> None:
    settings = (VAEConfig(kind="diffusers", path="-", channels_last=layout) for layout in ("on", "off"))
    laid_out, plain = (vae_of(video_vae(), config, "cpu") for config in settings)
    video = torch.randint(0, 256, (1, 5, 64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    check_channels_last(laid_out, plain, video)


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_tiles_are_those_of_diffusers(method: str) -> None:
    tiles: dict[str, Any] = {"tiling": True, "tile_sample_min": (64, 64), "tile_sample_stride": (32, 32)}
    model = video_vae()
    vae = vae_of(model, VAEConfig(kind="diffusers", path="-", **tiles), "cpu")
    model.use_tiling = True
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        if method == "encode":
            video = torch.randint(0, 256, (1, 5, 96, 128, 3), dtype=torch.uint8, generator=numbers)
            pixels = video.float().div(127.5).sub(1.0).movedim(-1, 1)
            found = vae.encode(video) * vae._std + vae._mean
            expected = model.encode(pixels).latent_dist.mode()
            assert len(vae.plan_tiles(5, 96, 128)) > 1
        else:
            latents = torch.randn(1, 8, 2, 6, 8, generator=numbers)
            found = vae._joined(
                [(tile, vae.decode_tile(latents, tile)) for tile in vae.plan_decode((2, 6, 8))], (2, 6, 8)
            )
            expected = model.decode(latents * vae._std + vae._mean).sample
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_clip_of_the_published_pipeline_is_that_of_its_own_scheduler(tmp_path: Path) -> None:
    """`heddle sample --from`, beside the pipeline without its sound and with guidance by the prompt alone: by the
    levels of LTX-2's scheduler, which end at 0.1, and over 1024 rows of text."""
    base, levels = publish(tmp_path / "base"), {"base_image_seq_len": 1024, "base_shift": 0.95, "max_shift": 2.05}
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1, **levels).save_pretrained(
        base / "scheduler"
    )
    saved = saved_model(base, device="cpu")
    assert saved.scheduler is not None and saved.scheduler.settings["shift_terminal"] == 0.1
    asked = ClipChanges(frames=9, height=32, width=64, steps=3, guidance_scale=2.0, seed=3)
    chosen = ClipSettings.of(saved.config, saved.scheduler).changed(asked)
    told, model = saved.encode(["a red disc"], negative=""), saved.load()
    requests, negative = clip_requests(model, told, chosen), told.negative.text
    (ours,) = sample_latents(model.dit, requests, negative, model.geometry, chosen.sampler)
    theirs = clip(LTX2Pipeline.from_pretrained(base), rows=1024, rate=24.0)
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)


def test_a_clip_from_a_first_frame_is_the_one_of_its_pipeline(folder: Path) -> None:
    """LTX2ImageToVideoPipeline, without its sound: the first latent frame is the picture's, at time 0."""
    model, geometry = resolve(settings(folder))
    text, away = build_text(model.text).encode(["a red disc", ""])
    video = torch.randint(0, 256, (1, 1, 32, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    first = patchify(build_vae(model.vae).encode(video)[0], (1, 1, 1))
    request = SampleRequest(text=text, frames=9, height=32, width=64, seed=3, first=first)
    config = SamplerConfig(steps=3, guidance_scale=2.0, token_shift=LINE)
    (ours,) = sample_latents(build_dit(model.dit, 0).eval(), [request], away, geometry, config)
    pipe = LTX2ImageToVideoPipeline.from_pipe(LTX2Pipeline.from_pretrained(folder))
    # given as latents, which it would draw: those of the picture, and noise after them
    noise = initial_noise(3, (8, 3, 2, 4))
    latents = torch.cat([unpatchify(first, (1, 2, 4), (1, 1, 1), 8), noise[:, 1:]], dim=1)
    theirs = clip(
        pipe,
        latents=pipe._denormalize_latents(
            latents[None], pipe.vae.latents_mean, pipe.vae.latents_std, pipe.vae.config.scaling_factor
        ),
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)


def test_only_the_branch_for_video_is_ours() -> None:
    """All weights of the class in whose names there is no word of the sound."""
    theirs = reference()
    assert set(own_weights(theirs, DIT)) == set(build_dit(DIT.fitted(8, STRIDE, 16, 0), 0).state_dict())
