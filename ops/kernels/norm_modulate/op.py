"""ln_modulate: what models call, the op heddle::ln_modulate with its derivative, and what it is compared with.

The backward is an op of its own, so torch.compile traces through it and selective checkpointing policies can name
both. Saved: x, mean, rstd (8 bytes a row) and the tables as they came; shift is not needed.

Measured beside it are eager PyTorch, a plain LayerNorm where one sample allows it, and Liger's RMSNorm; the ablations
of its reductions (`ablations.py`) replace only the backward and are functions of saved tensors instead.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.kernels.base.arguments import check_affine, check_tables, result_dtype, shaped, token_rows
from ops.kernels.base.autograd import Context, InputGradients
from ops.kernels.base.backend import use_kernels
from ops.kernels.base.blocks import is_per_token
from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.base.measured import (
    EPS,
    Contest,
    MeasuredOp,
    OpCase,
    OpVariant,
    Outputs,
    RowLayout,
    Tensors,
    modulation,
    samples,
)
from ops.kernels.base.registry import custom_op, refuse_double_backward, register_autograd
from ops.kernels.base.segments import INDEX_SCHEMA, Segments
from ops.kernels.norm_modulate import cpu, reference
from ops.kernels.norm_modulate.reference import NormBackwardCall, NormCall


def ln_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    segments: Segments | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    rms: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(norm(x) * weight + bias) * (1 + scale) + shift; LayerNorm, or RMSNorm with rms.

    x [..., D]; scale, shift [S, D] (other leading dimensions are flattened; chunks of a wider table are fine); weight,
    bias [D]. Without segments, tables of one row apply to all tokens and tables of N rows to one token each.

        h = ln_modulate(x, scale, shift, Segments.dense(B, L))        # x [B, L, D], scale and shift [B, D]
        h = ln_modulate(x, scale, shift, Segments.packed([5, 3]))     # x [8, D], scale and shift [2, D]

    x is bf16, fp16, fp32 or fp64, the tables and weights independently; fp32 inside, fp64 for fp64. The result has the
    shape of x and out_dtype: by default autocast's dtype where that is on, else x's. Gradients for all tensors, once:
    by backward(), not of gradients. Raises ValueError for what does not fit.
    """
    x_ND = token_rows(x)
    (scale, shift), index = check_tables(x_ND, segments, scale=scale, shift=shift)
    check_affine(x_ND, weight, bias)
    h, _, _ = forward(x_ND, weight, bias, scale, shift, *index, eps, rms, result_dtype(x, out_dtype))
    return shaped(h, x)


class FusedAdaLN(nn.Module):
    """Norm with optional affine weights and modulation: forward(x, scale, shift, segments), as `ln_modulate`.

    Its state is that of the nn.LayerNorm (or, with rms, nn.RMSNorm) of the same settings. These have another default:
    eps 1e-5 in LayerNorm, the machine epsilon in RMSNorm, and an affine norm in both.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        rms: bool = False,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`bias`: whether an affine LayerNorm has one; RMSNorm has none."""
        super().__init__()
        self.dim, self.eps, self.rms = dim, eps, rms
        affine, biased = elementwise_affine, elementwise_affine and bias and not rms
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if biased else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0: also after `to_empty`, which gives a module from the meta device memory without values."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        affine = f"elementwise_affine={self.weight is not None}, bias={self.bias is not None}"
        return f"{self.dim}, eps={self.eps}, {affine}, rms={self.rms}"

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        segments: Segments | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [..., D], tables [S, D] -> [..., D]."""
        return ln_modulate(
            x,
            scale,
            shift,
            segments,
            weight=self.weight,
            bias=self.bias,
            eps=self.eps,
            rms=self.rms,
            out_dtype=out_dtype,
        )


def cast_wanted(
    grads: Sequence[Tensor], wanted: Sequence[bool], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    """Table gradients in the dtypes of their tables; None for what needs no gradient."""
    return [
        grad.to(dtype) if want and dtype is not None else None
        for grad, want, dtype in zip(grads, wanted, dtypes, strict=True)
    ]


def _per_token_with_weight(per_token: bool, weight: Tensor | None) -> str | None:
    return "per-token tables together with an affine norm" if per_token and weight is not None else None


def fake_forward(call: NormCall) -> tuple[Tensor, ...]:
    """h [N, D], mean [N] or [0], rstd [N]"""
    x, num_rows, dtype = call.x, call.x.shape[0], compute_dtype(call.x)
    return (
        x.new_empty(x.shape, dtype=call.out_dtype),
        x.new_empty(0 if call.rms else num_rows, dtype=dtype),
        x.new_empty(num_rows, dtype=dtype),
    )


@custom_op(
    "ln_modulate",
    f"(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, {INDEX_SCHEMA}, "
    "float eps, bool rms, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    NormCall,
    fake_forward,
)
def forward(call: NormCall) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, D], mean [N] (empty for RMS) and rstd [N]."""
    lacking = _per_token_with_weight(is_per_token(call.x, call.scale, call.shift, call.segments), call.weight)
    if use_kernels(call.x, call.weight, call.bias, call.scale, call.shift, unsupported=lacking):
        from ops.kernels.norm_modulate import triton  # which not every machine has

        return triton.forward(call)
    return cpu.forward(call)


