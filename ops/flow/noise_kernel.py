"""`ops.flow.noise` on CUDA: one thread enciphers one counter and writes its eight numbers."""

# mypy: ignore-errors
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

NUMBERS = 8  # that one counter gives
BLOCK = 128  # counters of a program
_TURN = tl.constexpr(2.0 * math.pi)
# The multipliers and the steps of the keys of Philox4x64 (Salmon et al. 2011, table 2 and section 3.3).
_M0, _M1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_W0, _W1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def _store_pair(out, at, word, mask):
    radius = tl.sqrt(-2.0 * tl.log((word >> 32).to(tl.float64) * (2.0**-32) + 2.0**-33))
    angle = ((word & 0xFFFFFFFF).to(tl.float64) * (2.0**-32) + 2.0**-33) * _TURN
    tl.store(out + at, (radius * tl.cos(angle)).to(tl.float32), mask=mask)
    tl.store(out + at + 1, (radius * tl.sin(angle)).to(tl.float32), mask=mask)


# Every cascade has other numbers: not one of them may be a kind of kernel of its own. Triton compiles anew for 1, for
# multiples of 16, and for numbers of 32 bits, which annotations alone do not prevent.
@triton.jit(do_not_specialize=["start", "blocks", "low", "high"])
def philox_normal(out, start: tl.int64, blocks: tl.int64, low: tl.int64, high: tl.int64, BLOCK: tl.constexpr):
    """out fp32 [8 * blocks]: the numbers of counters `start` to `start + blocks`; `low`, `high`: halves of the key."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c0 = (start + index).to(tl.uint64)
    c1 = tl.zeros_like(c0)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + low.to(tl.uint64)
    k1 = tl.zeros_like(c0) + high.to(tl.uint64)
    m0 = tl.full([BLOCK], _M0, tl.uint64)
    m1 = tl.full([BLOCK], _M1, tl.uint64)
    w0 = tl.full([BLOCK], _W0, tl.uint64)
    w1 = tl.full([BLOCK], _W1, tl.uint64)
    for _ in tl.static_range(10):
        top0, bottom0 = tl.umulhi(c0, m0), c0 * m0
        top1, bottom1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = top1 ^ c1 ^ k0, bottom1, top0 ^ c3 ^ k1, bottom0
        k0 += w0
        k1 += w1
    mask = index < blocks
    at = index * 8
    _store_pair(out, at, c0, mask)
    _store_pair(out, at + 2, c1, mask)
    _store_pair(out, at + 4, c2, mask)
    _store_pair(out, at + 6, c3, mask)


def fill(low: int, high: int, start: int, blocks: int, device: torch.device) -> torch.Tensor:
    """fp32 [blocks * NUMBERS] of the stream under the key's two halves, from counter `start` on."""
    out = torch.empty(blocks * NUMBERS, dtype=torch.float32, device=device)
    if blocks:
        philox_normal[(triton.cdiv(blocks, BLOCK),)](out, start, blocks, _signed(low), _signed(high), BLOCK=BLOCK)
    return out


def _signed(bits: int) -> int:
    """The same 64 bits as a signed number, which is what a kernel takes."""
    return bits - 2**64 if bits >= 2**63 else bits
