"""SkyReels-V2: its cases for the tests of all families; levels by frame, and its pipelines' clips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, SkyReelsV2Pipeline, SkyReelsV2Transformer3DModel, UniPCMultistepScheduler
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from actors.config import CheckpointConfig
from app.settings.rules import check_sample
from app.settings.sections import SampleConfig
from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.sampling import initial_noise
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import dit_config, dit_json
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.load import build_dit
from ops.models.skyreels.config import SkyReelsConfig
from ops.models.skyreels.family import FAMILY
from ops.models.wan.config import WanConfig
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify
from ops.typed import ConfigError
from tests.families.kit import FamilyCases, SmallPipeline, small, their_class, whole

torch.set_num_threads(1)
DIT = SkyReelsConfig(
    num_layers=2, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16, text_dim=16, in_channels=4, out_channels=4
)


def publish(base: Path) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    SkyReelsV2Pipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=encoder,
        vae=vae,
        transformer=SkyReelsV2Transformer3DModel(**fields_of(DIT)),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0),
    ).save_pretrained(base)
    return base


def fields_of(dit: SkyReelsConfig) -> dict[str, object]:
    """What the class in Diffusers is made of."""
    return {key: value for key, value in dit_json(dit).items() if not key.startswith("_")}


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=SkyReelsConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=16, pad_to=16),
    )


def clip(pipeline: SkyReelsV2Pipeline) -> torch.Tensor:
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


NARROW = SkyReelsConfig(num_layers=2, num_heads=12, head_dim=4, ffn_dim=96, freq_dim=16)
MODEL = whole(replace(NARROW, diffusion_forcing=True, sample_info=True, frame_rate=16.0))
CASES = FamilyCases(
    variants={
        "": small(SkyReelsConfig),
        "df": small(SkyReelsConfig, diffusion_forcing=True),
        "df at a frame rate": small(SkyReelsConfig, diffusion_forcing=True, sample_info=True),
        "i2v": small(SkyReelsConfig, in_channels=12, first_frame="channels", image_dim=20),
    },
    models={"": MODEL, "i2v": whole(replace(NARROW, first_frame="channels"))},
    presets={"skyreels-v2-df-1.3b": 1.43, "skyreels-v2-df-14b": 14.29, "skyreels-v2-t2v-14b": 14.29},
    lora=("ffn.net.2", "attn2.to_out.0"),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        flow=FlowConfig(flow_shift=8.0),
        request={"prompt": "a red disc", "frames": 5, "height": 32, "width": 48, "guidance_scale": 5.0},
        clip=clip,
        scheduler="Euler, flow shift 8",
    ),
)
GRIDS = ((3, 2, 3), (1, 3, 2), (4, 2, 2))
TEXTS = (7, 12, 1)


@pytest.mark.parametrize("case", ["df", "df at a frame rate"])
def test_packed_clips_with_a_time_for_each_frame_equal_diffusers_one_by_one(case: str) -> None:
    """Forward and gradients, of clips of several lengths and, where the weights take it, frame rates."""
    config = CASES.variants[case]
    reference, model = their_class(config), build_dit(config, seed=0)
    model.load_state_dict(reference.state_dict())
    numbers = torch.Generator().manual_seed(1)
    latents = [torch.randn(4, t, 2 * h, 2 * w, generator=numbers) for t, h, w in GRIDS]
    texts = [torch.randn(length, 24, generator=numbers) for length in TEXTS]
    times = [1000 * torch.rand(grid[0], generator=numbers) for grid in GRIDS]
    rates = (16.0, 24.0, 16.0)
    layout = Layout(
        [
            Sequence(grid, length, frame_rate=rate, frame_times=True)
            for grid, length, rate in zip(GRIDS, TEXTS, rates, strict=True)
        ]
    )
    tokens = layout.local([patchify(latent, (1, 2, 2)) for latent in latents])
    packed = model(tokens, torch.cat(times), torch.cat(texts), layout, Group.solo())
    packed.square().sum().backward()
    for index, rows in enumerate(packed.split(layout.lengths)):
        fps = {"fps": [int(rates[index] == 24)]} if config.sample_info else {}
        inputs = latents[index][None], times[index][None], texts[index][None]
        expected = reference(*inputs, enable_diffusion_forcing=True, **fps).sample[0]
        expected.square().sum().backward()
        made = unpatchify(rows, GRIDS[index], (1, 2, 2), 4)
        torch.testing.assert_close(made, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    theirs = {name: weight.grad for name, weight in reference.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, theirs[name], atol=1e-5 * largest, rtol=1e-4, msg=name)


def test_attention_by_blocks_of_frames_is_refused_by_its_name() -> None:
    fields = dit_json(DIT) | {"num_frame_per_block": 5}
    with pytest.raises(ValueError, match="here has num_frame_per_block 5; only 1 is supported"):
        dit_config(fields, DIT, "here")


def test_a_folder_of_diffusion_forcing_is_known_by_its_pipeline() -> None:
    df = DIT.of_pipeline({"_class_name": "SkyReelsV2DiffusionForcingPipeline"})
    assert df.diffusion_forcing and FAMILY.pipeline_class(df) == "SkyReelsV2DiffusionForcingPipeline"
    assert DIT.of_pipeline({"_class_name": "SkyReelsV2Pipeline"}) == DIT
    assert FAMILY.pipeline_class(DIT) == "SkyReelsV2Pipeline"
    assert FAMILY.pipeline_class(replace(DIT, sample_info=True)) == "SkyReelsV2DiffusionForcingPipeline"
    with pytest.raises(ValueError, match="diffusion_forcing is true, and first_frame channels"):
        replace(DIT, diffusion_forcing=True, first_frame="channels")


@pytest.mark.parametrize(
    "dit",
    [replace(NARROW, first_frame="channels"), WanConfig(expert="both"), HunyuanConfig(first_frame="token_replace")],
)
def test_levels_by_frame_are_refused_where_a_clip_has_one_time(dit: DiTConfig) -> None:
    model = whole(dit)
    sample = SampleConfig()
    flow = FlowConfig(frame_levels="rising")
    with pytest.raises(ConfigError, match=r"train\.flow\.frame_levels is rising, and the transformer"):
        check_sample(sample, CheckpointConfig(), model, flow)
    check_sample(sample, CheckpointConfig(), whole(WanConfig()), flow)


def test_a_transformer_with_one_time_for_a_clip_takes_no_layout_with_one_for_each_frame() -> None:
    model = build_dit(small(HunyuanConfig, num_single_layers=1, pooled_dim=8), 0)
    layout = Layout([Sequence((2, 1, 1), 1, frame_times=True)])
    with pytest.raises(ValueError, match=r"a time for each frame: a transformer of architecture hunyuan"):
        model(torch.zeros(2, 16), torch.zeros(2), torch.zeros(1, 24), layout, Group.solo())
