"""The FLOP model prices what a training cascade computes and sends: counted by PyTorch, and on a bag's group."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actors.config import PlannerConfig, TrainConfig
from actors.plan.costs.flops import DiTWork, exchange_calls, exchange_seconds, flop_coefficients
from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import profile_json, read_profile, write_profile
from actors.plan.costs.setting import ProfiledSetting
from actors.planning.learned import setting_of
from actors.planning.options import flop_profile, profile_of
from app.export.parity import parity_sample
from ops.comm.collectives import Group
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ALL_TRAINED, TrainedPart
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.latte.config import LatteConfig
from ops.models.load import build_dit, trained_part
from ops.models.wan.config import WanConfig
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify
from ops.precision import half_products
from ops.waiting import PendingCollective
from tests.families.registry import ONE_EACH, VARIANTS
from tests.ops.conftest import _run_ranks

WAN = WanConfig(num_layers=4, num_heads=2, head_dim=64, ffn_dim=512, freq_dim=16, text_dim=8)
WAN_14B = WanConfig(num_layers=40, num_heads=40, head_dim=128, ffn_dim=13824, gradient_checkpointing=True)
GEOMETRY, CLIP = Geometry(), Samples.of(1, (81, 480, 832), 512)
BF16, BF16_WEIGHTS, FP32 = (
    TrainConfig(autocast="bfloat16"),
    TrainConfig(parameter_dtype="bfloat16"),
    TrainConfig(),
)


def passed(config: DiTConfig, dtype: torch.dtype, group: Group, autocast: bool = False) -> None:
    """Forward and backward of a small sample."""
    module, sample = build_dit(config, 0, dtype).train(), parity_sample(config)
    t, h, w = (size // patch for size, patch in zip(sample.latent.shape[1:], config.patch, strict=True))
    image = 0 if sample.conditions.image is None else len(sample.conditions.image)
    layout = Layout([Sequence((t, h, w), len(sample.text), image, sample.clean_frames)], group.size, group.rank)
    rows = layout.local([patchify(sample.latent, config.patch).to(dtype)])
    with half_products(torch.device("cpu"), autocast):
        out = module(rows, sample.timestep, sample.text.to(dtype), layout, group, sample.conditions)
    out.float().square().sum().backward()


def linear_flops(config: DiTConfig) -> int:
    """FLOPs of all products of a pass but those of attention, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter:
        passed(config, torch.float32, Group.solo())
    of_ops = counter.get_flop_counts()["Global"]
    return sum(count for op, count in of_ops.items() if str(op) in ("aten.mm", "aten.addmm"))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"lora_rank": 1},
        {"lora_rank": 1, "lora_targets": ("blocks.[23].*",)},
        {"train_only": ("blocks.3",)},
        {"train_only": ("blocks.2.ffn", "proj_out")},
        {"train_only": ("*.attn1",)},
        {"train_only": ("scale_shift_table", "proj_out")},
    ],
    ids=str,
)
def test_products_are_those_that_pytorch_counts(changed: dict[str, Any], checkpointing: bool) -> None:
    """A backward computes one side of two of a product with frozen weights, and nothing before the first trained
    block."""
    config = replace(WAN, gradient_checkpointing=checkpointing, **changed)
    part, whole = trained_part(config), replace(WAN, gradient_checkpointing=checkpointing)
    counted = linear_flops(config) / linear_flops(whole)
    expected = part.products(checkpointing) / ALL_TRAINED.products(checkpointing)
    # the first trained block needs no gradient of its own rows; factors of rank 1 are a hundredth
    assert counted == pytest.approx(expected, abs=0.08)
    assert changed == {} or expected < 0.85


def test_lora_computes_as_much_backward_as_forward() -> None:
    """A DiT whose weights are frozen has two forwards of products and three of attention, one more with checkpointing.
    A price is what a run counts as computed."""
    for checkpointing in (False, True):
        lora = replace(WAN_14B, lora_rank=32, gradient_checkpointing=checkpointing)
        fit = flop_coefficients(
            lora, 1.0, vae_flops_per_pixel=0.0, text_flops_per_token=0.0, launch_s=0.0, exchange_gbps=1.0
        )["dit"]
        assert fit.coefficients[1] == (2 + checkpointing) * lora.flops.video / 1e12
        assert fit.coefficients[2] == (3 + checkpointing) * lora.flops.pair / 1e12
        profile = Profile.from_flops(lora, geometry=GEOMETRY, tflops=1.0, launch_s=0.0)
        tokens = profile.tokens(*CLIP.shape)
        assert profile.seconds("dit", CLIP, 1) == pytest.approx(DiTWork.of(lora).computed_tflop(1, tokens, 512))
        assert DiTWork.of(lora).attention_again_tflop(tokens) == pytest.approx(
            checkpointing * lora.flops.attention(tokens, 0) / 1e12
        )


