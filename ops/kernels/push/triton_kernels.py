"""The kernel that adds a gradient into memory of a node's GPUs. Needs triton."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def push_kernel(grad_ptr, address, blocks, BLOCK: tl.constexpr):
    """grad [blocks * BLOCK] is added to the fp32 memory at `address`, a multiple of 16, of this GPU or of another.

    `relaxed` is enough: a barrier comes before anybody reads. Offsets are multiples of BLOCK, which lets the compiler
    load 64 bits and add 128 bits at a time. An address below 2^31, of a host, comes as an int32.
    """
    at = tl.arange(0, BLOCK)
    target = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.float32)), 16)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        gradient = tl.load(grad_ptr + start + at).to(tl.float32)
        tl.atomic_add(target + start + at, gradient, sem="relaxed", scope="sys")
