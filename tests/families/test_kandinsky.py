"""Kandinsky 5.0: its cases for the tests of all families; RoPE by the size of a clip, text, a whole run of its
pipeline."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler, Kandinsky5T2VPipeline
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from app.export.parity import our_velocity, their_velocity
from app.sampling.published import published_run
from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents, sigma_schedule
from ops.models.base.family import ParitySample
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_config, resolve
from ops.models.forecast import text_need
from ops.models.kandinsky.config import KandinskyConfig
from ops.models.load import build_dit, build_text, token_counter
from ops.models.text_pair import split
from ops.models.text_pair_load import text_classes
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify
from ops.typed import ConfigError
from tests.families.kit import FamilyCases, SmallPipeline, small, their_class, whole

torch.set_num_threads(1)
FAMILY = FAMILIES["kandinsky"]
RECIPE = FAMILY.texts["kandinsky"]
DIT = KandinskyConfig(
    num_layers=2,
    num_text_layers=2,
    num_heads=2,
    head_dim=16,
    ffn_dim=64,
    time_dim=24,
    text_dim=24,
    pooled_dim=12,
    in_channels=4,
    out_channels=4,
)
CAPTIONS = ["a red disc", "", "two  blue squares\n&amp; a dot"]
ATOL = 1e-5
NEGATIVE = "worst quality"


def qwen_tokens() -> PreTrainedTokenizerFast:
    """Words and single characters: more of the template than are dropped, and room for captions."""
    pieces = re.findall(r"[A-Za-z]+", RECIPE.template + " ".join([*CAPTIONS, NEGATIVE]))
    words = dict.fromkeys(["<pad>", "<unk>", *pieces, *(chr(code) for code in range(32, 127)), "\n"])
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z]+|[^A-Za-z]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<pad>", padding_side="right"
    )


def reference() -> torch.nn.Module:
    """The class of Diffusers; norms of queries and keys near 1, so that attention depends on what it sees."""
    made = their_class(DIT)
    for name, weight in made.named_parameters():
        if name.endswith(("query_norm.weight", "key_norm.weight")):
            torch.nn.init.normal_(weight, mean=1.5, std=0.2)
    return made


def vae() -> AutoencoderKLHunyuanVideo:
    return AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
    )


def publish(folder: Path) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    tokens = qwen_tokens()
    qwen = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokens),
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "bos_token_id": None,
            "eos_token_id": None,
            "initializer_range": 0.3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 24,
            "fullatt_block_indexes": [0],
        },
    )
    clip = CLIPTextConfig(
        vocab_size=384,
        hidden_size=12,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    Kandinsky5T2VPipeline(
        transformer=reference(),
        vae=vae(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(qwen).eval(),
        tokenizer=tokens,
        text_encoder_2=CLIPTextModel(clip).eval(),
        tokenizer_2=ByT5Tokenizer(model_max_length=77),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=KandinskyConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(kind="kandinsky", path=path, max_length=256),
    )


def as_trained(pipeline: Kandinsky5T2VPipeline) -> Kandinsky5T2VPipeline:
    """With the prompt of the weights, as exports say; in an older Diffusers it is that already."""
    pipeline.prompt_template = pipeline.prompt_template.replace("a prompt engineer", "a promt engineer")
    pipeline.prompt_template_encode_start_idx = 129
    return pipeline


def clip(pipeline: Kandinsky5T2VPipeline, negative: str = "", steps: int = 3) -> torch.Tensor:
    noise = initial_noise(3, (4, 2, 2, 4)).movedim(0, -1)[None]
    with FAMILY.parity_mode():
        made: torch.Tensor = pipeline(
            prompt="a red disc",
            negative_prompt=negative,
            height=16,
            width=32,
            num_frames=5,
            num_inference_steps=steps,
            guidance_scale=5.0,
            output_type="latent",
            latents=torch.cat([noise, torch.zeros(1, 2, 2, 4, 5)], dim=-1),
        ).frames[0]
    return made.movedim(-1, 0)


CASES = FamilyCases(
    variants={
        "": small(KandinskyConfig, num_text_layers=1, time_dim=48, pooled_dim=12),
        "of pooled states, without a first frame": small(
            KandinskyConfig, num_text_layers=2, time_dim=48, visual_cond=False, rope_axes=(12, 10, 10)
        ),
    },
    models={
        "": whole(KandinskyConfig(num_layers=2, num_text_layers=1, num_heads=12, head_dim=8, ffn_dim=96, time_dim=40)),
        "of two text encoders": whole(
            KandinskyConfig(num_layers=2, num_text_layers=1, num_heads=12, head_dim=8, ffn_dim=96, time_dim=40),
            kind="kandinsky",
            pooled_dim=12,
        ),
    },
    whole_runs=("of two text encoders",),
    presets={"kandinsky5-lite": 2.0, "kandinsky5-pro": 19.3},
    lora=("self_attention.to_query", "cross_attention.out_layer", "text_transformer_blocks.0.feed_forward.out_layer"),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        request={"prompt": "a red disc", "frames": 5, "height": 16, "width": 32, "guidance_scale": 5.0},
        clip=lambda pipeline: clip(as_trained(pipeline)),
        flow=FlowConfig(flow_shift=5.0),
        scheduler="Euler, flow shift 5",
        note="prompt_template.replace('a prompt engineer', 'a promt engineer')",
        sampled=settings,
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("kandinsky") / "pipeline")


SIZES = (((3, 4, 6), 900.5), ((1, 30, 52), 3.25), ((2, 30, 30), 500.0), ((1, 54, 30), 40.0))


def test_packed_clips_of_any_size_equal_diffusers_one_by_one() -> None:
    """Forward and gradients, of every parameter, with a vector for each: two sizes around 480p, among them a picture,
    and two others."""
    theirs, model = reference(), build_dit(DIT, 0)
    model.load_state_dict(theirs.state_dict())  # strict: the same names and shapes
    numbers = torch.Generator().manual_seed(2)
    samples = [
        ParitySample(
            latent=torch.randn(4, grid[0], 2 * grid[1], 2 * grid[2], generator=numbers),
            timestep=torch.tensor([time]),
            text=torch.randn(5 + 3 * index, 24, generator=numbers),
            conditions=Conditions(pooled=torch.randn(1, 12, generator=numbers)),
        )
        for index, (grid, time) in enumerate(SIZES)
    ]
    assert [DIT.rope_scale(*grid[1:]) for grid, _ in SIZES] == [3.16, 2.0, 2.0, 3.16]
    layout = Layout([Sequence(grid, len(sample.text)) for (grid, _), sample in zip(SIZES, samples, strict=True)])
    tokens = torch.cat([patchify(sample.latent, DIT.patch) for sample in samples])
    times, text = torch.cat([sample.timestep for sample in samples]), torch.cat([sample.text for sample in samples])
    pooled = torch.cat([sample.conditions.pooled for sample in samples if sample.conditions.pooled is not None])
    packed = model(tokens, times, text, layout, Group.solo(), Conditions(pooled=pooled))
    expected = torch.cat([patchify(their_velocity(theirs, DIT, sample), DIT.patch) for sample in samples])
    torch.testing.assert_close(packed, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    packed.square().mean().backward()
    expected.square().mean().backward()
    wanted = dict(theirs.named_parameters())
    largest = max(float(weight.grad.abs().max()) for weight in wanted.values() if weight.grad is not None)
    for name, weight in model.named_parameters():
        assert weight.grad is not None and wanted[name].grad is not None, name
        torch.testing.assert_close(weight.grad, wanted[name].grad, atol=1e-5 * largest, rtol=1e-4, msg=name)


@pytest.mark.parametrize("size", [(480, 480), (512, 768), (768, 512), (480, 854), (854, 854)])
def test_places_are_divided_as_in_the_pipeline(size: tuple[int, int]) -> None:
    def theirs(height: int, width: int) -> tuple[float, float, float]:
        found: tuple[float, float, float] = Kandinsky5T2VPipeline._get_scale_factor(None, height, width)
        return found

    for down, across in ((0, 0), (-16, 0), (0, -16), (16, 0), (0, 16), (512, 512), (-460, -460)):
        height, width = (size[0] + down) // 16 * 16, (size[1] + across) // 16 * 16
        scale = DIT.rope_scale(height // 16, width // 16)
        assert theirs(height, width) == (1, scale, scale), (height, width)


def test_the_class_of_diffusers_differs_by_the_rounding_of_queries_and_keys_alone() -> None:
    theirs, model = reference(), build_dit(DIT, 0)
    model.load_state_dict(theirs.state_dict())
    sample = ParitySample(latent=torch.randn(4, 2, 4, 6), timestep=torch.tensor([300.0]), text=torch.randn(5, 24))
    with torch.no_grad():
        ours, exact = our_velocity(model, sample), their_velocity(theirs, DIT, sample)
        rounded = theirs(**FAMILY.parity_inputs(DIT, sample)).sample[0].movedim(-1, 0)
    largest = float(exact.abs().max())
    torch.testing.assert_close(ours, exact, atol=1e-5 * largest, rtol=0)
    assert 1e-5 * largest < (rounded - exact).abs().max() < 2**-8 * largest  # bfloat16 has 8 bits


def test_weights_of_a_first_frame_see_zeros() -> None:
    """The others move the output, each by itself."""
    model, sample = (
        build_dit(DIT, 0),
        ParitySample(latent=torch.randn(4, 1, 2, 2), timestep=torch.tensor([300.0]), text=torch.randn(5, 24)),
    )
    our_velocity(model, sample).square().mean().backward()
    grad = model.get_parameter("visual_embeddings.in_layer.weight").grad
    assert grad is not None
    by_channel = grad.unflatten(1, (-1, 9)).abs().amax(dim=(0, 1))
    assert bool((by_channel[:4] > 0).all()) and not by_channel[4:].any()


def test_clips_with_clean_frames_are_refused() -> None:
    layout = Layout([Sequence((2, 1, 1), 1, clean_frames=1)])
    with pytest.raises(ValueError, match=r"of Kandinsky 5\.0 text to video is computed"):
        build_dit(DIT, 0)(torch.zeros(2, 16), torch.ones(1), torch.zeros(1, 24), layout, Group.solo())


def test_the_prompt_is_that_of_the_authors(folder: Path) -> None:
    """Diffusers 0.42 corrects the spelling of a word that the weights have seen as its authors wrote it, in two tokens
    instead of one (kandinsky/models/text_embedders.py of kandinskylab/kandinsky-5: crop_start 129)."""
    assert RECIPE.template.startswith("<|im_start|>system\nYou are a promt engineer. Describe the video in detail.\n")
    assert RECIPE.crop == 129
    assert as_trained(Kandinsky5T2VPipeline.from_pretrained(folder)).prompt_template == RECIPE.template


def test_rows_and_vectors_are_those_of_the_pipeline(folder: Path) -> None:
    """One by one: of several prompts the pipeline makes rows of padding, too. The longest is cut after whole tokens, as
    its authors cut it; the pipeline leaves out as many characters instead, which changes its last rows."""
    model, _ = resolve(settings(folder))
    assert (model.text.d_model, model.text.pooled, model.text.most_tokens, model.text.num_layers) == (24, 12, 256, 2)
    encoder, captions = build_text(model.text), [*CAPTIONS, "a red disc " * 200]
    texts, vectors = split(encoder.encode(captions), model.text)
    pipe = as_trained(Kandinsky5T2VPipeline.from_pretrained(folder))
    assert vectors is not None
    for caption, text, vector in zip(captions, texts, vectors, strict=True):
        with torch.no_grad():
            states, pooled, _ = pipe.encode_prompt(caption, max_sequence_length=256, device="cpu")
        kept = len(text) if caption != captions[3] else 250
        torch.testing.assert_close(text[:kept], states[0, :kept], atol=ATOL, rtol=0)
        torch.testing.assert_close(vector, pooled[0], atol=ATOL, rtol=0)
        assert encoder.count(caption) == len(text) == min(token_counter(model.text)(caption), 256)
    assert len(texts[3]) == 256


def test_an_encoder_without_its_head_and_eyes_makes_the_same_rows(folder: Path, tmp_path: Path) -> None:
    """The part of Qwen2.5-VL that reads text, as Heddle's own exports hold it."""
    whole_model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder")
    for part in ("tokenizer", "text_encoder_2", "tokenizer_2"):
        (tmp_path / part).symlink_to(folder / part)
    whole_model.model.language_model.save_pretrained(tmp_path / "text_encoder")
    config = TextConfig(kind="kandinsky", path=str(folder), max_length=256)
    alone = resolve(ModelConfig(dit=replace(DIT, path=None), text=replace(config, path=str(tmp_path))))[0].text
    both = [build_text(one).encode(["a red disc"])[0] for one in (resolve(settings(folder))[0].text, alone)]
    torch.testing.assert_close(*both, atol=1e-6, rtol=0)
    assert text_classes(config)["text_encoder"] == "Qwen2_5_VLForConditionalGeneration"
    assert text_classes(alone)["text_encoder"] == "Qwen2_5_VLTextModel"


