"""HunyuanVideo-1.5: its cases for the tests of all families; two kinds of text, VAE, a whole run of its pipeline."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
)
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

from app.export.parity import our_velocity, their_velocity
from app.sampling.published import published_run
from ops.comm.collectives import Group
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents
from ops.models.base.family import ParitySample
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_config, resolve
from ops.models.forecast import text_need
from ops.models.hunyuan15.config import Hunyuan15Config
from ops.models.hunyuan15.vae import Hunyuan15VAE
from ops.models.load import build_dit, build_text, build_vae, token_counter
from ops.models.text_glyphs import quoted
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify
from ops.typed import ConfigError
from tests.families.kit import FamilyCases, SmallPipeline, small, their_class, whole

torch.set_num_threads(1)
FAMILY = FAMILIES["hunyuan15"]
RECIPE = FAMILY.texts["hunyuan15"]
DIT = Hunyuan15Config(
    num_layers=2,
    num_refiner_layers=1,
    num_heads=2,
    head_dim=16,
    ffn_dim=128,
    text_dim=24,
    glyph_dim=16,
    image_dim=8,
    in_channels=4,
    out_channels=4,
    patch=(1, 1, 1),
    rope_theta=256.0,
)
CAPTIONS = [
    "a red disc",
    "",
    'a sign "open" and "shut" and "open"',
    "two  blue squares\n&amp; a dot " * 4,
    "it says “one”",
    'an empty ""',
]
ATOL = 1e-5
SCALE = 1.03682


def qwen_tokens() -> PreTrainedTokenizerFast:
    """Words and single characters in Qwen's chat: more of the template than are dropped, and room for captions."""
    pieces = re.findall(r"[A-Za-z]+", RECIPE.template + " ".join(CAPTIONS))
    words = dict.fromkeys(["<pad>", "<unk>", *pieces, *(chr(code) for code in range(32, 127)), "\n"])
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z]+|[^A-Za-z]"), "isolated")
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<pad>", padding_side="right"
    )
    tokens.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokens


def vae() -> AutoencoderKLHunyuanVideo15:
    return AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        scaling_factor=SCALE,
    )


