"""HunyuanDiT against Diffusers' HunyuanVideoTransformer3DModel."""

from __future__ import annotations

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel

from ops.comm import Group
from ops.conditions import Conditions
from ops.models.families import FAMILIES
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.hunyuan.model import HunyuanDiT
from ops.packing import Layout, Sequence, patchify, unpatchify

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
