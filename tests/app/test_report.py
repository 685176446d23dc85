"""The report is one file that names what went wrong, and its figures are those of the records."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

import av
import numpy as np
import pytest
from typer.testing import CliRunner

from actors.records.events import EnvironmentSeen, RunFinished
from actors.records.metrics_line import StepMetrics, metrics_of
from actors.records.span_record import SpanRecord, span_of
from app.cli import app
from app.drawing.style import CSS
from app.drawing.svg import ACROSS, Bar, BarRow, Lane, Series, bars, line_chart, thin_out, ticks, timeline
from app.records.rundir import RunDir
from app.records.timeline import final_times, windows
from app.report.facts import UsualStep, late_cascade, why_slow
from app.report.page import write_report
from app.report.totals import SpanTotals, StepTotals
from app.sampling.clips import write_clips
from app.settings.out_files import put_text
from data.ledger import Fault, Ledger, Reason
from ops.models.config import ModelConfig
from ops.typed import ConfigError
from tests.app.pages import assert_every_picture_has_a_name


def steps_of(lines: Iterable[StepMetrics]) -> StepTotals:
    held = list(lines)
    totals = StepTotals(len(held))
    for line in held:
        totals.add(line)
    return totals


def totals_of(spans: Iterable[SpanRecord]) -> SpanTotals:
    totals = SpanTotals(final_times(spans), wanted=())
    for window in windows(spans):
        totals.add(window)
    return totals


class Balanced(HTMLParser):
    """Fails on a closing tag that does not match the open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in ("meta", "img"):  # these have no end tag
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def test_the_page_is_well_formed_and_needs_nothing_from_outside(run_folder: Path) -> None:
    text = write_report(RunDir.open(run_folder)).read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"(src|href)=['\"](?!data:)", text)
    assert "<script" not in text


def test_the_page_says_what_became_of_every_source(run_folder: Path) -> None:
    ledger = Ledger()
    for source, (name, bad) in enumerate((("films", 0), ("mine & yours", 2))):
        ledger.name_source(source, name)
        ledger.add_indexed(10, source)
        ledger.add_planned(9, source)
        ledger.reject_many(Reason.NO_BUCKET, 1, "", source)
        ledger.schedule(5, source)
        for _ in range(bad):
            ledger.skip(Fault(Reason.FILE_MISSING, "t.csv", source=source))
        ledger.deliver(5 - bad, source)
    with (run_folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(RunFinished(step=1, ledger=ledger.summary()).line()) + "\n")
    table = write_report(RunDir.open(run_folder)).read_text().split("Data</h2>")[1].split("</table>")[0]
    rows = [re.findall("<td[^>]*>([^<]*)", row) for row in table.split("<tr>")[2:]]
    assert rows == [
        ["films", "10", "9", "5", "0.56", "5", "0", "1 no_bucket"],
        ["mine &amp; yours", "10", "9", "5", "0.56", "3", "2", "2 file_missing, 1 no_bucket"],
        ["all", "20", "18", "10", "0.56", "8", "2", "2 no_bucket, 2 file_missing"],
    ]


def test_the_page_tells_of_the_straggler_and_the_lost_worker(run_folder: Path) -> None:
    text = write_report(RunDir.open(run_folder)).read_text()
    assert "Step 12 took 2.60 s" in text
    cascade = "&#x27;dit 1f 64x96 b16 sp1 s12&#x27;"
    assert f"worker w1, which finished last, {cascade} took 2.20 s instead of 0.70 s (backward 0.40 s)" in text
    assert "Step 20 took 3.10 s, 2.8x the median: worker w1 died; generation 1: 2 workers (w1 died)" in text
    listed = text.split("Events</h3>")[1].split("</section>")[0]
    assert listed.count("<li>") == 3  # the end of a generation is not news beside the next one
    assert "recovered: step 20 finished 1.5 s after the loss" in listed


def test_the_page_has_the_gradient_norm_and_the_learning_rate(run_folder: Path) -> None:
    def loss_section() -> str:
        return write_report(RunDir.open(run_folder)).read_text().split("Loss</h2>")[1].split("</section>")[0]

    lines = [json.loads(text) for text in (run_folder / "metrics.jsonl").read_text().splitlines()]
    for one in lines:
        one |= {"grad_norm": 40.0 if one["step"] == 17 else 0.5, "lr": 1e-3 * (1 + one["step"]) / 30}
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    text = loss_section()
    assert "Gradient norm before clipping, median 0.5</h3>" in text and "<h3>Learning rate</h3>" in text
    assert "Prodigy" not in text
    assert "step 17: grad_norm 40<" in text and "step 29: lr 0.001<" in text
    for one in lines:  # of another program, or an early version
        del one["grad_norm"], one["lr"]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    text = loss_section()
    assert "Gradient norm" not in text and "Learning rate" not in text


