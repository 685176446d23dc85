"""Launches of the fused kernels that `python -m app.bench.gpu` tries, and what it says of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.bench.gpu import launches
from app.bench.gpu.launches import ROWS, USES, KernelLaunches, around, launch_of_today, measurements, said
from app.bench.gpu.measurement import Place
from app.bench.gpu.ops_speed import WIDTHS
from app.bench.timing import Closure, Timing
from ops.kernels.base.tuning import Launch, configuration, rule

FILE = Path(__file__).parents[2] / "docs" / "gpu" / "h200-launches.jsonl"
CPU = torch.device("cpu")
PLACE = Place(device=CPU, rehearse=False)
KERNELS = ("forward", "backward", "gate_forward", "gate_backward", "qk_forward", "qk_backward")


@pytest.mark.parametrize("width", [1536, 2048, 3072, 5120])
@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_are_few_and_such_as_a_kernel_takes(kernel: str, width: int) -> None:
    pytest.importorskip("triton")
    for now in (launch_of_today(kernel, width, CPU), rule(kernel, width)):
        found = around(now, kernel, width)
        assert found[0] == now and 5 < len(found) == len(set(found)) < 50
        assert 5 < len({(one.chunk, one.warps, one.stages) for one in found}) <= 15, "each of these is compiled"
        for one in found:
            assert one.chunk & (one.chunk - 1) == one.warps & (one.warps - 1) == 0
            assert one.chunk * one.chunks(width) >= width and one.chunk >= (128 if kernel.startswith("qk") else 64)
            assert 1 <= one.warps <= 16 and 1 <= one.stages <= 4 and one.per_sm >= 1
            if kernel.endswith("forward"):
                assert (one.stages, one.per_sm) == (now.stages, now.per_sm), "a forward has neither"


def test_the_rows_of_an_h200_are_found_around_those_before_them() -> None:
    measured: dict[tuple[str, int], dict[str, Launch]] = defaultdict(dict)
    for line in map(json.loads, FILE.read_text(encoding="utf-8").splitlines()):
        if line["kernel"] != "copy":
            launch = Launch(**{name: line[name] for name in ("chunk", "warps", "stages", "per_sm")})
            measured[line["kernel"], line["width"]][line["what"]] = launch
    assert set(measured) == {(use, width) for use in USES for width in WIDTHS}
    both = {use: found for use, found in measured.items() if "before" in found}
    assert len(both) == 14
    for (use, width), found in both.items():
        assert found["now"] in around(found["before"], USES[use][0], width)


def test_a_launch_is_said_as_its_row_is_written() -> None:
    one = Launch(chunk=1024, warps=4, stages=4)
    assert said(one, "qk_backward", 5120) == "1024 x 5, 4 warps, 4 stages, 1 per SM"
    assert said(Launch(chunk=512, warps=1), "forward", 1280) == "512 x 3, 1 warp"


def test_the_launch_of_today_and_the_best_are_told_and_failures_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    now = launch_of_today("qk_backward", 5120, CPU)
    best, nearly = replace(now, warps=2 * now.warps), replace(now, per_sm=2 * now.per_sm)
    seconds = {now: 520e-6, best: 500e-6, nearly: 504e-6}
    timed: list[Launch] = []

    def measure(make: Callable[[int], Closure], bytes_per_call: int, device: torch.device, repeats: int) -> Timing:
        assert bytes_per_call == 6 * 2 * ROWS * 5120
        timed.append(launch := configuration({}, "qk_backward", 5120))
        if launch.stages == 2:
            raise errors.OutOfResources(300, 227, "shared memory")
        if launch.chunk == 512:
            raise RuntimeError("PassManager::run failed")
        return Timing(seconds=seconds.get(launch, 600e-6), spread=0)

    monkeypatch.setattr(launches, "measure", measure)
    monkeypatch.setattr(launches, "copy_of", lambda *_: Timing(seconds=450e-6, spread=0))
    found = KernelLaunches(use="qk_backward", width=5120).run(PLACE, {})
    candidates = around(now, "qk_backward", 5120)
    assert timed == [*candidates, now, best], "those two once more"
    assert found == {
        "now is": said(now, "qk_backward", 5120),
        "now us": pytest.approx(520),
        "now of such a copy": pytest.approx(450 / 520),
        "best is": said(best, "qk_backward", 5120),
        "best us": pytest.approx(500),
        "best of such a copy": pytest.approx(0.9),
        "gain": pytest.approx(1.04),
        "as good": said(nearly, "qk_backward", 5120),
        "tried": len(candidates),
        "failed": sum(one.stages == 2 or one.chunk == 512 for one in candidates),
    }
    assert configuration({}, "qk_backward", 5120) == rule("qk_backward", 5120)


def test_a_launch_of_today_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def measure(*_: object) -> Timing:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(launches, "measure", measure)
    with pytest.raises(torch.OutOfMemoryError):
        KernelLaunches(use="forward", width=5120).run(PLACE, {})


def test_every_kernel_has_a_name_at_every_width() -> None:
    names = [one.name for one in measurements()]
    assert set(names) >= {f"launches.{kernel}.d{width}" for kernel in KERNELS for width in (1536, 3072, 5120)}
    assert len(names) == 24 and "launches.gate_backward-alone.d5120" in names
    assert sum(one.estimate_s for one in measurements()) <= 8 * 60, "one call of the usual nine minutes has them all"
