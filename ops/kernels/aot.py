"""Compile every shipped kernel configuration without a GPU, and report what the compiler made of it.

    python -m ops.kernels.aot             # for sm_90, one line per configuration; exit status 1 if one breaks a rule
    python -m ops.kernels.aot 5120        # those of this width only
    python -m ops.kernels.aot sm_100      # for Blackwell, with the launches that it runs with

Rules: no spills (stack 0), activations move in 128-bit (or, where the table says so, 64-bit) accesses, no layout
conversion inside a row loop, and registers and shared memory leave room for as many programs per multiprocessor as the
table starts. Each with bf16 and with fp32 modulation tables, which is how models under autocast have them. Needs
torch, of which a CPU build will do, and triton, which brings ptxas and cuobjdump. What counts is the triton that the
torch of the GPU machines brings, since versions differ in spills: constraints.txt pins it, also where a CPU build of
torch brings none. Another one is put first on PYTHONPATH:

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

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ops.kernels.base.compiled import CompileCase
from ops.kernels.base.tuning import Launch, configuration
from ops.kernels.folders import compiled_ops

OPS = compiled_ops()
ARCHITECTURES = ("sm_90", "sm_100")
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
ADDRESSES = {"address"}
INT32 = {"run_ptr", "cu_ptr", "run2mod_ptr", "mod_off_ptr", "mod_runs_ptr"}


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

    def violations(self, launch: Launch, scalar_limit: int, adds: bool = False) -> list[str]:
        """What breaks the rules; `scalar_limit` is how many accesses of statistics and indices are expected, `adds`
        whether the kernel adds into memory."""
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
        additions = {access for access in self.accesses if access.startswith(("RED", "ATOM"))}
        if additions != ({"RED.128"} if adds else set()):
            broken.append(f"additions {sorted(additions)}, {'RED.128' if adds else 'none'} expected")
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


def shipped(widths: Collection[int], arch: str) -> Iterator[CompileCase]:
    """Every row that the ops' tables have for an architecture, with the flags and table dtypes that the ops use it
    with, then their extra cases."""
    for op in OPS:
        for kernel, width, dtype in dict.fromkeys(key[:3] for key in op.table):
            if width not in widths:
                continue
            launch = configuration(op.table, kernel, width, dtype, arch)
            fp32_residual = dtype == "float32"
            for case in op.cases(kernel, width, launch, fp32_residual):
                if not (fp32_residual or case.variant):  # an fp32 residual stream comes with fp32 tables
                    yield case
                yield replace(case, name=f"{case.name}, fp32 tables", fp32=case.fp32 | TABLES)
    for op in OPS:
        yield from op.extra


def compile_case(case: CompileCase, arch: str) -> CompileReport:
    """Compile for an architecture and disassemble."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], int | str] = {}
    attributes: dict[tuple[int, ...], list[list[str | int]]] = {}
    for position, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
            constants[(position,)] = case.constants[name]
            continue
        signature[name] = _type(name, case.fp32)
        if name.endswith("_ptr"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": case.launch.warps, "enable_fp_fusion": True})
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
    """Global loads, stores, asynchronous copies and additions of a SASS listing by width: {"LDGSTS.128": 18, ...}.

    An addition that gives the old value back is an ATOM, one that does not a RED.
    """
    counts: Counter[str] = Counter()
    for kind, modifiers in re.findall(r"\b(LDGSTS|LDG|STG)\.E((?:\.\w+)*)", sass):
        width = re.search(r"\.[US]?(128|64|16|8)\b", modifiers)
        counts[f"{kind}.{width[1] if width else '32'}"] += 1
    for kind, modifiers in re.findall(r"\b(RED|ATOM)G?\.E\.ADD((?:\.\w+)*)", sass):
        vector = re.search(r"\.F32x(\d)", modifiers)
        counts[f"{kind}.{32 * int(vector[1]) if vector else 32}"] += 1
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


def _type(name: str, fp32: frozenset[str]) -> str:
    if name in INT32:
        return "*i32"
    if name in ADDRESSES:
        return "i64"
    if name.endswith("_ptr"):
        return "*fp32" if name in FP32 or name in fp32 else "*bf16"
    return "fp32" if name == "eps" else "i32"


def _cuobjdump(*arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def check(position: int, widths: Collection[int], arch: str) -> tuple[str, bool]:
    """The line of one shipped case and whether it breaks a rule."""
    case = list(shipped(widths, arch))[position]
    report = compile_case(case, arch)
    broken = report.violations(case.launch, case.scalars, case.adds)
    return report.line() + (f"  BROKEN: {'; '.join(broken)}" if broken else ""), bool(broken)


def main(chosen: Sequence[str]) -> int:
    """Check the shipped cases of the chosen widths, or all; 1 if one breaks a rule, 2 if there are none."""
    known = sorted({width for op in OPS for _, width, _, _ in op.table})
    unknown = [word for word in chosen if word not in {*map(str, known), *ARCHITECTURES}]
    archs = [arch for arch in ARCHITECTURES if arch in chosen] or [ARCHITECTURES[0]]
    if unknown or len(archs) > 1:
        sys.stderr.write(f"{' '.join(unknown or archs)}: takes widths of {known}, and one of {ARCHITECTURES}\n")
        return 2
    widths = [width for width in known if str(width) in chosen] or known
    failures = 0
    sys.stdout.write(f"triton {triton.__version__}, cuda {archs[0]}\n")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        cases = range(len(list(shipped(widths, archs[0]))))
        for line, broken in pool.map(check, cases, repeat(widths), repeat(archs[0])):
            failures += broken
            sys.stdout.write(line + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
