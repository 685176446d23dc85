"""The fused ops on the library path: equal to the plain reference in every dtype, layout and segment structure."""

import itertools
import logging

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.bench.ops_inputs import inputs_of
from ops.kernels.base import backend
from ops.kernels.base.measured import HEAD_DIM, OpCase, RowLayout
from ops.kernels.base.segments import Segments
from ops.kernels.folders import cases
from ops.kernels.gate_residual import reference as gate_reference
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate import reference as norm_reference
from ops.kernels.norm_modulate.op import ln_modulate
from ops.kernels.qk_rope import cpu
from ops.kernels.qk_rope import reference as qk_reference
from ops.kernels.qk_rope.op import qk_norm_rope
from ops.kernels.qk_rope.reference import QKBackwardCall, QKCall

FP64_ERROR = 1e-14
FP32_OUTPUT, FP32_TABLE = 2e-6, 5e-6  # relative L2, against float64
BF16_OUTPUT = 2.0e-3  # one rounding of a float: 1.67e-3

SEGMENTS = {
    "dense": Segments.dense(3, 40),
    "per frame": Segments.packed([9] * 8),
    "packed with empty runs": Segments.packed([70, 0, 50, 1, 0]),
    "repeated and unordered rows": Segments.packed([30, 20, 0, 41], [2, 0, 1, 2], num_mods=5),
    "no tokens": Segments.packed([0, 0], num_mods=2),
}


def rows_of(segments: Segments) -> Tensor:
    return segments.run2mod.long()[segments.run.long()]


def runs_of(rows: Tensor) -> tuple[list[int], list[int]]:
    """The lengths of the runs of tokens with one table row, and these rows."""
    tables, lengths = torch.unique_consecutive(rows, return_counts=True)
    return lengths.tolist(), tables.tolist()


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach(), expected.detach().double()
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def leaf(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def inputs(segments: Segments, width: int, dtype: torch.dtype, table_dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {
        "x": segments.num_rows,
        "y": segments.num_rows,
        "scale": segments.num_mods,
        "shift": segments.num_mods,
        "gate": segments.num_mods,
    }
    made = {
        name: leaf(rows, width, dtype=dtype if name in "xy" else table_dtype, seed=seed)
        for seed, (name, rows) in enumerate(shapes.items())
    }
    return made | {name: leaf(width, dtype=table_dtype, seed=9) for name in ("weight", "bias")}


def exact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


def gradients(outputs: list[Tensor], wrt: list[Tensor]) -> tuple[Tensor, ...]:
    cotangents = [leaf(*out.shape, dtype=out.dtype, seed=20 + i).detach() for i, out in enumerate(outputs)]
    return torch.autograd.grad(outputs, wrt, cotangents)


@pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "rms norm"])
def test_every_mix_of_dtypes_goes_forward_and_back(rms: bool) -> None:
    """A norm of fp32 tokens and a branch or tables of fp64 take fp64 backward, of statistics in fp32."""
    segments, dtypes = SEGMENTS["dense"], (torch.bfloat16, torch.float32, torch.float64)
    for x_dtype, y_dtype, table_dtype in itertools.product(dtypes, repeat=3):
        given = inputs(segments, 16, x_dtype, table_dtype)
        x, y, gate, scale, shift = (given[name] for name in ("x", "y", "gate", "scale", "shift"))
        y = y.detach().to(y_dtype).requires_grad_()
        outs = gate_residual_ln_modulate(x, y, gate, scale, shift, segments, rms=rms, residual_dtype=torch.float32)
        grads = gradients(list(outs), [x, y, gate, scale, shift])
        rounded = exact({"x": x, "y": y, "gate": gate, "scale": scale, "shift": shift})
        residual = gate_reference.gate_residual(rounded["x"], rounded["y"], rounded["gate"], rows_of(segments))
        h = norm_reference.ln_modulate(residual, rounded["scale"], rounded["shift"], rows_of(segments), rms=rms)
        expected = torch.autograd.grad(
            [residual, h],
            list(rounded.values()),
            [leaf(*out.shape, dtype=out.dtype, seed=20 + i).detach().double() for i, out in enumerate(outs)],
        )
        for grad, want in zip(grads, expected):
            assert error(grad, want) < 2e-2, (x_dtype, y_dtype, table_dtype)