def test_what_is_trained_late_moves_less_between_ranks() -> None:
    late = replace(WAN, train_only=("blocks.2",))
    assert trained_part(late) == TrainedPart(weights=0.25, blocks=0.5)
    assert trained_part(replace(WAN, train_only=("blocks.2", "patch_embedding"))).blocks == 1
    assert trained_part(replace(WAN, train_only=("proj_out",))) == TrainedPart(weights=0.0, blocks=0.0)
    mochi = replace(VARIANTS["mochi"], train_only=("pos_frequencies",))
    assert trained_part(mochi).blocks == 1, "they turn queries and keys of every block"
    assert exchange_calls(late, trained_part(late)) == 0.75 * exchange_calls(WAN)
    turns = LatteConfig(num_layers=6, train_only=("temporal_transformer_blocks.2",))
    assert trained_part(turns).blocks == pytest.approx(7 / 12), "they take turns with spatial ones"


def test_blocks_of_the_text_alone_are_no_part_of_what_is_counted() -> None:
    """What Kandinsky's blocks of the video cost in training did not count as all of it."""
    config = VARIANTS["kandinsky"]
    assert trained_part(replace(config, train_only=("visual_transformer_blocks*",))) == TrainedPart()
    assert trained_part(replace(config, train_only=("text_transformer_blocks*",))) == TrainedPart(weights=0.0)