def test_the_tokenizer_of_a_whole_folder_is_what_its_pipeline_calls(folder: Path, tmp_path: Path) -> None:
    """Published folders hold a processor of texts and pictures in tokenizer/."""
    for part in ("text_encoder", "text_encoder_2", "tokenizer_2"):
        (tmp_path / part).symlink_to(folder / part)
    (tmp_path / "tokenizer").mkdir()
    for file in (folder / "tokenizer").iterdir():
        (tmp_path / "tokenizer" / file.name).symlink_to(file)
    (tmp_path / "tokenizer" / "preprocessor_config.json").write_text("{}")
    config = TextConfig(kind="kandinsky", path=str(tmp_path), max_length=256)
    assert text_classes(config)["tokenizer"] == "Qwen2VLProcessor"
    assert text_classes(replace(config, path=str(folder)))["tokenizer"] != "Qwen2VLProcessor"


@pytest.mark.parametrize("negative", [NEGATIVE, ""])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_sampled_clip_is_the_one_of_the_pipeline(steps: int, negative: str, folder: Path) -> None:
    """Whole guided denoising steps."""
    model, geometry = resolve(settings(folder))
    (text, away), vectors = split(build_text(model.text).encode(["a red disc", negative]), model.text)
    assert vectors is not None
    request = SampleRequest(text=text, frames=5, height=16, width=32, seed=3, pooled=vectors[0])
    config = SamplerConfig(steps=steps, guidance_scale=5.0, flow_shift=5.0, spacing=model.dit.spacing)
    dit = build_dit(model.dit, 0).eval()
    (ours,) = sample_latents(dit, [request], away, geometry, config, negative_pooled=vectors[1])
    wanted = clip(as_trained(Kandinsky5T2VPipeline.from_pretrained(folder)), negative, steps)
    torch.testing.assert_close(ours, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("steps", "shift", "times"), [(1, 5.0, 1000), (2, 1.0, 1000), (16, 5.0, 1000), (50, 10.0, 500)]
)
def test_noise_levels_are_those_of_a_scheduler_that_gets_none(steps: int, shift: float, times: int) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift, num_train_timesteps=times)
    theirs.set_timesteps(steps)
    ours = sigma_schedule(steps, shift, spacing=DIT.spacing, times=times)
    torch.testing.assert_close(torch.tensor(ours), theirs.sigmas, atol=1e-6, rtol=1e-5)


