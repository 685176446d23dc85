"""`heddle bench ops`: what the device can move, and how close the fused ops and their rivals come to it.

    heddle bench ops                         # CUDA: the full grid in under ten minutes; CPU: a small one
    heddle bench ops --out bench-out/ops.md  # also writes the report

Ceilings come first (copy and triad). Then each op, forward and backward, as medians with the distance of their
quartiles: useful bytes (the minimum an op must move) per second as a share of the copy ceiling, the gain over eager,
and the peak memory of forward and backward together. On CUDA L2-cold, and the backward includes its second stage. Last,
whole transformer blocks with and without the ops. The targets are stated for one H200; a run without a GPU says what it
leaves out and is a check of the programme, not of the kernels.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from app.bench.ops_blocks import BlockResult, compare_block, mmdit_block, wan_block
from app.bench.ops_inputs import layouts
from app.bench.ops_measure import BenchCase, measure_case
from app.bench.ops_report import OpsRow, Results, block_table, tables, targets
from app.bench.timing import ceilings
from app.settings.out_files import check_writable
from ops.kernels.base import backend
from ops.kernels.base.measured import Contest, RowLayout
from ops.kernels.folders import contests

log = logging.getLogger(__name__)

NO_GPU = (
    "No CUDA device here. These are figures of the library path on a small grid: processor time of one thread, caches "
    "warm. Left out, because they need a GPU: the Triton kernels and with them the D-tile and atomic ablations; "
    "Liger's modulated RMSNorm (the package imports, its kernels do not run); torch.compile; N of 8k to 64k. The "
    "targets for an H200 (forward >= 92 %, backward >= 85 % of copy at N >= 32k) stay open until this runs on one."
)
NO_LIGER = "Left out: Liger's modulated RMSNorm, because liger-kernel is not installed (pip install liger-kernel)."


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseGrid:
    """What is measured. Static compiles cost seconds each, so torch.compile runs at `compile_tokens` only."""

    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    compile_tokens: tuple[int, ...]
    repeats: int


CUDA_GRID = CaseGrid(
    widths=(3072, 5120, 1536), tokens=(32768, 8192, 65536, 16384), compile_tokens=(32768, 8192), repeats=50
)
CPU_GRID = CaseGrid(widths=(512, 1536), tokens=(1008,), compile_tokens=(), repeats=9)


def run(
    compile: Annotated[bool, typer.Option(help="Include torch.compile of the eager chains (CUDA only).")] = True,
    liger: Annotated[
        bool | None,
        typer.Option(help="Liger's modulated RMSNorm (CUDA only). By default if liger-kernel is installed."),
    ] = None,
    blocks: Annotated[bool, typer.Option(help="Measure whole transformer blocks too.")] = True,
    budget_s: Annotated[float, typer.Option(help="Stop the op grid after this long and count the rest.")] = 480.0,
    out: Annotated[Path | None, typer.Option(help="Write the report here as well.")] = None,
) -> None:
    """Ceilings, then every op and transformer blocks, as one Markdown report."""
    check_writable([out])
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)
    page = report(
        torch.device("cuda" if cuda else "cpu"),
        CUDA_GRID if cuda else CPU_GRID,
        compile=compile,
        liger=liger,
        blocks=blocks,
        budget_s=budget_s,
    )
    print(page)
    if out is not None:
        out.write_text(page + "\n")


def report(
    device: torch.device, grid: CaseGrid, *, compile: bool, liger: bool | None, blocks: bool, budget_s: float
) -> str:
    """The report in Markdown; see `run` for the options."""
    cuda = device.type == "cuda"
    installed = importlib.util.find_spec("liger_kernel") is not None
    with_liger = cuda and (installed if liger is None else liger)
    started = time.monotonic()
    limits = ceilings(device, grid.repeats)
    lines = [*_heading(device, installed), "", *(f"{name}: {speed / 1e9:.0f} GB/s" for name, speed in limits.items())]
    rows: list[OpsRow] = []
    skipped = 0
    for case in _cases(grid, with_liger, compile and cuda, cuda):
        if time.monotonic() - started > budget_s:
            skipped += 1
            continue
        rows += measure_case(case, device, grid.repeats)
    results = Results(rows, limits["copy"])
    lines += tables(results)
    if skipped:
        lines += ["", f"{skipped} (op, layout, shape) cases were skipped after {budget_s:.0f} s; raise --budget-s."]
    if cuda:
        lines += targets(results)
    if blocks:
        lines += block_table(_blocks(device))
    lines += ["", f"{time.monotonic() - started:.0f} s in all"]
    return "\n".join(lines)


def _heading(device: torch.device, liger_installed: bool) -> list[str]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    path = "Triton kernels" if device.type == "cuda" and backend.has_triton() else "library path"
    lines = [f"# Fused ops on {name}", "", f"torch {torch.__version__}, {path}"]
    if device.type != "cuda":
        return [*lines, NO_GPU]
    return lines if liger_installed else [*lines, NO_LIGER]


def _cases(grid: CaseGrid, liger: bool, compile: bool, ablations: bool) -> Iterator[BenchCase]:
    """The most important shapes first, because a budget may cut the rest; cases that compile, which is slow, come
    last."""
    shapes = [(tokens, width) for tokens in grid.tokens for width in grid.widths]
    for tokens, width in shapes:
        for op, layout in _ops_and_layouts(liger, tokens):
            variants = dict(op.variants)
            if layout.name != "B=1":
                variants.pop("one-line eager", None)
            if not layout.uniform:
                variants.pop("Liger RMS", None)  # takes equal runs only
            yield BenchCase(
                op=op, layout=layout, width=width, variants=variants, ablations=ablations and op.name == "ln_modulate"
            )
    for tokens, width in shapes:
        if compile and tokens in grid.compile_tokens:
            for op, layout in _ops_and_layouts(liger, tokens):
                if op.name == "ln_modulate, RMS":
                    continue  # measured to stand beside Liger's
                compiled = torch.compile(op.variants["eager"], fullgraph=True, dynamic=False)
                yield BenchCase(op=op, layout=layout, width=width, variants={"torch.compile": compiled})


def _ops_and_layouts(liger: bool, tokens: int) -> Iterator[tuple[Contest, RowLayout]]:
    for op in contests(liger):
        # QK-norm has no tables: its layouts are the same.
        yield from ((op, layout) for layout in layouts(tokens) if op.name != "qk_norm_rope" or layout.name == "B=1")


def _blocks(device: torch.device) -> list[BlockResult]:
    """Wan-1.3B and the 13B MMDiT at 32k tokens; a narrow, short stand-in of each on CPU."""
    if device.type == "cuda":
        results = compare_block("Wan-1.3B", *wan_block(1536, 8960, 32768, device), device, 10)
        return results + compare_block("MMDiT-13B double", *mmdit_block(3072, 32768, device), device, 10)
    results = compare_block("Wan, 256 wide", *wan_block(256, 1024, 512, device), device, 3)
    return results + compare_block("MMDiT double, 256 wide", *mmdit_block(256, 512, device), device, 3)
