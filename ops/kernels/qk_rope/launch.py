"""Host side of the Triton kernels of qk_norm_rope: what cpu.py does, for CUDA (or the interpreter). Needs triton.

N tokens, D width, G heads or 1. Nothing here reads a value from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.base import host
from ops.kernels.base.tuning import Kernel, Launch, configuration
from ops.kernels.norm_modulate.launch import sum_slots
from ops.kernels.qk_rope import triton_kernels
from ops.kernels.qk_rope.call import QKBackwardCall, QKCall
from ops.kernels.qk_rope.launch_table import TABLE


def forward(call: QKCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k [N, D] and rstd of each [N, G]."""
    q, k, wq, wk, cos, sin, head_dim, per_head, eps, out_dtype = call
    width = q.shape[1]
    groups = width // head_dim if per_head else 1
    q_out, k_out = (torch.empty(x.shape, dtype=out_dtype, device=x.device) for x in (q, k))
    rstd_q, rstd_k = (torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device) for x in (q, k))
    rows = max(q.shape[0], k.shape[0])
    if rows:
        q, k = host.rows(q), host.rows(k)
        config, tiles = _head_tiles("qk_forward", q, head_dim, per_head, cos)
        triton_kernels.qk_forward_kernel[(2 * rows,)](
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
    q, k, dqo, dko = (host.rows(x) for x in (q, k, dqo, dko))
    config, tiles = _head_tiles("qk_backward", q, head_dim, per_head, cos)
    rows = max(q.shape[0], k.shape[0])
    programs = host.num_programs(rows, host.num_sms(q.device) * config.per_sm // 2)  # for q, and as many for k
    slots = torch.empty(2, programs, size, dtype=torch.float32, device=q.device)
    triton_kernels.qk_backward_kernel[(2 * programs,)](
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