PUBLISHED: dict[str, Any] = {"_class_name": "Kandinsky5Transformer3DModel"}
PRO = {"model_dim": 4096, "ff_dim": 16384, "num_text_blocks": 4, "num_visual_blocks": 60, "axes_dims": [32, 48, 48]}


def test_a_folder_is_resolved_to_its_numbers(folder: Path) -> None:
    model, geometry = resolve(settings(folder))
    assert replace(model.dit, path=None) == DIT
    assert geometry.token_grid(5, 16, 32) == (2, 1, 2)
    found = dit_config(PUBLISHED | PRO | {"visual_cond": True}, KandinskyConfig(), "here")
    assert (found.num_heads, found.head_dim, found.rope_split) == (32, 128, (32, 48, 48))
    lite = dit_config(PUBLISHED | {"model_dim": 1792, "ff_dim": 7168}, KandinskyConfig(), "here")
    assert (lite.num_heads, lite.head_dim, lite.rope_split) == (28, 64, (16, 24, 24))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"attention_type": "nabla", "attention_P": 0.9},
            "attention_type is nabla: sparse attention .* is not computed",
        ),
        ({"model_dim": 1800}, r"model_dim 1800 is no multiple of a head's 64, the sum of axes_dims \[16, 24, 24\]"),
    ],
)
def test_variants_that_are_not_computed_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dit_config(PUBLISHED | fields, KandinskyConfig(), "here")


