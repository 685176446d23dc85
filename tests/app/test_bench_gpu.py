"""`python -m app.bench.gpu`: lines, budget, resuming, targets, and the arithmetic of its measurements."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from app.bench import timing
from app.bench.gpu import counting, ops_speed, runner
from app.bench.gpu.__main__ import _without, main
from app.bench.gpu.attention_right import softmax_attention
from app.bench.gpu.catalogue import catalogue, chosen
from app.bench.gpu.ceilings import times_slower
from app.bench.gpu.counting import STAND_IN, DispatchCounter, as_on_a_gpu, counted_step
from app.bench.gpu.idle import use_of
from app.bench.gpu.lines import FILE, Facts, ResultLine, append_line, read_lines
from app.bench.gpu.measurement import Earlier, NamedFigures, Place
from app.bench.gpu.memory import blocks_that_fit, step_bytes
from app.bench.gpu.models import CLIP_480P81, HUNYUAN_13B, WAN_1_3B, WAN_14B, PackedCall, build, small
from app.bench.gpu.report import report
from app.bench.gpu.runner import Budget, OtherDevice, Round, TooLittleTime, run_all
from app.bench.gpu.supervise import supervised
from app.bench.gpu.targets import TARGETS, judged
from app.bench.gpu.timeline import StreamWork, timeline
from app.bench.gpu.train_step import AS_TRAINED, step_config, step_flops
from app.bench.gpu.vae_speed import psnr
from app.bench.timing import Closure, Timing
from ops.attention.lengths import Lengths
from ops.attention.varlen import attention
from ops.comm.collectives import Group
from ops.flow.train_pass import packed_loss
from ops.models.base.config import DiTConfig
from ops.models.load import dit_skeleton
from ops.packed.uploads import upload
from ops.upload_room import BLOCK

ROOT = Path(__file__).parents[2]
PLACE = Place(device=torch.device("cpu"), rehearse=False)
FACTS = Facts(
    device="GPU", torch="2", triton="3", cuda="13", python="3", commit="abc", command="bench", rehearsal=False
)


class Mute:
    """A measurement whose library cannot even say whether it can run."""

    name, estimate_s = "mute", 1.0

    def why_not(self, place: Place) -> str | None:
        raise ImportError("no such symbol")

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        raise AssertionError("it was not asked to run")


@dataclass(frozen=True, kw_only=True)
class Fake:
    """A measurement that answers, fails or cannot run here."""

    name: str
    estimate_s: float = 1.0
    error: Exception | None = None
    reason: str | None = None

    def why_not(self, place: Place) -> str | None:
        return self.reason

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        if self.error:
            raise self.error
        return {"value": float(len(earlier))}


def budget(seconds: float) -> Budget:
    return Budget(began=time.time(), seconds=seconds)


def run(fakes: Sequence[Fake], folder: Path, seconds: float = 600.0, retry: bool = False) -> Round:
    return run_all(fakes, PLACE, folder, FACTS, budget(seconds), lambda text: None, retry)


OOM = torch.OutOfMemoryError("CUDA out of memory")


def test_a_failure_is_a_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    run([Fake(name="a"), Fake(name="b", error=OOM), Fake(name="c", reason="No such thing."), Fake(name="d")], tmp_path)
    a, b, c, d = read_lines(tmp_path)
    assert a.good and d.figures == {"value": 1.0}, "d gets the result of a, the only one that succeeded before it"
    assert b.error is not None and "OutOfMemoryError: CUDA out of memory" in b.error and not b.good
    assert c.left_out == "No such thing."
    text = (tmp_path / runner.REPORT).read_text()
    assert "- b: OutOfMemoryError" in text and "- c: No such thing." in text


def test_a_library_that_does_not_answer_is_a_failure_of_that_line(tmp_path: Path) -> None:
    run_all([Mute(), Fake(name="a")], PLACE, tmp_path, FACTS, budget(60), lambda text: None)
    mute, a = read_lines(tmp_path)
    assert mute.error is not None and "ImportError: no such symbol" in mute.error and a.good


def test_a_second_call_measures_only_what_is_missing(tmp_path: Path) -> None:
    run([Fake(name="a"), Fake(name="b", error=OOM)], tmp_path)
    again = [Fake(name="a", error=ValueError("measured twice")), Fake(name="b"), Fake(name="c")]
    assert [line.name for line in run(again, tmp_path).lines] == ["c"]
    assert [line.name for line in run(again, tmp_path, retry=True).lines] == ["b"]
    assert [line.good for line in read_lines(tmp_path)] == [True, True, True], "the last line of a name counts"


def test_what_was_left_out_is_measured_once_it_can_be(tmp_path: Path) -> None:
    run([Fake(name="a"), Fake(name="b", reason="No package.")], tmp_path)
    written = (tmp_path / FILE).read_text()
    assert run([Fake(name="a"), Fake(name="b", reason="No package.")], tmp_path).lines == ()
    assert (tmp_path / FILE).read_text() == written, "the same reason stands there already"
    assert [line.left_out for line in run([Fake(name="b", reason="No memory.")], tmp_path).lines] == ["No memory."]
    assert [line.good for line in run([Fake(name="a"), Fake(name="b")], tmp_path).lines] == [True]
    assert [line.good for line in read_lines(tmp_path)] == [True, True]


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    run([Fake(name="a"), Fake(name="b")], tmp_path)
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-30])
    assert [line.name for line in run([Fake(name="a"), Fake(name="b")], tmp_path).lines] == ["b"]
    assert [line.name for line in read_lines(tmp_path)] == ["a", "b"]


@pytest.mark.long
def test_what_a_process_died_of_is_a_failure_and_not_run_again(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from tests.app import test_bench_gpu as t
class Deadly(t.Fake):
    def run(self, place, earlier):
        os._exit(9)
t.run([t.Fake(name="a"), Deadly(name="b"), t.Fake(name="c")], pathlib.Path({str(tmp_path)!r}))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 9
    done = run([Fake(name="a"), Fake(name="b"), Fake(name="c")], tmp_path)
    assert [line.name for line in done.lines] == ["c"]
    (error,) = [line.error for line in read_lines(tmp_path) if line.name == "b"]
    assert error is not None and "--retry" in error
    assert [line.name for line in run([Fake(name="b")], tmp_path, retry=True).lines] == ["b"]


def test_what_does_not_fit_is_skipped_by_name_and_what_fits_still_runs(tmp_path: Path) -> None:
    done = run([Fake(name="long", estimate_s=500), Fake(name="short")], tmp_path, seconds=100)
    assert [line.name for line in done.lines] == ["short"] and done.skipped == ("long",)
    assert "## No time for\n\n- long" in (tmp_path / runner.REPORT).read_text()


def test_a_device_that_is_slower_than_an_h200_is_given_more_time_for_each(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Slow(Fake):
        def run(self, place: Place, earlier: Earlier) -> NamedFigures:
            return {"copy GB/s": 1050.0, "bf16 matmul TFLOP/s": 250.0}

    done = run([Fake(name="long", estimate_s=30), Slow(name="ceilings"), Fake(name="a", estimate_s=30)], tmp_path, 100)
    assert [line.name for line in done.lines] == ["long", "ceilings"] and done.skipped == ("a",), "4 times 30 seconds"
    assert times_slower({}) == times_slower({"ceilings": {"copy GB/s": 5000.0, "bf16 matmul TFLOP/s": 900.0}}) == 1
    assert times_slower({"ceilings": {"copy GB/s": 4200.0, "bf16 matmul TFLOP/s": 250.0}}) == 3


def test_a_budget_for_not_one_result_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    fakes = [Fake(name="long", estimate_s=500), Fake(name="short", estimate_s=120), Fake(name="out", reason="No.")]
    with pytest.raises(
        TooLittleTime, match=r"--minutes 0.1 is too little for one result: .* shortest .*, short, needs"
    ):
        run(fakes, tmp_path, seconds=6)


def test_results_of_two_devices_do_not_mix(tmp_path: Path) -> None:
    run([Fake(name="a")], tmp_path)
    for facts in (replace(FACTS, device="other"), replace(FACTS, rehearsal=True)):
        with pytest.raises(OtherDevice, match=r"Give another --out\."):
            run_all([Fake(name="b")], PLACE, tmp_path, facts, budget(60), lambda text: None)


def test_results_of_another_torch_are_measured_again_and_told_until_then(tmp_path: Path) -> None:
    run([Fake(name="a"), Fake(name="b")], tmp_path)
    newer = replace(FACTS, torch="2.14", command="again")
    fakes = [Fake(name="a"), Fake(name="b", estimate_s=500)]
    done = run_all(fakes, PLACE, tmp_path, newer, budget(60), lambda text: None)
    assert [line.name for line in done.lines] == ["a"] and done.skipped == ("b",)
    text = (tmp_path / runner.REPORT).read_text()
    assert "\ntorch 2.14, triton 3, CUDA 13, Python 3; commit abc; `again`; " in text
    assert "\nStill by torch 2, triton 3, CUDA 13: b.\n" in text
    run_all([Fake(name="b")], PLACE, tmp_path, newer, budget(60), lambda text: None)
    assert "Still by" not in (tmp_path / runner.REPORT).read_text()


def test_a_dead_device_ends_the_process_s_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_answers", lambda place: False)
    done = run([Fake(name="a"), Fake(name="b", error=OOM), Fake(name="c")], tmp_path)
    assert done.dead and [line.name for line in done.lines] == ["a", "b"]


def test_what_is_retried_when_the_device_dies_is_retried_by_the_fresh_process(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    run([Fake(name=name, error=OOM) for name in names], tmp_path)
    one_call = budget(600)
    time.sleep(0.002)  # lines have milliseconds
    fakes = [Fake(name="a", error=OOM), Fake(name="b"), Fake(name="c")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_answers", lambda place: False)
        done = run_all(fakes, PLACE, tmp_path, FACTS, one_call, lambda text: None, retry=True)
    assert done.dead and [line.name for line in done.lines] == ["a"]
    done = run_all(fakes, PLACE, tmp_path, FACTS, one_call, lambda text: None, retry=True)
    assert [line.name for line in done.lines] == ["b", "c"], "a has failed in this call already"


def inner(folder: Path, fakes: str, more: str = "") -> list[str]:
    """A call of the process that measures these, on a CPU that it takes for the device."""
    code = f"""
