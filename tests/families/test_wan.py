"""Wan: its cases for the tests of all families; packed samples against Diffusers' class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.sampling import SamplerConfig, initial_noise, steps_of
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json
from ops.models.wan.config import WanConfig
from ops.models.wan.model import WanDiT
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify
from tests.families.kit import MODEL, FamilyCases, OriginalNames, Renames, SmallPipeline, small, whole

torch.set_num_threads(1)
CONFIG = WanConfig(
    num_layers=2, num_heads=4, head_dim=32, ffn_dim=192, freq_dim=64, text_dim=48, in_channels=4, out_channels=4
)
DIT = WanConfig(
    num_layers=2, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16, text_dim=16, in_channels=4, out_channels=4
)
# ours -> Wan's (wan/modules/model.py of Wan2.1); its norm2 and norm3 are the other way round
ORIGINAL: Renames = (
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"attn1\.", "self_attn."),
    (r"attn2\.", "cross_attn."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"ffn\.net\.0\.proj", "ffn.0"),
    (r"ffn\.net\.2", "ffn.2"),
    (r"norm2", "norm3"),
    (r"^scale_shift_table", "head.modulation"),
    (r"scale_shift_table", "modulation"),
    (r"^proj_out", "head.head"),
)


def publish(base: Path) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    fields = {key: value for key, value in dit_json(DIT).items() if not key.startswith("_")}
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    WanPipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=encoder,
        vae=vae,
        transformer=WanTransformer3DModel(**fields),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    ).save_pretrained(base)
    return base


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=WanConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=16, pad_to=16),
    )


def clip(pipeline: WanPipeline) -> torch.Tensor:
    return pipeline(
        prompt="a red disc",
        negative_prompt="",
        max_sequence_length=16,
        height=32,
        width=48,
        num_frames=5,
        guidance_scale=5.0,
        num_inference_steps=3,
        output_type="latent",
        latents=initial_noise(3, (4, 2, 4, 6))[None],
    ).frames[0]


I2V = replace(MODEL.dit, first_frame="channels")
IMAGE = ImageConfig(d_model=16, num_layers=1)
SOME = ("blocks.1.attn1", "blocks.0.ffn", "condition_embedder.text_embedder")
CASES = FamilyCases(
    variants={
        "": small(WanConfig),
        "i2v": small(WanConfig, in_channels=12, first_frame="channels", image_dim=20),
        "flf2v": small(WanConfig, in_channels=12, first_frame="channels", image_dim=20, pos_embed_seq_len=4),
        "i2v without an image encoder": small(WanConfig, in_channels=12, first_frame="channels"),
    },
    models={
        "": MODEL,
        "i2v": replace(MODEL, dit=I2V, image=IMAGE),
        "flf2v": replace(MODEL, dit=replace(I2V, pos_embed_seq_len=2 * IMAGE.tokens), image=IMAGE),
        "part of it trained": replace(MODEL, dit=replace(MODEL.dit, train_only=SOME)),
        "of 3 heads": whole(  # fewer than some bags have workers
            WanConfig(num_layers=2, num_heads=3, head_dim=16, ffn_dim=96, freq_dim=16)
        ),
    },
    whole_runs=("i2v", "flf2v"),
    presets={
        "wan2.1-1.3b": 1.42,
        "wan2.1-14b": 14.29,
        "wan2.1-i2v-14b-480p": 16.40,
        "wan2.1-i2v-14b-720p": 16.40,
        "wan2.1-flf2v-14b-720p": 16.40,
        "wan2.2-ti2v-5b": 5.00,
        "wan2.2-t2v-a14b": 14.29,
        "wan2.2-i2v-a14b": 14.29,
    },
    lora=("ffn.net.2", "attn2.to_out.0"),
    original=OriginalNames(renames=ORIGINAL, config=DIT),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        request={"prompt": "a red disc", "frames": 5, "height": 32, "width": 48, "guidance_scale": 5.0},
        clip=clip,
        scheduler="Euler, flow shift 3",
    ),
)
FP32 = {"atol": 1e-5, "rtol": 1e-5}
GRIDS = ((3, 4, 6), (1, 6, 2), (2, 3, 3))
TEXTS = (7, 12, 1)


def diffusers_model(cross_attn_norm: bool = True) -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=48,
        freq_dim=64,
        ffn_dim=192,
        num_layers=2,
        cross_attn_norm=cross_attn_norm,
        qk_norm="rms_norm_across_heads",
    )
    for parameter in model.parameters():  # norms and biases too, so that a forgotten one shows
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def samples() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    latents = [torch.randn(4, t, 2 * h, 2 * w, generator=numbers) for t, h, w in GRIDS]
    texts = [torch.randn(length, 48, generator=numbers) for length in TEXTS]
    return latents, texts, torch.tensor([900.5, 3.25, 500.0])


@pytest.mark.parametrize("cross_attn_norm", [True, False])
def test_packed_samples_equal_diffusers_one_by_one(cross_attn_norm: bool) -> None:
    reference = diffusers_model(cross_attn_norm)
    model = WanDiT(
        WanConfig(
            num_layers=2,
            num_heads=4,
            head_dim=32,
            ffn_dim=192,
            freq_dim=64,
            text_dim=48,
            in_channels=4,
            out_channels=4,
            cross_attn_norm=cross_attn_norm,
        )
    )
    model.load_state_dict(reference.state_dict())  # strict: the same names and shapes
    latents, texts, timesteps = samples()
    layout = Layout([Sequence(grid, length) for grid, length in zip(GRIDS, TEXTS)])
    with torch.no_grad():
        tokens = layout.local([patchify(latent, (1, 2, 2)) for latent in latents])
        packed = model(tokens, timesteps, torch.cat(texts), layout, Group.solo())
        for index, rows in enumerate(packed.split(layout.lengths)):
            expected = reference(latents[index][None], timesteps[index][None], texts[index][None]).sample[0]
            torch.testing.assert_close(unpatchify(rows, GRIDS[index], (1, 2, 2), 4), expected, **FP32)


def test_gradients_equal_diffusers() -> None:
    reference, model = diffusers_model(), WanDiT(CONFIG)
    model.load_state_dict(reference.state_dict())
    latents, texts, timesteps = samples()
    layout = Layout([Sequence(grid, length) for grid, length in zip(GRIDS, TEXTS)])
    tokens = layout.local([patchify(latent, (1, 2, 2)) for latent in latents])
    model(tokens, timesteps, torch.cat(texts), layout, Group.solo()).square().sum().backward()
    for latent, text, timestep in zip(latents, texts, timesteps):
        reference(latent[None], timestep[None], text[None]).sample.square().sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        scale = float(expected[name].grad.abs().max())
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4 * scale, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(3, 16)}, "tokens"),
        ({"timesteps": torch.zeros(2)}, "timesteps"),
        ({"text": torch.zeros(5, 48)}, "text"),
    ],
)
def test_a_shape_that_does_not_fit_the_layout_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    layout = Layout([Sequence((1, 2, 2), 3)])
    inputs = {"tokens": torch.zeros(4, 16), "timesteps": torch.zeros(1), "text": torch.zeros(3, 48)} | change
    with pytest.raises(ValueError, match=message):
        WanDiT(CONFIG)(**inputs, layout=layout, group=Group.solo())


def test_bf16_weights_and_an_empty_text_stay_near_fp32() -> None:
    """The dtype of a deployment without autocast; a sequence without text has nothing to attend to."""
    torch.manual_seed(0)
    model = WanDiT(CONFIG)
    layout = Layout([Sequence((2, 3, 4), 5), Sequence((1, 2, 2), 0)])
    tokens, text, timesteps = torch.randn(28, 16), torch.randn(5, 48), torch.tensor([3.0, 900.0])
    expected = model(tokens, timesteps, text, layout, Group.solo())
    actual = model.bfloat16()(tokens, timesteps, text, layout, Group.solo())
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("flow_shift", [1.0, 3.0, 5.0])
def test_times_of_any_number_of_steps_are_those_of_the_exported_scheduler(flow_shift: float) -> None:
    theirs = FAMILIES["wan"].scheduler(DIT, FlowConfig(flow_shift=flow_shift)).build()
    for count in range(1, 201):
        theirs.set_timesteps(count)
        config = SamplerConfig(steps=count, flow_shift=flow_shift, whole_times=FAMILIES["wan"].whole_times)
        assert [time for time, _, _ in steps_of(config, 0, None)] == theirs.timesteps.tolist()
