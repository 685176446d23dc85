"""Every measure against a number worked out by hand; FLOPs and peaks against published ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.plan.costs.flops import DiTWork, flop_coefficients, text_cost
from actors.plan.costs.forms import Load
from actors.plan.devices import DEVICES, device_speed, nearest_device
from actors.plan.measures import (
    correlation,
    cv_step,
    flops_utilization,
    variation,
    wait_sync,
    workload_imbalance,
)
from ops.models.base.flops import TrainedPart, joint_flops
from ops.models.latte.config import LatteConfig
from ops.models.stdit3.config import STDiT3Config
from ops.models.wan.config import WanConfig


def test_cv_step_is_the_gap_over_the_longest() -> None:
    assert cv_step([100.0, 75.0, 90.0]) == 0.25
    assert cv_step([0.0, 0.0]) == cv_step([]) == 0.0


def test_a_variation_is_the_deviation_over_the_mean() -> None:
    assert variation([1.0, 3.0]) == 0.5  # mean 2, deviation 1
    assert variation([5.0, 5.0, 5.0]) == variation([0.0, 0.0]) == 0.0


def test_wir_is_the_largest_over_the_smallest_load() -> None:
    assert workload_imbalance([6.0, 4.0, 5.0]) == 1.5
    assert workload_imbalance([6.0, 0.0]) is None


def test_utilization_divides_by_the_time_and_all_peaks() -> None:
    assert flops_utilization(40.0, 2.0, [50.0, 50.0]) == pytest.approx(0.2)
    assert flops_utilization(40.0, 2.0, [50.0, 0.0]) is None, "the peak of one device is not known"


def test_a_correlation_is_pearson_s() -> None:
    assert correlation([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx(1.0)
    assert correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(0.5)
    assert correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


def test_waiting_is_counted_inside_bags_and_for_the_last_one_to_come() -> None:
    assert wait_sync([1.0, 0.0], [10.0, 12.0]) == [3.0, 0.0]


def test_flops_are_those_of_knapformer_s_table() -> None:
    """FLUX, 57 blocks of width 3072 with an MLP of four times that: KnapFormer prints 26.20 % HFU for 461.8 K tokens in
    2.95 s on 32 H100. With sequences of one length (1024 of 451 tokens) it comes to 26.2 %."""
    work = DiTWork(forward=joint_flops(57, 3072, 4 * 3072), recomputes=True)
    tflop = work.computed_tflop(1024, 451)
    forward = 1024 * 57 * (24 * 451 * 3072**2 + 4 * 451**2 * 3072) / 1e12
    assert tflop == pytest.approx(4 * forward)
    assert work.model_tflop(1024, 451) == pytest.approx(3 * forward)
    assert 100 * (flops_utilization(tflop, 2.95, [989.0] * 32) or 0) == pytest.approx(26.2, abs=0.1)


def test_spatial_temporal_blocks_attend_to_frames_positions_and_text() -> None:
    """Latte-1 on 16 frames of 512 x 512 with 120 tokens of text: 28 blocks each of 1024 and of 16 tokens,
    counted block by block; the former attend to the text, of which each takes keys and values. Plans count the same."""
    dit = LatteConfig(num_layers=28, num_heads=16, head_dim=72, ffn_dim=4608)
    tokens, text, d = 16 * 1024, 120, 1152
    linear = 28 * tokens * (20 * d * d + 2 * 4 * d * 4608) + 28 * text * 4 * d * d
    attention = 28 * 4 * d * tokens * (1024 + text) + 28 * 4 * d * tokens * 16
    tflop = DiTWork.of(dit).model_tflop(1, tokens, text, 16)
    assert tflop == pytest.approx(3 * (linear + attention) / 1e12)
    fit = flop_coefficients(
        dit, 1.0, vae_flops_per_pixel=0.0, text_flops_per_token=0.0, launch_s=0.0, exchange_gbps=1.0
    )["dit"]
    load = Load(
        batch=1,
        frames=16,
        height=512,
        width=512,
        text_tokens=text,
        tokens=tokens,
        degree=1,
        token_frames=16,
        text=text_cost(dit),
    )
    assert fit.predict(load) == pytest.approx(tflop)
    both = STDiT3Config(num_layers=28, num_heads=16, head_dim=72, ffn_dim=4608)  # where every block attends to the text
    more = DiTWork.of(both).model_tflop(1, tokens, text, 16)
    assert more == pytest.approx(tflop + 3 * 28 * (4 * d * tokens * text + 4 * d * d * (tokens + text)) / 1e12)
    costs = flop_coefficients(
        both, 1.0, vae_flops_per_pixel=0.0, text_flops_per_token=0.0, launch_s=0.0, exchange_gbps=1.0
    )
    assert costs["dit"].predict(replace(load, text=text_cost(both))) == pytest.approx(more)
    full = DiTWork(forward=replace(dit.flops, in_turn=False), recomputes=False)
    assert tflop < 0.5 * full.model_tflop(1, tokens, text, 16)


def test_text_that_is_read_costs_keys_and_values_on_every_member_of_a_bag() -> None:
    """Wan2.1-1.3B: of a video token's 12 d^2 + 4 d f, a row of text takes 4 d^2."""
    dit = WanConfig(num_layers=30, num_heads=12, head_dim=128, ffn_dim=8960)
    tokens, text, d, blocks = 32760, 512, 1536, 30
    row, pair = 3 * blocks * (12 * d * d + 4 * d * 8960) / 1e12, 3 * blocks * 4 * d / 1e12
    fit = flop_coefficients(
        dit, 1.0, vae_flops_per_pixel=0.0, text_flops_per_token=0.0, launch_s=0.0, exchange_gbps=1e12
    )["dit"]
    for degree in (1, 4):
        load = Load(
            batch=2,
            frames=81,
            height=480,
            width=832,
            text_tokens=text,
            tokens=tokens,
            degree=degree,
            text=text_cost(dit),
        )
        keys_and_values = 3 * blocks * 4 * d * d * text / 1e12
        expected = 2 * ((row * tokens + pair * tokens * (tokens + text)) / degree + keys_and_values)
        assert fit.predict(load) == pytest.approx(expected, rel=1e-6)
    assert DiTWork.of(dit).model_tflop(2, tokens, text) == pytest.approx(
        2 * (row * tokens + pair * tokens * (tokens + text) + keys_and_values)
    )


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    full = DiTWork(forward=joint_flops(1, 2, 8), recomputes=False)
    lora = replace(full, part=TrainedPart(weights=0.0))
    linear, attention = 10 * (8 * 4 + 4 * 2 * 8), 4 * 100 * 2
    assert full.model_tflop(1, 10) == pytest.approx((3 * linear + 3 * attention) / 1e12)
    assert lora.model_tflop(1, 10) == pytest.approx((2 * linear + 3 * attention) / 1e12)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("Tesla V100-SXM2-16GB", 125.0),
    ],
)
def test_a_device_is_known_by_its_driver_s_name(name: str, bf16: float) -> None:
    found = device_speed(name)
    assert found is not None and found.peak_tflops("bfloat16") == bf16 > found.peak_tflops("float32")
    assert found.peak_tflops("tf32") == (bf16 / 2 if found.has_tf32 else found.peak_tflops("float32"))