@pytest.mark.parametrize("case", cases().values(), ids=lambda case: case.name)
def test_every_use_of_every_op_is_what_its_reference_says(case: OpCase) -> None:
    layout = RowLayout(name="packed", lengths=(7, 0, 1, 20))
    segments = Segments.packed(layout.lengths)
    given = exact(inputs_of(case.inputs, layout, 2 * HEAD_DIM, torch.device("cpu"), torch.float32))
    wanted = exact(given)
    fixed = {name: given[name].detach() for name in case.inputs if name not in case.differentiable}
    actual, expected = case.ours(given | fixed, segments), case.meaning(wanted | fixed, rows_of(segments))
    got, want = (
        gradients(list(outputs), [tensors[name] for name in case.differentiable])
        for outputs, tensors in ((actual, given), (expected, wanted))
    )
    for ours, theirs in zip([*actual, *got], [*expected, *want], strict=True):
        assert error(ours, theirs) <= FP64_ERROR


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_ln_modulate_is_the_reference(segments: Segments, rms: bool, affine: bool) -> None:
    for dtype, limit in ((torch.float64, FP64_ERROR), (torch.float32, FP32_TABLE)):
        given = inputs(segments, 48, dtype, dtype)
        names = ["x", "scale", "shift"] + (["weight", "bias"] if affine else [])
        options = {name: given[name] for name in names[3:]}
        actual = ln_modulate(given["x"], given["scale"], given["shift"], segments, rms=rms, **options)
        wanted = exact(given)
        expected = norm_reference.ln_modulate(
            wanted["x"],
            wanted["scale"],
            wanted["shift"],
            rows_of(segments),
            rms=rms,
            **{name: wanted[name] for name in names[3:]},
        )
        assert error(actual, expected) <= min(limit, FP32_OUTPUT)
        pairs = zip(gradients([actual], [given[n] for n in names]), gradients([expected], [wanted[n] for n in names]))
        for name, (got, want) in zip(names, pairs):
            assert error(got, want) <= limit, name


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("used", ["both outputs", "residual only", "norm only"])
@pytest.mark.parametrize(
    "flags",
    [(True, True), (False, True), (True, False), (False, False)],
    ids=["gate and modulation", "modulation", "gate", "neither"],
)
def test_gate_residual_ln_modulate_is_the_reference(segments: Segments, used: str, flags: tuple[bool, bool]) -> None:
    given = inputs(segments, 48, torch.float64, torch.float64)
    wanted = exact(given)
    names = ["x", "y"] + ["gate"] * flags[0] + (["scale", "shift"] if flags[1] else ["weight", "bias"])
    tables = {name: given[name] for name in names[2:]}
    actual = gate_residual_ln_modulate(given["x"], given["y"], segments=segments, **tables)
    rows = rows_of(segments)
    residual = gate_reference.gate_residual(wanted["x"], wanted["y"], wanted["gate"] if flags[0] else None, rows)
    norm = {name: wanted[name] for name in names[2:] if name != "gate"}
    expected = (residual, norm_reference.ln_modulate(residual, rows=rows, **norm))
    keep = {"both outputs": [0, 1], "residual only": [0], "norm only": [1]}[used]
    for out in keep:
        assert error(actual[out], expected[out]) <= FP64_ERROR
    reached = names if used != "residual only" else [n for n in names if n in ("x", "y", "gate")]
    got = gradients([actual[i] for i in keep], [given[n] for n in reached])
    want = gradients([expected[i] for i in keep], [wanted[n] for n in reached])
    for name, a, b in zip(reached, got, want):
        assert error(a, b) <= FP64_ERROR, name


