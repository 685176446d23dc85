"""In how many bits fp32 numbers are multiplied: autocast's, TF32 on a GPU, and neither for what is called precise.

TF32 rounds the numbers that are multiplied to 10 bits after the point, and adds the products in fp32; a GPU does that
eight times as fast (NVIDIA A100 whitepaper, 2020). On a CPU nothing here has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PART_ELEMENTS = 1 << 24  # of a weight that are cast at a time: 64 MiB in fp32


def allow_tf32(allowed: bool) -> None:
    """Whether products of fp32 matrices and convolutions of fp32 clips may be in TF32, in this process from now on."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def half_products(device: torch.device, enabled: bool = True) -> torch.autocast:
    """Autocast: products in bfloat16. Without its memory of what it has cast, which would hold a bf16 copy of every
    trained fp32 weight to the end of a forward, where next to none is cast twice; all threads of a process share it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


@contextmanager
def _whole_products(device: torch.device) -> Iterator[None]:
    """Neither autocast nor TF32 for what is launched here. A compiled call is traced without the switch of TF32."""
    switch = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 and not torch.compiler.is_compiling()
    with torch.autocast(device.type, enabled=False):
        if not switch:
            yield
            return
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = True


def precise_linear(layer: nn.Linear, x: Tensor, *, part_elements: int = _PART_ELEMENTS) -> Tensor:
    """`layer` of x [n, in] in at least fp32, whatever its weights and autocast are: [n, out].

    For few rows and what multiplies or shifts every activation. `part_elements` as for `precise_product`.
    """
    out = precise_product(x, layer.weight, part_elements=part_elements)
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def precise_product(x: Tensor, weight: Tensor, *, part_elements: int = _PART_ELEMENTS) -> Tensor:
    """x [n, in] times weight [out, in] transposed, in at least fp32: [n, out]. Of a weight in bf16 neither forward nor
    backward makes a whole copy in fp32, but of `part_elements` at a time, and none is kept between them."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    out: Tensor = _PreciseProduct.apply(x.to(dtype), weight, part_elements)  # type: ignore[no-untyped-call]
    return out


class _PreciseProduct(torch.autograd.Function):
    """See `precise_product`; x has the dtype that is computed in."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, part_elements: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.part_elements = part_elements  # type: ignore[attr-defined]
        with _whole_products(x.device):
            return _joined([F.linear(x, part.to(x.dtype)) for part in _parts(weight, x.dtype, part_elements)], dim=1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        wanted_x, wanted_weight, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        parts = _parts(weight, x.dtype, ctx.part_elements)  # type: ignore[attr-defined]
        shares = grad.split([len(part) for part in parts], dim=1)
        of_x = of_weight = None
        with _whole_products(x.device):
            if wanted_x:
                of_x = torch.zeros_like(x)
                for part, share in zip(parts, shares, strict=True):
                    of_x.addmm_(share, part.to(x.dtype))
            if wanted_weight:
                of_weight = _joined([(share.T @ x).to(weight.dtype) for share in shares], dim=0)
        return of_x, of_weight, None


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _parts(weight: Tensor, dtype: torch.dtype, part_elements: int) -> tuple[Tensor, ...]:
    """The weight [out, in] in rows that are cast at a time; whole where it has the dtype."""
    if weight.dtype == dtype:
        return (weight,)
    parts: tuple[Tensor, ...] = weight.split(max(1, part_elements // weight.shape[1]))
    return parts