def test_the_page_says_from_which_step_on_the_run_computed_with_what(run_folder: Path) -> None:
    commit = "84264bc162f783fbcecdb8c3a60619f309da7d86"
    one = EnvironmentSeen(from_step=0, software={"commit": commit, "torch": "2.12"}, hosts=("a", "b"))
    two = EnvironmentSeen(from_step=20, software={"commit": commit, "torch": "2.13"}, gpus={"H100": 2}, hosts=("a",))
    with (run_folder / "events.jsonl").open("a") as file:
        for event in (one, one.after(one), two.after(one)):
            file.write(json.dumps(event.line()) + "\n")
    text = write_report(RunDir.open(run_folder)).read_text()
    table = text.split("Settings</h2>")[1].split("</table>")[0]
    assert [re.findall("<td[^>]*>([^<]*)", row) for row in table.split("<tr>")[2:]] == [
        ["0", "commit 84264bc162, torch 2.12", "none", "a, b"],
        ["20", "commit 84264bc162, torch 2.13", "2 x H100", "a"],
    ]
    assert "the environment is another one from step 20 on: torch 2.12 -&gt; 2.13, GPUs none -&gt; H100" in text


def test_clips_and_their_contact_sheets_are_embedded(run_folder: Path) -> None:
    clip = run_folder / "samples" / "step-30-00.mp4"
    with av.open(str(clip), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for value in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 60 * value, np.uint8))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    (run_folder / "samples" / "step-30.png").write_bytes(b"\x89PNG fake sheet")
    text = write_report(RunDir.open(run_folder)).read_text()
    assert text.count("data:video/mp4;base64,") == 1
    assert text.count("data:image/png;base64,") == 1
    assert "step-30: a red circle moving to the right on a black background<" in text
    assert "<figcaption>step-30<" in text


def test_clips_are_captioned_with_the_prompts_they_were_made_from(run_folder: Path) -> None:
    clips, samples = list(enumerate(np.zeros((2, 2, 32, 32, 3), np.uint8))), run_folder / "samples"
    write_clips(samples / "step-30.mp4", clips, ["an earlier prompt", "and another"], 8)
    write_clips(samples / "step-30-prompts.mp4", clips[:1], ["a typed prompt"], 8)
    write_clips(samples / "step-29-prompts.mp4", clips, ["two", "were typed"], 8)
    write_clips(samples / "red.mp4", clips[:1], ["a red circle"], 8)
    run = RunDir.open(run_folder)
    assert {path.suffix for path in run.samples()} == {".mp4", ".png"}
    assert re.findall(r"<figcaption>(.*?)</figcaption>", write_report(run).read_text()) == [
        "step-30: an earlier prompt",
        "step-30: and another",
        "step-30-prompts: a typed prompt",
        "step-29-prompts: two",
        "step-29-prompts: were typed",
        "red: a red circle",
        "step-30",
        "step-29-prompts",
    ]


@pytest.mark.parametrize("content", ["", '["a pro', '{"a": 1}', "7", "[]"])
def test_a_list_of_prompts_that_is_none_leaves_clips_with_their_names(run_folder: Path, content: str) -> None:
    samples = run_folder / "samples"
    write_clips(samples / "red.mp4", enumerate(np.zeros((2, 2, 32, 32, 3), np.uint8)), ["one", "two"], 8)
    (samples / "red.json").write_text(content)
    (samples / "blue.mp4").symlink_to(samples / "gone.mp4")
    text = write_report(RunDir.open(run_folder)).read_text()
    assert re.findall(r"<figcaption>(.*?)</figcaption>", text)[-3:] == ["red-00", "red-01", "red"]


def test_buckets_have_no_tokens_where_the_folders_of_the_model_may_not_be_read(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(model: ModelConfig) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "weights/config.json")

    whole = write_report(RunDir.open(run_folder)).read_text()
    monkeypatch.setattr("app.report.tables.resolve", resolve)
    text = write_report(RunDir.open(run_folder)).read_text()
    assert text.count("<td>-</td>") > whole.count("<td>-</td>")


