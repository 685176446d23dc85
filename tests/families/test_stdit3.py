"""STDiT3: its cases for the tests of all families; a reference written here, since Diffusers has no class of it;
folders, text and noise levels."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from app.export.parity import our_velocity, parity_sample
from ops.comm.collectives import Group
from ops.config import FlowConfig, TokenShift
from ops.flow.objective import FlowObjective, draw_sigma, shift
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import dit_config, dit_json
from ops.models.load import build_dit, dit_skeleton
from ops.models.stdit3.config import STDiT3Config
from ops.models.stdit3.family import FAMILY
from ops.models.weights import write_folder
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify
from tests.families.kit import FamilyCases, small, whole

torch.set_num_threads(1)
DIT = STDiT3Config(
    num_layers=2,
    num_heads=4,
    head_dim=8,
    ffn_dim=128,
    text_dim=16,
    in_channels=4,
    out_channels=4,
    base_size=64,
    caption_rows=9,
    frame_rate=8.0,
)
# sizes of frames whose scale and square root are not whole, a picture, a caption that is no text
CLIPS = [Sequence((5, 2, 3), 4), Sequence((1, 3, 3), 0), Sequence((5, 2, 3), 7), Sequence((2, 4, 2), 1)]


class Reference(nn.Module):
    """The published transformer of one clip, written out: [C, T, H, W] -> [2 C, T, H, W], in plain products."""

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        self.c, dim = config, config.dim
        self.x_embedder = nn.ModuleDict(
            {"proj": nn.Conv3d(config.in_channels, dim, (1, 2, 2), stride=(1, 2, 2))},
        )
        self.t_embedder, self.fps_embedder = self.of_number(dim), self.of_number(dim)
        self.t_block = nn.ModuleList([nn.Identity(), nn.Linear(dim, 6 * dim)])
        self.y_embedder = nn.ModuleDict({"y_proj": self.two(config.text_dim, dim, dim)})
        self.y_embedder.register_buffer("y_embedding", torch.randn(config.caption_rows, config.text_dim))
        self.spatial_blocks = nn.ModuleList(self.block(dim) for _ in range(config.num_layers))
        self.temporal_blocks = nn.ModuleList(self.block(dim) for _ in range(config.num_layers))
        self.final_layer = nn.ModuleDict({"linear": nn.Linear(dim, 4 * 2 * config.out_channels)})
        self.final_layer.register_parameter("scale_shift_table", nn.Parameter(torch.randn(2, dim)))

    @staticmethod
    def two(inside: int, inner: int, outside: int) -> nn.ModuleDict:
        return nn.ModuleDict({"fc1": nn.Linear(inside, inner), "fc2": nn.Linear(inner, outside)})

    @staticmethod
    def of_number(dim: int) -> nn.ModuleDict:
        return nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))})

    def block(self, dim: int) -> nn.ModuleDict:
        norms = {name: nn.RMSNorm(self.c.head_dim) for name in ("q_norm", "k_norm")}
        attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim), **norms})
        cross = {"q_linear": nn.Linear(dim, dim), "kv_linear": nn.Linear(dim, 2 * dim), "proj": nn.Linear(dim, dim)}
        made = nn.ModuleDict({"attn": attn, "cross_attn": nn.ModuleDict(cross), "mlp": self.two(dim, 4 * dim, dim)})
        made.register_parameter("scale_shift_table", nn.Parameter(torch.randn(6, dim)))
        return made

    def forward(self, latent: Tensor, time: Tensor, text: Tensor, fps: float) -> Tensor:
        """latent [C, T, H, W], time [1], text [L, E]; frames of 16 by 16 pixels for a token."""
        told = self.number(self.t_embedder, time) + self.number(self.fps_embedder, torch.tensor([fps]))
        six = self.t_block[1](F.silu(told)).view(6, -1)
        y = self.mlp(self.y_embedder["y_proj"], text if len(text) else self.y_embedder.y_embedding)
        x = self.x_embedder["proj"](latent[None])[0]  # [D, T, h, w]
        _, frames, h, w = x.shape
        x = x.permute(1, 2, 3, 0).reshape(frames, h * w, -1) + self.places(h, w)
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks):
            x = self.run(spatial, x, y, six, rotated=False)
            x = self.run(temporal, x.transpose(0, 1), y, six, rotated=True).transpose(0, 1)
        shift, scale = self.final_layer.scale_shift_table + told
        x = self.final_layer["linear"](F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift)
        x = x.view(frames, h, w, 2, 2, -1)  # the patch, then channels
        return x.permute(5, 0, 1, 3, 2, 4).reshape(-1, frames, 2 * h, 2 * w)

    def run(self, block: nn.ModuleDict, x: Tensor, y: Tensor, six: Tensor, rotated: bool) -> Tensor:
        """x [sequences of self-attention, their rows, D]."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = block.scale_shift_table + six
        h = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        q, k, v = (self.heads(part) for part in block["attn"]["qkv"](h).chunk(3, dim=-1))
        q, k = self.normed(q, block["attn"]["q_norm"].weight), self.normed(k, block["attn"]["k_norm"].weight)
        if rotated:
            q, k = self.rotate(q), self.rotate(k)
        x = x + gate * block["attn"]["proj"](self.attend(q, k, v))
        cross = block["cross_attn"]
        k, v = (self.heads(part) for part in cross["kv_linear"](y)[None].chunk(2, dim=-1))
        x = x + cross["proj"](self.attend(self.heads(cross["q_linear"](x)), k, v))
        h = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.mlp(block["mlp"], h)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.c.num_heads, -1)).transpose(1, 2)  # [sequences, H, rows, d]

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    @staticmethod
    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    @staticmethod
    def rotate(x: Tensor) -> Tensor:
        """Neighbours are a pair, turned by the number of the row."""
        size = x.shape[-1]
        angle = torch.arange(x.shape[-2])[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    @staticmethod
    def mlp(two: nn.ModuleDict, x: Tensor) -> Tensor:
        return two["fc2"](F.gelu(two["fc1"](x), approximate="tanh"))

    @staticmethod
    def number(embedder: nn.ModuleDict, value: Tensor) -> Tensor:
        angle = value[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
        return embedder["mlp"](torch.cat([angle.cos(), angle.sin()], dim=1))

    def places(self, h: int, w: int) -> Tensor:
        """[h w, D]: the first half of the width tells the column, the second the row; of each, sines then cosines."""
        scale = math.sqrt(h * 16 * w * 16) / self.c.base_size
        side, quarter = round(math.sqrt(h * w)), self.c.dim // 4
        frequencies = 1 / 10000 ** (torch.arange(quarter) / quarter)
        found = []
        for row in range(h):
            for column in range(w):
                column_angle = column / scale * side / w * frequencies
                row_angle = row / scale * side / h * frequencies
                found.append(torch.cat([column_angle.sin(), column_angle.cos(), row_angle.sin(), row_angle.cos()]))
        return torch.stack(found)


def reference() -> Reference:
    """With every parameter random, also those that are published as zero, so that a forgotten one shows."""
    torch.manual_seed(0)
    made = Reference(DIT)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.08)
    return made


def publish(folder: Path) -> Path:
    """A folder as a user puts it together: text encoder and autoencoder of PixArt-Sigma's pipeline, and Open-Sora's own
    files of the transformer."""
    torch.manual_seed(0)
    fields, own = dit_json(DIT), FAMILY.own_code
    assert own is not None
    write_folder(folder / "transformer", {**reference().state_dict(), **own.constants(DIT)}, fields, stem="model")
    AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[4, 4, 4, 4],
        layers_per_block=1,
        norm_num_groups=1,
        latent_channels=4,
    ).save_pretrained(folder / "vae")
    t5 = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5EncoderModel(t5).save_pretrained(folder / "text_encoder")
    ByT5Tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "model_index.json").write_text('{"_class_name": "PixArtSigmaPipeline"}')
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=STDiT3Config(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=300, cleaned="lower", empty="none"),
    )