class Counted:
    """Bytes that ranks send to others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent, lock, begin = 0, threading.Lock(), Group.all_to_all_async

        def counting(group: Group, output: Tensor, input: Tensor, to: list[int], of: list[int]) -> PendingCollective:
            with lock:
                self.sent += input[:1].nbytes * (sum(of) - of[group.rank])
            return begin(group, output, input, to, of)

        monkeypatch.setattr(Group, "all_to_all_async", counting)


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(FP32, id="fp32", marks=pytest.mark.long),
        pytest.param(BF16, id="autocast"),
        pytest.param(BF16_WEIGHTS, id="bf16", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("case", ONE_EACH)
def test_what_bags_send_is_priced_by_its_bytes(case: str, train: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(VARIANTS[case], gradient_checkpointing=True)
    counted, ranks = Counted(monkeypatch), 2
    dtype = getattr(torch, train.parameter_dtype)
    _run_ranks(ranks, lambda group: passed(config, dtype, group, train.autocast == "bfloat16"))
    sample = parity_sample(config)
    tokens = sample.latent[0].numel() // (config.patch[0] * config.patch[1] * config.patch[2])
    rows = tokens + (len(sample.text) if config.flops.within else 0)
    priced = exchange_seconds(config, 1.0, train.element_bytes) * rows * (ranks - 1) / ranks**2
    # blocks in turn: the way back to the first layout is not that of a block, and of two blocks it is a sixth
    assert counted.sent / ranks == pytest.approx(priced, rel=0.26 if config.spatial_temporal else 0)


@pytest.mark.parametrize(
    ("train", "tflops", "element_bytes"),
    [
        (BF16, 989.4, 2),
        (BF16_WEIGHTS, 989.4, 2),
        (FP32, 66.9, 4),
        (TrainConfig(tf32="on"), 494.7, 4),
        (None, 989.4, 2),
    ],
    ids=["autocast", "bf16", "fp32", "tf32", "not said"],
)
def test_a_gpu_is_priced_in_the_precision_of_the_run(
    train: TrainConfig | None, tflops: float, element_bytes: int
) -> None:
    model = ModelConfig(dit=WAN_14B)
    profile = flop_profile(model, GEOMETRY, "NVIDIA H100", train=train)
    coefficients = profile.models["dit"].coefficients
    assert coefficients[1] == pytest.approx(4 * WAN_14B.flops.video / (0.4e12 * tflops))
    assert coefficients[3] == pytest.approx(exchange_seconds(WAN_14B, 0.7 * 450e9, element_bytes))
    assert profile.row_bytes == exchange_seconds(WAN_14B, 1.0, element_bytes)
    assert profile_of(PlannerConfig(), model, GEOMETRY, "NVIDIA H100", train).models == profile.models


def test_encoders_are_priced_in_their_own_precision() -> None:
    """Text in bf16, whatever the run has; a VAE in fp32 in TF32 where the run allows it."""
    model = ModelConfig(dit=WAN_14B, vae=VAEConfig(kind="diffusers", path="none", dtype="float32"))
    bf16, fp32, tf32 = (
        flop_profile(model, GEOMETRY, "NVIDIA H100", train=train).models
        for train in (BF16, FP32, TrainConfig(tf32="on"))
    )
    assert bf16["text"] == fp32["text"] == tf32["text"]
    assert bf16["vae"] == tf32["vae"]
    assert fp32["vae"].coefficients[1] == pytest.approx(bf16["vae"].coefficients[1] * 494.7 / 66.9)


def test_of_several_gpus_the_slowest_in_the_precision_of_the_run_counts() -> None:
    """An H20 is slower than an A100 in bf16, and faster in fp32. Encoders have precisions of their own."""
    vaes = [VAEConfig(kind="diffusers", path="none", dtype=dtype) for dtype in ("bfloat16", "float32")]
    names = ("NVIDIA A100+NVIDIA H20", "NVIDIA A100", "NVIDIA H20")
    for train, slowest in ((BF16, "NVIDIA H20"), (FP32, "NVIDIA A100")):
        for vae in vaes:
            model = ModelConfig(dit=WAN_14B, vae=vae)
            both, a100, h20 = (flop_profile(model, GEOMETRY, name, train=train).models for name in names)
            assert both["dit"].coefficients[1] == (h20 if slowest == "NVIDIA H20" else a100)["dit"].coefficients[1]
            assert both["text"] == h20["text"] != a100["text"]
            own = a100 if vae.dtype == "float32" and train is FP32 else h20
            assert both["vae"].coefficients[1] == pytest.approx(own["vae"].coefficients[1])
            assert both["vae"].coefficients[1] >= max(a100["vae"].coefficients[1], h20["vae"].coefficients[1])


def measured_by(model: ModelConfig, train: TrainConfig, device: str, folder: Path, factor: float) -> str:
    """The file of a machine that takes `factor` times what the FLOP model says, with a few points of it."""
    found, assumed = (flop_profile(model, GEOMETRY, device, train=train) for _ in range(2))
    for frames in (1, 17, 33):
        part = Samples.of(1, (frames, 480, 832))
        found.measure(part.key("dit", 1), factor * assumed.seconds("dit", part, 1))
    found.setting = replace(setting_of(model, device, train), backend="", vae="", text="")
    write_profile(found, folder / "p.json")
    return str(folder / "p.json")


def test_a_profile_of_a_lora_run_is_not_scaled_again(tmp_path: Path) -> None:
    """Its points are what LoRA took, and another training refuses it."""
    lora = ModelConfig(dit=replace(WAN_14B, lora_rank=32))
    file = PlannerConfig(profile=measured_by(lora, BF16, "NVIDIA H100", tmp_path, 2.0))
    clip = Samples.of(1, (33, 480, 832))
    found, assumed = (profile_of(one, lora, GEOMETRY, "NVIDIA H100", BF16) for one in (file, PlannerConfig()))
    assert found.seconds("dit", clip, 1) == pytest.approx(2 * assumed.seconds("dit", clip, 1))
    for frames, degree in ((81, 1), (81, 8), (17, 8)):
        part = Samples.of(1, (frames, 480, 832), 512)
        assert found.seconds("dit", part, degree) == pytest.approx(2 * assumed.seconds("dit", part, degree))
    with pytest.raises(Exception, match="is of training of 'LoRA factors of rank 32'; this run has 'all weights'"):
        profile_of(file, ModelConfig(dit=WAN_14B), GEOMETRY, "NVIDIA H100", BF16)


@pytest.mark.parametrize(
    ("precision", "now"),
    [("float32, autocast bfloat16", 0.5), ("bfloat16, autocast none", 0.5), ("float32, autocast none", 1.0), ("", 1.0)],
)
def test_a_file_that_counted_four_bytes_of_what_bags_send_is_read_by_what_they_do(precision: str, now: float) -> None:
    """Files had `exchange_s` of 4 bytes a number, whatever was sent; now they say how many they counted."""
    first = Profile(degrees={"dit": (1, 2)}, exchange_s=6e-5, exchange_calls=16.0)
    first.measure(CLIP.key("dit", 1), 2.0)
    first.setting = ProfiledSetting(precision=precision)
    written = profile_json(first)
    assert read_profile(written).exchange_s == 6e-5, "what is written is read as it stands"
    before = {key: value for key, value in written.items() if key != "element_bytes"}
    found = read_profile(before)
    assert found.exchange_s == now * 6e-5
    again = read_profile(profile_json(found))
    assert (again.exchange_s, again.element_bytes) == (found.exchange_s, 4 * now)


def test_a_few_points_of_a_gpu_that_nobody_knows_set_the_level_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is not timed: only the proportions of its FLOP model count. A file that says so is not extrapolated."""
    monkeypatch.setattr("actors.planning.options._measured_here", lambda device: pytest.fail("nothing is timed"))
    model, measured = ModelConfig(dit=WAN_14B), {"GPU of nobody": 58.0}
    found, known = (flop_profile(model, GEOMETRY, "GPU of nobody", measured, BF16) for _ in range(2))
    for module in ("text", "vae", "dit"):
        found.measure(CLIP.key(module, 1), 2 * known.seconds(module, CLIP, 1), 512)
    written = profile_json(found)
    for extrapolates in (True, False):
        (tmp_path / "p.json").write_text(json.dumps(written | {"extrapolate": extrapolates}))
        read = profile_of(PlannerConfig(profile=str(tmp_path / "p.json")), model, GEOMETRY, "GPU of nobody", BF16)
        longer = read.price("dit", Samples.of(2, (121, 480, 832), 512), 1)
        if not extrapolates:
            assert longer is None
        else:  # constants, of launches, are of a slower GPU than the assumed one
            assert longer == pytest.approx(2 * known.seconds("dit", Samples.of(2, (121, 480, 832), 512), 1), rel=1e-2)


