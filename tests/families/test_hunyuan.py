"""HunyuanVideo: its cases for the tests of all families; packed samples against Diffusers' class."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel

from ops.comm.collectives import Group
from ops.models.families import FAMILIES
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.hunyuan.model import HunyuanDiT
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify
from tests.families.kit import FamilyCases, OriginalNames, Renames, small, whole

torch.set_num_threads(1)
CONFIG = HunyuanConfig(
    num_layers=2,
    num_single_layers=2,
    num_refiner_layers=1,
    num_heads=2,
    head_dim=16,
    ffn_dim=64,
    text_dim=24,
    pooled_dim=12,
    in_channels=4,
    out_channels=4,
    rope_theta=256.0,
    rope_axes=(4, 6, 6),
    guidance_embeds=True,
)
ORIGINAL: Renames = (
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^txt_in\.proj_in", "txt_in.input_embedder"),
    (r"^txt_in\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
    (r"^txt_in\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
    (r"^txt_in\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
    (r"token_refiner\.refiner_blocks", "individual_token_refiner.blocks"),
    (r"(^txt_in.*)attn\.to_([qkv])", r"\1self_attn_qkv.\2"),
    (r"(^txt_in.*)attn\.to_out\.0", r"\1self_attn_proj"),
    (r"(^txt_in.*)ff\.net\.0\.proj", r"\1mlp.fc1"),
    (r"(^txt_in.*)ff\.net\.2", r"\1mlp.fc2"),
    (r"(^txt_in.*)norm_out\.linear", r"\1adaLN_modulation.1"),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.mlp.0"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.mlp.2"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks", "double_blocks"),
    (r"^single_transformer_blocks", "single_blocks"),
    (r"norm1\.linear", "img_mod.linear"),
    (r"norm1_context\.linear", "txt_mod.linear"),
    (r"(single_blocks\.\d+)\.norm\.linear", r"\1.modulation.linear"),
    (r"(single_blocks\.\d+)\.attn\.norm_([qk])", r"\1.\2_norm"),
    (r"(single_blocks\.\d+)\.attn\.to_([qkv])", r"\1.linear1.\2"),
    (r"proj_mlp", "linear1.x"),
    (r"(single_blocks\.\d+)\.proj_out", r"\1.linear2"),
    (r"attn\.norm_([qk])", r"img_attn_\1_norm"),
    (r"attn\.norm_added_([qk])", r"txt_attn_\1_norm"),
    (r"(double_blocks.*)attn\.to_([qkv])", r"\1img_attn_qkv.\2"),
    (r"attn\.add_([qkv])_proj", r"txt_attn_qkv.\1"),
    (r"attn\.to_out\.0", "img_attn_proj"),
    (r"attn\.to_add_out", "txt_attn_proj"),
    (r"ff\.net\.0\.proj", "img_mlp.fc1"),
    (r"ff\.net\.2", "img_mlp.fc2"),
    (r"ff_context\.net\.0\.proj", "txt_mlp.fc1"),
    (r"ff_context\.net\.2", "txt_mlp.fc2"),
)
HEADS_12 = HunyuanConfig(num_layers=1, num_single_layers=1, num_refiner_layers=1, num_heads=12, head_dim=8, ffn_dim=96)
HEADS_3 = replace(HEADS_12, num_heads=3)
CASES = FamilyCases(
    variants={
        "": small(HunyuanConfig, num_single_layers=1, num_refiner_layers=1, pooled_dim=8, guidance_embeds=True),
        "i2v latent_concat": small(
            HunyuanConfig, num_single_layers=1, pooled_dim=8, first_frame="latent_concat", in_channels=9
        ),
        "i2v token_replace": small(
            HunyuanConfig, num_single_layers=1, pooled_dim=8, first_frame="token_replace", guidance_embeds=True
        ),
    },
    models={
        "": whole(HEADS_12),
        "of two text encoders": whole(HEADS_3, kind="hunyuan", pooled_dim=20),
        **{  # text of captions and first frames
            f"i2v {variant}": whole(replace(HEADS_12, first_frame=variant), kind="hunyuan_i2v", pooled_dim=20)
            for variant in ("latent_concat", "token_replace")
        },
    },
    whole_runs=("of two text encoders", "i2v latent_concat", "i2v token_replace"),
    presets={"hunyuan-13b": 12.8, "hunyuan-i2v-13b": 12.8, "hunyuan-i2v-33ch-13b": 12.8},
    lora=("attn.add_k_proj", "proj_mlp", "proj_out"),
    original=OriginalNames(
        renames=ORIGINAL,
        halves="final_layer.adaLN_modulation",
        config=HunyuanConfig(
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
)
FP32 = {"atol": 1e-5, "rtol": 1e-5}
GRIDS = ((3, 4, 6), (1, 6, 2), (2, 3, 3))
TEXTS = (7, 12, 1)


def diffusers_model() -> HunyuanVideoTransformer3DModel:
    torch.manual_seed(0)
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=24,
        pooled_projection_dim=12,
        rope_theta=256.0,
        rope_axes_dim=(4, 6, 6),
        guidance_embeds=True,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def test_packed_samples_equal_diffusers_one_by_one() -> None:
    reference, model = diffusers_model(), HunyuanDiT(CONFIG)
    model.load_state_dict(reference.state_dict())  # strict: the same names and shapes
    numbers = torch.Generator().manual_seed(1)
    latents = [torch.randn(4, t, 2 * h, 2 * w, generator=numbers) for t, h, w in GRIDS]
    texts = [torch.randn(length, 24, generator=numbers) for length in TEXTS]
    pooled = torch.randn(3, 12, generator=numbers)
    timesteps, guidance = torch.tensor([900.5, 3.25, 500.0]), torch.tensor([1000.0, 6000.0, 3500.0])
    layout = Layout([Sequence(grid, length) for grid, length in zip(GRIDS, TEXTS)])
    with torch.no_grad():
        tokens = layout.local([patchify(latent, (1, 2, 2)) for latent in latents])
        packed = model(
            tokens, timesteps, torch.cat(texts), layout, Group.solo(), Conditions(pooled=pooled, guidance=guidance)
        )
        for i, rows in enumerate(packed.split(layout.lengths)):
            expected = reference(
                latents[i][None],
                timesteps[i][None],
                texts[i][None],
                torch.ones(1, TEXTS[i]),
                pooled[i][None],
                guidance=guidance[i][None],
            ).sample[0]
            torch.testing.assert_close(unpatchify(rows, GRIDS[i], (1, 2, 2), 4), expected, **FP32)


def test_a_pass_of_training_gets_the_guidance_of_the_training() -> None:
    """1000 times the scale, as the transformers of samples do; other weights take none."""
    numbers, layout = torch.Generator().manual_seed(1), Layout([Sequence((2, 1, 2), 3)])
    given = torch.randn(4, 16, generator=numbers), torch.tensor([500.0]), torch.randn(3, 24, generator=numbers)
    pooled = torch.randn(1, 12, generator=numbers)
    usual, six = (HunyuanDiT(replace(CONFIG, trained_guidance=scale)) for scale in (1.0, 6.0))
    usual.load_state_dict(diffusers_model().state_dict())
    six.load_state_dict(usual.state_dict())

    def velocity(model: HunyuanDiT, scale: float | None = None) -> torch.Tensor:
        guidance = None if scale is None else torch.tensor([1000.0 * scale])
        with torch.no_grad():
            found: torch.Tensor = model(*given, layout, Group.solo(), Conditions(pooled=pooled, guidance=guidance))
        return found

    assert torch.equal(velocity(six), velocity(usual, 6.0)) and torch.equal(velocity(usual), velocity(six, 1.0))
    assert not torch.equal(velocity(six), velocity(usual))
    with pytest.raises(ValueError, match=r"trained_guidance is 6, and guidance_embeds is false: .* Leave it out"):
        HunyuanConfig(trained_guidance=6.0)


def test_without_a_second_text_encoder_the_pooled_vector_is_the_mean_text() -> None:
    config = HunyuanConfig(
        num_layers=1,
        num_heads=2,
        head_dim=16,
        ffn_dim=64,
        text_dim=24,
        in_channels=4,
        out_channels=4,
    )
    model = HunyuanDiT(config)
    layout = Layout([Sequence((1, 2, 2), 3), Sequence((2, 1, 2), 5)])
    numbers = torch.Generator().manual_seed(1)
    tokens, text = torch.randn(8, 16, generator=numbers), torch.randn(8, 24, generator=numbers)
    mean = torch.stack([text[:3].mean(0), text[3:].mean(0)])
    call = (tokens, torch.tensor([10.0, 700.0]), text, layout, Group.solo())
    torch.testing.assert_close(model(*call), model(*call, Conditions(pooled=mean)), **FP32)


@pytest.mark.parametrize("architecture", ["wan", "hunyuan"])  # the width of LTX-Video is not free of its MLP's
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_rope_axes_fill_the_head_in_whole_pairs(architecture: str, head_dim: int) -> None:
    axes = FAMILIES[architecture].config(head_dim=head_dim).rope_split
    assert sum(axes) == head_dim and all(size % 2 == 0 for size in axes)
    assert head_dim != 128 or axes == {"wan": (44, 42, 42), "hunyuan": (16, 56, 56)}[architecture]


def test_rope_axes_that_do_not_fill_the_head_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 6, 8\).*head_dim 16"):
        HunyuanConfig(head_dim=16, rope_axes=(4, 6, 8))
