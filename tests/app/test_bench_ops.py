"""`heddle bench ops`: every contestant computes the same thing, and the report says what was measured."""

import pytest
import torch
from typer.testing import CliRunner

from app.bench import ops as bench
from app.bench.ops_blocks import BlockResult
from app.bench.ops_inputs import inputs_of, layouts
from app.bench.ops_report import OpsRow, Results, block_table, tables, targets
from app.bench.timing import Timing, peak_bytes
from app.cli import app
from ops.kernels.base.segments import Segments
from ops.kernels.folders import OPS, contests
from ops.kernels.norm_modulate.op import liger_rms

BF16_CHAIN_ERROR = 2e-2  # eager rounds after every op


@pytest.mark.parametrize("layout", layouts(84), ids=lambda layout: layout.name)
@pytest.mark.parametrize("op", contests(liger=False), ids=lambda op: op.name)
def test_all_variants_of_an_op_agree(op, layout) -> None:
    torch.manual_seed(0)
    segments = Segments.packed(layout.lengths)
    rows = segments.run2mod.long()[segments.run.long()]
    tensors = inputs_of(op.case.inputs, layout, 128, torch.device("cpu"), torch.bfloat16)
    expected = op.variants["fused"](tensors, layout, segments, rows)
    for name, variant in op.variants.items():
        if name == "one-line eager" and layout.name != "B=1":
            continue
        for actual, want in zip(variant(tensors, layout, segments, rows), expected, strict=True):
            difference = (actual.view_as(want).float() - want.float()).norm() / want.float().norm()
            assert difference <= BF16_CHAIN_ERROR, name


def test_every_folder_of_an_op_is_found_and_the_most_telling_contest_comes_first() -> None:
    assert {"gate_residual", "norm_modulate", "push", "qk_rope"} <= set(OPS)
    names = ["ln_modulate", "gate_residual_ln_modulate", "gate_residual", "qk_norm_rope", "ln_modulate, RMS"]
    assert [contest.name for contest in contests(liger=False) if contest.name in names] == names


def test_report_has_ceilings_a_row_per_variant_and_says_that_there_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(bench, "ceilings", lambda device, repeats: {"copy": 1e9, "triad": 2e9})
    small = bench.CaseGrid(widths=(128,), tokens=(84,), compile_tokens=(), repeats=2)
    report = bench.report(torch.device("cpu"), small, compile=True, liger=None, blocks=False, budget_s=480.0)
    assert "copy: 1 GB/s" in report and bench.NO_GPU in report and "## Targets" not in report
    rows = [line.split("|") for line in report.split("## gate")[0].splitlines() if line.startswith("| packed")]
    assert [row[4].strip() for row in rows] == ["fused", "eager"]
    assert all(float(row[11]) > 0 for row in rows)  # peak MB, also on CPU


def test_the_command_prints_its_report_and_writes_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(bench, "ceilings", lambda device, repeats: {"copy": 1e9, "triad": 2e9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "new" / "table.md"
    result = CliRunner().invoke(app, ["bench", "ops", "--no-blocks", "--budget-s", "0", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_text() == result.output and "cases were skipped after 0 s" in result.output


def row(variant: str, seconds: float, direction: str = "forward", tokens: int = 8192, layout: str = "B=1") -> OpsRow:
    return OpsRow(
        op="op",
        layout=layout,
        width=8,
        tokens=tokens,
        direction=direction,
        variant=variant,
        timing=Timing(seconds=seconds, spread=0.0),
        useful_bytes=1000,
        peak=None,
    )


def test_share_and_gain_come_from_the_medians() -> None:
    *_, fused, eager = tables(Results([row("fused", 1e-6), row("eager", 3e-6)], copy_speed=2e9))
    assert "| 50% | 3.00 | - |" in fused and "| 17% | 1.00 | - |" in eager


def test_targets_name_the_worst_case_and_what_was_not_measured() -> None:
    rows = [
        row("fused", 1e-6, "backward"),
        row("eager", 0.9e-6, "backward"),
        row("torch.compile", 1.3e-6, "backward"),
        row("fused", 1e-6, "backward", layout="packed"),
        row("eager", 2e-6, "backward", layout="packed"),
    ]
    lines = {line.split("|")[1].strip(): line for line in targets(Results(rows, copy_speed=2e9))[4:]}
    assert "0.90 (op, B=1, D=8, N=8192) | no" in lines["backward never slower than eager at 8k"]
    assert (
        "1.30" in lines["backward >= 1.2x torch.compile, B=1"]
        and "| yes |" in lines["backward >= 1.2x torch.compile, B=1"]
    )
    assert "not measured | open" in lines["forward >= 92% of copy at N >= 32k"]


def test_blocks_stand_beside_eager_and_the_paper() -> None:
    def result(variant: str, seconds: float, peak: int) -> BlockResult:
        return BlockResult(
            block="Wan",
            tokens=8,
            checkpointing=False,
            variant=variant,
            peak_bytes=peak,
            timing=Timing(seconds=seconds, spread=0.0),
        )

    *_, fused, _, paper = block_table([result("eager", 1.0, 2 * 10**9), result("fused", 0.9, 10**9)])
    assert "-10.0%" in fused and "-50.0%" in fused and "-10.7 %" in paper


def test_peak_counts_what_is_alive_at_once() -> None:
    x = torch.randn(2**16)
    assert peak_bytes(lambda: (x * 2).add_(1).sum(), torch.device("cpu")) == pytest.approx(4 * 2**16, rel=0.01)
    assert peak_bytes(lambda: (x * 2, x * 3), torch.device("cpu")) == pytest.approx(8 * 2**16, rel=0.01)


def test_liger_that_is_asked_for_but_absent_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="liger-kernel is not installed"):
        liger_rms()
