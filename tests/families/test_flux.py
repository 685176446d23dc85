"""FLUX.1: its cases for the tests of all families; VAE, text, a whole run of its pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline
from transformers import ByT5Tokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from ops.comm.collectives import Group
from ops.config import FlowConfig, TokenShift
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.flux.config import FluxConfig
from ops.models.folders import resolve
from ops.models.load import build_dit, build_text, build_vae, token_counter
from ops.models.text_pair import split
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify
from tests.families.kit import FamilyCases, OriginalNames, Renames, SmallPipeline, small, their_class, whole

torch.set_num_threads(1)
DIT = FluxConfig(
    num_layers=1,
    num_single_layers=1,
    num_heads=2,
    head_dim=16,
    ffn_dim=128,
    text_dim=24,
    pooled_dim=8,
    in_channels=4,
    out_channels=4,
    guidance_embeds=True,
)
LINE = TokenShift(base_tokens=4, max_tokens=32, base=0.5, max=1.15)
CAPTIONS = ["a red disc", "", "two  blue squares\n&amp; a dot " * 4]
ROWS = 32


def publish(folder: Path) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    t5 = T5Config(vocab_size=384, d_model=24, d_kv=12, d_ff=32, num_layers=2, num_heads=2)
    clip = CLIPTextConfig(
        vocab_size=384,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    scheduler = FAMILIES["flux"].scheduler(DIT, FlowConfig(token_shift=LINE))
    FluxPipeline(
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
        vae=AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[4, 4, 4, 4],
            layers_per_block=1,
            norm_num_groups=1,
            latent_channels=4,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=CLIPTextModel(clip),
        tokenizer=ByT5Tokenizer(model_max_length=77),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=ByT5Tokenizer(),
        transformer=their_class(DIT),
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=FluxConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(kind="flux", path=path, max_length=ROWS),
    )


def sampled(folder: Path) -> ModelConfig:
    """A published pipeline gives its transformer 512 rows."""
    model = settings(folder)
    return replace(model, text=replace(model.text, max_length=512))


def picture(pipeline: FluxPipeline, rows: int = ROWS) -> torch.Tensor:
    made = pipeline(
        prompt="a red disc",
        max_sequence_length=rows,
        height=32,
        width=64,
        guidance_scale=6.0,
        num_inference_steps=3,
        output_type="latent",
        latents=patchify(initial_noise(3, (4, 1, 4, 8)), (1, 2, 2))[None],
    ).images[0]
    return unpatchify(made, (1, 2, 4), (1, 2, 2), 4)


ORIGINAL: Renames = (
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^time_text_embed\.timestep_embedder", "time_in"),
    (r"^time_text_embed\.text_embedder", "vector_in"),
    (r"^time_text_embed\.guidance_embedder", "guidance_in"),
    (r"_in\.linear_1", "_in.in_layer"),
    (r"_in\.linear_2", "_in.out_layer"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks", "double_blocks"),
    (r"^single_transformer_blocks", "single_blocks"),
    (r"norm1\.linear", "img_mod.lin"),
    (r"norm1_context\.linear", "txt_mod.lin"),
    (r"norm\.linear", "modulation.lin"),
    (r"(single_blocks\.\d+)\.attn\.norm_q\.weight", r"\1.norm.query_norm.scale"),
    (r"(single_blocks\.\d+)\.attn\.norm_k\.weight", r"\1.norm.key_norm.scale"),
    (r"(single_blocks\.\d+)\.attn\.to_([qkv])", r"\1.linear1.\2"),
    (r"proj_mlp", "linear1.x"),
    (r"(single_blocks\.\d+)\.proj_out", r"\1.linear2"),
    (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
    (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
    (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
    (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
    (r"attn\.to_([qkv])", r"img_attn.qkv.\1"),
    (r"attn\.add_([qkv])_proj", r"txt_attn.qkv.\1"),
    (r"attn\.to_out\.0", "img_attn.proj"),
    (r"attn\.to_add_out", "txt_attn.proj"),
    (r"ff\.net\.0\.proj", "img_mlp.0"),
    (r"ff\.net\.2", "img_mlp.2"),
    (r"ff_context\.net\.0\.proj", "txt_mlp.0"),
    (r"ff_context\.net\.2", "txt_mlp.2"),
)
CASES = FamilyCases(
    variants={
        "": small(FluxConfig, num_single_layers=1, pooled_dim=8, guidance_embeds=True),
        "schnell with text as wide as its vector": small(FluxConfig, num_single_layers=1, rope_axes=(8, 12, 12)),
    },
    models={
        "": whole(
            FluxConfig(num_layers=1, num_single_layers=1, num_heads=12, head_dim=8, ffn_dim=384, guidance_embeds=True),
            kind="flux",
            max_length=20,
            pooled_dim=20,
        )
    },
    presets={"flux.1-dev": 11.9, "flux.1-schnell": 11.89},
    lora=("attn.add_q_proj", "proj_mlp", "proj_out"),
    original=OriginalNames(
        renames=ORIGINAL,
        halves="adaLN_modulation",
        config=FluxConfig(
            num_layers=2,
            num_single_layers=2,
            num_heads=24,
            head_dim=128,
            ffn_dim=12288,
            text_dim=8,
            guidance_embeds=True,
        ),
        rows_alone=True,
    ),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        sampled=sampled,
        flow=FlowConfig(token_shift=LINE),
        request={"prompt": "a red disc", "frames": 1, "height": 32, "width": 64, "guidance_scale": 6.0},
        clip=picture,
        scheduler="Euler, flow shift 3",
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("flux") / "pipeline")


def test_a_folder_is_resolved_to_its_numbers(folder: Path) -> None:
    model, geometry = resolve(settings(folder))
    assert replace(model.dit, path=None) == replace(DIT, rope_axes=None)
    assert (model.text.d_model, model.text.pooled, model.text.tail, model.text.least_tokens) == (24, 8, 1, ROWS)
    assert geometry.token_grid(1, 32, 48) == (1, 2, 3)


def test_latents_of_pictures_are_those_of_the_pipeline(folder: Path) -> None:
    vae = build_vae(resolve(settings(folder))[0].vae)
    model = AutoencoderKL.from_pretrained(folder / "vae")
    video = torch.randint(0, 256, (2, 1, 32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pixels = video[:, 0].float().div(127.5).sub(1.0).movedim(-1, 1)
    with torch.no_grad():
        plain = model.encode(pixels).latent_dist.mode()
        latents = vae.encode(video)
        assert latents.shape == (2, 4, 1, 4, 6) and vae.vae_stride == (1, 8, 8)
        torch.testing.assert_close(latents[:, :, 0], (plain - 0.1159) * 0.3611, atol=1e-5, rtol=1e-5)
        decoded = model.decode(plain).sample.movedim(1, -1)
    again = (decoded + 1).mul(127.5).round().clamp(0, 255)
    assert (vae.decode(latents)[:, 0].float() - again).abs().max() <= 1  # rounding to 8 bits


def test_rows_and_vector_are_those_of_the_pipeline(folder: Path) -> None:
    """All rows of the padding too, encoded without a mask; prompts as they are written."""
    model, _ = resolve(settings(folder))
    encoder = build_text(model.text)
    texts, vectors = split(encoder.encode(CAPTIONS), model.text)
    pipe = FluxPipeline.from_pretrained(folder)
    with torch.no_grad():
        rows, pooled, _ = pipe.encode_prompt(CAPTIONS, None, max_sequence_length=ROWS)
    torch.testing.assert_close(vectors, pooled, atol=1e-5, rtol=0)
    assert not torch.allclose(pooled[0], pooled[1], atol=1e-2)
    torch.testing.assert_close(torch.stack(texts), rows, atol=1e-5, rtol=0)
    assert [encoder.count(caption) for caption in CAPTIONS] == [ROWS] * 3
    assert token_counter(model.text)(CAPTIONS[2]) == len(CAPTIONS[2]) + 1 > ROWS


@pytest.mark.parametrize("steps", [1, 3])
def test_a_sampled_picture_is_the_one_of_the_pipeline(steps: int, folder: Path) -> None:
    """Whole denoising steps, with the shift of its tokens; the guidance is an input, and there is no second forward."""
    model, geometry = resolve(settings(folder))
    module = build_dit(model.dit, 0).eval()
    (text,), vectors = split(build_text(model.text).encode(CAPTIONS[:1]), model.text)
    assert vectors is not None
    request = SampleRequest(text=text, pooled=vectors[0], frames=1, height=32, width=64, seed=2)
    config = SamplerConfig(steps=steps, guidance_scale=6.0, token_shift=LINE)
    (ours,) = sample_latents(module, [request], text, geometry, config)
    wanted = FluxPipeline.from_pretrained(folder)(
        prompt=CAPTIONS[0],
        height=32,
        width=64,
        max_sequence_length=ROWS,
        num_inference_steps=steps,
        guidance_scale=6.0,
        latents=patchify(initial_noise(2, (4, 1, 4, 8)), (1, 2, 2))[None],
        output_type="latent",
    ).images[0]
    atol = 1e-4 * float(wanted.abs().max())
    torch.testing.assert_close(patchify(ours, (1, 2, 2)), wanted, atol=atol, rtol=0)
    (other,) = sample_latents(module, [request], text, geometry, replace(config, guidance_scale=1.0))
    assert (other - ours).abs().max() > 10 * atol
    (other,) = sample_latents(module, [request], text, geometry, replace(config, token_shift=None, flow_shift=9.0))
    assert steps == 1 or (other - ours).abs().max() > 10 * atol


def test_what_it_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    config = settings(folder)
    layout = Layout([Sequence((2, 1, 1), 1)])
    with pytest.raises(ValueError, match="a clip of several frames"):
        build_dit(replace(DIT, path=None), 0)(
            torch.zeros(2, 16), torch.ones(1), torch.zeros(1, 24), layout, Group.solo()
        )
    with pytest.raises(ValueError, match=r"always has max_length 32 rows. Leave both out"):
        replace(config.text, pad_to=64)
    with pytest.raises(ValueError, match="4 times the width 32"):
        replace(DIT, ffn_dim=100)
    for part in ("text_encoder", "tokenizer"):
        (tmp_path / part).symlink_to(folder / part)
    with pytest.raises(FileNotFoundError, match=r"text_encoder_2/config.json does not exist; model.text.kind flux"):
        resolve(replace(config, text=replace(config.text, path=str(tmp_path))))
    with pytest.raises(
        ValueError, match=r"is a clip_text_model encoder; T5 .* supported; set model.text.kind flux for"
    ):
        resolve(replace(config, text=TextConfig(path=str(folder))))


def test_the_random_pair_is_equal_everywhere() -> None:
    config = TextConfig(kind="flux", max_length=16, d_model=16, num_heads=2, num_layers=1, pooled_dim=20)
    texts, vectors = split(build_text(config).encode(["a red disc", "a blue disc"]), config)
    torch.manual_seed(8)
    again, _ = split(build_text(config).encode(["a red disc", "a blue disc"]), config)
    assert [len(text) for text in texts] == [16, 16] and vectors is not None and vectors.shape == (2, 20)
    assert all(torch.equal(a, b) for a, b in zip(texts, again))
    assert not torch.allclose(texts[0], texts[1], atol=1e-2)
    assert not torch.allclose(vectors[0], vectors[1], atol=1e-2)