def publish(folder: Path) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    tokens = qwen_tokens()
    qwen = Qwen2_5_VLTextConfig(
        vocab_size=len(tokens),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
    )
    byt5 = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    HunyuanVideo15Pipeline(
        text_encoder=Qwen2_5_VLTextModel(qwen).eval(),
        tokenizer=tokens,
        text_encoder_2=T5EncoderModel(byt5).eval(),
        tokenizer_2=ByT5Tokenizer(),
        transformer=their_class(DIT),
        vae=vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=Hunyuan15Config(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(kind="hunyuan15", path=path, max_length=1000),
    )


def clip(pipeline: HunyuanVideo15Pipeline, prompt: str = 'a sign "open"', steps: int = 3) -> torch.Tensor:
    pipeline.guider = pipeline.guider.new(guidance_scale=6.0)
    made: torch.Tensor = pipeline(
        prompt=prompt,
        height=16,
        width=32,
        num_frames=5,
        num_inference_steps=steps,
        output_type="latent",
        latents=initial_noise(3, (4, 2, 2, 4))[None],
    ).frames[0]
    return made


CASES = FamilyCases(
    variants={
        "": small(Hunyuan15Config, num_layers=2, glyph_dim=8, image_dim=8, num_refiner_layers=1, patch=(1, 1, 1)),
        "i2v": small(
            Hunyuan15Config,
            **{"num_layers": 2, "glyph_dim": 8, "image_dim": 8, "num_refiner_layers": 1, "patch": (1, 1, 1)},
            first_frame="channels",
            in_channels=9,
        ),
        "in patches, of glyphs as wide as captions": small(
            Hunyuan15Config, num_layers=2, image_dim=8, patch=(1, 2, 2), rope_axes=(8, 12, 12)
        ),
    },
    models={
        "": whole(
            Hunyuan15Config(
                num_layers=2, num_refiner_layers=1, num_heads=12, head_dim=8, ffn_dim=96, image_dim=8, patch=(1, 1, 1)
            )
        ),
        "of two text encoders": whole(
            Hunyuan15Config(
                num_layers=2, num_refiner_layers=1, num_heads=12, head_dim=8, ffn_dim=96, image_dim=8, patch=(1, 1, 1)
            ),
            kind="hunyuan15",
            pooled_dim=12,
        ),
        "i2v": whole(
            Hunyuan15Config(
                **{"num_layers": 2, "num_refiner_layers": 1, "num_heads": 12, "head_dim": 8, "ffn_dim": 96},
                patch=(1, 1, 1),
                first_frame="channels",
            ),
            **{"kind": "hunyuan15_i2v", "pooled_dim": 12, "picture_dim": 8},
        ),
    },
    whole_runs=("of two text encoders", "i2v"),
    presets={"hunyuan1.5-8b": 8.3, "hunyuan1.5-i2v-8b": 8.3},
    lora=("attn.add_k_proj", "attn.to_out.0", "blocks.0.ff_context.net.2"),
    unread=r"transformer_blocks\.1\.(attn\.to_add_out|ff_context)\.",  # what the last block makes of the text
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        request={"prompt": 'a sign "open"', "frames": 5, "height": 16, "width": 32, "guidance_scale": 6.0},
        clip=clip,
        scheduler="Euler, flow shift 3",
        sampled=settings,
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("hunyuan15") / "pipeline")


def of_kinds(states: int, glyphs: int, seed: int = 1, config: Hunyuan15Config = DIT) -> torch.Tensor:
    """A text of rows of both kinds, those of glyphs first."""
    numbers = torch.Generator().manual_seed(seed)
    text = torch.zeros(glyphs + states, config.text_dim + 1)
    text[:glyphs, : config.glyph_width] = torch.randn(glyphs, config.glyph_width, generator=numbers)
    text[:glyphs, -1] = 1
    text[glyphs:, :-1] = torch.randn(states, config.text_dim, generator=numbers)
    return text


def test_packed_samples_with_and_without_glyphs_equal_diffusers_one_by_one() -> None:
    """Forward and gradients, of every parameter."""
    reference, model = their_class(DIT), build_dit(DIT, 0)
    model.load_state_dict(reference.state_dict())  # strict: the same names and shapes
    numbers = torch.Generator().manual_seed(2)
    grids, kinds = ((3, 4, 6), (1, 6, 2), (2, 3, 3)), ((7, 3), (5, 0), (1, 9))
    samples = [
        ParitySample(
            latent=torch.randn(4, *grid, generator=numbers),
            timestep=torch.tensor([time]),
            text=of_kinds(*kind, seed=index),
        )
        for index, (grid, kind, time) in enumerate(zip(grids, kinds, (900.5, 3.25, 500.0)))
    ]
    layout = Layout([Sequence(grid, sum(kind)) for grid, kind in zip(grids, kinds)])
    tokens = torch.cat([patchify(sample.latent, (1, 1, 1)) for sample in samples])
    times, text = torch.cat([sample.timestep for sample in samples]), torch.cat([sample.text for sample in samples])
    packed = model(tokens, times, text, layout, Group.solo())
    expected = torch.cat([patchify(their_velocity(reference, DIT, sample), (1, 1, 1)) for sample in samples])
    torch.testing.assert_close(packed, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    packed.square().mean().backward()
    expected.square().mean().backward()
    theirs = dict(reference.named_parameters())
    largest = max(float(weight.grad.abs().max()) for weight in theirs.values() if weight.grad is not None)
    for name, weight in model.named_parameters():
        if theirs[name].grad is None:  # of the last block's way out for the text, which nothing reads
            assert weight.grad is None and name.startswith("transformer_blocks.1."), name
            continue
        assert weight.grad is not None, name
        torch.testing.assert_close(weight.grad, theirs[name].grad, atol=1e-5 * largest, rtol=1e-4, msg=name)
    assert model.get_parameter("context_embedder_2.linear_1.weight").grad.abs().max() > 0


def test_a_text_without_glyphs_is_the_same_with_their_column_and_without() -> None:
    model, text = build_dit(DIT, 0), of_kinds(6, 0)
    sample = ParitySample(latent=torch.randn(4, 2, 3, 2), timestep=torch.tensor([300.0]), text=text)
    with torch.no_grad():
        found = [our_velocity(model, replace(sample, text=rows)) for rows in (text, text[:, :-1])]
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        other = our_velocity(model, replace(sample, text=torch.cat([text, of_kinds(0, 2)])))
    assert (other - found[0]).abs().max() > 1e-4


def test_weights_of_images_are_kept_and_not_trained() -> None:
    model = build_dit(DIT, 0)
    kept = [name for name in model.state_dict() if name.startswith("image_embedder.")]
    assert len(kept) == 8 and not any(name.startswith("image_embedder.") for name, _ in model.named_parameters())


@pytest.mark.parametrize("caption", [*CAPTIONS, 'a "b"c"d', 'mixed “a" "b”', 'lines "a\nb"', "“”"])
def test_what_a_caption_quotes_is_what_the_pipeline_finds(caption: str) -> None:
    assert quoted(caption) == extract_glyph_texts(caption)


def test_the_prompt_is_the_pipeline_s() -> None:
    defaults = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    assert defaults["system_message"].default == RECIPE.system
    assert (defaults["crop_start"].default, defaults["num_hidden_layers_to_skip"].default) == (108, 2)
    said = [{"role": "system", "content": RECIPE.system}, {"role": "user", "content": "{}"}]
    assert qwen_tokens().apply_chat_template(said, tokenize=False, add_generation_prompt=True) == RECIPE.template


def test_rows_are_those_of_the_pipeline(folder: Path) -> None:
    model, _ = resolve(settings(folder))
    assert (model.text.d_model, model.text.glyph_dim, model.text.width, model.text.tail) == (24, 16, 25, 0)
    assert model.text.most_tokens == 1256
    encoder, captions = build_text(model.text), [*CAPTIONS, "a b" * 1100 + ' "' + "c" * 300 + '"']
    texts, pipe = encoder.encode(captions), HunyuanVideo15Pipeline.from_pretrained(folder)
    with torch.no_grad():
        states, mask, glyphs, glyph_mask = pipe.encode_prompt(captions, device="cpu", batch_size=len(captions))
    largest = float(states.abs().max())  # other rows in a batch are other roundings
    for i, text in enumerate(texts):
        first, rows = int(glyph_mask[i].sum()), int(mask[i].sum())
        assert text.shape == (first + rows, 25) and encoder.count(captions[i]) == len(text)
        assert bool((text[:first, -1] == 1).all()) and not text[first:, -1].any() and not text[:first, 16:-1].any()
        torch.testing.assert_close(text[:first, :16], glyphs[i, :first], atol=ATOL, rtol=0)
        torch.testing.assert_close(text[first:, :-1], states[i, :rows], atol=ATOL * largest, rtol=0)
    assert len(texts[6]) == 1256 and [int(row.sum()) for row in glyph_mask[:2]] == [0, 0]
    alone = encoder.encode([captions[2]])[0]
    torch.testing.assert_close(alone, texts[2], atol=ATOL * largest, rtol=0)
    assert token_counter(model.text)("a dot") == encoder.count("a dot")


def test_another_chat_template_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    tokens = qwen_tokens()
    tokens.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    shutil.rmtree(tmp_path / "other" / "tokenizer")
    tokens.save_pretrained(tmp_path / "other" / "tokenizer")
    with pytest.raises(ValueError, match="a chat template that makes another prompt than"):
        build_text(resolve(settings(tmp_path / "other"))[0].text)


@pytest.mark.parametrize("prompt", ["a red disc", 'a sign "open"'])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_sampled_clip_is_the_one_of_the_pipeline(steps: int, prompt: str, folder: Path) -> None:
    """Whole denoising steps; the guider of the folder is classifier-free guidance of scale 6."""
    model, geometry = resolve(settings(folder))
    text, negative = build_text(model.text).encode([prompt, ""])
    request = SampleRequest(text=text, frames=5, height=16, width=32, seed=3)
    config = SamplerConfig(steps=steps, guidance_scale=6.0, flow_shift=3.0)
    (ours,) = sample_latents(build_dit(model.dit, 0).eval(), [request], negative, geometry, config)
    wanted = clip(HunyuanVideo15Pipeline.from_pretrained(folder), prompt, steps)
    torch.testing.assert_close(ours, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)


def test_latents_and_clips_are_those_of_the_autoencoder_in_tiles_too(folder: Path) -> None:
    config = resolve(settings(folder))[0].vae
    assert (config.channels, config.temporal, config.spatial) == (4, 4, 8)
    theirs = AutoencoderKLHunyuanVideo15.from_pretrained(folder / "vae")
    video = torch.randint(0, 256, (1, 5, 80, 112, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pixels = video.float().div(127.5).sub(1.0).movedim(-1, 1)
    for tiling in (False, True):
        ours = build_vae(replace(config, tiling=tiling, tile_sample_min=(64, 64), tile_sample_stride=(48, 48)))
        if tiling:
            theirs.enable_tiling(64, 64, 8, 8, 0.25)
        with torch.no_grad():
            latents, wanted = ours.encode(video), theirs.encode(pixels).latent_dist.mode() * SCALE
            torch.testing.assert_close(latents, wanted, atol=ATOL, rtol=1e-5)
            again = (theirs.decode(wanted / SCALE).sample.movedim(1, -1) + 1).mul(127.5).round().clamp(0, 255)
        assert (ours.decode(latents).float() - again).abs().max() <= 1  # rounding to 8 bits
        assert len(ours.plan_tiles(5, 80, 112)) == (6 if tiling else 1)


@pytest.mark.parametrize(("frames", "pixels"), [(1, 6), (3, 4)])
def test_masks_of_the_autoencoder_are_those_of_its_class(frames: int, pixels: int, folder: Path) -> None:
    ours = build_vae(resolve(settings(folder))[0].vae)
    assert isinstance(ours, Hunyuan15VAE)
    theirs, given = AutoencoderKLHunyuanVideo15.from_pretrained(folder / "vae"), (frames, pixels, torch.float32, "cpu")
    for part in ("encoder", "decoder"):
        (block,) = getattr(ours.model, part).mid_block.attentions
        (plain,) = getattr(theirs, part).mid_block.attentions
        mask = block.prepare_causal_attention_mask(*given, batch_size=2)
        assert all(torch.equal(mask, one) for one in plain.prepare_causal_attention_mask(*given, batch_size=2))


PUBLISHED: dict[str, Any] = {"_class_name": "HunyuanVideo15Transformer3DModel", "task_type": "t2v"}


def test_a_folder_is_resolved_to_its_numbers(folder: Path) -> None:
    model, geometry = resolve(settings(folder))
    assert replace(model.dit, path=None) == DIT
    assert geometry.token_grid(5, 16, 32) == (2, 2, 4)
    found = dit_config(PUBLISHED, Hunyuan15Config(), "here")
    assert (found.in_channels, found.dim, found.glyph_dim, found.ffn_dim) == (32, 2048, 1472, 8192)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"task_type": "sr"},
            "task_type is sr: .* text to video and image to video are computed, not super-resolution",
        ),
        ({"use_meanflow": True}, "use_meanflow is true: its weights get a second time"),
        ({"in_channels": 64}, "in_channels is 64, and not one more than twice out_channels 32"),
        ({"text_embed_2_dim": 4000}, r"glyph_dim 4000 is more than text_dim 3584"),
    ],
)
def test_variants_that_are_not_computed_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dit_config(PUBLISHED | fields, Hunyuan15Config(), "here")


