"""What the functions of all fused ops take, and what they do to it first: tokens as rows, tables as [S, D].

    h = ln_modulate(x, scale, shift, segments)                      # norm(x) * (1 + scale) + shift
    x, h = gate_residual_ln_modulate(x, attn, gate, scale, shift, segments)
    q, k = qk_norm_rope(q, k, wq, wk, cos, sin, head_dim=128)

Tokens are packed [N, D] (any leading dimensions are flattened); `segments` says which row of the [S, D] tables each
token uses. On CUDA the Triton kernels run, elsewhere library calls; both mean what `reference.py` in the op's folder
says.

dtypes: activations bf16, fp16, fp32 or fp64, tables independently. Arithmetic, statistics and table gradients are fp32
(fp64 for fp64 inputs), with one rounding at each store. Results have the autocast dtype under autocast (except fp64
inputs), else x's dtype, unless out_dtype is given. Gradients of tables are sums over the local tokens, zero for rows
without tokens: summing them over sequence-parallel shards gives the gradient of the whole.

ValueError for what does not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base.segments import IndexTensors, Segments

NO_INDEX: IndexTensors = (None, None, None, None, None)
_unsafe_view = torch.ops.aten._unsafe_view.default  # looked up once: a call of the packet costs the host more
TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def token_rows(x: Tensor) -> Tensor:
    """[..., N, D] -> [tokens, D]"""
    if x.ndim < 2 or x.dtype not in TOKEN_DTYPES:
        raise ValueError(
            f"expected floating point tokens [..., N, D], got {x.dtype} {tuple(x.shape)}; tokens have two dimensions "
            "or more, and are bfloat16, float16, float32 or float64."
        )
    if x.is_nested:
        raise ValueError("tokens are a nested tensor; give its values() [N, D] and Segments.packed(lengths).")
    if x.shape[-1] == 0:
        raise ValueError(f"tokens {tuple(x.shape)} have width 0; a norm needs at least one value per token.")
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def shaped(rows_ND: Tensor, x: Tensor) -> Tensor:
    """[tokens, D] -> the shape of x [..., N, D], of rows that an op has made and nobody else keeps.

    Not a view for autograd: `fully_shard` loses the hooks of a module that returns one when it is changed in place.
    """
    return rows_ND if x.ndim == 2 else _unsafe_view(rows_ND, x.shape)


def num_rows(table: Tensor) -> int:
    """Rows of a table [..., D]."""
    return table.numel() // table.shape[-1]


def check_tables(
    x_ND: Tensor, segments: Segments | None, **tables: Tensor | None
) -> tuple[list[Tensor | None], IndexTensors]:
    """The tables as [S, D] views, and the index tensors of the op; ValueError if they do not fit the tokens."""
    if segments is not None and not isinstance(segments, Segments):
        raise ValueError(f"segments are {segments}; make them with Segments.packed(lengths) or Segments.dense.")
    num_rows, width = x_ND.shape
    flat: list[Tensor | None] = []
    for name, table in tables.items():
        if table is None:
            flat.append(None)
            continue
        if not isinstance(table, Tensor) or table.ndim == 0:
            raise ValueError(f"{name} is the number {table}; tables are tensors [S, D], or [D] for all tokens.")
        check_device(name, table, x_ND)
        if table.shape[-1] != width:
            raise ValueError(f"{name} has width {table.shape[-1]}, the tokens {width}; tables are [S, D].")
        table = table if table.ndim == 2 else table.reshape(-1, width)
        if segments is not None and table.shape[0] != segments.num_mods:
            raise ValueError(
                f"{name} has {table.shape[0]} rows but the segments address {segments.num_mods}; "
                "build the segments with num_mods = rows of the table."
            )
        if segments is None and table.shape[0] not in (1, num_rows):
            raise ValueError(
                f"{name} has {table.shape[0]} rows for {num_rows} tokens; without segments a table has one row, or one "
                "row per token. Pass Segments.dense(batch, tokens) for a row per sample, or Segments.packed(lengths)."
            )
        flat.append(table)
    if segments is not None and segments.num_rows != num_rows:
        raise ValueError(
            f"the segments cover {segments.num_rows} tokens, x has {num_rows}; rebuild them for this micro-batch."
        )
    if segments is not None:
        check_device("segments", segments.run, x_ND)
    _check_same_rows(flat)
    used = segments is not None and any(table is not None for table in flat)
    return flat, segments.tensors() if segments is not None and used else NO_INDEX


def check_device(name: str, tensor: Tensor, x_ND: Tensor) -> None:
    if tensor.device != x_ND.device:
        raise ValueError(f"{name} on {tensor.device}, the tokens on {x_ND.device}; move it with .to().")


def _check_same_rows(tables: list[Tensor | None]) -> None:
    rows = [table.shape[0] for table in tables if table is not None]
    if any(count != rows[0] for count in rows):  # a set would fix the number in code that is compiled for any
        raise ValueError(f"tables have {sorted(set(rows))} rows; scale, shift and gate share one index.")


def check_affine(x_ND: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        check_device(name, vector, x_ND)
        if vector.shape != x_ND.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; the tokens need ({x_ND.shape[1]},).")
    if bias is not None and weight is None:
        raise ValueError("bias without weight; an affine norm has both (give shift for a modulation).")


def check_same_shape(x: Tensor, y: Tensor) -> None:
    if x.shape != y.shape:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must have the same shape.")
    check_device("y", y, x)


def result_dtype(x: Tensor, requested: torch.dtype | None) -> torch.dtype:
    """`requested`, else the autocast dtype (but for fp64 tokens), else x's."""
    if requested is not None:
        if not requested.is_floating_point:
            raise ValueError(f"out_dtype is {requested}; normalised tokens are floating point.")
        return requested
    device = x.device.type
    if device == "meta":  # of which autocast knows nothing
        return x.dtype
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