@pytest.mark.parametrize(("train", "now"), [(BF16, 0.5), (FP32, 1.0), (None, 1.0)], ids=["bf16", "fp32", "not said"])
def test_a_file_that_says_no_precision_is_of_what_the_run_sends(
    train: TrainConfig | None, now: float, tmp_path: Path
) -> None:
    first = Profile(degrees={"dit": (1, 2)}, exchange_s=6e-5)
    first.measure(CLIP.key("dit", 1), 2.0)
    before = {key: value for key, value in profile_json(first).items() if key != "element_bytes"}
    (tmp_path / "p.json").write_text(json.dumps(before))
    found = profile_of(
        PlannerConfig(profile=str(tmp_path / "p.json")), ModelConfig(dit=WAN_14B), GEOMETRY, "NVIDIA H100", train
    )
    assert (found.exchange_s, found.element_bytes) == (now * 6e-5, 4 * now)
    assert found.row_bytes == exchange_seconds(WAN_14B, 1.0, found.element_bytes)


def test_a_gpu_that_no_table_lists_has_half_of_its_bf16_in_fp32() -> None:
    model, measured = ModelConfig(dit=WAN_14B), {"NVIDIA GeForce RTX 4070": 58.0}
    bf16, fp32 = (
        flop_profile(model, GEOMETRY, "NVIDIA GeForce RTX 4070", measured, train).models["dit"].coefficients[1]
        for train in (BF16, FP32)
    )
    assert fp32 == pytest.approx(2 * bf16)


def test_encoders_that_are_in_another_form_are_priced_as_ones_that_are_not_here(tmp_path: Path) -> None:
    """A benchmark prices presets whose folders are not here; the load of such a file says what it is."""
    file = tmp_path / "wan_2.1_vae.safetensors"
    missing = ModelConfig(
        vae=VAEConfig(kind="diffusers", path=str(file)), text=TextConfig(kind="t5", path=str(file), d_model=64)
    )
    prices = flop_profile(missing, GEOMETRY, "NVIDIA H100 80GB HBM3", train=BF16)
    file.write_bytes(b"x")
    assert profile_json(flop_profile(missing, GEOMETRY, "NVIDIA H100 80GB HBM3", train=BF16)) == profile_json(prices)