@pytest.mark.parametrize("per_head", [False, True], ids=["full width", "per head"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float64])
def test_qk_norm_rope_is_the_reference(per_head: bool, weighted: bool, table_dtype: torch.dtype) -> None:
    head_dim, width, tokens, batch = 8, 48, 70, 2
    size = head_dim if per_head else width
    given = [leaf(batch * tokens, width, dtype=torch.float64, seed=i) for i in (0, 1)]
    weights = [leaf(size, dtype=torch.float64, seed=i) if weighted else None for i in (2, 3)]
    angles = leaf(tokens, head_dim // 2, dtype=torch.float64, seed=4).detach()
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    actual = qk_norm_rope(*given, *weights, cos, sin, head_dim=head_dim, per_head=per_head)
    expected = [
        qk_reference.qk_norm_rope(x, w, cos, sin, head_dim=head_dim, per_head=per_head) for x, w in zip(given, weights)
    ]
    wrt = [*given, *(w for w in weights if w is not None)]
    for a, b in zip([*actual, *gradients(list(actual), wrt)], [*expected, *gradients(expected, wrt)]):
        assert error(a, b) <= FP64_ERROR


class NumCalls(TorchDispatchMode):
    """Counts the calls of library ops."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("period", [1, 8])
def test_a_table_of_few_rows_takes_hardly_more_calls_than_one_of_all(period: int) -> None:
    """Attention over time has the angles of its frames again at every place."""
    x, weight = leaf(1000, 1152, dtype=torch.float64, seed=0), leaf(72, dtype=torch.float64, seed=1)
    angles = leaf(period, 36, dtype=torch.float64, seed=2).detach()
    calls = []
    for table in (angles, angles.repeat(1000 // period, 1)):
        with NumCalls() as counter, torch.no_grad():
            settings = table.cos(), table.sin(), 72, True
            _, _, *rstd = cpu.forward(QKCall(x, x, weight, weight, *settings, 1e-6, x.dtype))
            cpu.backward(QKBackwardCall(x, x, x, x, weight, weight, *settings[:2], *rstd, *settings[2:]))
        calls.append(counter.calls)
    assert calls[0] <= calls[1] + 8, "cos and sin are repeated for q and for k, both ways"
    tables = angles.cos(), angles.sin()
    actual, _ = qk_norm_rope(x, x, weight, weight, *tables, head_dim=72, per_head=True)
    expected = qk_reference.qk_norm_rope(x, weight, *tables, head_dim=72, per_head=True)
    for a, b in zip([actual, *gradients([actual], [x, weight])], [expected, *gradients([expected], [x, weight])]):
        assert error(a, b) <= FP64_ERROR


def test_qk_norm_without_rope_takes_keys_of_another_length() -> None:
    q, k = leaf(9, 32, dtype=torch.float64, seed=0), leaf(5, 32, dtype=torch.float64, seed=1)
    weight = leaf(32, dtype=torch.float64, seed=2)
    actual = qk_norm_rope(q, k, weight, weight, head_dim=8)
    for got, x in zip(actual, (q, k)):
        assert error(got, qk_reference.qk_norm_rope(x, weight, None, None, head_dim=8, per_head=False)) <= FP64_ERROR


def test_only_one_of_q_and_k_may_be_used() -> None:
    q, k = leaf(6, 32, dtype=torch.float64, seed=0), leaf(6, 32, dtype=torch.float64, seed=1)
    out, _ = qk_norm_rope(q, k, None, None, head_dim=8)
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    (expected,) = torch.autograd.grad(
        qk_reference.qk_norm_rope(q, None, None, None, head_dim=8, per_head=False).sum(), q
    )
    assert error(dq, expected) <= FP64_ERROR
    assert not dk.any()


def test_rotation_keeps_the_norm_of_every_pair() -> None:
    x = leaf(7, 16, dtype=torch.float64, seed=0)
    angles = torch.rand(7, 4, dtype=torch.float64) * 6
    turned, still = (
        qk_norm_rope(x, x, None, None, *tables, head_dim=8)[0]
        for tables in ((angles.cos(), angles.sin()), (None, None))
    )
    pairs = [out.view(7, 8, 2).norm(dim=-1) for out in (turned, still)]
    torch.testing.assert_close(*pairs)


def test_one_row_and_per_token_tables_need_no_segments() -> None:
    x = leaf(50, 24, dtype=torch.float64, seed=0)
    for rows in (1, 50):
        scale, shift, gate = (leaf(rows, 24, dtype=torch.float64, seed=i) for i in (1, 2, 3))
        y = leaf(50, 24, dtype=torch.float64, seed=4)
        actual = gate_residual_ln_modulate(x, y, gate, scale, shift)
        residual = gate_reference.gate_residual(x, y, gate)
        expected = residual, norm_reference.ln_modulate(residual, scale, shift)
        wrt = [x, y, gate, scale, shift]
        for a, b in zip(gradients(list(actual), wrt), gradients(list(expected), wrt)):
            assert error(a, b) <= FP64_ERROR


def test_per_token_tables_are_rounded_once_too() -> None:
    x, scale, shift = (leaf(40, 96, dtype=torch.bfloat16, seed=i) for i in range(3))
    expected = norm_reference.ln_modulate(x.double(), scale.double(), shift.double())
    assert error(ln_modulate(x, scale, shift), expected) <= BF16_OUTPUT


def test_leading_dimensions_are_flattened_and_layouts_do_not_matter() -> None:
    batch, tokens, width = 2, 21, 32
    wide = leaf(batch, tokens, 2 * width, dtype=torch.float64, seed=0)
    table = leaf(batch, 6, width, dtype=torch.float64, seed=1)
    segments = Segments.dense(batch, tokens)
    x = wide[..., width:]
    scale, shift = table[:, 1], table[:, 0]
    actual = ln_modulate(x, scale, shift, segments)
    expected = torch.nn.functional.layer_norm(x, (width,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    assert actual.shape == expected.shape and error(actual, expected) <= FP64_ERROR
    expanded = torch.ones((), dtype=torch.float64).expand(batch, tokens, width)  # what .sum().backward() sends
    transposed = leaf(width, tokens, batch, dtype=torch.float64, seed=3).detach().permute(2, 1, 0)
    for cotangent in (expanded, transposed):
        got = torch.autograd.grad(actual, (wide, table), cotangent, retain_graph=True)
        want = torch.autograd.grad(expected, (wide, table), cotangent, retain_graph=True)
        for a, b in zip(got, want):
            assert error(a, b) <= FP64_ERROR


def eager_bf16(x: Tensor, scale: Tensor, shift: Tensor, rows: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[rows]) + shift[rows]


def test_bf16_is_rounded_once_and_no_worse_than_eager() -> None:
    segments = Segments.packed([100, 60, 40])
    given = inputs(segments, 256, torch.bfloat16, torch.bfloat16)
    wanted = exact(given)
    names = ["x", "scale", "shift"]
    expected = norm_reference.ln_modulate(*(wanted[n] for n in names), rows_of(segments))
    ours = ln_modulate(*(given[n] for n in names), segments)
    eager = eager_bf16(*(given[n] for n in names), rows_of(segments))
    assert error(ours, expected) <= BF16_OUTPUT
    assert error(ours, expected) <= 1.05 * error(eager, expected)
    cotangent = leaf(*ours.shape, dtype=torch.bfloat16, seed=30).detach()
    want = torch.autograd.grad(expected, [wanted[n] for n in names], cotangent.double())
    results = [torch.autograd.grad(out, [given[n] for n in names], cotangent) for out in (ours, eager)]
    for name, a, b, exact_gradient in zip(names, *results, want):
        assert error(a, exact_gradient) <= 1.05 * error(b, exact_gradient), name


def test_fp32_tables_get_fp32_gradients_from_bf16_tokens() -> None:
    segments = Segments.packed([130, 70])
    given = inputs(segments, 64, torch.bfloat16, torch.float32)
    wanted = exact(given)
    names = ["scale", "shift"]
    actual = ln_modulate(given["x"], given["scale"], given["shift"], segments)
    expected = norm_reference.ln_modulate(wanted["x"], wanted["scale"], wanted["shift"], rows_of(segments))
    cotangent = leaf(*actual.shape, dtype=torch.bfloat16, seed=30).detach()
    got = torch.autograd.grad(actual, [given[n] for n in names], cotangent)
    want = torch.autograd.grad(expected, [wanted[n] for n in names], cotangent.double())
    for a, b in zip(got, want):
        assert a.dtype == torch.float32 and error(a, b) <= 1e-5


def test_statistics_survive_a_large_mean_an_outlier_and_constant_rows() -> None:
    x = torch.randn(6, 512) + 1e3
    x[2, 7] = 1e4
    x[3] = 5.0
    y = ln_modulate(x.requires_grad_(), eps=1e-6)
    assert error(y[:3], norm_reference.ln_modulate(x.double())[:3]) <= 1e-4  # the input itself has 1e-7 * mean / std
    assert y[3].abs().max() == 0
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isfinite().all()
    poisoned = torch.randn(3, 64)
    poisoned[1, 5] = float("nan")
    assert ln_modulate(poisoned).isnan().any(-1).tolist() == [False, True, False]


def test_gradients_of_shards_add_up_to_the_whole() -> None:
    segments = Segments.packed([60, 41])
    given = inputs(segments, 64, torch.float32, torch.float32)
    cotangent = torch.randn(segments.num_rows, 64)
    tables = [given["scale"], given["shift"]]
    whole = torch.autograd.grad(ln_modulate(given["x"], *tables, segments), tables, cotangent)
    rows = rows_of(segments)
    for cuts in ([0, 50, 101], [0, 30, 60, 101]):
        parts = []
        for lo, hi in itertools.pairwise(cuts):
            local = Segments.packed(*runs_of(rows[lo:hi]), num_mods=2)
            out = ln_modulate(given["x"][lo:hi], *tables, local)
            parts.append(torch.autograd.grad(out, tables, cotangent[lo:hi]))
        for total, *shards in zip(whole, *parts):
            assert error(sum(shards), total) <= 1e-6


def test_two_runs_are_the_same_bits() -> None:
    segments = SEGMENTS["repeated and unordered rows"]
    given = inputs(segments, 64, torch.bfloat16, torch.float32)
    first, second = (
        torch.autograd.grad(
            ln_modulate(given["x"], given["scale"], given["shift"], segments).float().sum(),
            [given["x"], given["scale"], given["shift"]],
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize(
    "x_dtype, out_dtype",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)],
)
def test_autocast_gives_bf16_results_and_keeps_the_residual(x_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x, scale = torch.randn(4, 16, dtype=x_dtype), torch.randn(1, 16)
    assert ln_modulate(x, scale).dtype == x_dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        residual, h = gate_residual_ln_modulate(x, x.to(out_dtype), scale, scale, scale)
        q, _ = qk_norm_rope(x, x, None, None, head_dim=8)
        assert (h.dtype, q.dtype, residual.dtype) == (out_dtype, out_dtype, x_dtype)
        assert ln_modulate(x, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("per_token", [False, True], ids=["packed", "a row per token"])
def test_frozen_tables_get_no_gradient_and_change_no_other(per_token: bool) -> None:
    segments = None if per_token else Segments.packed([30, 0, 20])
    x, y = (leaf(50, 32, dtype=torch.float64, seed=i) for i in (0, 1))
    tables = [leaf(50 if per_token else 3, 32, dtype=torch.float64, seed=i) for i in (2, 3, 4)]

    def gradients_with(gate: Tensor, scale: Tensor, shift: Tensor) -> list[Tensor]:
        residual, h = gate_residual_ln_modulate(x, y, gate, scale, shift, segments)
        return list(
            gradients(
                [residual, h, ln_modulate(x, scale, shift, segments), gate_residual(x, y, gate, segments)],
                [x, y],
            )
        )

    trained, frozen = gradients_with(*tables), gradients_with(*(t.detach() for t in tables))
    assert all(torch.equal(a, b) for a, b in zip(trained, frozen))


def test_sum_without_a_gate_is_rounded_once_to_the_wider_residual() -> None:
    x, y = (leaf(40, 96, dtype=torch.bfloat16, seed=i) for i in (0, 1))
    assert error(gate_residual(x, y, residual_dtype=torch.float32), x.double() + y.double()) <= 1e-7


def test_nothing_is_saved_beyond_inputs_outputs_and_statistics() -> None:
    segments = Segments.packed([50, 50])
    given = inputs(segments, 64, torch.float32, torch.float32)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        ln_modulate(given["x"], given["scale"], given["shift"], segments)
    assert not any(t.data_ptr() == given["shift"].data_ptr() for t in saved)
    floats = sum(t.numel() for t in saved if t.is_floating_point())
    assert floats == given["x"].numel() + given["scale"].numel() + 2 * segments.num_rows


def test_bad_input_is_an_error_that_names_the_remedy() -> None:
    x, table = torch.randn(10, 16), torch.randn(2, 16)
    heads = x.view(2, 5, 2, 8)  # the 5 rows of a table for 5 tokens divide the 20 heads too
    cases = [
        (lambda: ln_modulate(x, table), r"Pass Segments.dense\(batch, tokens\)"),
        (lambda: ln_modulate(x, 0.5), "scale is the number 0.5"),
        (lambda: ln_modulate(x, table[0, 0]), "scale is the number"),
        (lambda: ln_modulate(x, table, table, [5, 5]), r"segments are \[5, 5\]; make them with Segments.packed"),
        (lambda: ln_modulate(x, out_dtype=torch.int32), "out_dtype is torch.int32"),
        (lambda: ln_modulate(x.to(torch.float8_e4m3fn)), "floating point tokens.*are bfloat16, float16"),
        (lambda: ln_modulate(x, table, table, Segments.packed([4, 4])), "cover 8 tokens, x has 10"),
        (lambda: ln_modulate(x, table, table, Segments.packed([4, 3, 3])), "num_mods"),
        (lambda: ln_modulate(x, table[:1], table, Segments.packed([5, 5])), "rows"),
        (lambda: ln_modulate(x, table[:, :8]), "width 8"),
        (lambda: ln_modulate(x, weight=table[0, :8]), "weight"),
        (lambda: ln_modulate(x, bias=table[0]), "bias without weight"),
        (lambda: ln_modulate(x.long()), "floating point"),
        (lambda: gate_residual(x, x[:5]), "same shape"),
        (lambda: qk_norm_rope(x, x, None, None, head_dim=5), "head_dim 5"),
        (lambda: qk_norm_rope(x, x, None, None, head_dim=0), "head_dim 0"),
        (lambda: qk_norm_rope(x, x, x[0, :8], None, head_dim=8), "wq"),
        (lambda: qk_norm_rope(heads, heads, None, None, x[:5, :4], x[:5, :4], head_dim=8), r"flatten\(-2\) q and k"),
        (lambda: qk_norm_rope(x, x, None, None, x[:, :4], None, head_dim=8), "come together"),
        (lambda: qk_norm_rope(x, x, None, None, x[:3, :4], x[:3, :4], head_dim=8), "multiple of the 3 rows"),
        (
            lambda: qk_norm_rope(x, x, None, None, x[:, :4], leaf(10, 4, dtype=torch.float32, seed=0), head_dim=8),
            "no gradient",
        ),
        (lambda: ln_modulate(torch.nested.nested_tensor([x, x[:3]], layout=torch.jagged)), r"give its values\(\)"),
        (lambda: ln_modulate(x[:, :0]), "width 0"),
        (lambda: ln_modulate(x, table.to("meta"), None, Segments.packed([5, 5])), "scale on meta"),
        (lambda: ln_modulate(x, table, None, Segments.packed([5, 5], device="meta")), "segments on meta"),
        (lambda: ln_modulate(x, weight=table[0].to("meta")), "weight on meta"),
        (lambda: gate_residual(x, x.to("meta")), "y on meta"),
        (lambda: Segments.packed([3, -1]), "negative"),
        (lambda: Segments.packed([3, 1], [0, 2], num_mods=2), "outside 0..1"),
        (lambda: Segments.packed([3, 1], [0]), "2 lengths but 1"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_double_backward_is_an_error() -> None:
    x = torch.randn(5, 16, requires_grad=True)
    gate = torch.randn(1, 16, requires_grad=True)
    outputs = {
        "ln_modulate": ln_modulate(x),
        "gate_residual": gate_residual(x, x, gate),
        "gate_residual_ln_modulate": gate_residual_ln_modulate(x, x, gate)[1],
        "qk_norm_rope": qk_norm_rope(x, x, None, None, head_dim=8)[0],
    }
    for name, out in outputs.items():
        first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match=f"{name}: the fused backward has no derivative"):
            first.sum().backward()


def test_what_the_kernels_do_not_take_runs_on_the_library_path_with_one_logged_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend._log_once.cache_clear()
    odd, double = torch.randn(4, 100), torch.randn(4, 64, dtype=torch.float64)
    with caplog.at_level(logging.WARNING), backend.forced("triton"):
        for _ in range(3):
            for x in (odd, double):
                torch.testing.assert_close(ln_modulate(x), norm_reference.ln_modulate(x))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and "width 100" in messages[0] and "float64" in messages[1]


def test_runs_of_rows_are_in_ascending_order() -> None:
    segments = Segments.packed([2, 1, 3], [2, 0, 2], num_mods=4)
    assert segments.run.tolist() == [0, 0, 1, 2, 2, 2] and segments.cu.tolist() == [0, 2, 3, 6]
    assert segments.run2mod.tolist() == [2, 0, 2]
    runs_of_rows = [segments.mod_runs[a:b].tolist() for a, b in itertools.pairwise(segments.mod_off)]
    assert runs_of_rows == [[1], [], [0, 2], []]