def test_sizes_of_clips_are_those_that_the_pipeline_chooses() -> None:
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    chooses = HunyuanVideo15ImageProcessor(vae_scale_factor=16).calculate_default_height_width
    for target in (256, 480, 640, 960):
        clips = FAMILY.published({}, {"target_size": target}).clips
        assert (clips["height"], clips["width"]) == tuple(map(int, chooses(9, 16, target))), target


def test_the_scale_of_guidance_is_that_of_the_guider(folder: Path, tmp_path: Path) -> None:
    def found(index: list[str | None] | None = None, **guider: object) -> float:
        work = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, work)
        file = work / "guider" / "guider_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | guider))
        if index:
            named = json.loads((work / "model_index.json").read_text())
            (work / "model_index.json").write_text(json.dumps(named | {"guider": index}))
        return published_run(work, False).sample.guidance_scale

    assert found() == 6.0 and found(guidance_scale=1.0) == 1.0 and found(enabled=False) == 1.0
    assert found(use_original_formulation=True) == 7.0
    for fault in ({"guidance_rescale": 0.5}, {"start": 0.2}, {"stop": 0.9}):
        (name,) = fault
        with pytest.raises(ConfigError, match=rf"guider_config.json: {name} .*not done"):
            found(**fault)
    with pytest.raises(ConfigError, match="the guider AdaptiveProjectedGuidance; clips are made with Classifier"):
        found(["diffusers", "AdaptiveProjectedGuidance"])


