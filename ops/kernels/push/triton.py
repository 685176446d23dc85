"""The Triton path of the push: its kernel, and what the compile gate compiles of it, for bf16 and fp32 gradients."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.base.compiled import CompileCase, CompiledOp
from ops.kernels.base.tuning import Launch
from ops.kernels.push.reference import ALIGN

# Four elements per thread: with eight the loads are of 128 bits, and the values go through shared memory on their way.
LAUNCH = Launch(chunk=ALIGN, warps=4, load_bits=64)


def push(gradient: Tensor, address: int, programs: int) -> None:
    """Add gradient [n] to the fp32 memory at the address, in the current stream."""
    push_kernel[(programs,)](
        gradient, address, gradient.numel() // LAUNCH.chunk, BLOCK=LAUNCH.chunk, num_warps=LAUNCH.warps
    )


@triton.jit
@no_type_check
def push_kernel(grad_ptr, address, blocks, BLOCK: tl.constexpr):
    """grad [blocks * BLOCK] is added to the fp32 memory at `address`, a multiple of 16, of this GPU or of another.

    `relaxed` is enough: a barrier comes before any worker reads. Offsets are multiples of BLOCK, which lets the
    compiler load 64 bits and add 128 bits at a time. An address below 2^31, of a host, comes as an int32.
    """
    at = tl.arange(0, BLOCK)
    target = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.float32)), 16)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        gradient = tl.load(grad_ptr + start + at).to(tl.float32)
        tl.atomic_add(target + start + at, gradient, sem="relaxed", scope="sys")


def _case(fp32: bool) -> CompileCase:
    return CompileCase(
        name=f"push{', fp32' if fp32 else ''}",
        kernel=push_kernel,
        constants={"BLOCK": LAUNCH.chunk},
        launch=LAUNCH,
        scalars=0,
        fp32=frozenset({"grad_ptr"} if fp32 else ()),
        adds=True,
    )


COMPILED = CompiledOp(extra=(_case(False), _case(True)))