import os, signal, sys, time, torch
from app.bench.gpu import __main__ as command, catalogue, measurement, runner
from tests.app.test_bench_gpu import FACTS, Doing, Fake
torch.cuda.is_available = lambda: True
command._facts = lambda rehearsal, arguments: FACTS
catalogue.catalogue = lambda place: [{fakes}]
real = measurement.Place
measurement.Place = lambda device, rehearse: real(device=torch.device("cpu"), rehearse=False)
{more}
sys.exit(command.main(["--inner", "--began", str(time.time()), "--out", {str(folder)!r}]))
"""
    return [sys.executable, "-c", code]


@dataclass(frozen=True, kw_only=True)
class Doing(Fake):
    """A measurement that does something to its process, the first time it runs."""

    do: Callable[[], object] = lambda: None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        self.do()
        return super().run(place, earlier)


@pytest.mark.long
def test_after_what_has_no_end_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said: list[str] = []
    fakes = 'Doing(name="hangs", do=lambda: time.sleep(3600), estimate_s=3), Fake(name="d", estimate_s=100)'
    code = supervised(inner(tmp_path, fakes, "runner._TIMES_EXPECTED, runner._AND_S = 1.0, 0.0"), said.append)
    assert code == 0 and said == ["the process that measures has asked for another; a fresh one goes on."]
    hangs, d = read_lines(tmp_path)
    assert (hangs.error or "").startswith("no end after 3 s, in ") and d.good


def under_supervision(code: str, made: Path) -> subprocess.Popen[bytes]:
    """A process that runs this code in one of its own, once that has made a file. Ctrl-C stops it wherever the tests
    run: a shell has what it starts in the background ignore it."""
    above = f"""