def fake_backward(call: NormBackwardCall) -> tuple[Tensor, ...]:
    """As `backward`; [0, D] and [0] for what is not asked for."""
    x, sums, dtype = call.x, call.sums, compute_dtype(call.x)
    num_rows, width = x.shape
    num_mods = num_rows if call.per_token else 1 if call.mod_off is None else call.mod_off.shape[0] - 1
    table = x.new_empty(num_mods if sums else 0, width, dtype=dtype)
    return (
        x.new_empty(num_rows, width),
        table,
        torch.empty_like(table),
        x.new_empty(width if sums and call.weight is not None else 0, dtype=dtype),
        x.new_empty(width if sums and call.bias is not None else 0, dtype=dtype),
    )


@custom_op(
    "ln_modulate_bwd",
    f"(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor mean, Tensor rstd, {INDEX_SCHEMA}, "
    "bool per_token, bool rms, bool sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    NormBackwardCall,
    fake_backward,
)
def backward(call: NormBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx [N, D], gradients of scale, shift [S, D], weight, bias [D]; without `sums` these are empty."""
    lacking = _per_token_with_weight(call.per_token, call.weight)
    if use_kernels(call.x, call.dy, call.weight, call.bias, call.scale, unsupported=lacking):
        from ops.kernels.norm_modulate import triton  # which not every machine has

        return triton.backward(call)
    return cpu.backward(call)


class NormContext(Context, Protocol):
    """Flags and the dtypes of the tables beside the saved tensors."""

    rms: bool
    per_token: bool
    dtypes: list[torch.dtype | None]


def _setup(ctx: NormContext, inputs: Iterable[object], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = NormCall._make(inputs)
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(call.x, call.weight, call.bias, call.scale, mean, rstd, *call[5:10])
    ctx.rms = call.rms
    ctx.per_token = is_per_token(call.x, call.scale, call.shift, call.segments)
    ctx.dtypes = [None if t is None else t.dtype for t in (call.scale, call.shift, call.weight, call.bias)]


def _backward(ctx: NormContext, dy: Tensor | None, *_stats: None) -> InputGradients:
    if dy is None:
        return (None,) * 13
    x, weight, bias, scale, mean, rstd, *index = ctx.saved_tensors
    _, weight_wanted, bias_wanted, scale_wanted, shift_wanted, *_ = ctx.needs_input_grad
    wanted = (scale_wanted, shift_wanted, weight_wanted, bias_wanted)
    dx, *grads = backward(dy, x, weight, bias, scale, mean, rstd, *index, ctx.per_token, ctx.rms, any(wanted))
    dscale, dshift, dweight, dbias = cast_wanted(grads, wanted, ctx.dtypes)
    return dx, dweight, dbias, dscale, dshift, *(None,) * 8


register_autograd(forward, _backward, _setup)
refuse_double_backward(backward, "ln_modulate")


def _case(name: str, rms: bool) -> OpCase:
    return OpCase(
        name=name,
        inputs={"x": "tokens", "scale": "table", "shift": "table"},
        ours=lambda t, segments: (ln_modulate(t["x"], t["scale"], t["shift"], segments, rms=rms),),
        meaning=lambda t, rows: (reference.ln_modulate(t["x"], t["scale"], t["shift"], rows, rms=rms),),
    )


def eager_ln(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    h = F.layer_norm(samples(t["x"], layout), t["x"].shape[-1:], eps=EPS)
    return (h * (1 + modulation(t["scale"], layout, rows)) + modulation(t["shift"], layout, rows),)


def _one_line_ln(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    """One sample needs no modulation ops at all: scale and shift are the affine weights of a plain LayerNorm."""
    return (F.layer_norm(t["x"], t["x"].shape[-1:], 1 + t["scale"][0], t["shift"][0], EPS),)


def _eager_rms(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
    h = F.rms_norm(samples(t["x"], layout), t["x"].shape[-1:], eps=EPS)
    return (h * (1 + modulation(t["scale"], layout, rows)) + modulation(t["shift"], layout, rows),)


def liger_rms() -> OpVariant:
    """Liger's modulated RMSNorm (no LayerNorm of that kind exists there), which takes one table row per equal run."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("liger-kernel is not installed. Install it, or run without --liger.")
    function = importlib.import_module("liger_kernel.ops.modulated_rms_norm").LigerModulatedRMSNormFunction

    def run(t: Tensors, layout: RowLayout, _: Segments, rows: Tensor) -> Outputs:
        # offset 0, bf16 rounding before the modulation as in eager, and dx not written over dy, which replays reuse
        return (function.apply(samples(t["x"], layout), None, t["scale"], t["shift"], EPS, 0.0, "llama", False),)

    return run


_NORM, _RMS = _case("ln_modulate", rms=False), _case("rms_modulate", rms=True)
_AFFINE = OpCase(
    name="affine-norm",
    inputs={"x": "tokens", "weight": "vector", "bias": "vector"},
    ours=lambda t, segments: (ln_modulate(t["x"], weight=t["weight"], bias=t["bias"]),),
    meaning=lambda t, rows: (reference.ln_modulate(t["x"], weight=t["weight"], bias=t["bias"]),),
)


def _contests(liger: bool) -> tuple[Contest, ...]:
    ln: dict[str, OpVariant] = {"eager": eager_ln, "one-line eager": _one_line_ln}
    rms: dict[str, OpVariant] = {"eager": _eager_rms}
    if liger:
        rms["Liger RMS"] = liger_rms()
    return (
        Contest(name="ln_modulate", case=_NORM, turn=0, forward_T=2, backward_T=3, others=ln),
        Contest(name="ln_modulate, RMS", case=_RMS, turn=4, forward_T=2, backward_T=3, others=rms),
    )


MEASURED = MeasuredOp(cases=(_NORM, _RMS, _AFFINE), contests=_contests)