def test_other_transformers_take_no_rows_of_glyphs() -> None:
    with pytest.raises(ValueError, match=r"of 12 numbers, and a transformer of architecture wan\s+takes none"):
        resolve(whole(FAMILIES["wan"].settings(), kind="hunyuan15", pooled_dim=12))
    layout = Layout([Sequence((2, 1, 1), 1, clean_frames=1)])
    with pytest.raises(ValueError, match="take one time for all of a clip"):
        build_dit(DIT, 0)(torch.zeros(2, 4), torch.ones(1), torch.zeros(1, 24), layout, Group.solo())


def test_the_random_pair_is_equal_everywhere_and_reads_glyphs() -> None:
    config = TextConfig(kind="hunyuan15", max_length=16, d_model=16, num_heads=2, num_layers=1, pooled_dim=12)
    texts = build_text(config).encode(["a red disc", 'a "red" disc', "a blue disc"])
    assert token_counter(config)("a red disc") == len(texts[0]) == 10
    torch.manual_seed(8)
    again = build_text(config).encode(["a red disc", 'a "red" disc', "a blue disc"])
    assert all(torch.equal(a, b) for a, b in zip(texts, again))
    assert [text.shape[1] for text in texts] == [17] * 3 and not torch.allclose(texts[0], texts[2][:10], atol=1e-2)
    assert int(texts[1][:, -1].sum()) == len('Text "red". ') + 1 and not texts[0][:, -1].any()


def test_memory_of_both_encoders_is_foreseen() -> None:
    config = TextConfig(kind="hunyuan15", max_length=64, d_model=32, num_heads=2, num_layers=2, pooled_dim=16)
    need = text_need(config, 4, 64, torch.float32)
    weights = sum(weight.numel() for weight in build_text(config).parameters())  # type: ignore[attr-defined]
    assert need.weights_gib == pytest.approx(4 * weights / 2**30) and need.peak_gib > 0


def test_numbers_are_of_the_text_that_is_quoted(folder: Path) -> None:
    """Two captions that differ in what they quote alone have the same number of rows and other rows of glyphs."""
    encoder = build_text(resolve(settings(folder))[0].text)
    one, other = encoder.encode(['a sign "open"', 'a sign "shut"'])
    assert one.shape == other.shape and not np.allclose(one[:5], other[:5], atol=1e-2)
