"""The Triton path of qk_norm_rope: kernels, launch table, launches, and what the compile gate compiles of them.

q and k in one launch. Traffic 4T forward and 6T backward, the minimum.

A row is held as NC tiles [HC, HD] of HC heads, so that the rotation works on the pairs of a head by reshape and split
inside registers, the norm reduces over a head (axis 1) or over everything, and the cos and sin row of a token is one
[1, HD / 2] vector for all heads. Even programs do q and odd ones k of the same row, so the second read of its cos and
sin row comes from L2.

The backward rotates the gradient back (the inverse rotation), and keeps the weight gradient in registers over the rows
of a persistent program, reduced over heads only after the loop: no shuffles for it inside. One slot per program, then
`sum_slots`.

N tokens, D width, G heads or 1. Nothing on the host's side reads a value from the device.
"""

# Triton code is no Python: tuples grow by +, and types are those of the compiler.
# ruff: noqa: RUF005

from collections.abc import Iterator
from dataclasses import replace
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.base import host
from ops.kernels.base.compiled import CompileCase, CompiledOp
from ops.kernels.base.measured import HEAD_DIM
from ops.kernels.base.slots import sum_slots
from ops.kernels.base.tuning import Kernel, Launch, Table, configuration
from ops.kernels.qk_rope.reference import QKBackwardCall, QKCall

LTX_WIDTH = 4096  # of LTX 13B and LTX-2

