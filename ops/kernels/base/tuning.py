"""Launch configurations of the Triton kernels: a checked-in table per op for shipped widths, a rule for all others.

No @triton.autotune: it recompiles cold for every N, prefers what is fast with a warm L2 (up to 45 % off), and fails in
the interpreter. A table (TABLE of an op's `triton.py`) is keyed by (kernel, D, activation dtype, architecture); the
ahead-of-time gate compiles every row for its architecture and asserts no spills, wide accesses and no layout conversion
in the row loop.

A row is made from what `python -m app.bench.gpu --only launches.` measures on a GPU of its architecture, some eight
minutes for all kernels: the launch of today, the best of those around it, and the gain. Where that is more than noise
(1 %), it becomes a row; `python -m ops.kernels.aot` then says whether it spills (for sm_90 and sm_100), and `pytest
tests/ops/kernels` on that GPU whether it is right.

Limits that shaped the rows (sm_90: 65536 registers per SM, 228 KB of shared memory): a backward holds 2 (norm) or 3
(gate and norm) fp32 sums per column, so a thread of the norm backward takes up to 40 columns and one of the gate
backward up to 24; stages - 1 rows per program are in flight by cp.async in shared memory. On an H200 the fastest
backwards have 48 to 80 KB in flight per multiprocessor, from 1 to 4 programs: with 20 KB the norm backward at width
5120 takes 1.7 times as long, and as many bytes from twice the programs take 7 % longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

Kernel = str  # the name of a kernel in the op's table


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How one kernel runs one width. `chunk` divides the row into power-of-two register tiles."""

    chunk: int
    warps: int
    stages: int = 1  # rows in flight + 1, backward only
    per_sm: int = 1  # persistent programs that a multiprocessor holds at once, backward only
    load_bits: int = 128  # narrowest row load; 64 where half the columns per thread avoid spills or are faster

    def chunks(self, width: int) -> int:
        return -(-width // self.chunk)


Table = Mapping[tuple[Kernel, int, str, str], Launch]  # (kernel, D, dtype of x, architecture)

_LARGE_SHARED = ("sm_90", "sm_100", "sm_103")  # with 228 KB of shared memory per multiprocessor
_IN_FLIGHT = 72 << 10  # bytes of rows per multiprocessor
_SHARED = 208 << 10  # of shared memory that rows may take there
_SMALL_SHARED = 96 << 10  # of it that rows of one program may take on any other architecture
_ROW_TENSORS = {"backward": 2, "gate_backward": 4, "qk_backward": 2}  # that a row in flight is of

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)

_launched: Mapping[Kernel, Launch] = {}


@contextmanager
def launched(kernel: Kernel, launch: Launch) -> Iterator[None]:
    """Run a kernel with this launch at every width, in all threads: benchmarks compare launches, no op does."""
    global _launched
    before, _launched = _launched, {**_launched, kernel: launch}
    try:
        yield
    finally:
        _launched = before


def configuration(table: Table, kernel: Kernel, width: int, dtype: str = "bfloat16", arch: str = "sm_90") -> Launch:
    """The row of the op's table for the architecture, else the one for sm_90, else the rule below.

    sm_100 has as many registers and as much shared memory per multiprocessor as sm_90: what fits there fits here. Other
    ones have down to 100 KB of it, and memory that fewer rows in flight keep busy: one per program, or none where it
    has no room, unless a row of their own says more.
    """
    if kernel in _launched:
        return _launched[kernel]
    if own := table.get((kernel, width, dtype, arch)):
        return own
    launch = table.get((kernel, width, dtype, "sm_90")) or rule(kernel, width, dtype)
    if arch in _LARGE_SHARED:
        return launch
    has_room = held_bytes(kernel, width, launch.chunk, dtype) <= _SMALL_SHARED
    return replace(launch, stages=min(launch.stages, 2 if has_room else 1))


def held_bytes(kernel: Kernel, width: int, chunk: int, dtype: str = "bfloat16") -> int:
    """Most shared memory that a program takes for each row in flight; 0 of a forward.

    Of the norm and gate backwards as if all were fp32, since the residual stream may be. That of q and k is the same
    loop twice, for q and for k, each with memory of its own; of a row it holds q and dq in their `dtype`, and the cos
    and the sin of half a tile in fp32. A tile is a chunk, or one head, of at most the power of two that divides the
    width.
    """
    tensors = _ROW_TENSORS.get(kernel, 0)
    padded = -(-width // chunk) * chunk
    if kernel != "qk_backward":
        return 4 * padded * tensors
    item = 2 if dtype in ("bfloat16", "float16") else 4
    return 2 * (item * padded * tensors + 4 * max(chunk, width & -width))


def rule(kernel: Kernel, width: int, dtype: str = "bfloat16") -> Launch:
    """Fewest padded lanes, at most `limit` columns per thread, then the fewest warps; of a backward as many rows in
    flight as are enough bytes, up to three in a program, and as many programs as have room for them."""
    limit = {"backward": 24, "token_backward": 24, "gate_backward": 20}.get(kernel, 40)
    if kernel == "qk_backward" and dtype == "float32":  # 32 spill in places on sm_100, 40 everywhere
        limit = 24
    options = []
    for chunk in CHUNKS:
        num_chunks = -(-width // chunk)
        for warps in (1, 2, 4, 8, 16):
            per_thread = num_chunks * chunk // (32 * warps)
            if num_chunks <= 8 and per_thread <= limit and chunk >= 64 * warps:
                options.append((num_chunks * chunk, warps, num_chunks, chunk))
    if not options:  # a very wide gate backward: let it spill rather than fail
        options.append((width, 16, -(-width // 4096), 4096))
    padded, warps, _, chunk = min(options)
    if kernel not in _ROW_TENSORS:
        return Launch(chunk=chunk, warps=warps)
    row_bytes, held = 2 * padded * _ROW_TENSORS[kernel], held_bytes(kernel, width, chunk, dtype)

    def rows(programs: int) -> int:
        """In flight in each of as many programs of a multiprocessor."""
        return min(-(-_IN_FLIGHT // (programs * row_bytes)), _SHARED // (programs * held), 3)

    counts = [programs for programs in (8, 4, 2, 1) if programs <= max(8 // warps, 1)]
    per_sm = max(counts, key=lambda programs: min(programs * rows(programs) * row_bytes, _IN_FLIGHT))
    return Launch(chunk=chunk, warps=warps, stages=1 + rows(per_sm), per_sm=per_sm)
