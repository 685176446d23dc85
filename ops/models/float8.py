"""Frozen projections in 8 bits: `model.dit.frozen_dtype: float8`.

A weight [out, in] is stored as e4m3 numbers (4 bits of exponent, 3 of fraction) with one scale for each row, a power of
two. So a widened weight has the same values in bfloat16 and in float32: e4m3 fits into both, and such a scale only
moves the exponent. Each weight is within 1/16 of what it was or, of one that is tiny beside the largest of its row,
within 2^-17 of that.

A product widens its weight for the moment of the call, and once more in the backward; no wide one is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.kernels.base.arguments import result_dtype
from ops.kernels.base.autograd import Context, InputGradients
from ops.kernels.base.registry import custom_op

FLOAT8 = torch.float8_e4m3fn
SCALE = ".weight_scale"  # the name of a layer's scales, after its own
FrozenDtype = Literal["same", "float8"]
_LARGEST = 448.0  # number of e4m3
_LEAST_EXPONENT = -100  # of a scale: rows of smaller numbers are zero in any training
_PART_ELEMENTS = 1 << 24  # of a weight that are rounded at a time: 64 MiB in fp32


def in_float8(weight: Tensor, *, part_elements: int = _PART_ELEMENTS) -> tuple[Tensor, Tensor]:
    """The nearest e4m3 numbers to a weight [out, in], and the scales [out] in fp32. The same on any device, and of any
    dtype that holds the weight exactly. A row with a number that is not finite becomes NaN, which the loss tells. Wide
    numbers are made of `part_elements` at a time."""
    small = torch.empty_like(weight, dtype=FLOAT8)
    scales = row_scales(weight, part_elements=part_elements)
    rows = _rows_of(weight, part_elements)
    for part, into, scale in zip(weight.split(rows), small.split(rows), scales.split(rows), strict=True):
        exact = _exactly(part)
        into.copy_(exact / scale[:, None].to(exact.dtype))
    return small, scales


def row_scales(weight: Tensor, *, part_elements: int = _PART_ELEMENTS) -> Tensor:
    """The scales of `in_float8` alone."""
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    rows = _rows_of(weight, part_elements)
    for part, scale in zip(weight.split(rows), scales.split(rows), strict=True):
        largest = _exactly(part).abs().amax(1)
        exponent = torch.frexp(largest / _LARGEST).exponent.clamp(min=_LEAST_EXPONENT)
        powers = ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)  # 2^exponent by its bits
        scale.copy_(torch.where(largest.isfinite(), powers, torch.nan))  # a cast makes 448 of infinity
    return scales


def _rows_of(weight: Tensor, part_elements: int) -> int:
    return max(1, part_elements // max(1, weight.shape[1]))


def _exactly(part: Tensor) -> Tensor:
    return part.to(torch.promote_types(part.dtype, torch.float32))


def widened(small: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `in_float8` stands for, in `dtype`: [out, in]"""
    return small.to(dtype).mul_(scales.to(dtype)[:, None])


class _WidenCall(NamedTuple):
    """The arguments of heddle::widened."""

    small: Tensor
    scales: Tensor
    dtype: torch.dtype
    after: Tensor | None


@custom_op(
    "widened",
    "(Tensor small, Tensor scales, ScalarType dtype, Tensor? after) -> Tensor",
    _WidenCall,
    lambda call: torch.empty_like(call.small, dtype=call.dtype),
)
def _widened(call: _WidenCall) -> Tensor:
    return widened(call.small, call.scales, call.dtype)


def wide_weight(small: Tensor, scales: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """`widened`, in compiled code as a call that the compiler does not look into: Triton knows e4m3 on few GPUs. With
    `after` the call is another one than that of the forward, of which the compiler would keep the result."""
    if torch.compiler.is_compiling():
        return _widened(small, scales, dtype, after)
    return widened(small, scales, dtype)


class _Product(torch.autograd.Function):
    """x [..., in] times a weight in 8 bits, and a bias; both are frozen, and x has the dtype that is computed in."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, small: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(small, scales)
        return F.linear(x, wide_weight(small, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> InputGradients:
        small, scales = ctx.saved_tensors
        return grad @ wide_weight(small, scales, grad.dtype, grad), None, None, None


class FrozenLinear(nn.Linear):
    """A frozen projection, its weight as it was or in 8 bits."""

    weight_scale: nn.Parameter | None

    def __init__(self, base: nn.Linear, dtype: FrozenDtype = "same") -> None:
        """Takes the weights of `base`, which may be on the meta device."""
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.register_parameter("weight_scale", None)
        if dtype == "float8":
            small, scales = in_float8(base.weight.detach())
            self.weight = nn.Parameter(small, requires_grad=False)
            self.weight_scale = nn.Parameter(scales, requires_grad=False)

    def held(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What a wide weight becomes in this layer of a module in `dtype`: itself and no scales, or 8 bits and them."""
        return (weight.to(dtype), None) if self.weight_scale is None else in_float8(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] times the frozen weight, and a bias: [..., out], in the dtype of F.linear."""
        if self.weight_scale is None:
            return F.linear(x, self.weight, bias)
        dtype = result_dtype(x, None)
        bias = None if bias is None else bias.to(dtype)
        out: Tensor = _Product.apply(x.to(dtype), self.weight, self.weight_scale, bias)  # type: ignore[no-untyped-call]
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenLinear:
        """As of any module, but that 8 bits and their scales are moved as bits: a cast is one of all else."""

        def moved(tensor: Tensor) -> Tensor:
            if tensor.dtype == FLOAT8:
                return fn(tensor.view(torch.uint8)).view(FLOAT8)
            return fn(tensor.view(torch.int32)).view(torch.float32) if tensor is self.weight_scale else fn(tensor)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


def in_8_bits(module: nn.Module) -> set[str]:
    """Names of the weights of a module that are."""
    return {name for name, weight in module.named_parameters() if weight.dtype == FLOAT8}


def spared_bytes(module: nn.Module, wide_bytes: int) -> int:
    """What weights in 8 bits and their scales take less than as many parameters of `wide_bytes` each."""
    held = [weight for name, weight in module.named_parameters() if weight.dtype == FLOAT8 or name.endswith(SCALE)]
    return sum(tensor.numel() * (wide_bytes - tensor.element_size()) for tensor in held)
