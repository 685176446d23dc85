"""The ahead-of-time gate: every shipped kernel configuration compiled for sm_90 and sm_100, without a GPU.

With the triton that the pinned torch brings, which a GPU will run, and with the one of the oldest torch that the
project takes, because versions differ in spills. One that is not installed is put beside the project (.cache/) from the
package index on first use; without network that test is skipped. Compiled kernels and their listings stay in .cache/:
later runs take seconds. The default run takes the widest kernels, which spill first, with the first of the two;
`make kernels` all of them with both.
"""

import importlib.metadata
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ops.kernels.base.tuning import Launch, configuration, held_bytes, launched, rule

ROOT = Path(__file__).parents[2]
PINNED = re.search(r"^triton==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]
OLDEST = "3.6.0"  # of torch 2.11
INSTALL_SECONDS = 120

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def compile_shipped(*widths: str, version: str, arch: str = "sm_90") -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Compiled kernels are cached between runs by a key of source, flags and triton's version.
    environment |= {"PYTHONPATH": folder(version), "TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton-kernels")}
    run = subprocess.run(
        [sys.executable, "-m", "ops.kernels.aot", arch, *widths],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    broken = [line for line in run.stdout.splitlines() if "BROKEN" in line]
    assert run.returncode == 0, "\n".join(broken) or run.stderr[-3000:]
    assert re.search(r"push .* RED\.128 x1$", run.stdout, re.MULTILINE)
    for width in widths or ("1536", "3072", "5120"):
        assert f"backward {width}, fp32 tables" in run.stdout
    assert f"triton {version}, cuda {arch}\n" in run.stdout


def install(version: str, folder: Path) -> str | None:
    """Put a triton into the folder; why that failed, if it did. Tries once and briefly."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--retries",
        "0",
        "--timeout",
        "10",
        "--target",
        str(folder),
        f"triton=={version}",
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"pip took more than {INSTALL_SECONDS} s"
    return run.stderr.strip()[-300:] or f"pip exited with {run.returncode}" if run.returncode else None


def folder(version: str) -> str:
    """Where that triton lies, installed if need be, or "" for the environment; skips the test if it cannot be had."""
    if importlib.metadata.version("triton") == version:
        return ""
    beside = ROOT / ".cache" / f"triton-{version}"
    if not (beside / "triton" / "backends").is_dir():
        failure = install(version, beside)
        if failure is not None:
            pytest.skip(f"triton {version} cannot be installed into .cache here: {failure}")
    return str(beside)


@pytest.mark.kernels
def test_the_widest_kernels_compile_without_spills() -> None:
    compile_shipped("5120", version=PINNED)


@pytest.mark.kernels
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("version", [PINNED, OLDEST])
def test_all_kernels_compile_without_spills(version: str, arch: str) -> None:
    compile_shipped(version=version, arch=arch)


def test_the_gate_takes_known_widths_and_one_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    aot = pytest.importorskip("ops.kernels.aot")
    for wrong in (["1537"], ["sm_75"], ["sm_90", "sm_100"]):
        assert aot.main(wrong) == 2
        assert "takes widths of [1536, 3072, 5120], and one of ('sm_90', 'sm_100')" in capsys.readouterr().err


def test_an_architecture_without_rows_runs_with_those_of_sm_90() -> None:
    rows = {("forward", 1536, "bfloat16", "sm_90"): Launch(chunk=64, warps=1)}
    own = {("forward", 1536, "bfloat16", "sm_100"): Launch(chunk=128, warps=1)}
    assert configuration(rows, "forward", 1536, arch="sm_100").chunk == 64
    assert configuration(rows | own, "forward", 1536, arch="sm_100").chunk == 128
    assert configuration(rows, "forward", 1024, arch="sm_100") == rule("forward", 1024)


def test_a_launch_that_is_tried_replaces_rows_and_rule_of_its_kernel_until_the_end_of_the_trial() -> None:
    rows = {("backward", 1536, "bfloat16", "sm_90"): Launch(chunk=64, warps=1, stages=4)}

    def now(kernel: str, width: int, arch: str = "sm_90") -> Launch:
        return configuration(rows, kernel, width, arch=arch)

    calls = [("backward", 1536), ("backward", 2048), ("forward", 1536), ("backward", 1536, "sm_80")]
    before = [now(*call) for call in calls]
    tried, other = Launch(chunk=128, warps=2, stages=4), Launch(chunk=256, warps=4)
    with launched("backward", tried):
        assert [now(*call) for call in calls] == [tried, tried, before[2], tried]
        with ThreadPoolExecutor() as autograd:
            assert autograd.submit(now, "backward", 1536).result() == tried, "a backward runs in another thread"
        with pytest.raises(RuntimeError, match="out of resources"), launched("backward", other):
            assert now("backward", 1536) == other
            raise RuntimeError("out of resources")
        assert now("backward", 1536) == tried
    assert [now(*call) for call in calls] == before


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_fewer_rows_are_in_flight_where_there_is_less_shared_memory(arch: str) -> None:
    launch = Launch(chunk=64, warps=1, stages=4, per_sm=2)
    rows = {("backward", 1536, "bfloat16", "sm_90"): launch}
    assert configuration(rows, "backward", 1536, arch="sm_90") == launch
    assert configuration(rows, "backward", 1536, arch=arch) == replace(launch, stages=2)
    assert configuration({}, "backward", 2048, arch=arch).stages == 2
    own = {("backward", 1536, "bfloat16", arch): replace(launch, stages=3)}
    assert configuration(rows | own, "backward", 1536, arch=arch).stages == 3, "measured there"


@pytest.mark.parametrize("width", [1024, 2048, 4096, 8192])
def test_rows_in_flight_are_enough_bytes_for_a_multiprocessor(width: int) -> None:
    """48 KB and more, where three rows of each program are that much, and shared memory has room for them."""
    for kernel, tensors in (("backward", 2), ("gate_backward", 4), ("qk_backward", 2)):
        launch = rule(kernel, width)
        most = 3 * launch.per_sm * 2 * width * tensors
        is_full = launch.per_sm * launch.stages * held_bytes(kernel, width, launch.chunk) > 208 << 10
        assert (launch.stages - 1) * most / 3 >= min(48 << 10, most) or (is_full and width == 8192)
        assert 2 <= launch.stages <= 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("arch", "of_a_block"), [("sm_90", 227 << 10), ("sm_100", 227 << 10), ("sm_89", 99 << 10)])
def test_no_launch_takes_more_shared_memory_than_a_multiprocessor_has(arch: str, of_a_block: int, dtype: str) -> None:
    """For any width: the presets' are from 1152 to 6144. A block that asked for more would not start."""
    for kernel, width in itertools.product(("backward", "gate_backward", "qk_backward"), range(64, 8193, 64)):
        launch = configuration({}, kernel, width, dtype, arch)
        held = (launch.stages - 1) * held_bytes(kernel, width, launch.chunk, dtype)
        blocks = launch.per_sm if of_a_block == 227 << 10 else 1
        assert blocks * (held + 1024) <= of_a_block, (kernel, width, launch)


@pytest.mark.parametrize(
    ("width", "chunk", "rows", "dtype", "found"),
    [
        (4096, 4096, 3, "float32", 294_940),
        (6144, 2048, 3, "float32", 344_092),
        (5120, 1024, 2, "float32", 180_248),
        (3072, 1024, 3, "float32", 172_060),
        (4096, 4096, 3, "bfloat16", 196_636),
    ],
)
def test_rows_in_flight_of_q_and_k_are_counted_as_the_compiler_lays_them(
    width: int, chunk: int, rows: int, dtype: str, found: int
) -> None:
    """What triton gives the kernel for sm_90 with RoPE and a full-width norm; beside rows it keeps a reduction."""
    assert 0 <= found - rows * held_bytes("qk_backward", width, chunk, dtype) < 64


def test_the_widest_rotation_is_compiled_by_rule_in_both_dtypes() -> None:
    aot = pytest.importorskip("ops.kernels.aot")
    named = [case.name for case in aot.shipped([], "sm_90")]
    assert {f"qk_backward 4096 full width {d}, heads of {h}" for d in ("bfloat16", "float32") for h in (128, 4096)} <= {
        *named
    }


def test_the_gate_notices_spills_narrow_loads_crowding_and_conversions() -> None:
    aot = pytest.importorskip("ops.kernels.aot")
    from ops.kernels.base.tuning import Launch

    good = {
        "name": "k",
        "registers": 128,
        "stack": 0,
        "shared_bytes": 0,
        "loop_conversions": 0,
        "warps": 4,
        "accesses": {"LDG.128": 4, "LDG.32": 2, "STG.128": 2},
    }
    launch = Launch(chunk=1024, warps=4, per_sm=4)
    assert aot.CompileReport(**good).violations(launch, scalar_limit=2) == []
    for change, complaint in (
        ({"stack": 8}, "spills"),
        ({"registers": 136}, "3 programs fit"),
        ({"loop_conversions": 1}, "conversions"),
        ({"accesses": {"LDG.64": 1}}, "narrower"),
        ({"accesses": {"LDG.32": 3}}, "32 bits or less"),
        ({"accesses": {"LDG.128": 3, "RED.128": 1}}, "none expected"),
    ):
        assert complaint in aot.CompileReport(**(good | change)).violations(launch, scalar_limit=2)[0]


def test_the_gate_notices_narrow_and_answered_additions() -> None:
    aot = pytest.importorskip("ops.kernels.aot")
    from ops.kernels.push.triton import LAUNCH

    def complaints(accesses: dict[str, int]) -> list[str]:
        report = aot.CompileReport(
            name="k", registers=30, stack=0, shared_bytes=0, loop_conversions=0, warps=4, accesses=accesses
        )
        return report.violations(LAUNCH, scalar_limit=1, adds=True)

    assert complaints({"LDG.64": 2, "RED.128": 1}) == []
    for wrong in ({"RED.32": 1}, {"ATOM.128": 1}, {"LDG.64": 2}):
        assert "RED.128 expected" in complaints(wrong)[-1]


def test_widths_are_read_from_the_listing_and_conversions_from_loops_only() -> None:
    aot = pytest.importorskip("ops.kernels.aot")
    sass = "LDG.E.EF.128 R12 ; LDG.E R2 ; LDGSTS.E.BYPASS.64 [R1] ; STG.E.U8 desc ; STG.E.128 desc"
    red = "REDG.E.ADD.F32x4.FTZ.RN.STRONG.SYS desc ; REDG.E.ADD.F32.FTZ.RN desc ; ATOMG.E.ADD.F32x2.FTZ R2"
    assert aot.access_widths(red) == {"RED.128": 1, "RED.32": 1, "ATOM.64": 1}
    assert aot.access_widths(sass) == {"LDG.128": 1, "LDG.32": 1, "LDGSTS.64": 1, "STG.8": 1, "STG.128": 1}
    ttgir = "  ttg.convert_layout %a\n  scf.for %i {\n    ttg.convert_layout %b\n  }\n  ttg.convert_layout %c\n"
    assert aot.conversions_in_loops(ttgir) == 1