import signal, sys
from app.bench.gpu.supervise import supervised
signal.signal(signal.SIGINT, signal.default_int_handler)
supervised([sys.executable, "-c", {code!r}], print)
"""
    command = [sys.executable, "-c", above]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not made.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("number", "whole"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)],
    ids=["as a terminal does", "the one above", "as a scheduler does"],
)
def test_what_a_person_stops_is_no_failure(tmp_path: Path, number: signal.Signals, whole: bool) -> None:
    """Also where the process that measures sees it late: here in a call that holds the interpreter."""
    busy = f"""
import pathlib, sys, time
from app.bench.gpu import __main__ as command
mark = pathlib.Path({str(tmp_path)!r}, "mark")
def measure(options, arguments):
    try:
        mark.touch()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sum(range(30_000_000))
    finally:
        time.sleep(0.5)
        mark.unlink()
command._run = measure
sys.exit(command.main(["--inner"]))
"""
    process = under_supervision(busy, tmp_path / "mark")
    os.killpg(process.pid, number) if whole else process.send_signal(number)
    assert process.wait(60) != 0 and not (tmp_path / "mark").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_it_twice_frees_the_device_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """The one that measures waits for a device and heeds nothing."""
    deaf = f"""
import os, pathlib, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path({str(tmp_path)!r}, "pid.new").write_text(str(os.getpid()))
os.replace({str(tmp_path / "pid.new")!r}, {str(tmp_path / "pid")!r})
time.sleep(600)
"""
    process = under_supervision(deaf, tmp_path / "pid")
    child = int((tmp_path / "pid").read_text())
    process.send_signal(number)
    time.sleep(1.0)
    assert process.poll() is None, "it waits for the process that measures"
    process.send_signal(number)
    assert process.wait(20) != 0
    until = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "it still has the device"
        time.sleep(0.01)


def test_processes_that_die_are_followed_by_others_until_they_are_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    assert supervised([sys.executable, "-c", "raise SystemExit(75)"], said.append) == 1
    assert len(said) == 7 and said[-1].startswith("6 processes have ended so")
    assert supervised([sys.executable, "-c", "raise SystemExit(2)"], said.append) == 2 and len(said) == 7
    once = f"""