# (kernel, D, dtype of x, architecture)
TABLE: Table = {
    ("qk_forward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2),
    ("qk_forward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("qk_forward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("qk_backward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2, stages=3, per_sm=4),
    ("qk_backward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4, stages=3, per_sm=2),
    ("qk_backward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4, stages=4, per_sm=1),
    ("qk_backward", 5120, "bfloat16", "sm_100"): Launch(chunk=1024, warps=8, stages=3, per_sm=1, load_bits=64),
}


def forward(call: QKCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k [N, D] and rstd of each [N, G]."""
    q, k, wq, wk, cos, sin, head_dim, per_head, eps, out_dtype = call
    wq, wk = _weights(wq, wk)
    width = q.shape[1]
    groups = width // head_dim if per_head else 1
    q_out, k_out = (torch.empty(x.shape, dtype=out_dtype, device=x.device) for x in (q, k))
    rstd_q, rstd_k = (torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device) for x in (q, k))
    rows = max(q.shape[0], k.shape[0])
    if rows:
        q, k = host.rows(q), host.rows(k)
        config, tiles = _head_tiles("qk_forward", q, head_dim, per_head, cos)
        qk_forward_kernel[(2 * rows,)](
            q,
            k,
            host.or_else(wq, q),
            host.or_else(wk, q),
            host.or_else(cos, q),
            host.or_else(sin, q),
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
            **host.options(config),
        )
    return q_out, k_out, rstd_q, rstd_k


def backward(call: QKBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk [N, D], and gradients of wq and wk [D] or [head_dim] in fp32."""
    dqo, dko, q, k, wq, wk, cos, sin, rstd_q, rstd_k, head_dim, per_head = call
    width = q.shape[1]
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    size = head_dim if per_head else width
    if not max(q.shape[0], k.shape[0]):
        dwq = torch.zeros(size, dtype=torch.float32, device=q.device)
        return dq, dk, dwq, torch.zeros_like(dwq)
    wq, wk = _weights(wq, wk)
    q, k, dqo, dko = (host.rows(x) for x in (q, k, dqo, dko))
    widest = max(q, dqo, key=lambda x: x.element_size())  # rows of both are in shared memory
    config, tiles = _head_tiles("qk_backward", widest, head_dim, per_head, cos)
    rows = max(q.shape[0], k.shape[0])
    programs = host.num_programs(rows, host.num_sms(q.device) * config.per_sm // 2)  # for q, and as many for k
    slots = torch.empty(2, programs, size, dtype=torch.float32, device=q.device)
    qk_backward_kernel[(2 * programs,)](
        dqo,
        dko,
        q,
        k,
        host.or_else(wq, q),
        host.or_else(wk, q),
        host.or_else(cos, q),
        host.or_else(sin, q),
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
        **host.options(config),
    )
    dwq, dwk = sum_slots(slots, None, 1, 1)
    return dq, dk, dwq.view(-1), dwk.view(-1)


def _weights(wq: Tensor | None, wk: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Dense weights of q and k, which the kernels read for both or for neither: ones where one has none."""
    if wq is None and wk is not None:
        wq = torch.ones_like(wk)
    if wk is None and wq is not None:
        wk = torch.ones_like(wq)
    return (None if wq is None else wq.contiguous()), (None if wk is None else wk.contiguous())


def _head_tiles(
    kernel: Kernel, q: Tensor, head_dim: int, per_head: bool, cos: Tensor | None
) -> tuple[Launch, dict[str, int]]:
    """Configuration and tile arguments. A full-width norm without RoPE has no heads: any power of two will do."""
    width = q.shape[1]
    if not per_head and cos is None:
        head_dim = width & -width
    config = configuration(TABLE, kernel, width, host.name(q), host.arch(q.device))
    heads_per_tile = max(config.chunk // head_dim, 1)
    heads = width // head_dim
    return config, {"HEADS": heads, "HD": head_dim, "HC": heads_per_tile, "NC": -(-heads // heads_per_tile)}


@triton.jit
@no_type_check
def load_heads(ptr, c: tl.constexpr, HEADS: tl.constexpr, HC: tl.constexpr, HD: tl.constexpr, POLICY: tl.constexpr):
    """Tile c: heads c * HC and up, [HC, HD], zero beyond the last head."""
    heads = c * HC + tl.arange(0, HC)
    offsets = heads[:, None] * HD + tl.arange(0, HD)[None, :]
    if HEADS % HC == 0:
        return tl.load(ptr + offsets, eviction_policy=POLICY)
    else:
        return tl.load(ptr + offsets, mask=(heads < HEADS)[:, None], other=0.0, eviction_policy=POLICY)


@triton.jit
@no_type_check
def store_heads(ptr, tile, c: tl.constexpr, HEADS: tl.constexpr, HC: tl.constexpr, HD: tl.constexpr):
    heads = c * HC + tl.arange(0, HC)
    offsets = heads[:, None] * HD + tl.arange(0, HD)[None, :]
    value = tile.to(ptr.dtype.element_ty)
    if HEADS % HC == 0:
        tl.store(ptr + offsets, value)
    else:
        tl.store(ptr + offsets, value, mask=(heads < HEADS)[:, None])


@triton.jit
@no_type_check
def load_angles(ptr, HC: tl.constexpr, HD: tl.constexpr):
    """The cos or sin row [HD / 2], repeated for the HC heads of a tile."""
    offsets = tl.zeros((HC,), tl.int32)[:, None] + tl.arange(0, HD // 2)[None, :]
    return tl.load(ptr + offsets).to(tl.float32)


@triton.jit
@no_type_check
def rotate(tile, cos, sin, HC: tl.constexpr, HD: tl.constexpr):
    even, odd = tl.split(tl.reshape(tile, (HC, HD // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (HC, HD))


@triton.jit(do_not_specialize=["num_q", "num_k", "num_angles"])
@no_type_check
def qk_forward_kernel(
    q_ptr,
    k_ptr,
    wq_ptr,
    wk_ptr,
    cos_ptr,
    sin_ptr,
    qo_ptr,
    ko_ptr,
    rstd_q_ptr,
    rstd_k_ptr,
    num_q,
    num_k,
    num_angles,
    q_stride8,
    k_stride8,
    eps,
    HEADS: tl.constexpr,
    HD: tl.constexpr,
    HC: tl.constexpr,
    NC: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROPE: tl.constexpr,
):
    """One row of q (even programs) or k (odd programs): RMSNorm, weight, rotation; rstd [N] or [N, HEADS]."""
    row = tl.program_id(0) // 2
    is_q = tl.program_id(0) % 2 == 0
    if is_q:
        qk_forward_row(
            q_ptr,
            wq_ptr,
            cos_ptr,
            sin_ptr,
            qo_ptr,
            rstd_q_ptr,
            row,
            num_q,
            num_angles,
            q_stride8,
            eps,
            HEADS,
            HD,
            HC,
            NC,
            PER_HEAD,
            WEIGHT,
            ROPE,
        )
    else:
        qk_forward_row(
            k_ptr,
            wk_ptr,
            cos_ptr,
            sin_ptr,
            ko_ptr,
            rstd_k_ptr,
            row,
            num_k,
            num_angles,
            k_stride8,
            eps,
            HEADS,
            HD,
            HC,
            NC,
            PER_HEAD,
            WEIGHT,
            ROPE,
        )


@triton.jit
@no_type_check
def qk_forward_row(
    x_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    rstd_ptr,
    row,
    num_rows,
    num_angles,
    stride8,
    eps,
    HEADS: tl.constexpr,
    HD: tl.constexpr,
    HC: tl.constexpr,
    NC: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROPE: tl.constexpr,
):
    if row < num_rows:
        base = row.to(tl.int64)
        x_row = x_ptr + base * (stride8 * 8)
        out_row = out_ptr + base * (HEADS * HD)
        if ROPE:
            angle = (row % num_angles) * (HD // 2)
            cos, sin = load_angles(cos_ptr + angle, HC, HD), load_angles(sin_ptr + angle, HC, HD)
        x = ()
        squares = tl.zeros((HC, HD), tl.float32)
        for c in tl.static_range(NC):
            tile = load_heads(x_row, c, HEADS, HC, HD, "evict_first").to(tl.float32)
            squares += tile * tile
            x = x + (tile,)
        if not PER_HEAD:
            rstd = 1.0 / tl.sqrt(tl.sum(squares) / (HEADS * HD) + eps)
            tl.store(rstd_ptr + base, rstd)
        for c in tl.static_range(NC):
            tile = x[c]
            if PER_HEAD:
                head_rstd = 1.0 / tl.sqrt(tl.sum(tile * tile, axis=1) / HD + eps)
                heads = c * HC + tl.arange(0, HC)
                tl.store(rstd_ptr + base * HEADS + heads, head_rstd, mask=heads < HEADS)
                tile = tile * head_rstd[:, None]
            else:
                tile = tile * rstd
            if WEIGHT:
                if PER_HEAD:
                    tile = tile * load_weight(w_ptr, HC, HD).to(tl.float32)
                else:
                    tile = tile * load_heads(w_ptr, c, HEADS, HC, HD, "evict_last").to(tl.float32)
            if ROPE:
                tile = rotate(tile, cos, sin, HC, HD)
            store_heads(out_row, tile, c, HEADS, HC, HD)


@triton.jit
@no_type_check
def load_weight(w_ptr, HC: tl.constexpr, HD: tl.constexpr):
    """One head's weights for each of HC heads."""
    offsets = tl.zeros((HC,), tl.int32)[:, None] + tl.arange(0, HD)[None, :]
    return tl.load(w_ptr + offsets, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["num_q", "num_k", "num_angles", "num_slots", "rows_q", "rows_k"])
@no_type_check
def qk_backward_kernel(
    dqo_ptr,
    dko_ptr,
    q_ptr,
    k_ptr,
    wq_ptr,
    wk_ptr,
    cos_ptr,
    sin_ptr,
    rstd_q_ptr,
    rstd_k_ptr,
    dq_ptr,
    dk_ptr,
    slots_ptr,
    num_q,
    num_k,
    num_angles,
    num_slots,
    rows_q,
    rows_k,
    dqo_stride8,
    dko_stride8,
    q_stride8,
    k_stride8,
    HEADS: tl.constexpr,
    HD: tl.constexpr,
    HC: tl.constexpr,
    NC: tl.constexpr,
    STAGES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROPE: tl.constexpr,
):
    """rows_q (rows_k) consecutive rows of q (k); slots [2, num_slots, HD if PER_HEAD else D] get sum dz * xhat."""
    program = tl.program_id(0) // 2
    width = HD if PER_HEAD else HEADS * HD
    if tl.program_id(0) % 2 == 0:
        qk_backward_rows(
            dqo_ptr,
            q_ptr,
            wq_ptr,
            cos_ptr,
            sin_ptr,
            rstd_q_ptr,
            dq_ptr,
            slots_ptr + program * width,
            program * rows_q,
            tl.minimum((program + 1) * rows_q, num_q),
            num_angles,
            dqo_stride8,
            q_stride8,
            HEADS,
            HD,
            HC,
            NC,
            STAGES,
            PER_HEAD,
            WEIGHT,
            ROPE,
        )
    else:
        qk_backward_rows(
            dko_ptr,
            k_ptr,
            wk_ptr,
            cos_ptr,
            sin_ptr,
            rstd_k_ptr,
            dk_ptr,
            slots_ptr + (num_slots + program) * width,
            program * rows_k,
            tl.minimum((program + 1) * rows_k, num_k),
            num_angles,
            dko_stride8,
            k_stride8,
            HEADS,
            HD,
            HC,
            NC,
            STAGES,
            PER_HEAD,
            WEIGHT,
            ROPE,
        )


@triton.jit
@no_type_check
def qk_backward_rows(
    dy_ptr,
    x_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    rstd_ptr,
    dx_ptr,
    slot_ptr,
    first,
    last,
    num_angles,
    dy_stride8,
    x_stride8,
    HEADS: tl.constexpr,
    HD: tl.constexpr,
    HC: tl.constexpr,
    NC: tl.constexpr,
    STAGES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROPE: tl.constexpr,
):
    base = first.to(tl.int64)
    x_base, dy_base = x_ptr + base * (x_stride8 * 8), dy_ptr + base * (dy_stride8 * 8)
    dx_base = dx_ptr + base * (HEADS * HD)
    rstd_base = rstd_ptr + (base * HEADS if PER_HEAD else base)
    sums = ()
    weights = ()  # in registers for all rows: inside the pipelined loop they would be copied from L2 once per row
    for c in tl.static_range(1 if PER_HEAD else NC):
        sums = sums + (tl.zeros((HC, HD), tl.float32),)
        if WEIGHT and PER_HEAD:
            weights = weights + (load_weight(w_ptr, HC, HD),)
        elif WEIGHT:
            weights = weights + (load_heads(w_ptr, c, HEADS, HC, HD, "evict_last"),)
    for i in tl.range(0, last - first, num_stages=STAGES):
        x = ()
        dz = ()
        for c in tl.static_range(NC):
            x = x + (load_heads(x_base + i * (x_stride8 * 8), c, HEADS, HC, HD, "evict_first"),)
            dz = dz + (load_heads(dy_base + i * (dy_stride8 * 8), c, HEADS, HC, HD, "evict_first"),)
        if ROPE:
            angle = ((first + i) % num_angles) * (HD // 2)
            cos, sin = load_angles(cos_ptr + angle, HC, HD), load_angles(sin_ptr + angle, HC, HD)
        if not PER_HEAD:
            rstd = tl.load(rstd_base + i)
        products = tl.zeros((HC, HD), tl.float32)
        xhats = ()
        grads = ()
        for c in tl.static_range(NC):
            grad = dz[c].to(tl.float32)
            if ROPE:
                grad = rotate(grad, cos, -sin, HC, HD)
            if PER_HEAD:
                heads = c * HC + tl.arange(0, HC)
                head_rstd = tl.load(rstd_base + i * HEADS + heads, mask=heads < HEADS, other=0.0)[:, None]
                xhat = x[c].to(tl.float32) * head_rstd
                sums = (sums[0] + grad * xhat,)
                if WEIGHT:
                    grad = grad * weights[0].to(tl.float32)
                mean = tl.sum(grad * xhat, axis=1)[:, None] / HD
                store_heads(dx_base + i * (HEADS * HD), (grad - xhat * mean) * head_rstd, c, HEADS, HC, HD)
            else:
                xhat = x[c].to(tl.float32) * rstd
                sums = sums[:c] + (sums[c] + grad * xhat,) + sums[c + 1 :]
                if WEIGHT:
                    grad = grad * weights[c].to(tl.float32)
                products += grad * xhat
                xhats = xhats + (xhat,)
                grads = grads + (grad,)
        if not PER_HEAD:
            mean = tl.sum(products) / (HEADS * HD)
            for c in tl.static_range(NC):
                store_heads(dx_base + i * (HEADS * HD), (grads[c] - xhats[c] * mean) * rstd, c, HEADS, HC, HD)
    if PER_HEAD:
        tl.store(slot_ptr + tl.arange(0, HD), tl.sum(sums[0], axis=0))
    else:
        for c in tl.static_range(NC):
            store_heads(slot_ptr, sums[c], c, HEADS, HC, HD)


def cases(kernel: str, width: int, launch: Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    """Cases of one row of the launch table."""
    for per_head in (False, True):
        yield _case(kernel, width, launch, HEAD_DIM, per_head)


def _case(kernel: str, width: int, launch: Launch, head_dim: int, per_head: bool) -> CompileCase:
    heads, per_tile = width // head_dim, max(launch.chunk // head_dim, 1)
    flags: dict[str, int] = {
        "HEADS": heads,
        "HD": head_dim,
        "HC": per_tile,
        "NC": -(-heads // per_tile),
        "WEIGHT": True,
        "ROPE": True,
    }
    function = qk_forward_kernel
    if kernel == "qk_backward":
        function, flags["STAGES"] = qk_backward_kernel, launch.stages
    tiles = flags["NC"] if per_head else 1
    # rstd of q and of k; in the backward one prologue load per stage that triton 3.6 unrolls once more, and the
    # weight slot
    scalars = 2 * tiles if kernel == "qk_forward" else 2 * (tiles * (launch.stages + 1) + 1)
    return CompileCase(
        name=f"{kernel} {width} {'per head' if per_head else 'full width'}",
        kernel=function,
        constants=flags | {"PER_HEAD": per_head},
        launch=launch,
        scalars=scalars,
    )


def _by_rule() -> Iterator[CompileCase]:
    """The backward that takes most shared memory of widths without a row: LTX, whose RoPE turns all heads as one, or
    each apart."""
    rows = frozenset(f"{name}_ptr" for name in ("dqo", "dko", "q", "k", "wq", "wk", "dq", "dk"))
    for dtype, fp32 in (("bfloat16", frozenset[str]()), ("float32", rows)):
        launch = configuration({}, "qk_backward", LTX_WIDTH, dtype)
        for head_dim in (LTX_WIDTH, HEAD_DIM):
            case = _case("qk_backward", LTX_WIDTH, launch, head_dim, per_head=False)
            yield replace(case, name=f"{case.name} {dtype}, heads of {head_dim}", fp32=fp32)


COMPILED = CompiledOp(table=TABLE, cases=cases, extra=tuple(_by_rule()))