SMALL = whole(  # one caption is the fixed rows that stand for none
    STDiT3Config(num_layers=1, num_heads=12, head_dim=4, ffn_dim=192, spatial_slices=3, caption_rows=6), empty="none"
)
CASES = FamilyCases(
    variants={"": small(STDiT3Config, base_size=96, caption_rows=5)},
    models={"": SMALL, "by ulysses": replace(SMALL, dit=replace(SMALL.dit, bag_mode="ulysses"))},  # type: ignore[call-arg]
    whole_runs=("",),
    presets={"stdit-xl2": 1.21, "stdit-3b2": 3.18},
    lora=("attn.qkv", "attn.proj", "cross_attn.kv_linear", "cross_attn.proj", "mlp.fc1"),
)


def test_names_and_shapes_are_the_published_ones() -> None:
    """The model is XL/2 as its report lists it; every block of a kind is alike."""
    config = replace(STDiT3Config(), num_layers=28, num_heads=16, head_dim=72, ffn_dim=4608, text_dim=4096)
    config = replace(config, in_channels=4, out_channels=4)
    found = {name: tuple(value.shape) for name, value in dit_skeleton(config).state_dict().items()}
    block = {
        "attn.qkv.weight": (3456, 1152),
        "attn.qkv.bias": (3456,),
        "attn.q_norm.weight": (72,),
        "attn.k_norm.weight": (72,),
        "attn.proj.weight": (1152, 1152),
        "attn.proj.bias": (1152,),
        "cross_attn.q_linear.weight": (1152, 1152),
        "cross_attn.q_linear.bias": (1152,),
        "cross_attn.kv_linear.weight": (2304, 1152),
        "cross_attn.kv_linear.bias": (2304,),
        "cross_attn.proj.weight": (1152, 1152),
        "cross_attn.proj.bias": (1152,),
        "mlp.fc1.weight": (4608, 1152),
        "mlp.fc1.bias": (4608,),
        "mlp.fc2.weight": (1152, 4608),
        "mlp.fc2.bias": (1152,),
        "scale_shift_table": (6, 1152),
    }
    expected: dict[str, tuple[int, ...]] = {
        "x_embedder.proj.weight": (1152, 4, 1, 2, 2),
        "x_embedder.proj.bias": (1152,),
        "t_block.1.weight": (6912, 1152),
        "t_block.1.bias": (6912,),
        "y_embedder.y_embedding": (300, 4096),
        "y_embedder.y_proj.fc1.weight": (1152, 4096),
        "y_embedder.y_proj.fc1.bias": (1152,),
        "y_embedder.y_proj.fc2.weight": (1152, 1152),
        "y_embedder.y_proj.fc2.bias": (1152,),
        "final_layer.linear.weight": (32, 1152),
        "final_layer.linear.bias": (32,),
        "final_layer.scale_shift_table": (2, 1152),
    }
    for name in ("t_embedder", "fps_embedder"):
        expected |= {f"{name}.mlp.0.weight": (1152, 256), f"{name}.mlp.0.bias": (1152,)}
        expected |= {f"{name}.mlp.2.weight": (1152, 1152), f"{name}.mlp.2.bias": (1152,)}
    for number in range(28):
        for kind in ("spatial_blocks", "temporal_blocks"):
            expected |= {f"{kind}.{number}.{name}": shape for name, shape in block.items()}
    assert found == expected
    assert FAMILY.own_code is not None
    assert {name: tuple(value.shape) for name, value in FAMILY.own_code.constants(config).items()} == {
        "rope.freqs": (36,)
    }


