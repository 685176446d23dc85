"""metrics.jsonl holds every step once; TensorBoard and the progress line follow it."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.records.metrics_line import StepMetrics, metrics_of
from app.inputs.checkpoints import most_steps, steps_begun
from app.records.follow import Tail
from app.records.metrics import PER_WORKER, Metrics, newest_line, scalars
from app.records.progress import ProgressLine, clock, figures
from app.records.trackers import TensorBoardTracker
from app.settings.config import RunConfig


def written(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def line(step: int, **figures_: Any) -> StepMetrics:
    """A step of which nothing else is known."""
    return metrics_of({"step": step, "time": 100.0 + step, **figures_})


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in written(folder)]


def write(folder: Path, *numbers: int, **figures_: float) -> None:
    with Metrics(folder, track=()) as metrics:
        for number in numbers:
            metrics.step(line(number, **figures_))


def test_steps_are_lines_with_a_time(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, loss=0.5)
    assert steps(tmp_path) == [0, 1]
    assert all(line["loss"] == 0.5 and line["time"] > 0 for line in written(tmp_path))


def test_a_resumed_run_replaces_the_steps_it_computes_again(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2, 3, 4, loss=1.0)
    write(tmp_path, 3, 4, 5, loss=2.0)
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert [line["loss"] for line in written(tmp_path)] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert [line["step"] for line in written(tmp_path) if line.get("recomputed")] == [3, 4]


def test_a_gap_before_the_step_at_which_a_run_goes_on_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 0, 1, 2)
    assert not caplog.records
    write(tmp_path, 6, 7)  # from a checkpoint that outlasted a power cut
    assert [record.message for record in caplog.records if "no lines of steps 3 to 5" in record.message]
    assert len(caplog.records) == 1


def test_a_recovery_inside_a_run_marks_its_recomputed_steps(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2, 1, 2, 3)
    assert [(line["step"], line.get("recomputed", False)) for line in written(tmp_path)] == [
        (0, False),
        (1, True),
        (2, True),
        (3, False),
    ]


def test_the_most_steps_that_a_run_has_had_outlast_a_recovery(tmp_path: Path) -> None:
    """One that starts from a picture, and whose pictures end at step 950, is resumed though it is before that again."""
    config = RunConfig.from_yaml(f"run: {{name: one, dir: {tmp_path}}}")
    folder = tmp_path / "one"
    write(folder, *range(941), *range(930, 945))
    assert steps_begun(config) == 945 and most_steps(config) == 945
    write(folder, *range(945, 961), *range(900, 930))  # within one start
    write(folder, *range(920, 945))
    assert steps_begun(config) == 945 and most_steps(config) == 961


def test_the_newest_line_is_the_last_whole_one(tmp_path: Path) -> None:
    """By which a controller sees that a step counted whose keepers had not heard of it when the one before died."""
    with Metrics(tmp_path, track=()) as first:
        assert newest_line(tmp_path) is None
        first.step(line(0, generation=1))
        first.step(line(1, generation=2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "gene')
    assert newest_line(tmp_path) == (1, 2)


def test_a_torn_last_line_is_cut_and_the_rest_kept(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    write(tmp_path, 2)
    assert steps(tmp_path) == [0, 1, 2]


class Counted(io.FileIO):
    """Counts what is read of a file."""

    read_bytes = 0

    def readinto(self, buffer: Any, /) -> int | None:
        size = super().readinto(buffer)
        Counted.read_bytes += size or 0
        return size


@pytest.fixture
def long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 200,000 lines of metrics, and every byte counted that is read of it."""
    text = json.dumps({"step": 0, "time": 1.0, "loss": 0.5, "loss_by_bucket": {"1x64x96": 0.5, "17x64x96": 0.25}})
    lines = (text.replace('"step": 0', f'"step": {step}') for step in range(200_000))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def opened(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        raw = Counted(path, mode.replace("b", ""))
        buffered = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        binary: Any = buffered(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

    Counted.read_bytes = 0
    monkeypatch.setattr(Path, "open", opened)
    return tmp_path


def test_a_long_history_costs_a_start_no_more_than_a_short_one(long_run: Path) -> None:
    size = (long_run / "metrics.jsonl").stat().st_size
    with Metrics(long_run, track=()) as metrics:
        metrics.step(line(200_000))
    assert size > 15 * 2**20
    assert 0 < Counted.read_bytes < 512 * 1024


def test_recomputed_steps_cut_the_end_of_a_long_history_and_read_no_more_than_that(long_run: Path) -> None:
    size = (long_run / "metrics.jsonl").stat().st_size
    with Metrics(long_run, track=()) as metrics:
        for step in range(199_990, 200_001):
            metrics.step(line(step, loss=2.0))
    assert 0 < Counted.read_bytes < 512 * 1024
    text = (long_run / "metrics.jsonl").read_bytes()
    assert abs(len(text) - size) < 8192
    tail = [json.loads(line) for line in text.splitlines()[-13:]]
    assert [line["step"] for line in tail] == list(range(199_988, 200_001))
    assert [line.get("recomputed", False) for line in tail] == [False] * 2 + [True] * 10 + [False]


def test_a_follower_of_a_long_history_reads_its_end(long_run: Path) -> None:
    tail = Tail(long_run / "metrics.jsonl")
    assert tail.read() == [] and 0 < Counted.read_bytes < 512 * 1024


def test_a_start_that_takes_no_step_leaves_half_a_line_as_it_is(tmp_path: Path) -> None:
    """What a killed writer left is cut off before the next line, and not by a resume that is refused."""
    write(tmp_path, 0)
    file = tmp_path / "metrics.jsonl"
    torn = file.read_bytes() + b'{"step": 1, "lo'
    file.write_bytes(torn)
    with Metrics(tmp_path, track=()) as metrics:
        assert file.read_bytes() == torn
    assert file.read_bytes() == torn
    with Metrics(tmp_path, track=()) as metrics:
        metrics.step(line(1))
    assert steps(tmp_path) == [0, 1]


def test_going_back_over_many_chunks_finds_the_step(tmp_path: Path) -> None:
    """Lines of all lengths, some longer than what is read at a time."""
    with Metrics(tmp_path, track=()) as metrics:
        for step in range(60):
            metrics.step(line(step, loss_by_bucket={"x" * (step * 3001 % 150_000): 1.0}))
        for step in range(7, 9):
            metrics.step(line(step, loss=2.0))
    assert steps(tmp_path) == list(range(9))
    assert [line["step"] for line in written(tmp_path) if line.get("recomputed")] == [7, 8]


WORKERS = 1024


def of_workers(folder: Path) -> list[int]:
    """Steps whose figures of single workers are there, in the order of the files."""
    texts = [(folder / name).read_text() for name in ("workers.1.jsonl", "workers.jsonl") if (folder / name).exists()]
    return [json.loads(text)["step"] for text in "".join(texts).splitlines()]


def write_of_workers(folder: Path, *numbers: int, most_bytes: int = 10**9) -> None:
    with Metrics(folder, track=(), workers_bytes=most_bytes) as metrics:
        for number in numbers:
            values = {f"w{n}": number + n / 1000 for n in range(WORKERS)}
            metrics.step(line(number, tflops_by_worker=values, exposed_by_worker=values))


def test_a_thousand_workers_make_no_line_of_the_metrics_longer_and_have_a_file_of_their_own(tmp_path: Path) -> None:
    write_of_workers(tmp_path, 0, 1)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "_by_worker" not in text and len(text) < 2 * 1500 and steps(tmp_path) == [0, 1]
    found = json.loads((tmp_path / "workers.jsonl").read_text().splitlines()[1])
    assert found["step"] == 1 and found["time"] == written(tmp_path)[1]["time"]
    assert found["tflops_by_worker"]["w7"] == 1.007 and len(found["exposed_by_worker"]) == WORKERS


def test_figures_of_workers_are_those_of_the_newest_steps_in_two_files_of_bounded_size(tmp_path: Path) -> None:
    most = 200_000
    write_of_workers(tmp_path, *range(40), most_bytes=most)
    sizes = [(tmp_path / name).stat().st_size for name in ("workers.1.jsonl", "workers.jsonl")]
    one = sizes[0] // len((tmp_path / "workers.1.jsonl").read_text().splitlines())
    assert most < sizes[0] <= most + one and sizes[1] <= most + one
    kept = of_workers(tmp_path)
    assert kept == list(range(kept[0], 40)) and 10 < len(kept) < 25
    assert steps(tmp_path) == list(range(40)), "the others have the whole history"


@pytest.mark.parametrize("again", [37, 31, 3])
def test_steps_that_are_computed_again_replace_those_of_both_files(tmp_path: Path, again: int) -> None:
    """In the newer file, in the older one, and before both."""
    write_of_workers(tmp_path, *range(40), most_bytes=200_000)
    kept = of_workers(tmp_path)
    newer = json.loads((tmp_path / "workers.jsonl").read_text().splitlines()[0])["step"]
    assert kept[0] < 31 < newer <= 37
    write_of_workers(tmp_path, *range(again, 42))
    assert of_workers(tmp_path) == list(range(min(kept[0], again), 42))
    assert steps(tmp_path) == list(range(42))


def test_a_step_that_is_computed_again_without_figures_of_workers_leaves_no_line_of_before(tmp_path: Path) -> None:
    write_of_workers(tmp_path, 0, 1, 2)
    write(tmp_path, 1, loss=2.0)
    assert of_workers(tmp_path) == [0] and steps(tmp_path) == [0, 1]
    write_of_workers(tmp_path, 2)
    assert of_workers(tmp_path) == [0, 2]


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    write(tmp_path, 0, loss=math.nan)
    assert written(tmp_path)[0]["loss"] is None


def test_tensorboard_holds_the_documented_tags_and_forgets_replaced_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, loss in ((0, 1.0), (2, 3.0)):
        with Metrics(tmp_path) as metrics:
            for step in range(first, first + 3):
                metrics.step(
                    line(
                        step,
                        loss=loss,
                        step_s=2.0,
                        data_wait_s=0.5,
                        workers=2,
                        tokens_per_s=100.0,
                        idle_ratio=0.1,
                        loss_by_bucket={"1x64x96": 0.3},
                    )
                )
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert {
        "train/loss",
        "perf/step_time_s",
        "perf/data_wait_pct",
        "perf/tokens_per_s_per_gpu",
        "balance/idle_ratio",
        "train/loss_by_bucket/1x64x96",
    } <= set(events.Tags()["scalars"])
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert losses == [(0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0), (4, 3.0)]


def test_a_step_is_one_record_of_an_event_file(tmp_path: Path) -> None:
    """In a month of steps event files are the most that a run writes beside its checkpoints."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    names = [f"train/loss_by_bucket/{number}x64x96" for number in range(20)]
    tracker = TensorBoardTracker(tmp_path, {})
    for step in range(50):
        tracker.log(step, 100.0 + step, [(name, step + number / 8) for number, name in enumerate(names)])
    tracker.log(50, 150.0, [])
    tracker.close()
    (file,) = (tmp_path / "events").iterdir()
    found = [event for event in EventFileLoader(str(file)).Load() if event.step]
    assert [(event.step, event.wall_time) for event in found] == [(step, 100.0 + step) for step in range(1, 50)]
    assert {tuple(value.tag for value in event.summary.value) for event in found} == {tuple(names)}
    content = sum(len(name) + 9 for name in names)  # a tag, its value, their keys and lengths
    assert file.stat().st_size < 50 * (content + 60) + 600


def test_event_files_sort_as_they_were_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))  # "10" sorts before "9"
    tracker = TensorBoardTracker(tmp_path, {})
    [first] = (tmp_path / "events").iterdir()
    tracker.forget(0)
    tracker.close()
    assert sorted((tmp_path / "events").iterdir())[0] == first


def test_an_event_file_of_the_future_is_told_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / f"events.out.tfevents.{int(time.time()) + 3600}.host.1.0").touch()
    TensorBoardTracker(tmp_path, {}).close()
    assert "ahead of this machine's clock" in caplog.text


def test_curves_of_many_single_workers_do_not_fill_the_event_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for count, kept in ((8, 40), (64, 4)):
        names = [name for name in StepMetrics.__dataclass_fields__ if name.endswith(PER_WORKER)]
        values = {name: {f"w{n}": 1.0 for n in range(count)} for name in names}
        with Metrics(tmp_path / str(count)) as metrics:
            for step in range(40):
                metrics.step(line(step, **values))
        events = EventAccumulator(str(tmp_path / str(count) / "events")).Reload()
        assert len(names) * count == sum(tag.startswith("workers/") for tag in events.Tags()["scalars"])
        assert [one.step for one in events.Scalars("workers/tflops/w3")] == list(range(0, 40, 40 // kept))
        assert len(events.Scalars("train/loss")) == 40


def test_ratios_are_derived_from_the_line() -> None:
    tags = dict(scalars(line(3, step_s=2.0, data_wait_s=0.5, predicted_s=1.5, tokens_per_s=90.0, workers=3)))
    assert tags["perf/data_wait_pct"] == 25.0
    memory = scalars(line(3, peak_memory_gib=61.5, room_gib=12.0, rss_gib=9.0))
    named = {tag: value for tag, value in memory if tag.startswith("memory/")}
    assert named == {"memory/max_active_gib": 61.5, "memory/room_gib": 12.0, "memory/rss_gib": 9.0}
    assert tags["balance/pred_vs_actual_err"] == -0.25
    assert tags["perf/tokens_per_s_per_gpu"] == 30.0


def test_of_more_workers_than_a_chart_shows_the_spread_is_a_curve() -> None:
    few = dict(scalars(line(1, tflops_by_worker={f"w{n}": float(n) for n in range(64)})))
    assert few["workers/tflops/w63"] == 63.0 and "workers/tflops/most" not in few
    values = {f"w{n}": float(n) for n in range(65)} | {"w65": math.nan}
    many = {tag: value for tag, value in scalars(line(1, tflops_by_worker=values)) if tag.startswith("workers/")}
    assert many == {"workers/tflops/least": 0.0, "workers/tflops/median": 32.0, "workers/tflops/most": 64.0}
    unknown = scalars(line(1, tflops_by_worker=dict.fromkeys(values, math.nan)))
    assert not [tag for tag, _ in unknown if tag.startswith("workers/")]


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = ProgressLine(3, stream, interval_s=0)
    for step in range(3):
        shown = {"grad_norm": 0.41234, "step_s": 1.25, "tokens_per_s": 1234.5, "idle_ratio": 0.04, "workers": 2}
        progress.show(line(step, loss=0.5, **shown))
    assert stream.getvalue().splitlines()[0] == (
        "step 1/3  loss 0.5000  grad norm 0.412  1.25 s/step  1,234 tokens/s  idle 4%  2 workers"
    )
    assert len(stream.getvalue().splitlines()) == 3


def test_plain_lines_are_rare_but_the_last_one_always_comes() -> None:
    stream = io.StringIO()
    progress = ProgressLine(100, stream, interval_s=1000)
    for step in range(100):
        progress.show(line(step))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/100", "100/100"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_a_terminal_gets_one_line_that_moves(stream: Terminal) -> None:
    progress = ProgressLine(3, stream)
    for step in range(3):
        progress.show(line(step, loss=0.5, step_s=1.25, workers=2))
    progress.say("worker w1: dead")
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "step 3/3" in text and "loss 0.5000  1.25 s/step  2 workers" in text
    assert "worker w1: dead" in text


@pytest.mark.parametrize("shown", [False, True], ids=["log", "terminal"])
def test_a_bar_takes_warnings_above_itself_where_they_are_for_the_terminal(
    shown: bool, stream: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`heddle train 2> err.log` lost them to the terminal of the bar."""
    monkeypatch.setattr("sys.stderr", err := Terminal() if shown else io.StringIO())
    progress = ProgressLine(3, stream)
    print("a warning", file=sys.stderr)
    progress.close()
    assert ("a warning" in stream.getvalue()) == shown and err.getvalue() == ("" if shown else "a warning\n")


@pytest.mark.parametrize(("columns", "bar", "last"), [(80, False, "3.11 s/step"), (140, True, "8 workers")])
def test_a_narrow_terminal_keeps_the_step_the_times_and_the_first_figures(
    columns: int, bar: bool, last: str, stream: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = ProgressLine(10000, stream)
    shown = {"grad_norm": 0.41234, "step_s": 3.11, "tokens_per_s": 45234.0, "idle_ratio": 0.12, "workers": 8}
    progress.show(line(1199, loss=0.112, **shown))
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()[-1]
    assert len(text.rstrip()) <= columns and ("━" in text) == bar
    assert re.search(r"step 1200/10000 .*\d:\d\d:\d\d < \S+ +loss 0\.1120  grad norm 0\.412  .*" + last, text)


def test_a_terminal_that_writes_over_nothing_gets_plain_lines(
    stream: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    progress = ProgressLine(3, stream)
    progress.show(line(0, loss=0.5))
    assert stream.getvalue() == "step 1/3  loss 0.5000\n"
    progress.close()


def test_steps_of_minutes_have_a_time_left(stream: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    progress = ProgressLine(10, stream)
    for step in range(3):
        now[0] = 60.0 * (step + 1)
        progress.show(line(step, loss=0.5))
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()[-1]
    assert re.search(r"step 3/10 .*0:03:00 < 0:07:00", text), text


def test_figures_say_when_a_loss_is_not_finite() -> None:
    assert figures(line(1, loss=math.nan)) == "loss not finite"
    assert figures(line(1, loss=None, recomputed=True)) == "loss not finite  recomputed"


def test_clock_reads_like_a_clock() -> None:
    assert (clock(75), clock(3700), clock(0)) == ("1:15", "1:01:40", "0:00")


def test_the_gradient_norm_keeps_its_zeros() -> None:
    """The columns after it moved with every step."""
    norms = (0.2, 0.451, 12.0, 123.4)
    told = [figures(line(0, loss=1.0, grad_norm=norm)) for norm in norms]
    assert [re.search(r"grad norm (\S+)", one)[1] for one in told] == ["0.200", "0.451", "12.0", "123"]  # type: ignore[index]