def test_a_device_that_is_not_listed_has_no_peak() -> None:
    assert device_speed("CPU core") is None and device_speed("NVIDIA GeForce GTX 1080") is None


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.3),
        ("NVIDIA A100 80GB PCIe", 79.1),
        ("NVIDIA A100-SXM4-80GB+NVIDIA H100 80GB HBM3", 79.1),
        ("Tesla V100-SXM2-32GB", 31.7),
        ("Tesla V100-PCIE-16GB", 15.7),
        ("NVIDIA GH200 480GB", 94.5),  # of its processor
        ("NVIDIA A100", 39.3),  # of two sizes the smaller one
        ("NVIDIA GeForce RTX 4090", 23.6),
    ],
)
def test_memory_is_that_of_the_size_in_the_name(name: str, gib: float) -> None:
    found = device_speed(name)
    assert found is not None and found.memory_gib == gib


def test_every_listed_device_has_its_memory_and_is_the_nearest_to_its_own_name() -> None:
    for words, speed in DEVICES:
        assert 14 < speed.memory_gib < 200
        assert nearest_device("NVIDIA " + "-".join(words).lower()) == " ".join(words)
    assert nearest_device("NVIDIA GeForce RTX 4070") == "RTX 4090"
    assert nearest_device("h10") == "H100"


def test_no_device_hides_a_more_special_one() -> None:
    for number, (words, _) in enumerate(DEVICES):
        assert not any(set(before) <= set(words) for before, _ in DEVICES[:number]), words
