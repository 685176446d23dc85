"""Host side of the Triton kernels: same functions as `ops.kernels.library`, for CUDA (or the interpreter).

Nothing here reads a value from the device. Imported only where triton is installed (`ops.kernels.backend`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ops.kernels import backend, norm_kernels, qk_kernels, tuning
from ops.kernels.library import is_per_token, no_table_grads, table_grads
from ops.kernels.segments import Segments

ROWS_MIN = 32  # a persistent program with fewer rows does not pay for its slot in the second stage
INTERPRETER_PROGRAMS = 3  # stands in for the multiprocessors of a GPU when the interpreter runs on CPU tensors


def ln_modulate_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    segments: Segments | None,
    eps: float,
    rms: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    _, out, mean, rstd = _forward(x, None, None, weight, bias, scale, shift, segments, eps, rms, x.dtype, out_dtype)
    return out, mean, rstd


def gate_ln_modulate_fwd(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    segments: Segments | None,
    eps: float,
    rms: bool,
    residual_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward(x, y, gate, weight, bias, scale, shift, segments, eps, rms, residual_dtype, out_dtype)


def gate_residual_fwd(
    x: Tensor, y: Tensor, gate: Tensor | None, segments: Segments | None, residual_dtype: torch.dtype
) -> Tensor:
    residual, *_ = _forward(x, y, gate, None, None, None, None, segments, 0.0, False, residual_dtype, None)
    return residual


def ln_modulate_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    segments: Segments | None,
    per_token: bool,
    rms: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if per_token:
        dx, dscale, dshift = _token_backward(dy, x, scale, mean, rstd, rms)
        if not sums:
            return dx, *no_table_grads(x.shape[1], torch.float32, x.device)
        return dx, dscale, dshift, rstd.new_empty(0), rstd.new_empty(0)
    dx, _, found = _backward(dy, None, x, None, None, weight, scale, mean, rstd, segments, rms, x.dtype, sums, False)
    return dx, *_norm_grads(found, sums, weight, bias, scale, x)


def gate_residual_bwd(
    dxo: Tensor, y: Tensor, gate: Tensor | None, segments: Segments | None, gate_sum: bool
) -> tuple[Tensor, Tensor]:
    if is_per_token(y, gate, None, segments):
        assert gate is not None
        dy = (gate.float() * dxo.float()).to(y.dtype)
        return dy, y.float() * dxo.float() if gate_sum else _no_gate_grad(y)
    _, dy, found = _backward(None, dxo, y, y, gate, None, None, None, None, segments, False, y.dtype, False, gate_sum)
    return dy, found[0] if gate_sum else _no_gate_grad(y)


def gate_ln_modulate_bwd(
    dxo: Tensor | None,
    dh: Tensor,
    xo: Tensor,
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    segments: Segments | None,
    rms: bool,
    x_dtype: torch.dtype,
    sums: bool,
    gate_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dy, found = _backward(dh, dxo, xo, y, gate, weight, scale, mean, rstd, segments, rms, x_dtype, sums, gate_sum)
    dgate = found[-1] if gate_sum else _no_gate_grad(y)
    return dx, dy, dgate, *_norm_grads(found, sums, weight, bias, scale, xo)


def qk_norm_rope_fwd(
    q: Tensor,
    k: Tensor,
    wq: Tensor | None,
    wk: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    head_dim: int,
    per_head: bool,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = q.shape[1]
    groups = width // head_dim if per_head else 1
    q_out, k_out = (torch.empty(x.shape, dtype=out_dtype, device=x.device) for x in (q, k))
    rstd_q, rstd_k = (torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device) for x in (q, k))
    rows = max(q.shape[0], k.shape[0])
    if rows:
        q, k = _rows(q), _rows(k)
        config, tiles = _head_tiles("qk_forward", q, head_dim, per_head, cos)
        qk_kernels.qk_forward_kernel[(2 * rows,)](
            q,
            k,
            _or(wq, q),
            _or(wk, q),
            _or(cos, q),
            _or(sin, q),
            q_out,
            k_out,
            rstd_q,
            rstd_k,
            q.shape[0],
            k.shape[0],
            1 if cos is None else cos.shape[0],
            q.stride(0) // 8,
            k.stride(0) // 8,
            eps,
            PER_HEAD=per_head,
            WEIGHT=wq is not None,
            ROPE=cos is not None,
            **tiles,
            **_options(config),
        )
    return q_out, k_out, rstd_q, rstd_k


def qk_norm_rope_bwd(
    dqo: Tensor,
    dko: Tensor,
    q: Tensor,
    k: Tensor,
    wq: Tensor | None,
    wk: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rstd_q: Tensor,
    rstd_k: Tensor,
    head_dim: int,
    per_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = q.shape[1]
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    size = head_dim if per_head else width
    if not max(q.shape[0], k.shape[0]):
        dwq = torch.zeros(size, dtype=torch.float32, device=q.device)
        return dq, dk, dwq, torch.zeros_like(dwq)
    q, k, dqo, dko = (_rows(x) for x in (q, k, dqo, dko))
    config, tiles = _head_tiles("qk_backward", q, head_dim, per_head, cos)
    rows = max(q.shape[0], k.shape[0])
    programs = _num_programs(rows, _num_sms(q.device) * config.per_sm // 2)  # for q, and as many for k
    slots = torch.empty(2, programs, size, dtype=torch.float32, device=q.device)
    qk_kernels.qk_backward_kernel[(2 * programs,)](
        dqo,
        dko,
        q,
        k,
        _or(wq, q),
        _or(wk, q),
        _or(cos, q),
        _or(sin, q),
        rstd_q,
        rstd_k,
        dq,
        dk,
        slots,
        q.shape[0],
        k.shape[0],
        1 if cos is None else cos.shape[0],
        programs,
        -(-q.shape[0] // programs),
        -(-k.shape[0] // programs),
        dqo.stride(0) // 8,
        dko.stride(0) // 8,
        q.stride(0) // 8,
        k.stride(0) // 8,
        STAGES=config.stages,
        PER_HEAD=per_head,
        WEIGHT=wq is not None,
        ROPE=cos is not None,
        **tiles,
        **_options(config),
    )
    dwq, dwk = sum_slots(slots, None, 1, 1)
    return dq, dk, dwq.view(-1), dwk.view(-1)


def _forward(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    segments: Segments | None,
    eps: float,
    rms: bool,
    residual_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x' (x itself without y), out (empty without out_dtype), mean, rstd."""
    num_rows, width = x.shape
    norm = out_dtype is not None
    residual = x if y is None else torch.empty(num_rows, width, dtype=residual_dtype, device=x.device)
    out = torch.empty(num_rows if norm else 0, width, dtype=out_dtype or x.dtype, device=x.device)
    mean = torch.empty(num_rows if norm and not rms else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(num_rows if norm else 0, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return residual, out, mean, rstd
    table = next((t for t in (gate, scale, shift) if t is not None), None)
    x, y = _rows(x), None if y is None else _rows(y)
    gate, scale, shift, weight, bias = (_table(t) for t in (gate, scale, shift, weight, bias))
    config = tuning.configuration("forward" if y is None else "gate_forward", width, _name(x), _arch(x.device))
    index = _index(x, table, segments)
    norm_kernels.forward_kernel[(num_rows,)](
        x,
        _or(y, x),
        _or(gate, x),
        _or(weight, x),
        _or(bias, x),
        _or(scale, x),
        _or(shift, x),
        *((segments.run, segments.run2mod) if segments is not None else (x, x)),
        residual,
        out if norm else x,
        mean if mean.numel() else x,
        rstd if norm else x,
        _stride8(x),
        _stride8(y),
        _stride8(gate),
        _stride8(scale),
        _stride8(shift),
        eps,
        D=width,
        CH=config.chunk,
        NC=config.chunks(width),
        HAS_Y=y is not None,
        HAS_GATE=gate is not None,
        NORM=norm,
        RMS=rms,
        AFFINE=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        HAS_SHIFT=shift is not None,
        INDEX=index,
        **_options(config),
    )
    return residual, out, mean, rstd


def _backward(
    dh: Tensor | None,
    dxo: Tensor | None,
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    segments: Segments | None,
    rms: bool,
    dx_dtype: torch.dtype,
    sums: bool,
    gate_sum: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """dx (empty without dh), dy (empty without y), and column sums [S, D] per table row.

    The sums: of dh * xhat and of dh with `sums`, then of y * total with `gate_sum`.
    """
    num_rows, width = x.shape
    norm = dh is not None
    dx = torch.empty(num_rows if norm else 0, width, dtype=dx_dtype, device=x.device)
    dy = torch.empty(0 if y is None else num_rows, width, dtype=x.dtype if y is None else y.dtype, device=x.device)
    num_mods = 1 if segments is None else segments.num_mods
    planes = 2 * sums + gate_sum
    if num_rows == 0:
        return dx, dy, [torch.zeros(num_mods, width, dtype=torch.float32, device=x.device) for _ in range(planes)]
    x = _rows(x)
    dh, dxo, y = (None if t is None else _rows(t) for t in (dh, dxo, y))
    gate, scale, weight = (_table(t) for t in (gate, scale, weight))
    config = tuning.configuration("backward" if y is None else "gate_backward", width, _name(x), _arch(x.device))
    programs = _num_programs(num_rows, _num_sms(x.device) * config.per_sm)
    rows_per_program = -(-num_rows // programs)
    num_slots = programs + (0 if segments is None else segments.num_runs)
    slots = torch.empty(planes, num_slots, width, dtype=torch.float32, device=x.device)
    norm_kernels.backward_kernel[(programs,)](
        _or(dh, x),
        _or(dxo, x),
        x,
        _or(y, x),
        _or(gate, x),
        _or(weight, x),
        _or(scale, x),
        mean if mean is not None and mean.numel() else x,
        _or(rstd, x),
        *((segments.run, segments.cu, segments.run2mod) if segments is not None else (x, x, x)),
        dx if norm else x,
        dy if y is not None else x,
        slots if planes else x,
        num_rows,
        rows_per_program,
        num_slots,
        _stride8(dh),
        _stride8(dxo),
        _stride8(x),
        _stride8(y),
        _stride8(gate),
        _stride8(scale),
        D=width,
        CH=config.chunk,
        NC=config.chunks(width),
        STAGES=config.stages,
        NORM=norm,
        RMS=rms,
        AFFINE=weight is not None,
        HAS_SCALE=scale is not None,
        SUMS=sums,
        HAS_DXO=dxo is not None,
        HAS_Y=y is not None,
        HAS_GATE=gate is not None,
        GATE_SUM=gate_sum,
        INDEX="one" if segments is None else "runs",
        **_options(config),
    )
    return dx, dy, sum_slots(slots, segments, rows_per_program, num_mods)


def sum_slots(slots: Tensor, segments: Segments | None, rows_per_program: int, num_mods: int) -> list[Tensor]:
    """One [num_mods, D] per plane of the slots [planes, num_slots, D] that a backward kernel filled.

    Tensors of their own, because outputs of a custom op may not share memory.
    """
    planes, num_slots, width = slots.shape
    sums = [torch.empty(num_mods, width, dtype=torch.float32, device=slots.device) for _ in range(planes)]
    if planes == 0 or num_mods == 0:
        return sums
    block = tuning.SUM_COLUMNS if slots.is_cuda else 1024
    index = (slots,) * 3 if segments is None else (segments.cu, segments.mod_off, segments.mod_runs)
    norm_kernels.sum_slots_kernel[(num_mods, -(-width // block), planes)](
        slots,
        *index,
        *(sums + sums[:1] * 2)[:3],
        num_slots,
        rows_per_program,
        D=width,
        BLOCK_SLOTS=tuning.SUM_SLOTS,
        BLOCK_D=block,
        INDEX="one" if segments is None else "runs",
        num_warps=tuning.SUM_WARPS,
    )
    return sums


def _token_backward(
    dh: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, rstd: Tensor, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = x.shape
    dx = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    dscale, dshift = (torch.empty(num_rows, width, dtype=torch.float32, device=x.device) for _ in range(2))
    if num_rows:
        x, dh, scale = _rows(x), _rows(dh), _table(scale)
        config = tuning.configuration("token_backward", width, _name(x), _arch(x.device))
        norm_kernels.token_backward_kernel[(num_rows,)](
            dh,
            x,
            _or(scale, x),
            mean if mean.numel() else x,
            rstd,
            dx,
            dscale,
            dshift,
            _stride8(dh),
            _stride8(x),
            _stride8(scale),
            D=width,
            CH=config.chunk,
            NC=config.chunks(width),
            RMS=rms,
            HAS_SCALE=scale is not None,
            **_options(config),
        )
    return dx, dscale, dshift


def _head_tiles(
    kernel: tuning.Kernel, q: Tensor, head_dim: int, per_head: bool, cos: Tensor | None
) -> tuple[tuning.Launch, dict[str, int]]:
    """Configuration and tile arguments. A full-width norm without RoPE has no heads: any power of two will do."""
    width = q.shape[1]
    if not per_head and cos is None:
        head_dim = width & -width
    config = tuning.configuration(kernel, width, _name(q), _arch(q.device))
    heads_per_tile = max(config.chunk // head_dim, 1)
    heads = width // head_dim
    return config, {"HEADS": heads, "HD": head_dim, "HC": heads_per_tile, "NC": -(-heads // heads_per_tile)}


def _norm_grads(
    found: list[Tensor], sums: bool, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of scale, shift, weight and bias from the two column sums; empty ones without `sums`."""
    if not sums:
        return no_table_grads(x.shape[1], torch.float32, x.device)
    return table_grads(found[0], found[1], weight, bias, scale)


def _no_gate_grad(y: Tensor) -> Tensor:
    return y.new_empty(0, y.shape[1], dtype=torch.float32)


def _num_programs(num_rows: int, most: int) -> int:
    """Persistent programs: `most` fill the device, each takes at least ROWS_MIN rows and none is without a row."""
    rows_per_program = -(-num_rows // max(min(most, -(-num_rows // ROWS_MIN)), 1))
    return -(-num_rows // rows_per_program)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _rows(x: Tensor) -> Tensor:
    """x itself where its rows are 16-byte aligned and dense, else one contiguous copy."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    backend.log_copy(f"strides {x.stride()} or a start that is not on 16 bytes; rows must be dense and aligned")
    return x.contiguous()


def _table(table: Tensor | None) -> Tensor | None:
    """[S, D] or [D] with dense, aligned rows."""
    if table is None:
        return None
    return _rows(table if table.ndim == 2 else table.view(1, -1))


def _index(x: Tensor, table: Tensor | None, segments: Segments | None) -> str:
    if segments is not None:
        return "runs"
    return "token" if is_per_token(x, table, None, None) else "one"


def _stride8(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0) // 8


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Kernels take a pointer for every argument; flags say which ones they read."""
    return stand_in if tensor is None else tensor


def _options(config: tuning.Launch) -> dict[str, Any]:
    return {"num_warps": config.warps, "enable_fp_fusion": True}


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
