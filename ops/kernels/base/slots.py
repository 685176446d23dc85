"""The second stage of every backward that sums over tokens: the slots that its programs filled, added in one order.

The backward is one pass: P programs walk R = ceil(N / P) consecutive rows each and keep their column sums in fp32
registers. A program that meets the end of a run writes its sums to slot `program + run`. Walking the rows, either the
program or the run grows at every write, so slots are unique, those of a run are contiguous, there are fewer than P + R
of them, and neither atomics nor the host are needed. `sum_slots` adds the slots of each table row in a fixed order: the
result is the same bits on every run.

N tokens, D width, R runs. Needs triton.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.base.compiled import CompileCase
from ops.kernels.base.segments import Segments
from ops.kernels.base.tuning import Launch

# SUM_SLOTS x SUM_COLUMNS values are loaded at once, so the 130 to 400 slots of a whole sample are two to four trips to
# the L2 cache.
SUM_SLOTS, SUM_COLUMNS, SUM_WARPS = 128, 32, 4


def sum_slots(slots: Tensor, segments: Segments | None, rows_per_program: int, num_mods: int) -> list[Tensor]:
    """One [num_mods, D] per plane of the slots [planes, num_slots, D] that a backward kernel filled.

    Tensors of their own, because outputs of a custom op may not share memory.
    """
    planes, num_slots, width = slots.shape
    sums = [torch.empty(num_mods, width, dtype=torch.float32, device=slots.device) for _ in range(planes)]
    if planes == 0 or num_mods == 0:
        return sums
    block = SUM_COLUMNS if slots.is_cuda else 1024
    index = (slots,) * 3 if segments is None else (segments.cu, segments.mod_off, segments.mod_runs)
    sum_slots_kernel[(num_mods, -(-width // block), planes)](
        slots,
        *index,
        *(sums + sums[:1] * 2)[:3],
        num_slots,
        rows_per_program,
        D=width,
        BLOCK_SLOTS=SUM_SLOTS,
        BLOCK_D=block,
        INDEX="one" if segments is None else "runs",
        num_warps=SUM_WARPS,
    )
    return sums


@triton.jit(do_not_specialize=["num_slots", "rows_per_program"])
@no_type_check
def sum_slots_kernel(
    slots_ptr,
    cu_ptr,
    mod_off_ptr,
    mod_runs_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    num_slots,
    rows_per_program,
    D: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INDEX: tl.constexpr,
):
    """One [num_mods, D] sum per plane of the slots of each table row, in ascending order of run and slot.

    A table row without tokens gets zeros: sums over sequence-parallel ranks stay right.
    """
    mod, plane = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (columns < D)[None, :]
    base = slots_ptr + plane.to(tl.int64) * num_slots * D
    total = tl.zeros((BLOCK_SLOTS, BLOCK_D), tl.float32)
    first_run, last_run = 0, 1
    if INDEX == "runs":
        first_run, last_run = tl.load(mod_off_ptr + mod), tl.load(mod_off_ptr + mod + 1)
    for index in tl.range(first_run, last_run):
        first_slot, end_slot = 0, num_slots
        if INDEX == "runs":
            run = tl.load(mod_runs_ptr + index)
            first_row, end_row = tl.load(cu_ptr + run), tl.load(cu_ptr + run + 1)
            first_slot = first_row // rows_per_program + run
            # An empty run owns no slot.
            end_slot = tl.where(end_row > first_row, (end_row - 1) // rows_per_program + run + 1, first_slot)
        for lo in tl.range(first_slot, end_slot, BLOCK_SLOTS):
            slots = lo + tl.arange(0, BLOCK_SLOTS)
            total += tl.load(
                base + slots[:, None].to(tl.int64) * D + columns[None, :],
                mask=(slots < end_slot)[:, None] & inside,
                other=0.0,
            )
    offsets = mod.to(tl.int64) * D + columns
    sums = tl.sum(total, axis=0)
    if plane == 0:
        tl.store(first_ptr + offsets, sums, mask=columns < D)
    elif plane == 1:
        tl.store(second_ptr + offsets, sums, mask=columns < D)
    else:
        tl.store(third_ptr + offsets, sums, mask=columns < D)


COMPILE_CASE = CompileCase(
    name="sum_slots",
    kernel=sum_slots_kernel,
    constants={"D": 3072, "BLOCK_SLOTS": SUM_SLOTS, "BLOCK_D": SUM_COLUMNS, "INDEX": "runs"},
    launch=Launch(chunk=SUM_COLUMNS, warps=SUM_WARPS),
    scalars=16,  # offsets and boundaries of runs, and the one row of sums of each plane
)
