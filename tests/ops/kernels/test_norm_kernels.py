"""Triton kernels of norm, modulation and gate against float64, through the public functions."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from ops.kernels.base import host
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual import reference as gate_reference
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate import ablations
from ops.kernels.norm_modulate import reference as norm_reference
from ops.kernels.norm_modulate.op import ln_modulate
from ops.kernels.qk_rope.op import qk_norm_rope
from tests.long import in_default_run

FP32_OUTPUT, FP32_TABLE = 2e-6, 5e-6  # relative L2
BF16_OUTPUT, BF16_GRADIENT = 2.0e-3, 2.0e-3  # rounding a float to bf16 costs 1.67e-3
FP32_TABLE_FROM_BF16 = 1e-5

PACKED = Segments.packed([7, 0, 1, 12, 0], [2, 0, 2, 1, 4], num_mods=5)
MANY_RUNS = Segments.packed([1, 2, 0, 1, 3, 1, 1, 2, 0, 1], [3, 0, 1, 2, 3, 0, 1, 2, 4, 0], num_mods=6)


def test_the_few_rows_of_these_tests_cross_programs() -> None:
    assert host.num_programs(PACKED.num_rows, 5) == 5
    with host.dealt(host.RowShares()):
        assert host.num_programs(PACKED.num_rows, 5) == 1


def rows_of(segments: Segments) -> Tensor:
    return segments.run2mod.long()[segments.run.long()]


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def make(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype).requires_grad_()


def exact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


def rounded_once(actual: Tensor, expected: Tensor) -> bool:
    """Every bf16 value is within half a step of the exact one, give or take the fp32 arithmetic before the store."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return bool(((actual - expected).abs() <= 2**-8 * expected.abs() + 2e-5).all())