def test_forward_and_gradients_are_those_of_the_published_computation() -> None:
    """A pack of three grids, one of them twice, against each clip alone: 1e-5 of the largest output and gradient. The
    output's second half, learned variances, has no gradient."""
    theirs, ours = reference(), build_dit(DIT, 0)
    ours.load_state_dict(theirs.state_dict())  # strict: the same names and shapes
    numbers = torch.Generator().manual_seed(1)
    latents = [torch.randn(4, t, 2 * h, 2 * w, generator=numbers) for t, h, w in (clip.grid for clip in CLIPS)]
    text = [torch.randn(clip.text_tokens, 16, generator=numbers) for clip in CLIPS]
    times = torch.tensor([999.0, 3.5, 500.0, 20.0])
    tokens = torch.cat([patchify(latent, DIT.patch) for latent in latents])
    found = ours(tokens, times, torch.cat(text), Layout(CLIPS), Group.solo())
    expected = torch.cat(
        [
            -patchify(theirs(latent, time[None], rows, 8.0 if latent.shape[1] > 1 else 120.0)[:4], DIT.patch)
            for latent, time, rows in zip(latents, times, text)
        ]
    )
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    weights = torch.randn(found.shape, generator=numbers)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in gradients.values() if grad is not None)
    assert dict(ours.named_parameters()).keys() == gradients.keys()
    for name, weight in ours.named_parameters():
        assert weight.grad is not None and gradients[name] is not None, name
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-5 * largest, rtol=1e-4, msg=name)
    velocity, variance = theirs.final_layer["linear"].weight.grad.view(4, 2, 4, -1).unbind(1)
    assert velocity.abs().min() > 0 and variance.abs().max() == 0