import os, pathlib, signal
mark = pathlib.Path({str(tmp_path)!r}, "mark")
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    assert supervised([sys.executable, "-c", once], said.append) == 0
    assert said[7:] == ["the process that measures was ended by SIGSEGV; a fresh one goes on."]


def test_a_line_has_the_call_that_a_person_made() -> None:
    assert _without(["--minutes", "1", "--only", "step.", "--inner", "--began", "1"]) == [
        "--minutes",
        "1",
        "--only",
        "step.",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rehearse", "--minutes", "0"], "--minutes 0 is too little for one result"),
        (
            ["--rehearse", "--only", "nothing"],
            "--only nothing fits no measurement; their names begin with ceilings, ",
        ),
        (["--rehearse", "--minutes", "nan"], "--minutes nan is no time"),
        ([], "there is no CUDA device here. Run it with --rehearse"),
    ],
    ids=["no time", "no such name", "no number", "no device"],
)
def test_a_call_that_cannot_be_answered_is_one_sentence_and_code_2(
    options: list[str],
    sentence: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    if not options and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS"):  # which a rehearsal sets
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    assert main([*options, "--out", str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err
    assert said.startswith(sentence) and said.count("\n") == 1, said


def test_a_process_that_cannot_answer_its_call_ends_with_one_sentence_and_code_2() -> None:
    command = [sys.executable, "-m", "app.bench.gpu", "--rehearse", "--minutes", "nan"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2 and done.stderr.startswith("--minutes nan is no time"), done.stderr
    assert done.stderr.count("\n") == 1


def test_the_list_names_every_measurement_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = [line.split(" s  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert listed == [one.name for one in catalogue(PLACE)] and len(listed) > 60
    assert listed[0] == "ceilings" and listed[1].startswith("kernels.")
    assert {name.split(".")[0] for name in listed} >= {"ceilings", "step", "attention", "ops", "ipc", "copies", "vae"}


def test_only_takes_beginnings_of_names() -> None:
    assert {one.name.split(".")[0] for one in chosen(catalogue(PLACE), ["ipc", "step."])} == {"ipc", "step"}


def test_what_is_asked_for_first_runs_first_and_nothing_twice() -> None:
    listed = catalogue(PLACE)
    names = [one.name for one in listed]
    found = [one.name for one in chosen(listed, ["worker", "kernels", "worker.", "step.wan-1.3b"])]
    own = [[name for name in names if name.startswith(prefix)] for prefix in ("worker", "kernels", "step.wan-1.3b")]
    assert all(own) and found == [*own[0], *own[1], *own[2]], "those of one beginning in the order of all"
    assert names.index(own[0][0]) > names.index(own[1][0])


def test_an_op_is_held_against_a_copy_of_its_own_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def copy_of(num_bytes: int, device: torch.device, repeats: int) -> Timing:
        copied.append(num_bytes)
        return Timing(seconds=0.5, spread=0)

    monkeypatch.setattr(ops_speed, "copy_of", copy_of)
    measurement = ops_speed.OpsSpeed(op="gate_residual_ln_modulate", width=1536, tokens=8192)
    found = measurement.run(replace(PLACE, rehearse=True), {})
    values = 2 * ops_speed.SMALL_WIDTH * ops_speed.SMALL_TOKENS
    assert copied == [4 * values, 6 * values], "once for each direction, not for each layout"
    for key in ("B=1/forward", "packed/backward"):
        assert found[f"{key}/fused of such a copy"] == pytest.approx(500 / float(found[f"{key}/fused ms"] or 0))
        assert found[f"{key}/fused of copy"] is None, "the ceiling was not measured"


def test_a_copy_moves_as_many_bytes_as_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(make: Callable[[int], Closure], bytes_per_call: int, device: torch.device, repeats: int) -> Timing:
        target = make(0)()
        assert isinstance(target, torch.Tensor)
        assert 2 * target.nbytes == bytes_per_call == 4096
        return Timing(seconds=1, spread=0)

    monkeypatch.setattr(timing, "measure", measure)
    assert timing.copy_of(4096, PLACE.device, 1).seconds == 1


def line(name: str, **figures: float | bool) -> ResultLine:
    return ResultLine(name=name, facts=FACTS, at="2026-01-01T00:00:00+00:00", seconds=1.0, figures=figures)


def test_targets_are_met_missed_or_open_by_the_worst_figure() -> None:
    of_copy = "packed/forward/fused of copy"
    lines = [
        line("ops.gate.d1536.n32768", **{of_copy: 0.95}),
        line("ops.norm.d1536.n32768", **{of_copy: 0.90}),
        line("ops.norm.d1536.n8192", **{of_copy: 0.10}),  # no share is promised for short packs
        line("step.wan-1.3b.as-trained", **{"MFU": 0.40, "idle share": 0.01}),
        line("step.wan-1.3b.compiled-blocks", **{"MFU": 0.47, "idle share": 0.5}),
        line("kernels.gate_residual", right=True),
    ]
    share, idle, open_one = (verdict(lines, what) for what in ("fused ops forward, share", "idle share", "14B block"))
    assert share == ("90%", "**no**", "ops.norm.d1536.n32768, packed/forward/fused of copy")
    assert idle == ("1.0%", "yes", "step.wan-1.3b.as-trained, idle share"), "only as it is trained"
    assert open_one == ("-", "open", "")
    assert verdict(lines, "Wan2.1-1.3B step") == ("47%", "yes", "step.wan-1.3b.compiled-blocks, MFU"), (
        "the best setting"
    )
    of_all = f" of {len(chosen(catalogue(PLACE), ['kernels.']))}"
    assert verdict(lines, "all kernels") == ("1", "open", f"kernels.gate_residual, right; 1{of_all}")
    broken = replace(line("kernels.noise"), error="illegal memory access")
    answer = ("0", "**no**", f"kernels.noise, right; 2{of_all}")
    assert verdict([*lines, broken], "all kernels") == answer, "a failure is not right"
    assert len(judged(lines)) == len(TARGETS)
    text = report(lines, ["step.x"])
    assert "commit abc" in text and "`bench`" in text and "## No time for" in text


def test_a_target_of_all_is_met_by_all_that_this_device_can_measure() -> None:
    *those, last = [one.name for one in chosen(catalogue(PLACE), ["attention-right."])]
    lines = [line(name, right=True) for name in those]
    assert verdict(lines, "all attention")[1:] == ("open", f"{those[0]}, right; {len(those)} of {len(those) + 1}")
    lines.append(replace(line(last), left_out="needs the package"))
    assert verdict(lines, "all attention")[1:] == ("yes", f"{those[0]}, right; {len(those)} of {len(those) + 1}")


def verdict(lines: list[ResultLine], what: str) -> tuple[str, str, str]:
    """Measured, met and by of the row of the report that begins so."""
    (row,) = [row for row in report(lines, []).splitlines() if row.startswith(f"| {what}")]
    _, _, _, measured, met, by, _ = (part.strip() for part in row.split("|"))
    return measured, met, by


def test_a_line_survives_the_file_also_with_numbers_that_json_lacks(tmp_path: Path) -> None:
    append_line(tmp_path, line("a", value=float("inf"), right=True))
    (found,) = read_lines(tmp_path)
    assert found.figures == {"value": "inf", "right": True} and found.facts == FACTS


def test_idle_is_what_no_interval_covers() -> None:
    use = use_of([(0, 10), (5, 8), (20, 30), (30, 40)], copies=1)
    assert use.idle_share == pytest.approx(0.25) and use.longest_gap_s == pytest.approx(10e-9)
    assert (use.kernels, use.copies) == (3, 1) and use_of([]).idle_share == 1.0


def test_a_timeline_says_what_a_stream_did_beside_the_others(tmp_path: Path) -> None:
    def event(name: str, stream: int, begin: int, end: int) -> StreamWork:
        return StreamWork(name=name, stream=stream, begin_ns=6000 + begin, end_ns=6000 + end)

    events = [event("gemm", 7, 0, 3000), event("gemm", 7, 4000, 6000), event("Memcpy DtoH", 20, 2000, 4000)]
    place = replace(PLACE, folder=tmp_path)
    compute, copy = timeline(events, "copies", place).values()
    assert compute == (
        f"[{'#' * 30}{'.' * 10}{'#' * 20}] stream 7:  83.3% busy,  20% of it beside others, 2 kernels and copies, most "
        "time in gemm"
    )
    assert str(copy).startswith(f"[{'.' * 20}{'#' * 20}{'.' * 20}] stream 20:  33.3% busy,  50% of it beside others")
    (shown,) = [
        one for one in json.loads((tmp_path / "timelines/copies.json").read_text())["traceEvents"] if one["tid"] == 20
    ]
    assert (shown["name"], shown["ph"], shown["ts"], shown["dur"]) == ("Memcpy DtoH", "X", 2.0, 2.0)
    text = report([replace(line("copies"), figures={"right": True, **timeline(events, "copies", place)})], [])
    assert "## Timelines\n" in text and f"copies:\n\n```\n{compute}\n{copy}\n```\n" in text
    assert "| timeline" not in text and timeline([], "nothing", place) == {}


@pytest.mark.parametrize(
    "config",
    [WAN_1_3B, *(pytest.param(one, marks=pytest.mark.long) for one in (WAN_14B, HUNYUAN_13B))],
    ids=lambda config: f"{config.dim} wide",
)
def test_flops_of_a_step_are_those_of_its_products(config) -> None:
    """PyTorch counts every product of a traced call; a backward of attention computes its scores again, which is no
    work of the model."""
    import torch.nn.attention.varlen  # noqa: F401 (registers the count of its op)
    from torch.utils.flop_counter import FlopCounterMode

    with as_on_a_gpu():
        dit = build(config, STAND_IN)
        call = PackedCall.of(config, [CLIP_480P81], STAND_IN)
        with FlopCounterMode(display=False) as counter:
            out = dit(call.tokens, call.timesteps, call.text, call.layout, Group.solo())
            packed_loss(out.float(), call.target, call.layout, call.weights).backward()
    rows = CLIP_480P81.tokens + (CLIP_480P81.text_tokens if config is HUNYUAN_13B else 0)
    again = 2.0 * sum(config.block_counts) * config.dim * rows**2
    share = step_flops(config, [CLIP_480P81], recompute=False) / (counter.get_total_flops() - again)
    assert 0.985 < share < 1.0005  # modulation, embeddings and the refiner of the text are left out
    assert step_flops(config, [CLIP_480P81], recompute=True) == pytest.approx(
        step_flops(config, [CLIP_480P81], recompute=False) * 4 / 3
    )


def test_blocks_fit_as_long_as_their_step_does() -> None:
    model = replace(WAN_14B, gradient_checkpointing=True)
    clips = [CLIP_480P81]
    blocks = blocks_that_fit(model, clips, 120e9)
    assert 5 < blocks < 40

    def needed(count: int) -> float:
        return step_bytes(replace(model, num_layers=count), clips)

    assert needed(blocks) <= 120e9 < needed(blocks + 1)
    weights = [sum(w.numel() for w in dit_skeleton(replace(model, num_layers=n)).parameters()) for n in (6, 7)]
    states = 22 * (weights[1] - weights[0])  # bf16, and in fp32 gradient, master copy, two moments, EMA
    assert needed(7) - needed(6) == pytest.approx(states + 2 * 5120 * CLIP_480P81.tokens, rel=1e-3)
    assert blocks_that_fit(model, clips, 1e13) == 40 and blocks_that_fit(model, clips, 0) == 0


@pytest.mark.parametrize(
    ("gib", "blocks"),
    [pytest.param(139, (30, 13), id="H200", marks=pytest.mark.long), pytest.param(79, (30, 7), id="H100")],
)
def test_a_model_gets_the_blocks_that_the_device_holds(
    gib: int, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib * 2**30, gib * 2**30))
    place = Place(device=torch.device("cuda", 0), rehearse=False)
    assert tuple(step_config(model, AS_TRAINED, place).num_layers for model in (WAN_1_3B, WAN_14B)) == blocks
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 2**30, 8 * 2**30))
    with pytest.raises(RuntimeError, match="not one block fits: 7 GiB are free"):
        step_config(WAN_14B, AS_TRAINED, place)


def test_what_needs_all_of_a_model_is_left_out_where_it_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(device=torch.device("cuda", 0), rehearse=False)
    for gib, lacks in ((23.5, True), (39.4, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, gib=gib: (gib * 2**30, gib * 2**30))
        told = [one.why_not(place) for one in chosen(catalogue(place), ["graphs.", "worker."])]
        assert [reason is not None for reason in told] == [lacks] * len(told) and len(told) > 5


def test_moves_and_reads_are_counted_and_views_are_not() -> None:
    host = torch.ones(4, 2)
    with DispatchCounter() as counter:
        there = host.to(STAND_IN)
        doubled = (there * 2).view(8)
        assert doubled.sum().item() == 1
        doubled.cpu()
        host + 1  # on the host: nothing that a device sees
        torch.empty(8, device=STAND_IN)  # memory alone
    assert (counter.uploads, counter.uploaded_bytes, counter.downloads, counter.waits) == (1, 32, 1, 3)
    assert counter.kernels == 3  # upload, product, sum


def test_an_upload_waits_unless_it_is_pinned_and_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = torch.ones(4)
    monkeypatch.setattr(counting, "is_pinned", lambda source: source is pinned)
    there = torch.empty(4, device=STAND_IN)
    for copy, waits in (
        (lambda: pinned.to(STAND_IN, non_blocking=True), 0),
        (lambda: there.copy_(pinned, non_blocking=True), 0),
        (lambda: pinned.to(STAND_IN), 1),
        (lambda: torch.ones(4).to(STAND_IN, non_blocking=True), 1),
        (lambda: there.copy_(torch.ones(4)), 1),
        (lambda: torch.tensor([1.0, 2.0], device=STAND_IN), 1),
        (lambda: there[torch.tensor([0, 3])], 1),
    ):
        with DispatchCounter() as counter:
            copy()
        assert (counter.uploads, counter.waits) == (1, waits)
    with DispatchCounter() as counter:
        there * torch.tensor(2.0)  # one number of the host goes with the launch
        there.fill_(2.0)
        assert torch.tensor([3.0, 4.0], device=STAND_IN).tolist() == [1.0, 1.0]
    assert (counter.uploads, counter.downloads, counter.waits) == (1, 1, 2)


def test_a_large_upload_waits_when_all_memory_for_such_is_under_way() -> None:
    large = torch.ones(4 * BLOCK, dtype=torch.uint8)
    with as_on_a_gpu(), DispatchCounter() as counter:
        for copies, waits in ((4, 0), (8, 4), (12, 8)):  # through four blocks
            upload([large], STAND_IN)
            assert (counter.uploads, counter.waits) == (copies, waits)


@pytest.mark.parametrize("model", [WAN_1_3B, HUNYUAN_13B], ids=lambda config: config.architecture)
def test_the_end_of_a_step_uploads_once_and_waits_for_its_cascades_losses_and_sums(model: DiTConfig) -> None:
    one, two = (counted_step(small(model, layers)) for layers in (1, 2))
    assert one.cascade.kernels < two.cascade.kernels and two.finish.kernels > 0
    cascades, losses, sums = 1, 1, 1
    for counts in (one.finish, two.finish):
        assert (counts.uploads, counts.downloads) == (1, losses + sums)
        assert counts.waits == cascades + losses + sums


def test_the_reference_of_attention_is_attention() -> None:
    q_lengths, k_lengths = (5, 1, 4), (2, 7, 3)
    q, k, v = (torch.randn(sum(n), 2, 8, dtype=torch.float64) for n in (q_lengths, k_lengths, k_lengths))
    actual = attention(q, k, v, Lengths.of(q_lengths), Lengths.of(k_lengths))
    torch.testing.assert_close(softmax_attention(q, k, v, q_lengths, k_lengths), actual)


def test_psnr_is_of_the_range_of_what_was_expected() -> None:
    expected = torch.tensor([0.0, 10.0])
    assert psnr(expected + 0.1, expected) == pytest.approx(40.0)
    assert psnr(expected, expected) == float("inf")