def test_the_page_is_made_elsewhere_where_the_folder_of_the_run_takes_no_files(
    run_folder: Path, tmp_path: Path
) -> None:
    (run_folder / "timeline.json").mkdir()
    made = CliRunner().invoke(app, ["report", str(run_folder), "--out", str(tmp_path / "page.html")])
    assert made.exit_code == 0 and "timeline.json cannot be written (Is a directory)" in made.output
    assert (tmp_path / "page.html").is_file()
    assert isinstance(CliRunner().invoke(app, ["report", str(run_folder)]).exception, IsADirectoryError)


def test_buckets_count_a_bag_once_and_add_up_its_seconds() -> None:
    def span(worker: str, module: str, seconds: float) -> SpanRecord:
        line = {
            "step": 0,
            "worker": worker,
            "module": module,
            "cascade": "a/dit/0",
            "item": "a",
            "bucket": [17, 64, 96],
            "batch": 4,
            "degree": 2,
            "start": 0.0,
            "end": seconds,
        }
        return span_of(line)

    spans = [span("w0", "dit", 2.0), span("w1", "dit", 3.0), span("w0", "vae", 1.0)]
    rows = totals_of(spans).buckets({(17, 64, 96): 120})
    assert len(rows) == 1
    assert (rows[0].samples, rows[0].items, rows[0].batch, rows[0].tokens) == (4, 1, 4.0, 120)
    assert (rows[0].dit_s, rows[0].vae_s, rows[0].worker_seconds, rows[0].share) == (5.0, 1.0, 6.0, 1.0)


def test_the_largest_deviation_comes_first(run_folder: Path) -> None:
    found = totals_of(RunDir.open(run_folder).spans()).deviations
    assert (found[0].step, found[0].worker) == (12, "w1")
    assert found[0].excess_s == pytest.approx(1.5, abs=1e-3)


def test_a_slow_step_is_blamed_on_data_or_on_heavy_items_when_they_are_the_cause() -> None:
    def line(step: int, step_s: float, data_wait_s: float, predicted_s: float) -> StepMetrics:
        figures = {"step_s": step_s, "data_wait_s": data_wait_s, "predicted_s": predicted_s}
        return metrics_of({"step": step, "time": 10.0 * step + 10 * (step > 9), **figures})

    usual = [line(step, 1.0, 0.0, 0.9) for step in range(10)]
    waited, heavy = line(10, 3.0, 2.0, 0.9), line(11, 3.0, 0.0, 2.9)
    steps = steps_of([*usual, waited, heavy])
    medians = UsualStep(step_s=1.0, data_wait_s=0.0, predicted_s=0.9)
    assert [why_slow(line, (), (), medians) for line in steps.slow()] == [
        "Step 10 took 3.00 s, 3.0x the median: it waited 2.00 s for data (0.00 s is usual).",
        "Step 11 took 3.00 s, 3.0x the median: its items are heavy, 2.90 s were planned (0.90 s is usual).",
    ]


def test_waiting_for_others_is_not_mistaken_for_work(run_folder: Path) -> None:
    """The gradient sum makes all workers end together; the cascade after it is the one to name."""
    window = next(w for w in windows(RunDir.open(run_folder).spans()) if w.step == 12)
    late = late_cascade(window.spans)
    assert late is not None and late.worker == "w1"


def test_generations_list_their_steps_and_workers(run_folder: Path) -> None:
    found = steps_of(RunDir.open(run_folder).metrics()).generations
    assert [(g.number, g.first, g.last, g.workers) for g in found.listed] == [(0, 0, 19, 3), (1, 20, 29, 2)]
    assert found.count == 2