def test_a_pack_on_a_bag_gives_what_each_clip_gives_alone(run_ranks: Callable) -> None:
    """Three grids, of which two are a stack, text of any length; more ranks than frames; several schedules."""
    module = build_dit(DIT, 0).double().eval()
    numbers = torch.Generator().manual_seed(0)
    tokens = [torch.randn(clip.tokens, 16, dtype=torch.float64, generator=numbers) for clip in CLIPS]
    text = [torch.randn(clip.text_tokens, 16, dtype=torch.float64, generator=numbers) for clip in CLIPS]
    times = torch.tensor([999.0, 3.0, 500.0, 20.0], dtype=torch.float64)
    with torch.no_grad():
        alone = [
            module(tokens[i], times[i : i + 1], text[i], Layout([clip]), Group.solo()) for i, clip in enumerate(CLIPS)
        ]

    def work(group: Group) -> float:
        layout = Layout(CLIPS, group.size, group.rank)
        with torch.no_grad():
            found = module(layout.local(tokens), times, torch.cat(text), layout, group)
        return float((found - layout.local(alone)).abs().max())

    for degree, slices in ((2, 3), (4, 2)):
        module.config = replace(DIT, temporal_slices=slices, spatial_slices=slices)
        assert max(run_ranks(degree, work)) < 1e-10
    module.config = replace(DIT, bag_mode="ulysses")
    for degree in (2, 3, 7):  # heads are shared by ranks, of which some have no positions
        assert max(run_ranks(degree, work)) < 1e-10


def test_what_it_learns_is_signal_minus_noise() -> None:
    """Our objective's loss is the published one: its output against signal minus noise, told 1000 times the share of
    noise."""
    theirs, ours = reference(), build_dit(DIT, 0)
    ours.load_state_dict(theirs.state_dict())
    numbers = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(4, 2, 4, 6, generator=numbers) for _ in range(2))
    text = torch.randn(4, 16, generator=numbers)
    objective, level = FlowObjective(FlowConfig()), 0.3
    noisy, target = objective.noisy(level, clean, noise), objective.target(level, clean, noise)
    layout, time = Layout([Sequence((2, 2, 3), 4)]), torch.tensor([1000 * level])
    with torch.no_grad():
        found = ours(patchify(noisy, DIT.patch), objective.times(torch.tensor([level])), text, layout, Group.solo())
        wanted = theirs((1 - level) * clean + level * noise, time, text, 8.0)[:4]
    mine = (found - patchify(target, DIT.patch)).square().mean()
    torch.testing.assert_close(mine, (wanted - (clean - noise)).square().mean(), atol=0, rtol=1e-5)


