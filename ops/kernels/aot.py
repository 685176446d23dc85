"""Compile every shipped kernel configuration for sm_90 without a GPU, and report what the compiler made of it.

    python -m ops.kernels.aot          # one line per configuration; exit status 1 if one breaks a rule
    python -m ops.kernels.aot 5120     # those of this width only

Rules: no spills (stack 0), activations move in 128-bit (or, where the table says so, 64-bit) accesses, no layout
conversion inside a row loop, and registers and shared memory leave room for as many programs per multiprocessor as the
table starts. Each with bf16 and with fp32 modulation tables, which is how models under autocast have them. Needs
triton, which brings ptxas and cuobjdump, and nothing else. What counts is the triton that the torch of the GPU machines
brings, since versions differ in spills: constraints.txt pins it, also where a CPU build of torch brings none. Another
one is put first on PYTHONPATH:

    pip install --no-deps --target .cache/triton-3.6.0 triton==3.6.0
    PYTHONPATH=.cache/triton-3.6.0 python -m ops.kernels.aot
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ops.kernels import norm_kernels, qk_kernels, tuning

TARGET = GPUTarget("cuda", 90, 32)
HEAD_DIM = 128
FP32 = {
    "mean_ptr",
    "rstd_ptr",
    "slots_ptr",
    "first_ptr",
    "second_ptr",
    "third_ptr",
    "dscale_ptr",
    "dshift_ptr",
    "cos_ptr",
    "sin_ptr",
    "rstd_q_ptr",
    "rstd_k_ptr",
}
TABLES = frozenset(f"{name}_ptr" for name in ("gate", "weight", "bias", "scale", "shift", "wq", "wk"))
INT32 = {"run_ptr", "cu_ptr", "run2mod_ptr", "mod_off_ptr", "mod_runs_ptr"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One kernel with its flags and launch configuration. `fp32` names the activations and tables held in fp32."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    launch: tuning.Launch
    fp32: frozenset[str] = frozenset()
    variant: bool = False  # flags other than the op's usual ones


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileReport:
    """Registers per thread, spill bytes, global accesses by width in bits, layout conversions inside loops."""

    name: str
    registers: int
    stack: int
    shared_bytes: int
    accesses: dict[str, int]
    loop_conversions: int
    warps: int

    @property
    def programs_per_sm(self) -> int:
        """How many fit a multiprocessor: 65536 registers, handed out in eights per thread, and 227 KB shared."""
        by_registers = 65536 // max(-(-self.registers // 8) * 8 * self.warps * 32, 1)
        return min(by_registers, 232448 // max(self.shared_bytes + 1024, 1), 64 // self.warps, 32)

    def violations(self, launch: tuning.Launch, scalar_limit: int) -> list[str]:
        """What breaks the rules; `scalar_limit` is how many accesses of statistics and indices are expected."""
        load_bits = launch.load_bits
        broken = []
        if self.programs_per_sm < launch.per_sm:
            broken.append(f"{self.programs_per_sm} programs fit a multiprocessor, {launch.per_sm} are started")
        if self.stack:
            broken.append(f"{self.stack} bytes of spills")
        if self.loop_conversions:
            broken.append(f"{self.loop_conversions} layout conversions in the row loop")
        if self._count(at_most=32) > scalar_limit:
            broken.append(f"{self._count(at_most=32)} accesses of 32 bits or less, {scalar_limit} expected")
        narrow_loads = self._count(at_most=load_bits - 1, kind="LD") - self._count(at_most=32, kind="LD")
        if narrow_loads:
            broken.append(f"{narrow_loads} row loads narrower than {load_bits} bits")
        return broken

    def _count(self, at_most: int, kind: str = "") -> int:
        return sum(
            count
            for access, count in self.accesses.items()
            if access.startswith(kind) and int(access.split(".")[1]) <= at_most
        )

    def line(self) -> str:
        accesses = ", ".join(f"{kind} x{count}" for kind, count in sorted(self.accesses.items()))
        return (
            f"{self.name:42} regs {self.registers:3} stack {self.stack} shared {self.shared_bytes:6} "
            f"programs/SM {self.programs_per_sm:2} loop conversions {self.loop_conversions}  {accesses}"
        )


def shipped(widths: Collection[int]) -> Iterator[CompileCase]:
    """Every (op, width) of the tuning table with the flags and table dtypes the ops use it with."""
    for kernel, width, dtype, arch in tuning.TABLE:
        if width not in widths:
            continue
        launch = tuning.configuration(kernel, width, dtype, arch)
        fp32_residual = dtype == "float32"
        for case in _cases(kernel, width, launch, fp32_residual):
            if not (fp32_residual or case.variant):  # an fp32 residual stream comes with fp32 tables
                yield case
            yield replace(case, name=f"{case.name}, fp32 tables", fp32=case.fp32 | TABLES)
    flags: dict[str, Any] = {"D": 3072, "BLOCK_SLOTS": tuning.SUM_SLOTS, "BLOCK_D": tuning.SUM_COLUMNS, "INDEX": "runs"}
    yield CompileCase(
        name="sum_slots",
        kernel=norm_kernels.sum_slots_kernel,
        constants=flags,
        launch=tuning.Launch(chunk=tuning.SUM_COLUMNS, warps=tuning.SUM_WARPS),
    )


def compile_case(case: CompileCase) -> CompileReport:
    """Compile for sm_90 and disassemble."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
            constants[(position,)] = case.constants[name]
            continue
        signature[name] = _type(name, case.fp32)
        if name.endswith("_ptr"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=TARGET, options={"num_warps": case.launch.warps, "enable_fp_fusion": True})
    listing = disassemble(compiled.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert found is not None, f"cuobjdump printed no resource usage for {case.name}: {listing[:500]}"
    return CompileReport(
        name=case.name,
        registers=int(found[1]),
        stack=int(found[2]),
        shared_bytes=compiled.metadata.shared,
        accesses=access_widths(listing),
        loop_conversions=conversions_in_loops(compiled.asm["ttgir"]),
        warps=case.launch.warps,
    )


def disassemble(cubin: bytes) -> str:
    """Resource usage and SASS. Kept beside triton's compiled kernels: cuobjdump takes longer than a cached compile."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache") / "heddle-sass"
    kept = folder / hashlib.sha256(cubin).hexdigest()
    if kept.is_file():
        return kept.read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = _cuobjdump("-res-usage", "-sass", file.name)
    folder.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_text(listing)
    partial.replace(kept)
    return listing


def access_widths(sass: str) -> dict[str, int]:
    """Global loads, stores and asynchronous copies of a SASS listing by width: {"LDGSTS.128": 18, ...}."""
    counts: Counter[str] = Counter()
    for kind, modifiers in re.findall(r"\b(LDGSTS|LDG|STG)\.E((?:\.\w+)*)", sass):
        width = re.search(r"\.[US]?(128|64|16|8)\b", modifiers)
        counts[f"{kind}.{width[1] if width else '32'}"] += 1
    return dict(counts)


def conversions_in_loops(ttgir: str) -> int:
    """ttg.convert_layout operations inside an scf.for, which would go through shared memory once per row."""
    count = 0
    open_loops: list[int] = []
    for line in ttgir.splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if open_loops and text.startswith("}") and indent == open_loops[-1]:
            open_loops.pop()
        if "scf.for" in text:
            open_loops.append(indent)
        if open_loops and "convert_layout" in text:
            count += 1
    return count


def scalar_accesses(case: CompileCase) -> int:
    """Accesses of 32 bits that belong to statistics, run indices and their prefetch, not to rows of activations."""
    stages = case.launch.stages
    if case.kernel is norm_kernels.forward_kernel:
        return 4  # run, run2mod, mean, rstd
    if case.kernel is norm_kernels.backward_kernel:
        return 3 + 2 * stages  # run, run2mod, cu; mean and rstd once per stage
    if case.kernel is norm_kernels.token_backward_kernel:
        return 2  # mean, rstd
    if case.kernel is norm_kernels.sum_slots_kernel:
        return 16  # offsets and boundaries of runs, and the one row of sums of each plane
    tiles = case.constants["NC"] if case.constants["PER_HEAD"] else 1
    if case.kernel is qk_kernels.qk_forward_kernel:
        return 2 * tiles  # rstd of q and of k
    # rstd of q and of k: one prologue load per stage that triton 3.6 unrolls once more; and the weight slot
    return 2 * (tiles * (stages + 1) + 1)


def _cases(kernel: str, width: int, launch: tuning.Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    if kernel.startswith("qk"):
        yield from _qk_cases(kernel, width, launch)
    elif kernel == "token_backward":
        tiles = {"D": width, "CH": launch.chunk, "NC": launch.chunks(width), "RMS": False, "HAS_SCALE": True}
        yield CompileCase(
            name=f"{kernel} {width}{' fp32' if fp32_residual else ''}",
            constants=tiles,
            launch=launch,
            kernel=norm_kernels.token_backward_kernel,
            fp32=frozenset({"x_ptr", "dx_ptr"} if fp32_residual else ()),
        )
    else:
        cases = _forward_cases if kernel.endswith("forward") else _backward_cases
        yield from cases(kernel, width, launch, fp32_residual)


def _forward_cases(kernel: str, width: int, launch: tuning.Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    has_y = kernel.startswith("gate")
    flags = {
        "D": width,
        "CH": launch.chunk,
        "NC": launch.chunks(width),
        "HAS_Y": has_y,
        "HAS_GATE": has_y,
        "NORM": True,
        "RMS": False,
        "AFFINE": False,
        "HAS_BIAS": False,
        "HAS_SCALE": True,
        "HAS_SHIFT": True,
        "INDEX": "runs",
    }
    variants = {
        "": {},
        " affine": {
            "AFFINE": True,
            "HAS_BIAS": True,
            "HAS_SCALE": False,
            "HAS_SHIFT": False,
            "HAS_GATE": False,
            "INDEX": "one",
        },
    }
    if not has_y:
        variants[" rms"] = {"RMS": True}
    if has_y:
        variants[" without norm"] = {"NORM": False, "HAS_SCALE": False, "HAS_SHIFT": False}
    yield from _variants(
        kernel,
        width,
        launch,
        norm_kernels.forward_kernel,
        flags,
        variants,
        {"x_ptr", "residual_ptr"} if fp32_residual else set(),
    )


def _backward_cases(kernel: str, width: int, launch: tuning.Launch, fp32_residual: bool) -> Iterator[CompileCase]:
    has_y = kernel.startswith("gate")
    flags = {
        "D": width,
        "CH": launch.chunk,
        "NC": launch.chunks(width),
        "STAGES": launch.stages,
        "NORM": True,
        "RMS": False,
        "AFFINE": False,
        "HAS_SCALE": True,
        "SUMS": True,
        "HAS_DXO": has_y,
        "HAS_Y": has_y,
        "HAS_GATE": has_y,
        "GATE_SUM": has_y,
        "INDEX": "runs",
    }
    variants: dict[str, dict[str, Any]] = {
        "": {},
        " frozen tables": {"SUMS": False, "GATE_SUM": False},
        " affine": {"AFFINE": True, "HAS_SCALE": False, "HAS_GATE": False, "GATE_SUM": False, "INDEX": "one"},
    }
    if has_y:
        variants[" without norm"] = {"NORM": False, "SUMS": False, "HAS_SCALE": False}
    yield from _variants(
        kernel,
        width,
        launch,
        norm_kernels.backward_kernel,
        flags,
        variants,
        {"x_ptr", "dxo_ptr", "dx_ptr"} if fp32_residual else set(),
    )


def _variants(
    kernel: str,
    width: int,
    launch: tuning.Launch,
    function: Any,
    flags: dict[str, Any],
    variants: dict[str, dict[str, Any]],
    fp32: set[str],
) -> Iterator[CompileCase]:
    for suffix, changes in variants.items():
        name = f"{kernel} {width}{' fp32' if fp32 else ''}{suffix}"
        yield CompileCase(
            name=name,
            kernel=function,
            constants=flags | changes,
            launch=launch,
            fp32=frozenset(fp32),
            variant=bool(changes),
        )


def _qk_cases(kernel: str, width: int, launch: tuning.Launch) -> Iterator[CompileCase]:
    heads, per_tile = width // HEAD_DIM, launch.chunk // HEAD_DIM
    flags: dict[str, Any] = {
        "HEADS": heads,
        "HD": HEAD_DIM,
        "HC": per_tile,
        "NC": -(-heads // per_tile),
        "WEIGHT": True,
        "ROPE": True,
    }
    function = qk_kernels.qk_forward_kernel
    if kernel == "qk_backward":
        function, flags["STAGES"] = qk_kernels.qk_backward_kernel, launch.stages
    for per_head in (False, True):
        yield CompileCase(
            name=f"{kernel} {width} {'per head' if per_head else 'full width'}",
            kernel=function,
            constants=flags | {"PER_HEAD": per_head},
            launch=launch,
        )


def _type(name: str, fp32: frozenset[str]) -> str:
    if name in INT32:
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32" if name in FP32 or name in fp32 else "*bf16"
    return "fp32" if name == "eps" else "i32"


def _cuobjdump(*arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def check(position: int, widths: Collection[int]) -> tuple[str, bool]:
    """The line of one shipped case and whether it breaks a rule."""
    case = list(shipped(widths))[position]
    report = compile_case(case)
    broken = report.violations(case.launch, scalar_accesses(case))
    return report.line() + (f"  BROKEN: {'; '.join(broken)}" if broken else ""), bool(broken)


def main(chosen: Sequence[str]) -> int:
    """Check the shipped cases of the chosen widths, or all; 1 if one breaks a rule, 2 if there are none."""
    known = sorted({width for _, width, _, _ in tuning.TABLE})
    widths = [width for width in known if str(width) in chosen] if chosen else known
    if len(widths) < len(set(chosen)):
        sys.stderr.write(f"widths {' '.join(chosen)}: the table has {known}\n")
        return 2
    failures = 0
    sys.stdout.write(f"triton {triton.__version__}, {TARGET.backend} sm_{TARGET.arch}\n")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for line, broken in pool.map(check, range(len(list(shipped(widths)))), repeat(widths)):
            failures += broken
            sys.stdout.write(line + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
