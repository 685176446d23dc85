"""The kernel that adds a gradient into the memory of a node's GPUs. Needs triton."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def push_kernel(grad_ptr, peers_ptr, blocks, me, GPUS: tl.constexpr, BLOCK: tl.constexpr):
    """grad [GPUS * blocks * BLOCK] lies piece by piece; piece g is added to the fp32 accumulator at address peers[g].

    Each GPU of the node begins with its neighbour's piece, so that at a time they add to different ones. `relaxed` is
    enough: a barrier comes before anybody reads. Offsets are multiples of BLOCK, which lets the compiler load 64 bits
    and add 128 bits at a time.
    """
    at = tl.arange(0, BLOCK)
    for turn in range(GPUS):
        owner = (me + 1 + turn) % GPUS
        target = tl.multiple_of(tl.load(peers_ptr + owner).to(tl.pointer_type(tl.float32)), 16)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            source = (tl.cast(owner, tl.int64) * blocks + block) * BLOCK
            gradient = tl.load(grad_ptr + source + at).to(tl.float32)
            tl.atomic_add(target + tl.cast(block, tl.int64) * BLOCK + at, gradient, sem="relaxed", scope="sys")
