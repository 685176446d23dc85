"""attention.json: written by the bench, read by a run, kept in its settings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.config import TrainConfig
from actors.planning.learned import setting_of
from app.bench.gpu.attention_table import FILE, table_of, write_table
from app.bench.gpu.lines import Facts, ResultLine, read_lines
from app.settings.attention_table import read_table
from app.settings.config import RunConfig
from app.settings.resume import check_resume, kind_of
from app.settings.run_folder import prepare_run_dir
from ops.attention.lengths import Lengths
from ops.attention.table import AttentionTable, TableRow, mean_length
from ops.attention.varlen import choose
from ops.typed import ConfigError
from tests.few_packages import few_packages
from tests.ops.attention_tables import table

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "runs" / "demo.yaml"
FACTS = Facts(
    device="GPU", torch="2.13", triton="3", cuda="13", python="3", commit="abc", command="bench", rehearsal=False
)
ON_CPU = table(("flex", 64, 1.0), ("sdpa", 64, 2.0), device="CPU", dtype="float32")


def line(name: str, **other: Any) -> ResultLine:
    return ResultLine(name=name, facts=FACTS, at="", seconds=1.0, **other)


def both(size: int, forward: float, backward: float) -> dict[str, float]:
    return {f"d{size} forward ms": forward, f"d{size} forward TFLOP/s": 1.0, f"d{size} backward ms": backward}


def test_a_table_has_what_was_measured_of_self_attention() -> None:
    found = table_of(
        [
            line("attention.flash.one-32760", figures={**both(128, 8000.0, 20000.0), **both(64, 9000.0, 30000.0)}),
            line("attention.cudnn.one-32760", error="it broke"),
            line("attention.flex.packed-8k", figures={"d128 forward ms": 3000.0}),
            line("attention.flash.cross-32760", figures=both(128, 1.0, 2.0)),
            line("attention.flash3.one-32760", left_out="needs the package"),
            line("attention-right.flash", figures={"d128 forward ms": 3.0}),
        ]
    )
    assert found == AttentionTable(
        device="GPU",
        dtype="bfloat16",
        torch="2.13",
        cuda="13",
        rows=(
            TableRow(backend="flash", head_dim=64, lengths="one", length=32760, forward_s=9.0, backward_s=30.0),
            TableRow(backend="flash", head_dim=128, lengths="one", length=32760, forward_s=8.0, backward_s=20.0),
            TableRow(
                backend="flex",
                head_dim=128,
                lengths="unequal",
                length=mean_length((2304, 1536, 1536, 1024, 768, 576, 256)),
                forward_s=3.0,
            ),
        ),
    )


def test_a_table_is_of_the_newest_torch_alone() -> None:
    newer = replace(FACTS, torch="2.14")
    lines = [
        replace(line("attention.flash.one-32760", figures=both(128, 8000.0, 20000.0)), facts=newer, at="2026-02-01"),
        replace(line("attention.cudnn.one-32760", figures=both(128, 7000.0, 20000.0)), at="2026-01-01"),
    ]
    found = table_of(lines)
    assert found is not None and (found.torch, [row.backend for row in found.rows]) == ("2.14", ["flash"])


def test_results_without_attention_make_no_table(tmp_path: Path) -> None:
    write_table([line("ceilings", figures={"copy": 1.0})], tmp_path)
    assert not list(tmp_path.iterdir()) and table_of([]) is None


@pytest.mark.long
def test_what_a_rehearsal_writes_is_read_back_and_followed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.bench.gpu", "--rehearse", "--out", str(tmp_path), "--only", "attention."]
    done = subprocess.run(command, cwd=ROOT, env=few_packages(tmp_path), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = read_table(tmp_path / FILE)
    assert found == table_of(read_lines(tmp_path))
    assert found.device == "CPU" and found.backends == ("flex", "sdpa") and found.torch == torch.__version__
    assert {(row.head_dim, row.lengths) for row in found.rows} == {(16, "one"), (16, "equal"), (16, "unequal")}
    q, one = torch.zeros(24, 2, 16, dtype=torch.bfloat16), Lengths.of((24,))
    took = {row.backend: row.forward_s for row in found.rows if row.length == 24}
    assert choose(q, (one, one), table=found).name == min(took, key=lambda name: took[name])
    turned = replace(found, rows=tuple(slower(row, min(took, key=lambda name: took[name])) for row in found.rows))
    assert choose(q, (one, one), table=turned).name == max(took, key=lambda name: took[name])
    assert choose(q.requires_grad_(), (one, one), table=found).name == "sdpa"  # which alone has a backward there


def slower(row: TableRow, name: str) -> TableRow:
    return replace(row, forward_s=1e3 * row.forward_s) if row.backend == name else row


def written(folder: Path, of: AttentionTable = ON_CPU, change: Callable[[dict[str, Any]], object] | None = None) -> str:
    from ops.typed import as_plain

    plain = as_plain(of)
    if change:
        change(plain)
    path = folder / FILE
    path.write_text(json.dumps(plain))
    return str(path)


def load(folder: Path, *overrides: str) -> RunConfig:
    return RunConfig.load(DEMO, [f"run.dir={folder}", "run.name=one", *overrides])


def test_settings_of_a_run_hold_the_table_and_not_its_file(tmp_path: Path) -> None:
    """Other nodes lack the file, and later starts may find another one."""
    path = written(tmp_path)
    config = load(tmp_path, f"model.dit.attention={path}")
    Path(path).unlink()
    assert config.model.dit.attention == ON_CPU
    assert (
        RunConfig.from_yaml(config.to_yaml()) == config
    )  # as the controller gets them, and as a run's folder has them


def test_a_resume_with_another_table_says_so_and_goes_on(tmp_path: Path) -> None:
    before = load(tmp_path, f"model.dit.attention={written(tmp_path)}")
    folder = prepare_run_dir(before)
    (folder / "metrics.jsonl").write_text('{"step": 9}\n')
    assert check_resume(before) == []
    other = table(("sdpa", 64, 1.0), device="CPU", dtype="float32")
    after = load(tmp_path, f"model.dit.attention={written(tmp_path, other)}")
    assert [change.key for change in check_resume(after)] == ["model.dit.attention"]
    assert [change.key for change in check_resume(load(tmp_path))] == ["model.dit.attention"]
    assert kind_of("model.dit.attention.rows") == kind_of("model.dit.compile") == "schedule"


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown backend": (
        lambda table: table["rows"][0].update(backend="fast"),
        r"attention table .*attention\.json: rows\.0\.backend is 'fast'; expected one of flash3, flash, ",
    ),
    "no rows": (lambda table: table.update(rows=[]), "has no rows; run python -m app.bench.gpu --only attention"),
    "no device": (lambda table: table.pop("device"), "device is missing"),
    "a second row": (lambda table: table["rows"].append(table["rows"][0]), "stands twice in the table"),
    "no seconds": (lambda table: table["rows"][0].update(forward_s=0), "forward_s 0 of attention flex is not above 0"),
    "another key": (lambda table: table["rows"][0].update(forward=1), r"unknown key rows\.0\.forward"),
}


@pytest.mark.parametrize(("change", "sentence"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_file_that_is_no_table_is_refused_with_one_sentence(
    change: Callable[[dict[str, Any]], object], sentence: str, tmp_path: Path
) -> None:
    path = written(tmp_path, change=change)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(tmp_path, f"model.dit.attention={path}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_broken_or_absent_is_refused_with_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with pytest.raises(ConfigError, match=r"attention table .*attention\.json does not exist\."):
        load(tmp_path, f"model.dit.attention={path}")
    path.write_text('{"device": "CPU", ')
    with pytest.raises(ConfigError, match=r"^attention table .*attention\.json is not valid JSON: .* at line 1"):
        load(tmp_path, f"model.dit.attention={path}")
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"attention\.json: the config must be a mapping of settings, not \[\]"):
        load(tmp_path, f"model.dit.attention={path}")


def test_a_table_of_another_kind_of_device_is_refused_before_anything_starts(tmp_path: Path) -> None:
    gpu = written(tmp_path, replace(ON_CPU, device="NVIDIA H100"))
    with pytest.raises(ConfigError, match=r"is a table of NVIDIA H100, and workers\.device is cpu\."):
        load(tmp_path, f"model.dit.attention={gpu}", "workers.device=cpu")
    cpu = written(tmp_path)
    with pytest.raises(ConfigError, match=r"is a table of CPU, and workers\.device is cuda\."):
        load(tmp_path, f"model.dit.attention={cpu}", "workers.device=cuda")


def test_costs_that_were_measured_by_rules_are_not_those_by_a_table(tmp_path: Path) -> None:
    by_rules = load(tmp_path).model
    by_table = replace(by_rules, dit=replace(by_rules.dit, attention=ON_CPU))
    settings = [setting_of(model, "cpu", TrainConfig()) for model in (by_rules, by_table)]
    assert [one.attention for one in settings] == ["auto", "auto"]
    assert [one.backend for one in settings] == ["sdpa", "sdpa by a table"]