@pytest.mark.parametrize("height, width, frames", [(512, 512, 1), (240, 432, 51), (720, 1280, 102), (144, 256, 17)])
def test_noise_levels_are_shifted_by_area_and_length_as_published(height: int, width: int, frames: int) -> None:
    """By sqrt(height width / 512^2) sqrt(latent frames), 5 of 17: with one token of 16x16 pixels that is the root of
    tokens / 1024."""
    latent_frames = 1 if frames == 1 else frames // 17 * 5
    ratio = math.sqrt(height * width / 512**2) * math.sqrt(latent_frames)
    tokens = latent_frames * (height // 16) * (width // 16)
    law = TokenShift(law="root", base_tokens=1024)
    assert law.at(tokens) == pytest.approx(ratio, rel=1e-12)
    flow = FlowConfig(token_shift=law)
    plain = draw_sigma(FlowConfig(flow_shift=1.0), 3, 5, "clip", tokens)
    drawn = draw_sigma(flow, 3, 5, "clip", tokens)
    assert drawn == pytest.approx(ratio * plain / (1 + (ratio - 1) * plain)) and drawn == shift(plain, law.at(tokens))


def test_published_weights_are_read_and_written_in_their_own_layout(tmp_path: Path) -> None:
    """A config.json of Transformers and model.safetensors, with the frequencies of RoPE among the weights; runtime
    switches of the original code are passed over."""
    theirs = reference()
    fields = {
        "architectures": ["STDiT3"],
        "model_type": "STDiT3",
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 4.0,
        "caption_channels": 16,
        "model_max_length": 9,
        "in_channels": 4,
        "input_sq_size": 64,
        "patch_size": [1, 2, 2],
        "qk_norm": True,
        "pred_sigma": True,
        "skip_y_embedder": False,
        "enable_flash_attn": True,
        "class_dropout_prob": 0.1,
        "torch_dtype": "float32",
    }
    assert FAMILY.own_code is not None
    frequencies = FAMILY.own_code.constants(DIT)
    torch.testing.assert_close(frequencies["rope.freqs"], torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({**theirs.state_dict(), **frequencies}, tmp_path / "model.safetensors")
    config = dit_config(fields, replace(DIT, num_layers=1, caption_rows=4, base_size=1), "here")
    assert config == DIT and dit_json(DIT).items() <= fields.items()
    module = build_dit(replace(config, path=str(tmp_path)), 7)
    for name, value in module.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    sample = parity_sample(DIT)
    with torch.no_grad():
        wanted = -theirs(sample.latent, sample.timestep, sample.text, 8.0)[:4]
        torch.testing.assert_close(our_velocity(module, sample), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)
    write_folder(tmp_path / "again", {**module.state_dict(), **frequencies}, dit_json(config), stem="model")
    written, stored = load_file(tmp_path / "again" / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"qk_norm": False}, "here has qk_norm False; only True is supported"),
        ({"pred_sigma": False}, "here has pred_sigma False; only True"),
        ({"skip_y_embedder": True}, "here has skip_y_embedder True; only False"),
        ({"hidden_size": 34}, "hidden_size 34 is not a multiple of num_heads 4"),
        ({"patch_size": [2, 2, 2]}, r"model\.dit\.patch \(2, 2, 2\): tokens of stdit3 are squares of one frame"),
        ({"architectures": ["STDiT2"]}, "here is a STDiT2; known are"),
    ],
)
def test_published_variants_that_are_not_computed_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dit_config({**dit_json(DIT), **change}, DIT, "here")


def test_settings_that_the_transformer_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="ffn_dim 100 is not 4 times the width 32"):
        replace(DIT, ffn_dim=100)
    with pytest.raises(ValueError, match=r"model\.dit\.caption_rows is 0; it must be at least 1"):
        replace(DIT, caption_rows=0)
    with pytest.raises(ValueError, match="one time for all of a clip"):
        layout = Layout([Sequence((2, 1, 1), 1, clean_frames=1)])
        build_dit(DIT, 0)(torch.zeros(2, 16), torch.zeros(1), torch.zeros(1, 16), layout, Group.solo())
