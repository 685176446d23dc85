"""CogVideoX: its cases for the tests of all families; text, and whole runs of its pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from app.export.parity import their_velocity
from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents
from ops.geometry import Geometry
from ops.models.base.family import ParitySample
from ops.models.cogvideox.config import CogVideoXConfig
from ops.models.cogvideox.family import FAMILY
from ops.models.cogvideox.model import kept_positions
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import resolve
from ops.models.forecast import Precision, dit_need_gib
from ops.models.load import build_dit, build_text
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify
from tests.families.kit import FamilyCases, SmallPipeline, small, their_class, whole

torch.set_num_threads(1)
ROWS = 12
DIT = CogVideoXConfig(
    num_layers=2,
    num_heads=2,
    head_dim=16,
    ffn_dim=128,
    time_dim=16,
    text_dim=16,
    in_channels=4,
    out_channels=4,
    sample_size=(12, 20),
    text_rows=ROWS,
)
KINDS = {
    "2b": replace(DIT, rotary=False, snr_shift=3.0),
    "5b": DIT,
    "1.5": replace(DIT, patch=(2, 2, 2)),
}


def publish(folder: Path, dit: CogVideoXConfig = KINDS["2b"]) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    scheduler = FAMILY.scheduler(dit, FlowConfig())
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    transformer = their_class(dit)
    with torch.no_grad():  # blocks that count for something, so that a wrong place or text shows
        for parameter in transformer.parameters():
            parameter.mul_(4)
    t5 = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    CogVideoXPipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=T5EncoderModel(t5),
        vae=vae,
        transformer=transformer,
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=CogVideoXConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=ROWS, unmasked=ROWS, pad_to=ROWS),
    )


def settings_2b(folder: Path, **dit: object) -> ModelConfig:
    return settings(folder, snr_shift=3.0, **dit)


def clip(pipeline: CogVideoXPipeline) -> torch.Tensor:
    made = pipeline(
        prompt="a dot",
        negative_prompt="",
        max_sequence_length=ROWS,
        height=32,
        width=48,
        num_frames=5,
        guidance_scale=4.0,
        num_inference_steps=3,
        output_type="latent",
        latents=initial_noise(3, (4, 2, 4, 6)).transpose(0, 1)[None],
    )
    return made.frames[0].transpose(0, 1)


PADDED = {"max_length": 20, "unmasked": 20, "pad_to": 20}
CASES = FamilyCases(
    variants={
        "2b": small(CogVideoXConfig, rotary=False, text_rows=9, time_dim=16, snr_shift=3.0),
        "5b": small(CogVideoXConfig, time_dim=16, sample_size=(12, 20)),
        "1.5": small(CogVideoXConfig, time_dim=16, patch=(2, 2, 2)),
        "5b i2v": small(
            CogVideoXConfig,
            in_channels=8,
            first_frame="channels",
            time_dim=16,
            sample_size=(4, 6),
            sample_frames=5,
            learned_positions=True,
            text_rows=9,
        ),
        "1.5 i2v": small(
            CogVideoXConfig, in_channels=8, first_frame="channels", time_dim=16, patch=(2, 2, 2), ofs_dim=16
        ),
    },
    models={
        "2b": whole(
            CogVideoXConfig(
                num_layers=2, num_heads=12, head_dim=4, ffn_dim=192, time_dim=16, rotary=False, snr_shift=3.0
            ),
            **PADDED,
        ),
        "5b": whole(
            CogVideoXConfig(num_layers=1, num_heads=12, head_dim=16, ffn_dim=768, time_dim=16, sample_size=(4, 6)),
            **PADDED,
        ),
        "5b i2v": whole(
            CogVideoXConfig(
                num_layers=1,
                num_heads=12,
                head_dim=16,
                ffn_dim=768,
                time_dim=16,
                sample_size=(4, 6),
                sample_frames=5,
                learned_positions=True,
                text_rows=20,
                first_frame="channels",
            ),
            **PADDED,
        ),
    },
    whole_runs=("2b", "5b i2v"),
    presets={
        "cogvideox-2b": 1.69,
        "cogvideox-5b": 5.57,
        "cogvideox1.5-5b": 5.57,
        "cogvideox-5b-i2v": 5.57,
        "cogvideox1.5-5b-i2v": 5.57,
    },
    lora=("attn1.to_q", "attn1.to_out.0"),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings_2b,
        sampled=settings_2b,
        request={"prompt": "a dot", "frames": 5, "height": 32, "width": 48, "guidance_scale": 4.0},
        clip=clip,
        scheduler="DDIM, SNR shift 3",
        note="call the pipeline with max_sequence_length=12.",
    ),
)


@pytest.mark.parametrize("grid", [(2, 2, 3), (3, 2, 3)])
def test_learned_places_are_those_of_clips_of_one_size(grid: tuple[int, int, int]) -> None:
    """Places that no sinusoid has, in a pack and in bags, beside a clip of another length, as Diffusers' class has
    them."""
    config = CASES.variants["5b i2v"]
    reference = their_class(config).eval()
    torch.nn.init.normal_(reference.patch_embed.pos_embedding)  # type: ignore[arg-type,union-attr]
    module = build_dit(config, 0)
    module.load_state_dict(reference.state_dict())
    numbers = torch.Generator().manual_seed(1)
    latents = [torch.randn(8, t, 2 * h, 2 * w, generator=numbers) for t, h, w in (grid, (2, 2, 3))]
    texts, times = torch.randn(2, 9, 24, generator=numbers), torch.tensor([500.0, 20.0])
    with torch.no_grad():
        expected = [
            their_velocity(reference, config, ParitySample(latent=latent, timestep=time[None], text=text))
            for latent, time, text in zip(latents, times, texts, strict=True)
        ]
        rows = [patchify(latent, config.patch) for latent in latents]
        layouts = [Layout([Sequence(grid, 9), Sequence((2, 2, 3), 9)], 3, rank) for rank in range(3)]
        solo = Layout([Sequence(grid, 9), Sequence((2, 2, 3), 9)])
        found = module(solo.local(rows), times, texts.flatten(0, 1), solo, Group.solo())
    wanted = torch.cat([patchify(velocity, config.patch) for velocity in expected])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    kept = module.patch_embed.pos_embedding  # type: ignore[union-attr]
    video, text = kept_positions(solo, config, kept)  # type: ignore[arg-type]
    parts = [kept_positions(layout, config, kept) for layout in layouts]  # type: ignore[arg-type]
    for index in (0, 1):
        own = [part[0][layout.seq_index == index] for layout, part in zip(layouts, parts)]
        assert torch.equal(torch.cat(own), video[solo.seq_index == index])
    order = torch.cat([layout.text_rows for layout in layouts])
    assert torch.equal(torch.cat([part[1] for part in parts]), text[order])


def test_a_text_that_has_no_learned_places_is_refused() -> None:
    config = CASES.variants["5b i2v"]
    with pytest.raises(ValueError, match="a text of 10 rows, and this transformer has places for 9"):
        kept_positions(Layout([Sequence((2, 2, 3), 10)]), config, torch.zeros(1, 21, 64))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "frames", "latents"), [*((kind, 13, 4) for kind in KINDS), ("1.5", 17, 6)])
def test_a_sampled_clip_is_the_one_of_the_pipeline(kind: str, frames: int, latents: int, tmp_path: Path) -> None:
    """Prompts of any length have all their rows, encoded without a mask; guidance; DDIM from a time without signal. Of
    17 frames, 5 latents, 1.5 makes a sixth in front, which is not shown."""
    folder = publish(tmp_path / "base", KINDS[kind])
    model, geometry = resolve(settings(folder, snr_shift=KINDS[kind].snr_shift))
    assert replace(model.dit, path=None) == KINDS[kind]
    encoder = build_text(model.text)
    text, negative = encoder.encode(["a  dot &amp; ", ""])
    assert len(text) == len(negative) == ROWS == encoder.count("")
    pipe = CogVideoXPipeline.from_pretrained(folder)
    with torch.no_grad():
        wanted, unwanted = pipe.encode_prompt("a  dot &amp; ", "", max_sequence_length=ROWS)
    torch.testing.assert_close(torch.stack([text, negative]), torch.cat([wanted, unwanted]), atol=1e-5, rtol=0)
    module = build_dit(model.dit, 0).eval()
    request = SampleRequest(text=text, frames=frames, height=32, width=48, seed=5)
    config = SamplerConfig(steps=3, guidance_scale=4.0)
    (ours,) = sample_latents(module, [request], negative, geometry, config)
    noise = initial_noise(5, (4, latents, 4, 6))
    theirs = pipe(
        prompt="a  dot &amp; ",
        negative_prompt="",
        max_sequence_length=ROWS,
        height=32,
        width=48,
        num_frames=frames,
        num_inference_steps=3,
        guidance_scale=4.0,
        latents=noise.transpose(0, 1)[None],
        output_type="latent",
    ).frames[0]
    atol = 1e-4 * float(theirs.abs().max())
    assert ours.shape[1] == (frames - 1) // 4 + 1
    torch.testing.assert_close(ours, theirs.transpose(0, 1)[:, -ours.shape[1] :], atol=atol, rtol=0)
    others = {"2b": {"spatial_scale": 1.0}, "5b": {"sample_size": (24, 20)}, "1.5": {"rope_theta": 100.0}}
    other = build_dit(replace(KINDS[kind], **others[kind]), 0).eval()  # type: ignore[arg-type]
    other.load_state_dict(module.state_dict())
    (elsewhere,) = sample_latents(other, [request], negative, geometry, config)
    assert (elsewhere - ours).abs().max() > 5 * atol
    (without,) = sample_latents(module, [replace(request, text=text[:4])], negative, geometry, config)
    assert (without - ours).abs().max() > 10 * atol


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_of_each_clip_in_a_packed_batch(kind: str) -> None:
    """Two clips of other shapes beside each other are what each is alone."""
    module = build_dit(KINDS[kind], 0).eval()
    generator = torch.Generator().manual_seed(1)
    grids = [(2, 6, 10), (1, 4, 3), (2, 1, 7)]
    width = 4 * module.patch_size
    tokens = [torch.randn(t * h * w, width, generator=generator) for t, h, w in grids]
    texts = [torch.randn(rows, 16, generator=generator) for rows in (ROWS, 3, 5)]
    times = torch.tensor([900.0, 20.0, 999.0])
    with torch.no_grad():
        layout = Layout([Sequence(grid, len(text)) for grid, text in zip(grids, texts)])
        together = module(torch.cat(tokens), times, torch.cat(texts), layout, Group.solo())
        for rows, grid, own, text, time in zip(together.split(layout.lengths), grids, tokens, texts, times):
            alone = module(own, time[None], text, Layout([Sequence(grid, len(text))]), Group.solo())
            torch.testing.assert_close(rows, alone, atol=1e-5, rtol=1e-5)


def test_latents_that_fill_no_patch_of_two_are_filled_up_in_front() -> None:
    geometry = Geometry(patch=(2, 2, 2))
    assert [geometry.token_grid(frames, 32, 48) for frames in (1, 13, 17)] == [(1, 2, 3), (2, 2, 3), (3, 2, 3)]
    latent = torch.arange(3.0)[None, :, None, None].expand(1, -1, 2, 2)
    rows = patchify(latent, (2, 2, 2))
    assert unpatchify(rows, (2, 1, 1), (2, 2, 2), 1)[0, :, 0, 0].tolist() == [0, 0, 1, 2]


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="4 times the width 32"):
        replace(DIT, ffn_dim=100)
    with pytest.raises(ValueError, match=r"tokens are \[1, 2, 2\] latents, those of 1.5 \[2, 2, 2\]"):
        replace(DIT, patch=(1, 4, 4))
    with pytest.raises(ValueError, match="head_dim 24 is not a multiple of 16"):
        replace(DIT, head_dim=24, ffn_dim=192)


def test_the_memory_of_learned_positions_is_forecast() -> None:
    """A forecast has shapes and no values."""
    i2v = CASES.models["5b i2v"].dit
    assert isinstance(i2v, CogVideoXConfig) and i2v.learned_positions
    assert dit_need_gib(i2v, [Sequence((2, 2, 3), 8), Sequence((3, 2, 3), 5)], 1, Precision()) > 0
