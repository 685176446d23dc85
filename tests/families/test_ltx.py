"""LTX-Video: its cases for the tests of all families; VAE, text, and a whole sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, LTXConditionPipeline, LTXPipeline, LTXVideoTransformer3DModel
from diffusers.pipelines.ltx import pipeline_ltx_condition
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from ops.comm.collectives import Group
from ops.config import FlowConfig, TokenShift
from ops.flow.noise import NoiseKey, normal
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents, sigma_schedule
from ops.geometry import Geometry
from ops.models.base.vae import DecodeNoise, DiffusersVAE
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.decoding import decode_together
from ops.models.folders import resolve, vae_numbers
from ops.models.forecast import vae_need
from ops.models.load import build_dit
from ops.models.ltx.config import LTXConfig
from ops.models.ltx.family import FAMILY
from ops.models.text import random_t5
from ops.models.vae import vae_of
from ops.packed.patches import patchify, unpatchify
from tests.families.kit import FamilyCases, OriginalNames, SmallPipeline, small, their_class, whole
from tests.ops.conftest import RunRanks

torch.set_num_threads(1)
DIT = LTXConfig(num_layers=2, num_heads=2, head_dim=16, ffn_dim=128, text_dim=8, frame_rate=12.0)
CAUSAL = replace(DIT, causal_temporal_positioning=True)
STRIDE = (4, 16, 16)
LINE = TokenShift(base_tokens=4, max_tokens=32, base=0.9, max=2.0)


USUAL_ENCODER = {
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": (1, 1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, False, False),
}
TIMED_DECODER = {
    "decoder_block_out_channels": (8, 16),
    "decoder_layers_per_block": (1, 1, 1),
    "decoder_spatio_temporal_scaling": (True, True),
    "upsample_residual": (True, True),
    "upsample_factor": (2, 2),
    "timestep_conditioning": True,
}
VAES: dict[str, dict[str, Any]] = {  # by the version that has such a one; strides as STRIDE
    "0.9.0": {
        **USUAL_ENCODER,
        "decoder_block_out_channels": (8, 8, 8, 8),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
        "decoder_spatio_temporal_scaling": (True, True, False, False),
        "scaling_factor": 0.5,
    },
    "0.9.1": {**USUAL_ENCODER, **TIMED_DECODER, "decoder_inject_noise": (True, True, False)},
    "0.9.5": {
        **TIMED_DECODER,
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("LTXVideo095DownBlock3D",) * 3,
        "downsample_type": ("spatial", "temporal", "spatiotemporal"),
        "layers_per_block": (1, 1, 1, 1),
        "spatio_temporal_scaling": (True, True, True),
        "decoder_inject_noise": (False, False, False),
        "spatial_compression_ratio": 16,
        "temporal_compression_ratio": 4,
    },
}


def make_vae(version: str = "0.9.0", **settings: object) -> DiffusersVAE:
    torch.manual_seed(0)
    model = AutoencoderKLLTXVideo(latent_channels=8, **VAES[version])
    model.latents_mean.copy_(torch.linspace(-1, 1, 8))
    model.latents_std.copy_(torch.linspace(0.5, 2, 8))
    for name, weight in model.named_parameters():
        if "per_channel_scale" in name:  # zero in a new one: nothing would be drawn
            torch.nn.init.normal_(weight)
    return vae_of(model, VAEConfig(kind="diffusers", path="-", **settings), "cpu")  # type: ignore[arg-type]


def publish(folder: Path, version: str = "0.9.0") -> Path:
    """A small pipeline as Diffusers itself saves it."""
    pipeline, dit = (LTXConditionPipeline, CAUSAL) if version == "0.9.5" else (LTXPipeline, DIT)
    scheduler = FAMILY.scheduler(dit, FlowConfig(token_shift=LINE))
    vae = make_vae(version).model
    t5 = T5Config(vocab_size=384, d_model=8, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    pipeline(
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
        vae=vae,
        text_encoder=T5EncoderModel(t5),
        tokenizer=ByT5Tokenizer(),
        transformer=their_class(DIT.fitted(8, STRIDE, 8, 0)),
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=replace(DIT, path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=24, unmasked=24),
    )


def clip(pipeline: LTXPipeline) -> torch.Tensor:
    made = pipeline(
        prompt="a red disc",
        negative_prompt="",
        max_sequence_length=24,
        height=32,
        width=64,
        num_frames=9,
        frame_rate=12,
        num_inference_steps=3,
        guidance_scale=2.0,
        latents=patchify(initial_noise(3, (8, 3, 2, 4)), (1, 1, 1))[None],
        output_type="latent",
    ).frames[0]
    return unpatchify(made, (3, 2, 4), (1, 1, 1), 8)


CASES = FamilyCases(
    variants={
        "": small(LTXConfig, patch=(1, 1, 1)),
        "of a width that a sixth does not divide": small(LTXConfig, num_heads=4, head_dim=16, frame_rate=8.0),
        "0.9.5": small(LTXConfig, vae_stride=(4, 16, 16), causal_temporal_positioning=True),
    },
    models={
        "": whole(LTXConfig(num_layers=2, num_heads=12, head_dim=4, ffn_dim=192)),
        "0.9.5": whole(
            LTXConfig(num_layers=1, num_heads=12, head_dim=4, ffn_dim=192, causal_temporal_positioning=True)
        ),
    },
    whole_runs=("",),
    presets={"ltx-2b": 1.92, "ltx-2b-0.9.5": 1.92, "ltx-13b": 13.0},
    lora=("attn1.to_out.0", "attn2.to_k", "ff.net.2"),
    original=OriginalNames(
        renames=((r"^proj_in", "patchify_proj"), (r"time_embed", "adaln_single"), (r"norm_([qk])\b", r"\1_norm")),
        config=small(LTXConfig, num_layers=2, head_dim=8, ffn_dim=64, text_dim=8),
        prefix="model.diffusion_model.",
    ),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        flow=FlowConfig(token_shift=LINE),
        request={"prompt": "a red disc", "frames": 9, "height": 32, "width": 64, "guidance_scale": 2.0},
        clip=clip,
        scheduler="Euler, flow shift 3",
    ),
)


def test_latents_are_normalised_by_the_buffers_of_the_vae() -> None:
    vae = make_vae()
    video = torch.randint(0, 256, (1, 9, 32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pixels = video.float().div(127.5).sub(1.0).movedim(-1, 1)
    model = vae.model
    with torch.no_grad():
        plain = model.encode(pixels).latent_dist.mode()
        expected = LTXPipeline._normalize_latents(plain, model.latents_mean, model.latents_std, 0.5)
        latents = vae.encode(video)
        assert latents.shape == (1, 8, 3, 2, 3) and vae.vae_stride == STRIDE
        torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)
        decoded = model.decode(plain).sample.movedim(1, -1)
    again = (decoded + 1).mul(127.5).round().clamp(0, 255)
    assert (vae.decode(latents).float() - again).abs().max() <= 1  # rounding to 8 bits


def test_what_the_vae_needs_is_predicted_without_weights(tmp_path: Path) -> None:
    make_vae().model.save_pretrained(tmp_path / "vae")
    need = vae_need(VAEConfig(kind="diffusers", path=str(tmp_path)), 1, 9, 32, 48)
    assert need.peak_gib > 0 and need.weights_gib * 2**30 == 4 * sum(p.numel() for p in make_vae().model.parameters())


@pytest.mark.parametrize("version", VAES)
def test_strides_are_those_of_the_class(version: str) -> None:
    """They stand in config.json where the class counts another number of halvings than it makes."""
    model = make_vae(version).model
    fields = {"_class_name": "AutoencoderKLLTXVideo", **model.config}
    assert vae_numbers(fields, "vae") == (8, STRIDE)
    assert (model.temporal_compression_ratio, model.spatial_compression_ratio) == STRIDE[:2]


@pytest.mark.parametrize("tiling", [False, True])
def test_a_decoder_is_told_its_time_and_gets_the_noise_of_its_clip(tiling: bool) -> None:
    """As the pipelines mix it into latents that are not normalised; noise of a tile is cut out of the clip's."""
    tiles = {"tiling": True, "tile_sample_min": (32, 32), "tile_sample_stride": (16, 16)} if tiling else {}
    vae, key = make_vae("0.9.5", **tiles), NoiseKey.of(3, 0, "decode")
    latents = torch.randn(1, 8, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    told = DecodeNoise(time=0.3, share=0.25, key=key)
    vae.model.use_tiling = tiling
    with torch.no_grad():
        noise = normal(key, 0, latents.numel()).view_as(latents)
        mixed = 0.75 * (latents * vae._std + vae._mean) + 0.25 * noise
        expected = vae.model.decode(mixed, torch.tensor([0.3])).sample
    tiles_of = vae.plan_decode((2, 3, 4))
    assert (len(tiles_of) > 4) == tiling
    found = vae._joined([(tile, vae.decode_tile(latents, tile, told)) for tile in tiles_of], (2, 3, 4))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    one = vae.decode(latents, told)
    for other in (replace(told, time=0.0), replace(told, share=0.0), replace(told, key=NoiseKey.of(4, 0, "decode"))):
        assert not torch.equal(vae.decode(latents, other), one)


@pytest.mark.parametrize("version", ["0.9.1", "0.9.5"])
def test_a_bag_decodes_with_noise_what_one_worker_does(version: str, run_ranks: RunRanks) -> None:
    """Also what 0.9.1's blocks draw while they decode, which torch's own generator has no part in."""
    tiles = {"tiling": True, "tile_sample_min": (32, 32), "tile_sample_stride": (16, 16)}
    clips = list(torch.randn(2, 8, 2, 3, 4, generator=torch.Generator().manual_seed(1)))
    told = [DecodeNoise(time=0.05, share=0.025, key=NoiseKey.of(seed, 0, "decode")) for seed in (3, 4)]
    alone = [make_vae(version, **tiles).decode(clip[None], own)[0] for clip, own in zip(clips, told, strict=True)]

    def decoded(group: Group) -> list[torch.Tensor]:
        return decode_together(vaes[group.rank], clips, group, torch.device("cpu"), told)

    vaes = [make_vae(version, **tiles) for _ in range(3)]
    found = run_ranks(3, decoded)[0]
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    swapped = make_vae(version, **tiles).decode(clips[0][None], replace(told[1], share=0.0, time=0.0))[0]
    plain = make_vae(version, **tiles).decode(clips[0][None], replace(told[0], share=0.0, time=0.0))[0]
    assert torch.equal(swapped, plain) == (version == "0.9.5")


def test_text_is_encoded_over_padded_rows_without_a_mask_and_cut() -> None:
    """As LTXPipeline does, which passes the encoder no mask: it changes the rows of the caption themselves."""
    config = TextConfig(max_length=24, unmasked=24, d_model=8, num_heads=2)
    captions = ["a red disc", "", "a long caption that is cut at the end of its rows"]
    ids = ByT5Tokenizer()(captions, padding="max_length", max_length=24, truncation=True, return_tensors="pt")
    encoder = random_t5(config, "cpu")
    with torch.no_grad():
        states = encoder.encoder(ids.input_ids)[0]
    found = encoder.encode(captions)
    for rows, state, mask in zip(found, states, ids.attention_mask):
        torch.testing.assert_close(rows, state[mask.bool()], atol=1e-5, rtol=1e-5)
    alone = random_t5(replace(config, unmasked=0), "cpu").encode(captions)
    assert (alone[0] - found[0]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="unmasked 8 rows cannot hold max_length 24"):
        replace(config, unmasked=8)


def test_a_sampled_clip_is_the_one_of_the_pipeline() -> None:
    """With the shift of its tokens, its frame rate in the positions, and prompts of two lengths."""
    vae = make_vae()
    dit = DIT.fitted(8, STRIDE, 8, 0)
    transformer = their_class(dit)
    assert isinstance(transformer, LTXVideoTransformer3DModel)
    with torch.no_grad():
        for block in transformer.transformer_blocks:  # attention that looks at places, so that a wrong one shows
            block.attn1.norm_q.weight.mul_(20)
            block.attn1.norm_k.weight.mul_(20)
            block.attn1.to_v.weight.mul_(5)
    scheduler = FAMILY.scheduler(DIT, FlowConfig(token_shift=LINE))
    pipe = LTXPipeline(
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
        vae=vae.model,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    ours = build_dit(dit, 0)
    ours.load_state_dict(transformer.state_dict())
    texts = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(2))
    masks = torch.arange(6) < torch.tensor([[4], [2]])
    request = SampleRequest(text=texts[0, :4], frames=9, height=32, width=64, seed=7)
    config = SamplerConfig(steps=3, guidance_scale=2.0, token_shift=LINE, whole_times=FAMILY.whole_times)
    geometry = Geometry(vae_stride=STRIDE, patch=(1, 1, 1))
    (latent,) = sample_latents(ours, [request], texts[1, :2], geometry, config)
    noise = initial_noise(7, (8, 3, 2, 4))
    expected = pipe(
        prompt_embeds=texts[:1],
        prompt_attention_mask=masks[:1],
        negative_prompt_embeds=texts[1:],
        negative_prompt_attention_mask=masks[1:],
        height=32,
        width=64,
        num_frames=9,
        frame_rate=12,
        num_inference_steps=3,
        guidance_scale=2.0,
        latents=patchify(noise, (1, 1, 1))[None],
        output_type="latent",
    ).frames[0]
    torch.testing.assert_close(patchify(latent, (1, 1, 1)), expected, atol=1e-4, rtol=1e-4)
    other = build_dit(replace(dit, frame_rate=24.0), 0)
    other.load_state_dict(transformer.state_dict())
    assert not torch.allclose(sample_latents(other, [request], texts[1, :2], geometry, config)[0], latent, atol=1e-3)


def test_a_sampled_clip_of_the_later_weights_is_the_one_of_their_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of first frames, noise levels in a line and a parabola, and no shift."""
    vae, dit = make_vae("0.9.5"), CAUSAL.fitted(8, STRIDE, 8, 0)
    transformer = their_class(dit)
    with torch.no_grad():
        for block in transformer.transformer_blocks:  # type: ignore[union-attr]  # attention that looks at places
            block.attn1.norm_q.weight.mul_(20)
            block.attn1.norm_k.weight.mul_(20)
            block.attn1.to_v.weight.mul_(5)
    scheduler = FAMILY.scheduler(CAUSAL, FlowConfig(token_shift=LINE))
    pipe = LTXConditionPipeline(
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
        vae=vae.model,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    ours, other = build_dit(dit, 0), build_dit(replace(dit, causal_temporal_positioning=False), 0)
    for module in (ours, other):
        module.load_state_dict(transformer.state_dict())
    texts = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(2))
    masks = torch.arange(6) < torch.tensor([[4], [2]])
    request = SampleRequest(text=texts[0, :4], frames=9, height=32, width=64, seed=7)
    config = SamplerConfig(steps=5, guidance_scale=2.0, flow_shift=1.0, spacing=dit.spacing)
    geometry = Geometry(vae_stride=STRIDE, patch=(1, 1, 1))
    found, wrong = (sample_latents(one, [request], texts[1, :2], geometry, config)[0] for one in (ours, other))
    noise = initial_noise(7, (8, 3, 2, 4))
    monkeypatch.setattr(pipeline_ltx_condition, "randn_tensor", lambda *shape, **how: noise[None].clone())
    expected = pipe(
        prompt_embeds=texts[:1],
        prompt_attention_mask=masks[:1],
        negative_prompt_embeds=texts[1:],
        negative_prompt_attention_mask=masks[1:],
        height=32,
        width=64,
        num_frames=9,
        frame_rate=12,
        num_inference_steps=5,
        guidance_scale=2.0,
        output_type="latent",
    ).frames[0]
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=1e-4 * largest, rtol=0)
    assert (wrong - expected).abs().max() > 1e-3 * largest


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_levels_of_the_later_weights_are_those_of_their_pipeline(steps: int) -> None:
    """Also of a single step, with which a run's samples would otherwise end it at the first checkpoint."""
    expected = [*pipeline_ltx_condition.linear_quadratic_schedule(steps).tolist(), 0.0]
    assert sigma_schedule(steps, 1.0, spacing=CAUSAL.spacing) == pytest.approx(expected, abs=1e-6)
    assert SamplerConfig(steps=steps, spacing=CAUSAL.spacing).steps == steps


def test_a_transformer_takes_its_strides_from_the_vae() -> None:
    vae = VAEConfig(kind="haar", temporal=8, spatial=16, channels=32)
    assert resolve(ModelConfig(dit=DIT, vae=vae))[0].dit.vae_stride == (8, 16, 16)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="4 times the width"):
        replace(DIT, ffn_dim=100)