def test_a_live_run_with_a_torn_line_can_be_reported(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "los')
    assert "30 steps" in write_report(RunDir.open(run_folder)).read_text()


def test_a_broken_line_in_the_middle_is_named(run_folder: Path) -> None:
    path = run_folder / "metrics.jsonl"
    path.write_text("not json\n" + path.read_text())
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 1 is not JSON"):
        write_report(RunDir.open(run_folder))


def test_a_run_without_steps_says_so(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="has no finished step yet"):
        write_report(RunDir.open(run_folder))


def test_the_page_makes_its_folder_and_replaces_no_records(run_folder: Path) -> None:
    run = RunDir.open(run_folder)
    assert write_report(run, run_folder / "new" / "page.html").is_file()
    before = (run_folder / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"config.yaml is there and no page; give a file that ends in .html"):
        write_report(run, run_folder / "config.yaml")
    assert (run_folder / "config.yaml").read_bytes() == before


def test_a_full_disk_leaves_the_earlier_page(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, write = RunDir.open(run_folder), Path.write_bytes
    (link := run_folder / "link.html").symlink_to(write_report(run))
    before = link.read_bytes()

    def full(path: Path, *given: object, **named: object) -> NoReturn:
        write(path, b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        for name in ("write_text", "write_bytes"):
            patched.setattr(Path, name, full)
        for out in (None, link):
            with pytest.raises(OSError, match="No space left"):
                write_report(run, out)
        with pytest.raises(OSError, match="No space left"):
            put_text(run_folder / "report.html", "of two runs")
    assert link.read_bytes() == before and not list(run_folder.glob(".*.part"))
    put_text(link, "another")
    assert link.is_symlink() and (run_folder / "report.html").read_text() == "another"


def test_a_page_goes_into_a_pipe_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "page.html")
    with ThreadPoolExecutor(1) as readers:
        read = readers.submit(pipe.read_text)
        put_text(pipe, "of a run")
        assert read.result(60) == "of a run" and pipe.is_fifo()
    ours, theirs = os.pipe()  # as of /dev/stdout, which leads to no path
    put_text(Path(f"/dev/fd/{theirs}"), "of a run")
    os.close(theirs)
    with open(ours) as end:
        assert end.read() == "of a run"


def test_a_file_that_is_mounted_or_has_no_name_is_written_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing takes the place of a file that a container mounts."""
    with TemporaryFile("w+") as unnamed:
        put_text(Path(f"/dev/fd/{unnamed.fileno()}"), "of a run")
        assert unnamed.read() == "of a run"
    page = tmp_path / "page.html"
    page.touch()
    before = page.stat().st_ino
    monkeypatch.setattr(os.path, "ismount", lambda path: path == page)
    put_text(page, "of a run")
    assert page.stat().st_ino == before and page.read_text() == "of a run"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        RunDir.open(tmp_path)


def test_missing_figures_do_not_break_the_page(run_folder: Path) -> None:
    lines = [{"step": 0, "time": 1.0, "loss": None}, {"step": 1, "time": 2.0, "loss": 0.5}]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_folder / "timeline.jsonl").unlink()
    assert "2 steps" in write_report(RunDir.open(run_folder)).read_text()


def test_ticks_are_round_and_cover_the_range() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3) == [3]
    low, *_, high = ticks(0.13, 7.9)
    assert low <= 0.13 and high >= 7.9


def test_long_curves_are_thinned_without_losing_their_mean() -> None:
    ys = [math.sin(i / 50) for i in range(10_000)]
    thin = thin_out(Series(name="s", xs=list(range(10_000)), ys=ys))
    assert len(thin.xs) == 800
    assert sum(thin.ys) / 800 == pytest.approx(sum(ys) / 10_000, abs=1e-3)


class WordsOfPictures(HTMLParser):
    """Counts the words of pictures, and those inside of one that a browser scales to the width of its column."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[bool] = []  # of each <svg>: whether it is scaled
        self.words = self.scaled = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "svg":
            self.open.append("viewbox" in dict(attrs))
        elif tag == "text":
            self.words += 1
            self.scaled += any(self.open)

    def handle_endtag(self, tag: str) -> None:
        if tag == "svg":
            self.open.pop()


def test_words_of_pictures_are_as_large_on_a_phone_as_on_a_screen() -> None:
    """A picture of 960 units that is scaled to a phone's 330 pixels has letters of 4."""
    pictures = WordsOfPictures()
    pictures.feed(line_chart([Series(name="loss", xs=[0.0, 10.0], ys=[1.0, 2.0], hover=True)]))
    pictures.feed(timeline([Lane(name="w0", bars=[Bar(start_s=0, end_s=1, css="dit", title="t", label="dit 9f")])]))
    pictures.feed(bars([BarRow(label="a", bars=[("f1", 2.0, "2 s"), ("f2", -1.0, "-1 s")])]))
    assert pictures.words >= 15 and not pictures.scaled


def test_a_curve_reaches_from_one_end_of_its_axis_to_the_other() -> None:
    drawn = line_chart([Series(name="loss", xs=[2.0, 3.0, 6.0], ys=[1.0, 2.0, 1.5], hover=True)], zero=True)
    (path,) = re.findall(r'class="line c1" d="([^"]+)"', drawn)
    assert [float(x) for x in re.findall(r"[ML]([\d.]+) ", path)] == [0.0, ACROSS / 4, ACROSS]
    assert re.findall(r'cx="([^"]+)"', drawn) == ["0.00%", "25.00%", "100.00%"]


def test_what_is_read_out_of_a_picture_are_its_names_and_its_first_and_last_values() -> None:
    """A reader of a screen takes a picture as one: of what lies in it, hover titles as well, nothing is read out."""
    loss = Series(name="loss <a>", xs=[0, 1, 2, 3], ys=[math.nan, 2.5, 9.0, 0.125])
    rate = Series(name="rate", xs=[0, 3], ys=[1e-4, 1e-5], css="c2 dashed")
    gone = Series(name="b", xs=[0, 2, 3], ys=[2.0, 1.0, math.nan])
    drawn = line_chart([loss, rate, gone])
    said = "loss &lt;a&gt; from 2.5 to 0.125; rate from 0.0001 to 1e-05; b from 2 to 1, the last not known"
    said = f"curves over step 0 to 3: {said}"
    assert f'role="img" aria-label="{said}"' in drawn
    drawn = timeline([Lane(name=f"w{i}", bars=[Bar(start_s=0, end_s=2, css="dit", title="t")] * 3) for i in range(4)])
    assert 'role="img" aria-label="timeline of 2 s, w0 to w3: 12 bars"' in drawn
    drawn = bars([BarRow(label="a", bars=[("f1", 2.0, "2 s"), ("f2", 1.0, "1 s")]), BarRow(label="b", bars=())])
    assert 'role="img" aria-label="bars of a: 2 s, 1 s; b: "' in drawn


def test_every_picture_of_a_report_has_a_name(run_folder: Path) -> None:
    assert_every_picture_has_a_name(write_report(RunDir.open(run_folder)).read_text())


def _contrast(first: str, second: str) -> float:
    """Ratio of two colours #rrggbb by WCAG, 1 to 21."""

    def luminance(colour: str) -> float:
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_labels_stand_out_from_their_bars_in_light_and_in_dark() -> None:
    light, dark = CSS.split("prefers-color-scheme: dark")
    for look in (light, dark.split("}")[0]):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+);", look))
        for kind, bar in {**{name: name for name in ("text", "vae", "dit", "finish")}, "other": "soft"}.items():
            label = colours[f"on-{kind}"]
            assert f"svg rect.{kind} + text.in {{ fill: var(--on-{kind}); }}" in CSS
            assert _contrast(colours[bar], "#ffffff" if label == "#fff" else label) >= 4.5, (kind, label)


def test_curves_differ_in_more_than_colour() -> None:
    dashes = re.findall(r"\.line\.dashed\.(c\d) { stroke-dasharray: ([\d ]+);", CSS)
    assert [css for css, _ in dashes] == ["c2", "c3", "c4"] and len({dash for _, dash in dashes}) == 3


def test_nothing_to_draw_gives_nothing() -> None:
    assert line_chart([Series(name="s", xs=[0.0], ys=[math.nan])]) == ""
    assert timeline([Lane(name="w", bars=[])]) == ""


def test_names_are_escaped() -> None:
    bar = Bar(start_s=0, end_s=1, css="dit", title="<b>", label="<long label here>")
    drawn = timeline([Lane(name="<w>", bars=[bar])])
    assert "<w>" not in drawn and "<b>" not in drawn and "<long" not in drawn


def test_the_loss_of_each_expert_has_a_curve_of_its_own(run_folder: Path) -> None:
    """In a run of both; a step whose clips are all of one leaves the other where it was."""
    file = run_folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert "Loss of each expert" not in write_report(RunDir.open(run_folder)).read_text()
    for line in lines:
        line["loss_by_expert"] = {"low": 0.25} if line["step"] % 2 else {"high": 0.75, "low": 0.25}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = steps_of(metrics_of(line) for line in lines)
    found = {name: curve.ys for name, curve in steps.smoothed_by_expert.items()}
    assert {name: set(np.round(ys, 9)) for name, ys in found.items()} == {"high": {0.75}, "low": {0.25}}
    text = write_report(RunDir.open(run_folder)).read_text()
    assert 'Loss of each expert, smoothed: high, low (orange, dashed)</h3><div class="curves"><svg' in text


def test_starts_that_number_their_generations_alike_are_listed_apart() -> None:
    """A run of two workers that went on with three was one generation of three."""
    lines = [metrics_of({"step": step, "generation": 1, "workers": 2 + step // 3}) for step in range(5)]
    found = steps_of(lines).generations
    assert [(one.first, one.last, one.workers) for one in found.listed] == [(0, 2, 2), (3, 4, 3)]
    assert found.count == 2
