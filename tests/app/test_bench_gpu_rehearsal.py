"""The whole of `python -m app.bench.gpu`, small, on the CPU, where only the packages that it names are installed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from app.bench.gpu.catalogue import catalogue, chosen
from app.bench.gpu.lines import Facts, ResultLine, read_lines
from app.bench.gpu.measurement import Place
from app.bench.gpu.runner import Budget, run_all
from app.bench.gpu.targets import TARGETS
from tests.few_packages import few_packages

ROOT = Path(__file__).parents[2]
PLACE = Place(device=torch.device("cpu"), rehearse=True)


def rehearse(out: Path, env: dict[str, str]) -> list[ResultLine]:
    command = [sys.executable, "-m", "app.bench.gpu", "--rehearse", "--minutes", "60", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return read_lines(out)


@pytest.mark.timeout(900)
def test_every_measurement_runs_with_few_packages(tmp_path: Path) -> None:
    lines = rehearse(tmp_path / "out", few_packages(tmp_path))
    assert [line.name for line in lines] == [one.name for one in catalogue(PLACE)]
    assert not [line for line in lines if line.error]
    for line in lines:
        assert line.left_out is None or "needs a CUDA device" in line.left_out or line.name.startswith("vae.")
        assert line.figures.get("right", True) is True, line
    measured = {line.name.split(".")[0] for line in lines if line.good}
    wanted = {
        "kernels",
        "attention-right",
        "dit-right",
        "ceilings",
        "step",
        "ops",
        "attention",
        "ipc",
        "copies",
        "update",
    }
    assert measured == wanted | {
        "counts",
        "graphs",
        "push",
        "slices",
        "longest",
        "worker",
        "launches",
        "together",
        "lora",
    }
    for line in (line for line in lines if line.name.startswith("launches.")):
        assert (line.figures["tried"], line.figures["failed"]) == (2, 0), "the interpreter runs every launch"
    for name in (line.name for line in lines if "right" in line.figures):
        assert any(target.deciding({name: {"right": False}}) for target in TARGETS), (
            f"no target asks whether {name} is right"
        )
    text = (tmp_path / "out" / "report.md").read_text()
    assert all(target.what in text for target in TARGETS) and "A rehearsal" in text
    drawn = {path.stem for path in (tmp_path / "out" / "timelines").iterdir()}
    assert drawn > {"copies", "worker.wan-1.3b", "step.wan-1.3b.as-trained"} and all(
        f"\n{name}:\n" in text for name in drawn
    )
    found = {line.name: line.figures for line in lines}
    assert {"bf16 output", "fp16 gradient", "table gradient from fp16"} < found["kernels.qk_norm_rope"].keys()
    noise = found["kernels.noise"]
    assert noise["numbers that differ"] == 0
    assert {"ms drawn on the device", "ms drawn on the host and sent"} < noise.keys()
    assert "packed d72 dk" in found["attention-right.sdpa"]
    compiled = found["step.wan-1.3b.compiled-blocks"]
    assert compiled["right"] is True and compiled["codes after the first"] == 0
    assert found["together"]["right"] is True and found["together"]["adds"] == "exactly"
    times = {"GB/s of a sum", "seconds of a cancel", "seconds until the device is free"}
    assert times < found["together"].keys(), "one of its processes died, and the others ended"
    measured_here = [one for one in catalogue(PLACE) if not one.name.startswith("vae.")]  # Diffusers may be installed
    again = run_all(measured_here, PLACE, tmp_path / "out", lines[0].facts, Budget(began=time.time(), seconds=60))
    assert again.lines == again.skipped == ()


@pytest.mark.timeout(300)
def test_the_autoencoder_is_measured_where_diffusers_is_installed(tmp_path: Path) -> None:
    facts = Facts(device="CPU", torch="2", triton="3", cuda=None, python="3", commit=None, command="", rehearsal=True)
    kinds = chosen(catalogue(PLACE), ["vae.bf16", "vae.tiled"])
    lines = run_all(kinds, PLACE, tmp_path, facts, Budget(began=time.time(), seconds=280)).lines
    assert len(lines) == 3 and all(line.good for line in lines)
    *whole, tiled = [float(line.figures["PSNR to fp32 dB"] or 0) for line in lines]
    assert min(whole) > 30 > tiled > 0, "tiles do not see what lies around them"