@pytest.mark.parametrize(
    ("name", "use"),
    [("Kandinsky5I2VPipeline", "image to video"), ("Kandinsky5T2IPipeline", "pictures"), ("Kandinsky5I2IPipeline", "")],
)
def test_pipelines_of_other_uses_are_refused(name: str, use: str, folder: Path, tmp_path: Path) -> None:
    """Their transformers have the same class and settings."""
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "model_index.json").unlink()
    index = json.loads((folder / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    with pytest.raises(ConfigError, match=rf"a {name}, for {use}.*: of Kandinsky 5.0 text to video is computed"):
        published_run(tmp_path, False)
    with pytest.raises(ValueError, match=rf"a {name}, for {use}"):
        resolve(settings(tmp_path))


def test_a_published_pipeline_is_sampled_with_its_negative_prompt(folder: Path) -> None:
    sample = published_run(folder, False).sample
    assert (sample.steps, sample.guidance_scale, sample.frames) == (50, 5.0, 121)
    assert sample.negative_prompt in inspect.getsource(Kandinsky5T2VPipeline.__call__)
    assert sample.negative_prompt.startswith("Static, 2D cartoon")


def test_a_patch_that_its_pipeline_does_not_count_is_refused() -> None:
    with pytest.raises(ValueError, match=r"patch \[1, 1, 1\]: Kandinsky5T2VPipeline counts tokens of 2x2 latents"):
        replace(DIT, patch=(1, 1, 1))


def test_a_vae_of_latents_that_are_not_square_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.vae makes latents of 8x16 pixels"):
        DIT.fitted(4, (4, 8, 16), 24, 0)
    assert DIT.fitted(4, (4, 16, 16), 24, 0).rope_scale(20, 20) == 2.0 != DIT.rope_scale(20, 20)


def test_the_random_pair_is_equal_everywhere() -> None:
    config = TextConfig(kind="kandinsky", max_length=16, d_model=16, num_heads=2, num_layers=1, pooled_dim=12)
    texts, vectors = split(build_text(config).encode(["a red disc", "a  red&#32;disc", "a blue disc"]), config)
    assert vectors is not None and token_counter(config)("a red disc") == len(texts[0])
    torch.manual_seed(8)
    again, _ = split(build_text(config).encode(["a red disc", "a  red&#32;disc", "a blue disc"]), config)
    assert all(torch.equal(a, b) for a, b in zip(texts, again, strict=True))
    torch.testing.assert_close(texts[0], texts[1], atol=ATOL, rtol=0)  # cleaned
    torch.testing.assert_close(vectors[0], vectors[1], atol=ATOL, rtol=0)
    assert not np.allclose(texts[0][:8], texts[2][:8], atol=1e-2) and not np.allclose(vectors[0], vectors[2], atol=1e-2)


def test_memory_of_both_encoders_is_foreseen() -> None:
    config = TextConfig(kind="kandinsky", max_length=64, d_model=32, num_heads=2, num_layers=2, pooled_dim=16)
    need = text_need(config, 4, 64, torch.float32)
    weights = sum(weight.numel() for weight in build_text(config).parameters())  # type: ignore[attr-defined]
    assert need.weights_gib == pytest.approx(4 * weights / 2**30) and need.peak_gib > 0