def compare(outputs: list[Tensor], expected: list[Tensor], given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Outputs and gradients within what their dtype allows; table gradients are exact sums in fp32."""
    cotangents = [torch.randn_like(out) for out in outputs]
    got = torch.autograd.grad(outputs, list(given.values()), cotangents)
    want = torch.autograd.grad(expected, list(wanted.values()), [c.double() for c in cotangents])
    for a, b in zip(outputs, expected):
        assert error(a, b) <= (BF16_OUTPUT if a.dtype == torch.bfloat16 else FP32_OUTPUT)
        assert a.dtype != torch.bfloat16 or rounded_once(a, b)
    low = any(t.dtype == torch.bfloat16 for t in given.values())
    for name, a, b in zip(given, got, want):
        assert a.isfinite().all(), name
        limit = BF16_GRADIENT if a.dtype == torch.bfloat16 else FP32_TABLE_FROM_BF16 if low else FP32_TABLE
        if name in ("x", "y") and a.dtype != torch.bfloat16:
            limit = FP32_TABLE_FROM_BF16 if low else FP32_OUTPUT
        assert error(a, b) <= limit, name


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(
    ("width", "dtype"),
    in_default_run({(64, "fp32"), (200, "bf16")}, of=product((64, 200, 1536, 5120), DTYPES)),
)
def test_ln_modulate(device: str, width: int, dtype: str) -> None:
    torch.manual_seed(width)
    segments = PACKED.to(device)
    given = {"x": make(device, DTYPES[dtype], segments.num_rows, width)}
    given |= {name: make(device, torch.float32, segments.num_mods, width) for name in ("scale", "shift")}
    wanted = exact(given)
    actual = ln_modulate(**given, segments=segments)
    compare([actual], [norm_reference.ln_modulate(**wanted, rows=rows_of(segments))], given, wanted)


@pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize(
    "tables", [("scale",), ("shift",), ("weight", "bias"), ("weight", "bias", "scale", "shift")], ids="-".join
)
def test_every_combination_of_tables(device: str, rms: bool, tables: tuple[str, ...]) -> None:
    segments, width = MANY_RUNS.to(device), 72
    given = {"x": make(device, torch.float32, segments.num_rows, width)}
    for name in tables:
        shape = (width,) if name in ("weight", "bias") else (segments.num_mods, width)
        given[name] = make(device, torch.float32, *shape)
    wanted = exact(given)
    actual = ln_modulate(**given, segments=segments, rms=rms)
    compare([actual], [norm_reference.ln_modulate(**wanted, rows=rows_of(segments), rms=rms)], given, wanted)


@pytest.mark.parametrize(
    ("width", "residual"), in_default_run({(72, "bf16"), (72, "fp32")}, of=product((72, 3072), DTYPES))
)
def test_gate_residual_ln_modulate(device: str, width: int, residual: str) -> None:
    torch.manual_seed(width)
    segments = PACKED.to(device)
    given = {
        "x": make(device, DTYPES[residual], segments.num_rows, width),
        "y": make(device, torch.bfloat16, segments.num_rows, width),
    }
    given |= {name: make(device, torch.float32, segments.num_mods, width) for name in ("gate", "scale", "shift")}
    wanted = exact(given)
    actual = gate_residual_ln_modulate(**given, segments=segments, out_dtype=torch.bfloat16)
    x = gate_reference.gate_residual(wanted["x"], wanted["y"], wanted["gate"], rows_of(segments))
    # The norm sees x' as stored; the rounding is part of the op, so the reference gets the rounded values too.
    stored = x + (actual[0].detach().double() - x.detach())
    expected = [x, norm_reference.ln_modulate(stored, wanted["scale"], wanted["shift"], rows_of(segments))]
    compare(list(actual), expected, given, wanted)


@pytest.mark.parametrize("used", [[0], [1]], ids=["residual only", "norm only"])
def test_one_output_of_gate_residual_ln_modulate(device: str, used: list[int]) -> None:
    segments, width = MANY_RUNS.to(device), 64
    given = {name: make(device, torch.float32, segments.num_rows, width) for name in "xy"}
    given["gate"] = make(device, torch.float32, segments.num_mods, width)
    wanted = exact(given)
    actual = gate_residual_ln_modulate(**given, segments=segments)
    x = gate_reference.gate_residual(wanted["x"], wanted["y"], wanted["gate"], rows_of(segments))
    expected = [x, norm_reference.ln_modulate(x)]
    compare([actual[i] for i in used], [expected[i] for i in used], given, wanted)


@pytest.mark.long
def test_frozen_tables_need_no_sums(device: str) -> None:
    segments, width = MANY_RUNS.to(device), 72
    given = {name: make(device, torch.bfloat16, segments.num_rows, width) for name in "xy"}
    given |= {name: make(device, torch.float32, segments.num_mods, width) for name in ("gate", "scale", "shift")}
    cotangent = torch.randn(segments.num_rows, width, device=device)

    def gradients(frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
        tensors = {name: t.detach() if name in frozen else t for name, t in given.items()}
        residual, h = gate_residual_ln_modulate(**tensors, segments=segments)
        tables = {name: tensors[name] for name in ("scale", "shift")}
        outs = [
            residual,
            h,
            ln_modulate(tensors["x"], **tables, segments=segments),
            gate_residual(tensors["x"], tensors["y"], tensors["gate"], segments),
        ]
        wrt = {name: t for name, t in given.items() if name not in frozen}
        found = torch.autograd.grad(outs, list(wrt.values()), [cotangent.to(out.dtype) for out in outs])
        return dict(zip(wrt, found, strict=True))

    whole = gradients()
    for frozen in (("scale", "shift"), ("gate", "scale", "shift")):
        assert all(torch.equal(one, whole[name]) for name, one in gradients(frozen).items()), frozen


def test_gate_residual(device: str) -> None:
    segments, width = PACKED.to(device), 104
    given = {name: make(device, torch.bfloat16, segments.num_rows, width) for name in "xy"}
    given["gate"] = make(device, torch.float32, segments.num_mods, width)
    wanted = exact(given)
    expected = gate_reference.gate_residual(wanted["x"], wanted["y"], wanted["gate"], rows_of(segments))
    compare([gate_residual(**given, segments=segments)], [expected], given, wanted)


@pytest.mark.parametrize("table_rows", [1, 9], ids=["one row", "a row per token"])
def test_tables_without_segments(device: str, table_rows: int) -> None:
    given = {
        "x": make(device, torch.bfloat16, 9, 136),
        "scale": make(device, torch.float32, table_rows, 136),
        "shift": make(device, torch.float32, table_rows, 136),
    }
    wanted = exact(given)
    compare([ln_modulate(**given)], [norm_reference.ln_modulate(**wanted)], given, wanted)
    given["y"], given["gate"] = make(device, torch.bfloat16, 9, 136), make(device, torch.float32, table_rows, 136)
    given = {name: given[name] for name in ("x", "y", "gate")}
    wanted = exact(given)
    compare([gate_residual(**given)], [gate_reference.gate_residual(**wanted)], given, wanted)


@pytest.mark.parametrize("seed", in_default_run({0}, of=range(6)))
def test_random_widths_and_segments(device: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    torch.manual_seed(seed)
    num_mods, width = draw(1, 5), 8 * draw(1, 1025)
    lengths = [draw(0, 6) for _ in range(draw(1, 7))]
    segments = Segments.packed(lengths, [draw(0, num_mods) for _ in lengths], num_mods, device)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    given = {"x": make(device, dtype, segments.num_rows, width)}
    given |= {name: make(device, dtype, num_mods, width) for name in ("scale", "shift")}
    wanted = exact(given)
    actual = ln_modulate(**given, segments=segments)
    expected = norm_reference.ln_modulate(**wanted, rows=rows_of(segments))
    assert error(actual, expected) <= (FP32_OUTPUT if dtype == torch.float32 else BF16_OUTPUT)
    cotangent = torch.randn_like(actual)
    got = torch.autograd.grad(actual, list(given.values()), cotangent)
    want = torch.autograd.grad(expected, list(wanted.values()), cotangent.double())
    for a, b in zip(got, want):
        assert error(a, b) <= (FP32_TABLE if dtype == torch.float32 else BF16_GRADIENT)


def test_layouts_do_not_matter(device: str, caplog: pytest.LogCaptureFixture) -> None:
    host.log_copy.cache_clear()
    segments, width = MANY_RUNS.to(device), 64
    wide = make(device, torch.float32, segments.num_rows, 3 * width)
    table = make(device, torch.float32, segments.num_mods, 6, width)
    odd = make(device, torch.float32, segments.num_rows, width + 3)
    for x in (wide[:, width : 2 * width], odd[:, 3:]):
        scale, shift = table[:, 1], table[:, 4]
        actual = ln_modulate(x, scale, shift, segments)
        expected = norm_reference.ln_modulate(x.double(), scale.double(), shift.double(), rows_of(segments))
        assert error(actual, expected) <= FP32_OUTPUT
        leaves = [wide if x.stride(0) == 3 * width else odd, table]
        expanded, transposed = torch.ones((), device=device), torch.randn(width, x.shape[0], device=device).T
        for cotangent in (expanded.expand_as(actual), transposed):
            got = torch.autograd.grad(actual, leaves, cotangent, retain_graph=True)
            want = torch.autograd.grad(expected, leaves, cotangent.double(), retain_graph=True)
            assert all(error(a, b) <= FP32_TABLE for a, b in zip(got, want))
    copied = [record.getMessage() for record in caplog.records if "copy an operand" in record.getMessage()]
    assert len(copied) == len(set(copied)) == 3  # the odd rows, the expanded gradient, the transposed gradient


def test_no_tokens(device: str) -> None:
    segments = Segments.packed([0, 0], device=device)
    x, gate = make(device, torch.float32, 0, 64), make(device, torch.float32, 2, 64)
    residual, h = gate_residual_ln_modulate(x, x, gate, gate, gate, segments)
    q, _ = qk_norm_rope(x, x, make(device, torch.float32, 64), None, head_dim=16)
    assert residual.shape == h.shape == q.shape == (0, 64)
    (grad,) = torch.autograd.grad(residual.sum() + h.sum() + q.sum(), gate)
    assert torch.equal(grad, torch.zeros_like(gate))


def test_large_mean_outlier_constant_and_broken_rows(device: str) -> None:
    x = torch.randn(6, 512, device=device) + 1e3
    x[2, 7], x[3], x[4, 0], x[5, 1] = 1e4, 5.0, float("nan"), float("inf")
    y = ln_modulate(x)
    assert error(y[:3], norm_reference.ln_modulate(x.double())[:3]) <= 1e-4  # the input itself has 1e-7 * mean / std
    assert y[3].abs().max() == 0
    assert y.isfinite().all(-1).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "rms norm"])
def test_small_values_under_a_tiny_epsilon(device: str, rms: bool) -> None:
    given = {"x": (torch.randn(5, 200, device=device) * 1e-5).requires_grad_()}
    wanted = exact(given)
    actual = ln_modulate(**given, eps=1e-12, rms=rms)
    compare([actual], [norm_reference.ln_modulate(**wanted, eps=1e-12, rms=rms)], given, wanted)


def test_gradients_repeat_bit_by_bit(device: str) -> None:
    segments = MANY_RUNS.to(device)
    x, scale = make(device, torch.bfloat16, segments.num_rows, 128), make(device, torch.float32, 6, 128)
    runs = [
        torch.autograd.grad(gate_residual_ln_modulate(x, x, scale, scale, scale, segments)[1].float().sum(), [x, scale])
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize(
    "backward", [partial(ablations.dtile_bwd, tile_rows=8), ablations.atomic_bwd], ids=["d-tile", "atomic"]
)
def test_ablations_compute_the_same_gradients(device: str, backward) -> None:
    segments, width = PACKED.to(device), 200
    x, scale = make(device, torch.float32, segments.num_rows, width), make(device, torch.float32, 5, width)
    dy = torch.randn_like(x)
    mean, var = x.mean(-1), x.var(-1, correction=0)
    got = backward(dy, x.detach(), scale.detach(), mean.detach(), torch.rsqrt(var + 1e-6).detach(), segments)
    shift = torch.zeros_like(scale, requires_grad=True)
    out = norm_reference.ln_modulate(x, scale, shift, rows_of(segments))
    for a, b in zip(got, torch.autograd.grad(out, [x, scale, shift], dy)):
        assert error(a, b) <= FP32_TABLE
