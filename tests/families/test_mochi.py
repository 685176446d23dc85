"""Mochi: its cases for the tests of all families; VAE, text, and a run of its pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLMochi, MochiPipeline
from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.objective import FlowObjective
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents, sigma_schedule
from ops.models.base.family import PipelineFiles
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import resolve
from ops.models.load import build_dit, build_text, build_vae
from ops.models.mochi.config import MochiConfig
from ops.models.mochi.family import FAMILY
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify
from tests.families.kit import FamilyCases, OriginalNames, Renames, SmallPipeline, small, their_class, whole

torch.set_num_threads(1)
DIT = MochiConfig(
    num_layers=2,
    num_heads=2,
    head_dim=8,
    ffn_dim=64,
    freq_dim=16,
    text_dim=16,
    context_dim=12,
    in_channels=12,
    out_channels=12,
)


def publish(folder: Path) -> Path:
    """A small pipeline as Diffusers itself saves it, with the setting of the published one for empty prompts."""
    torch.manual_seed(0)
    scheduler = FAMILY.scheduler(DIT, FlowConfig(flow_shift=2.0))
    vae = AutoencoderKLMochi(
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        scaling_factor=0.5,
    )
    t5 = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    MochiPipeline(
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
        vae=vae,
        text_encoder=T5EncoderModel(t5),
        tokenizer=ByT5Tokenizer(),
        transformer=their_class(DIT),
        force_zeros_for_empty_prompt=True,
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=MochiConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=256, cleaned=False, empty="none"),
    )


def clip(pipeline: MochiPipeline) -> torch.Tensor:
    size = {"height": 32, "width": 48, "num_frames": 7, "num_inference_steps": 3}
    latents = initial_noise(3, (12, 2, 4, 6))[None]
    made = pipeline("a dot", guidance_scale=4.0, latents=latents, output_type="latent", **size)
    return made.frames[0].detach()


ORIGINAL: Renames = (
    (r"^patch_embed\.proj", "x_embedder.proj"),
    (r"^time_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^time_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"^time_embed\.pooler", "t5_y_embedder"),
    (r"^time_embed\.caption_proj", "t5_yproj"),
    (r"^transformer_blocks", "blocks"),
    (r"norm1\.linear\.", "mod_x."),
    (r"norm1_context\.linear(_1)?\.", "mod_y."),
    (r"attn1\.norm_([qk])", r"attn.\1_norm_x"),
    (r"attn1\.norm_added_([qk])", r"attn.\1_norm_y"),
    (r"attn1\.to_out\.0", "attn.proj_x"),
    (r"attn1\.to_add_out", "attn.proj_y"),
    (r"ff\.net\.0\.proj", "mlp_x.w1"),
    (r"ff\.net\.2", "mlp_x.w2"),
    (r"ff_context\.net\.0\.proj", "mlp_y.w1"),
    (r"ff_context\.net\.2", "mlp_y.w2"),
    (r"attn1\.to_([qkv])", r"attn.qkv_x.\1"),
    (r"attn1\.add_([qkv])_proj", r"attn.qkv_y.\1"),
    (r"^norm_out\.linear", "final_layer.mod"),
    (r"^proj_out", "final_layer.linear"),
)
CASES = FamilyCases(
    variants={"": small(MochiConfig, num_layers=2, context_dim=20)},
    models={  # one caption is no text at all
        "": whole(
            MochiConfig(num_layers=2, num_heads=12, head_dim=4, ffn_dim=192, freq_dim=16, context_dim=20),
            cleaned=False,
            empty="none",
        )
    },
    presets={"mochi-1": 10.03},
    lora=("attn1.add_k_proj", "attn1.to_add_out", "ff_context.net.0.proj"),
    original=OriginalNames(
        renames=ORIGINAL,
        halves=r"final_layer\.mod|w1",
        config=small(  # its converter counts the published 48 layers
            MochiConfig, num_layers=48, head_dim=8, ffn_dim=64, context_dim=12, text_dim=8, freq_dim=16
        ),
    ),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        sampled=settings,
        flow=FlowConfig(flow_shift=2.0),
        request={"prompt": "a dot", "frames": 7, "height": 32, "width": 48, "guidance_scale": 4.0},
        clip=clip,
        scheduler="Euler, flow shift 2",
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("mochi"))


def test_latents_are_normalised_by_statistics_and_scale(folder: Path) -> None:
    """As MochiPipeline takes them back to those of the VAE; 6 k + 1 frames are k + 1 latents."""
    vae = build_vae(settings(folder).vae)
    assert vae.channels == 12 and vae.vae_stride == (6, 8, 8)
    model = AutoencoderKLMochi.from_pretrained(folder / "vae")
    video = torch.randint(0, 256, (1, 7, 16, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(x).view(1, 12, 1, 1, 1) for x in (model.config.latents_mean, model.config.latents_std))
    with torch.no_grad():
        plain = model.encode(video.float().div(127.5).sub(1.0).movedim(-1, 1)).latent_dist.mode()
        latents = vae.encode(video)
        torch.testing.assert_close(latents * std / 0.5 + mean, plain, atol=1e-5, rtol=1e-5)
        decoded = model.decode(plain).sample.movedim(1, -1)
    assert latents.shape == (1, 12, 2, 2, 3)
    again = (decoded + 1).mul(127.5).round().clamp(0, 255)
    assert vae.decode(latents).shape == video.shape and (vae.decode(latents).float() - again).abs().max() <= 1


def test_text_is_that_of_the_pipeline_in_its_true_length(folder: Path) -> None:
    """Captions as they are, with a mask; of an empty one no row is left, which is what its mask says."""
    captions = ["a  red &amp; blue disc", "b" * 300, ""]
    pipe = MochiPipeline.from_pretrained(folder, vae=None, transformer=None)
    found = build_text(settings(folder).text).encode(captions)
    for caption, rows in zip(captions, found, strict=True):
        with torch.no_grad():
            states, mask, _, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
        assert len(rows) == int(mask.sum())
        torch.testing.assert_close(rows, states[0, mask[0]], atol=1e-5, rtol=0)
    assert [len(rows) for rows in found][1:] == [256, 0]
    usual = build_text(replace(settings(folder).text, cleaned=True, empty="encoded")).encode(captions)
    assert len(usual[0]) < len(found[0]) and len(usual[2]) == 1
    with pytest.raises(ValueError, match=r"model\.text\.empty none: an empty caption can be no text where"):
        TextConfig(empty="none", pad_to=8)


def test_a_sampled_clip_is_the_one_of_the_pipeline(folder: Path) -> None:
    """Guidance away from no text at all; levels in a line, then a parabola; the share of signal as the time."""
    model, geometry = resolve(settings(folder))
    assert replace(model.dit, path=None) == DIT
    text, negative = build_text(model.text).encode(["a red dot", ""])
    request = SampleRequest(text=text, frames=13, height=32, width=48, seed=5)
    module = build_dit(model.dit, 0).eval()
    config = SamplerConfig(steps=5, guidance_scale=4.0, flow_shift=2.0, spacing=DIT.spacing)
    (ours,) = sample_latents(module, [request], negative, geometry, config)
    theirs = (
        MochiPipeline.from_pretrained(folder)(
            prompt="a red dot",
            height=32,
            width=48,
            num_frames=13,
            num_inference_steps=5,
            guidance_scale=4.0,
            latents=initial_noise(5, (12, 3, 4, 6))[None],
            output_type="latent",
        )
        .frames[0]
        .detach()
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)
    (even,) = sample_latents(module, [request], negative, geometry, replace(config, spacing="even"))
    assert (even - ours).abs().max() > 0.01 * theirs.abs().max()


@pytest.mark.parametrize("steps", [2, 5, 64])
def test_levels_are_those_of_the_pipeline(steps: int) -> None:
    expected = [*linear_quadratic_schedule(steps, 0.025), 0.0]
    assert sigma_schedule(steps, 1.0, spacing="linear_quadratic") == pytest.approx(expected, abs=1e-12)


def test_what_it_learns_is_signal_minus_noise_at_the_share_of_signal(folder: Path) -> None:
    """The loss of our objective is that of the published weights: their output against signal minus noise, told 1000
    times the share of signal."""
    numbers = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(12, 2, 4, 6, generator=numbers) for _ in range(2))
    text = torch.randn(4, 16, generator=numbers)
    theirs, ours = their_class(DIT), build_dit(DIT, 0)
    ours.load_state_dict(theirs.state_dict())
    objective, level = FlowObjective(FlowConfig()), 0.3
    noisy, target = objective.noisy(level, clean, noise), objective.target(level, clean, noise)
    with torch.no_grad():
        found = ours(
            patchify(noisy, DIT.patch),
            objective.times(torch.tensor([level])),
            text,
            Layout([Sequence((2, 2, 3), 4)]),
            Group.solo(),
        )
        wanted = theirs(noisy[None], text[None], torch.tensor([1000 * (1 - level)]), torch.ones(1, 4)).sample[0]
    mine = (found - patchify(target, DIT.patch)).square().mean()
    torch.testing.assert_close(mine, (wanted - (clean - noise)).square().mean(), atol=0, rtol=1e-5)


def test_settings_that_the_class_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="ffn_dim 100 is not 4 times the width 16"):
        replace(DIT, ffn_dim=100)
    with pytest.raises(ValueError, match="text_dim 12 is not a multiple of 8"):
        replace(DIT, text_dim=12)
    with pytest.raises(ValueError, match="its scheduler has no invert_sigmas"):
        FAMILY.recipe(PipelineFiles(scheduler={"shift": 1.0}))
