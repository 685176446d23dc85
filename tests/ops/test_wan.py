"""WanDiT against Diffusers' WanTransformer3DModel, sample by sample."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel

from ops.comm import Group
from ops.models.wan.config import WanConfig
from ops.models.wan.model import WanDiT
from ops.packing import Layout, Sequence, patchify, unpatchify

torch.set_num_threads(1)
CONFIG = WanConfig(
    num_layers=2, num_heads=4, head_dim=32, ffn_dim=192, freq_dim=64, text_dim=48, in_channels=4, out_channels=4
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
