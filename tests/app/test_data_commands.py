"""`heddle data ...` as a person runs it: what is printed, which exit code."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from app.commands.data import app
from app.data_tools.printing import print_statistics
from app.records.progress import ProgressBar
from app.settings.out_files import begin_list
from data.config import SourceConfig
from data.dataset.index_build import build_index
from data.errors import DataError
from data.ledger import Ledger
from data.tools import convert
from data.tools.synthetic import SynthConfig
from ops.typed import ConfigError
from tests.data.making import clip, good, picture, sample, shard

RUNNER = CliRunner()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "shards"
    path.mkdir()
    (path / "00000.tar").write_bytes(shard(good(6)))
    (path / "00001.tar").write_bytes(shard([*good(5), *sample(5, mp4=None)]))
    return path


def spoil(folder: Path) -> None:
    data = bytearray(clip(frames=33))
    for at in range(data.index(b"mdat") + 4, data.index(b"moov") - 8):
        data[at] ^= 0xA5
    (folder / "00002.tar").write_bytes(shard([*good(5), *sample(5, mp4=bytes(data)), *sample(6, txt=b"\xff")])[:-1])


def run(*arguments: object) -> str:
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_index_says_how_much_is_usable(folder):
    text = run("index", folder)
    assert "11 of 12 samples usable in 2 shards, media of 91.7% found" in text
    assert "indexed 12 = usable 11 + rejected 1 (1 no_media)" in text
    facts = json.loads(run("index", folder / "00000.tar", folder / "00001.tar", "--json"))
    assert facts["ledger"]["planned"] == 11 and facts["sources"][0]["shards"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_that_read_shards_end_with_their_command(tmp_path: Path, number: signal.Signals) -> None:
    """They waited for jobs for ever."""
    for shard_number in range(3):
        os.mkfifo(tmp_path / f"{shard_number}.tar")  # reading it takes as long as the test
    words = ["index", str(tmp_path / "{0..2}.tar"), "--workers", "2", "--cache", str(tmp_path / "cache")]
    command = subprocess.Popen([sys.executable, "-m", "app.cli", "data", *words], cwd=Path(__file__).parents[2])
    until, readers = time.monotonic() + 90, []
    while len(readers) < 2 and time.monotonic() < until:
        time.sleep(0.2)
        children = psutil.Process(command.pid).children()
        readers = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
    time.sleep(2)  # imports
    command.send_signal(number)
    assert command.wait(60) == (128 + number if number == signal.SIGTERM else -number)
    _, left = psutil.wait_procs(readers, timeout=30)
    for one in left:
        one.kill()
    assert len(readers) == 2 and not left


def test_lint_counts_every_source(folder):
    spoil(folder)
    config = folder.parent / "run.yaml"
    config.write_text(
        "run: {name: x}\n"
        "data:\n"
        "  sources: [{path: shards/00000.tar, name: whole}, {path: shards/00002.tar, name: spoilt}]\n"
        "  buckets: {table: [9x48x64]}\n"
    )
    result = RUNNER.invoke(app, ["lint", "--config", str(config)])
    assert isinstance(result.exception, DataError), result.output
    lines = [line for line in result.output.splitlines() if line.startswith("source ")]
    assert lines[0] == "source whole: indexed 6 = usable 6 + rejected 0; decoded 6 = good 6 + bad 0"
    assert re.fullmatch(
        r"source spoilt: indexed 7 = usable 6 \+ rejected 1 .*; decoded 6 = good 5 \+ bad 1 .*", lines[1]
    )


def test_lint_lists_what_training_would_reject(folder):
    text = run("lint", folder)
    assert "decoded 11 = good 11 + bad 0" in text
    assert [json.loads(line)["reason"] for line in Path("bad.jsonl").read_text().splitlines()] == ["no_media"]
    spoil(folder)
    with pytest.raises(DataError, match=r"bad data: 1 shards with faults > max_bad_shards 0.*Full list: bad\.jsonl"):
        run("lint", folder)
    reasons = [json.loads(line)["reason"] for line in Path("bad.jsonl").read_text().splitlines()]
    assert sorted(reasons) == ["caption_not_utf8", "decode_error", "no_media", "truncated_tar"]


def test_lint_and_stats_say_which_samples_have_the_clip_of_another(folder):
    """Three clips in eleven samples."""
    text = run("lint", folder, "--headers-only")
    assert "repeated  8 samples with the clip of an earlier one" in text
    assert f"000003 in {folder}/00000.tar is 000000 in {folder}/00000.tar" in text
    assert "and 5 more, in repeated.jsonl" in text
    assert len(Path("repeated.jsonl").read_text().splitlines()) == 8
    assert json.loads(run("lint", folder, "--headers-only", "--json"))["repeated"] == 8
    assert json.loads(run("stats", folder, "--json"))[0]["repeated"] == 8
    assert "repeated  8 samples" in run("stats", folder)
    (folder / "00000.tar").unlink()
    (folder / "00001.tar").write_bytes(shard(good(3)))
    assert "repeated" not in run("lint", folder, "--headers-only") + run("stats", folder)
    assert not Path("repeated.jsonl").exists()


def test_index_and_lint_name_what_is_not_read(folder):
    (folder / "00001.tar").write_bytes(shard([*good(2), *sample(2, **{"mask.png": b"-", "pose.npy": b"-"})]))
    for text in (run("index", folder), run("lint", folder, "--headers-only")):
        assert "source shards: not read: mask.png, pose.npy. Of a sample its clip and caption are trained" in text
    assert json.loads(run("index", folder, "--json"))["sources"][0]["unread"] == ["mask.png", "pose.npy"]


def test_lint_of_a_set_without_a_usable_sample_still_lists_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = b"<!DOCTYPE html><html></html>"
    Path("bad.tar").write_bytes(shard([*sample(0, mp4=page), *sample(1, txt=None, json=None)]))
    with pytest.raises(DataError, match=r"none of 2 samples can be used: 1 no.*, 1 no.*; bad\.jsonl lists them"):
        run("lint", "bad.tar")
    reasons = [json.loads(line)["reason"] for line in Path("bad.jsonl").read_text().splitlines()]
    assert sorted(reasons) == ["no_caption", "not_mp4"]


def test_lint_of_a_run_counts_what_its_filters_and_buckets_refuse(folder):
    config = Path("run.yaml")
    config.write_text(f"""
run: {{name: x}}
data:
  sources: [{{path: {folder}, filters: ["aesthetic_score >= 4.2"]}}]
  buckets: {{table: [1x32x48, 9x48x64]}}
""")
    text = run("lint", "--config", config)
    assert "  4 filtered(aesthetic_score >= 4.2)" in text
    assert "indexed 12 = usable 7 + rejected 5 (4 filtered, 1 no_media)" in text
    assert "decoded 7 = good 7 + bad 0" in text
    assert "dropped   dropped.jsonl, 5 samples" in text
    lines = [json.loads(line) for line in Path("dropped.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines[:2]] == ["000000", "000001"]
    assert sorted(line["reason"] for line in lines) == ["filtered"] * 4 + ["no_media"]
    config.write_text(config.read_text().replace(', filters: ["aesthetic_score >= 4.2"]', ""))
    run("lint", "--config", config, "--headers-only", "--out", "elsewhere/bad.jsonl")
    assert [json.loads(line)["reason"] for line in Path("elsewhere/dropped.jsonl").read_text().splitlines()] == [
        "no_media"
    ]


def test_lint_writes_into_what_is_no_file_as_it_is_and_puts_nothing_beside_it(folder, tmp_path):
    (folder / "00002.tar").write_bytes((folder / "00000.tar").read_bytes())  # repeated samples
    config, there = Path("run.yaml"), tmp_path / "devices"
    source = f"{{path: {folder}, filters: ['aesthetic_score >= 4.2']}}"
    config.write_text(f"run: {{name: x}}\ndata: {{sources: [{source}], buckets: {{table: [1x32x48, 9x48x64]}}}}\n")
    there.mkdir()
    os.mkfifo(pipe := there / "null")
    end = os.open(pipe, os.O_RDWR)  # a reader that waits for nobody
    text = run("lint", "--config", config, "--headers-only", "--out", pipe)
    assert json.loads(os.read(end, 2**16))["reason"] == "no_media" and pipe.is_fifo()
    os.close(end)
    assert [*there.iterdir()] == [pipe] and "repeated " in text and "dropped " not in text
    run("lint", folder, "--headers-only", "--out", "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_an_earlier_list_goes_and_one_that_a_link_leads_to_is_emptied(tmp_path: Path) -> None:
    (listed := tmp_path / "bad.jsonl").write_text("{}\n")
    (link := tmp_path / "link.jsonl").symlink_to(listed)
    begin_list(link)
    assert link.is_symlink() and listed.read_text() == ""
    begin_list(listed)
    assert not listed.exists()


def test_lint_in_the_folder_of_a_run_leaves_the_lists_of_the_run(folder, tmp_path, monkeypatch):
    (of_run := tmp_path / "runs").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "bad.jsonl"):
        (of_run / name).write_text("{}\n")
    monkeypatch.chdir(of_run)
    with pytest.raises(ConfigError, match=r"--out bad.jsonl is in the folder of a run.*give a file elsewhere"):
        run("lint", folder, "--headers-only")
    (beside := tmp_path / "beside").mkdir()
    (beside / "bad.jsonl").symlink_to(of_run / "bad.jsonl")
    monkeypatch.chdir(beside)
    with pytest.raises(ConfigError, match=r"--out bad.jsonl is in the folder of a run"):
        run("lint", folder, "--headers-only")
    assert (of_run / "bad.jsonl").read_text() == "{}\n" and len([*of_run.iterdir()]) == 3


def test_lint_names_the_files_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here.mp4").write_bytes(clip())
    Path("manifest.csv").write_text("path,caption\nhere.mp4,a\nclips/missing.mp4,b\n")
    text = run("lint", "manifest.csv")
    assert "1 file_missing" in text
    (line,) = map(json.loads, Path("bad.jsonl").read_text().splitlines())
    assert line["key"] == f"{tmp_path}/clips/missing.mp4" and line["reason"] == "file_missing"


def test_lint_of_shards_that_are_not_there_speaks_of_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nothere").mkdir()
    with pytest.raises(DataError, match=r"nothere/\*\.tar") as caught:
        run("lint", "nothere/*.tar")
    assert "csv" not in str(caught.value)


def test_lint_of_videos_without_captions_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("clips").mkdir()
    for number in range(2):
        Path(f"clips/{number}.mp4").write_bytes(clip())
    with pytest.raises(DataError, match=r"none of 2 samples can be used: 2 no_caption"):
        run("lint", "clips")


@pytest.mark.parametrize("option", ["--clips", "--images"])
def test_a_negative_number_of_clips_is_refused(tmp_path, option):
    assert RUNNER.invoke(app, ["synth", str(tmp_path / "set"), option, "-3"]).exit_code == 2
    with pytest.raises(ValueError, match="neither may be negative"):
        SynthConfig(clips=-3)


@pytest.mark.parametrize("fails", [KeyboardInterrupt, RuntimeError])
def test_a_conversion_that_is_stopped_leaves_whole_shards_only(folder, tmp_path, monkeypatch, fails):
    usual, calls = convert._members, []

    def members(*arguments):
        calls.append(arguments)
        if len(calls) == 8:
            raise fails
        return usual(*arguments)

    monkeypatch.setattr(convert, "_members", members)
    index = build_index(SourceConfig(path=str(folder)), tmp_path / "cache", Ledger())
    with pytest.raises(fails):
        convert.convert(index, tmp_path / "out", Ledger(), shard_count=5)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["00000.tar"]
    assert "5 of 5 samples usable" in run("index", tmp_path / "out")


@pytest.mark.parametrize("name", ["50% of it", "a%d", "%%", "%05d"])
def test_shards_go_to_a_folder_whose_name_has_a_per_cent_sign(folder, tmp_path, name):
    index = build_index(SourceConfig(path=str(folder)), tmp_path / "cache", Ledger())
    assert convert.convert(index, tmp_path / name, Ledger()) == [tmp_path / name / "00000.tar"]


@pytest.mark.parametrize(("most", "cut"), [(4, 11), (200, 0)])
def test_lint_of_a_run_counts_the_captions_that_its_encoder_cuts(folder, most, cut):
    config = Path("run.yaml")
    config.write_text(f"""
run: {{name: x}}
model: {{text: {{max_length: {most}}}}}
data:
  sources: [{{path: {folder}}}]
  buckets: {{table: [1x32x48, 9x48x64]}}
""")
    text = run("lint", "--config", config, "--headers-only")
    assert (f"{cut} of 11 captions have more than model.text.max_length {most} tokens" in text) == bool(cut)
    assert json.loads(run("lint", "--config", config, "--headers-only", "--json"))["long_captions"] == cut


def test_lint_of_headers_does_not_decode(folder):
    spoil(folder)
    with pytest.raises(DataError):
        run("lint", folder, "--headers-only")
    reasons = [json.loads(line)["reason"] for line in Path("bad.jsonl").read_text().splitlines()]
    assert "decode_error" not in reasons and "caption_not_utf8" in reasons


def test_stats_and_convert(folder, tmp_path):
    (facts,) = json.loads(run("stats", folder, "--json"))
    assert facts["usable"] == 11 and facts["shapes"] == [{"width": 64, "height": 48, "count": 11}]
    said = run("stats", folder)
    assert "aesthetic" in said and f"{facts['bytes'] / 2**20:.1f} MiB of media in 2 shards" in said
    assert f" {3600 * facts['hours']:.0f} s, " in said and "distributions\n" in said, "there are clips alone"
    converted = run("convert", folder, tmp_path / "out", "--shard-samples", 5)
    assert "11 samples in 3 shards" in converted
    assert "read 11 = written 11 + left out 0" in converted and "copied as they are, not decoded" in converted
    assert not re.search("decoded [0-9]|checked|good", converted)
    assert "11 of 11 samples usable in 3 shards" in run("index", tmp_path / "out")


def test_no_figure_of_stats_is_cut_in_a_narrow_terminal(folder, monkeypatch):
    name = "a_score_with_a_name_that_takes_half_of_a_narrow_terminal"
    (folder.parent / "table.csv").write_text(f"path,caption,{name}\nhere.mp4,a,123456.5\n")
    (folder.parent / "here.mp4").write_bytes(clip(frames=33))
    monkeypatch.setenv("COLUMNS", "60")
    said = run("stats", "table.csv")
    assert said.isascii() and re.search(rf"^  {name} ( +1.235e\+05){{7}}$", said, re.MULTILINE), said
    assert re.search(r"^ +min +5 % +25 % +median +75 % +95 % +max$", said, re.MULTILINE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("moves", [False, True], ids=["log", "terminal"])
def test_a_bar_moves_on_a_terminal_alone_and_leaves_stdout_as_it_is(monkeypatch, moves: bool) -> None:
    """FORCE_COLOR had it write into logs; `heddle data cache > log` lost its lines to the terminal of the bar."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out, err = io.StringIO(), Terminal() if moves else io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    with ProgressBar("encoding") as progress:
        progress(1, 4)
        print("1 of 4 entries")
        progress(4, 4)
    assert out.getvalue() == "1 of 4 entries\n"
    assert ("encoding" in err.getvalue()) == ("4/4" in err.getvalue()) == moves and bool(err.getvalue()) == moves
    assert sys.stderr is err, "what warns after it has no bar to go around"


@pytest.mark.parametrize("moves", [False, True], ids=["log", "terminal"])
@pytest.mark.parametrize("quiet", [False, True])
def test_where_no_bar_moves_a_line_comes_every_half_a_minute(monkeypatch, moves: bool, quiet: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", Terminal() if moves else io.StringIO())
    now, told = 100.0, list[str]()
    monkeypatch.setattr("app.records.progress.time.monotonic", lambda: now)
    with ProgressBar("steps of 2 clips", quiet=quiet, tell=told.append) as progress:
        for at, done in ((129.0, 0), (130.0, 0), (150.0, 5), (160.0, 6)):
            now = at
            progress(done, 8)
    lines = ["steps of 2 clips: 0/8, 0:04:00 left", "steps of 2 clips: 6/8, 0:00:20 left"]
    assert told == ([] if moves and not quiet else lines)
    assert ("steps of 2 clips" in sys.stderr.getvalue()) == (moves and not quiet)


def test_an_infinite_score_is_counted_and_in_no_quantile(folder):
    """The PSNR of a still clip; quantiles between infinities are NaN, which JSON does not have."""
    for name in "abcd":
        (folder.parent / f"{name}.mp4").write_bytes(clip(frames=33))
    rows = "".join(f"{name}.mp4,{name},{psnr}\n" for name, psnr in zip("abcd", ("inf", "31.2", "44", "inf")))
    (folder.parent / "table.csv").write_text(f"path,caption,psnr\n{rows}")
    told = run("stats", "table.csv", "--json")
    (facts,) = json.loads(told, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert facts["infinite"] == {"psnr": 2}
    low, *_, median, _, _, high = facts["scores"]["psnr"]
    assert (low, median, high) == pytest.approx((31.2, 37.6, 44.0))
    assert "psnr of 2 samples is infinite, and in none of these figures" in run("stats", "table.csv")
    (facts,) = json.loads(run("stats", folder, "--json"))
    assert facts["infinite"] == {}


def test_a_folder_of_pairs_is_no_shard(tmp_path):
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "a.png").write_bytes(picture(96, 64, seed=1))
    (tmp_path / "pairs" / "a.txt").write_text("a disc")
    assert " MiB of media in 1 folder" in run("stats", tmp_path / "pairs")
    (tmp_path / "pairs" / "b.mp4").write_bytes(clip())
    (tmp_path / "pairs" / "b.txt").write_text("a clip")
    assert "(fps, frames and seconds: of videos alone)" in run("stats", tmp_path / "pairs")
    for name in ("b.mp4", "b.txt"):
        (tmp_path / "pairs" / name).unlink()
    shutil.copytree(tmp_path / "pairs", tmp_path / "pairs [v2]")
    assert "pairs [v2]" in run("stats", tmp_path / "pairs [v2]")
    assert "1 of 1 samples usable in 1 folder, media of" in run("index", tmp_path / "pairs")
    (tmp_path / "pairs" / "a.txt").unlink()
    with pytest.raises(DataError, match=r"none of its 1 sample in 1 folder can be used \(1 no_caption"):
        run("stats", tmp_path / "pairs")


def test_a_folder_that_shards_cannot_go_to_is_refused_before_the_source_is_read(folder, monkeypatch):
    """The index of a large set was made first, for hours."""
    monkeypatch.setattr("data.dataset.index_build.build_index", lambda *_, **__: pytest.fail("the source is read"))
    Path("file").touch()
    Path("taken").mkdir()
    Path("taken/00000.tar").touch()
    for out, sentence in (
        ("taken", "taken already holds shards"),
        ("file/out", "file is a file"),
        ("file", "is a file"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run("convert", folder, out)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=r"out cannot be written: .* is read-only\. Name another folder"):
        run("convert", folder, "out")
    assert not Path("out").exists()


def test_path_and_config_exclude_each_other(folder):
    assert RUNNER.invoke(app, ["index"]).exit_code == 2
    assert RUNNER.invoke(app, ["index", str(folder), "--config", "x.yaml"]).exit_code == 2
    assert RUNNER.invoke(app, ["index", str(folder), "--kind", "tar"]).exit_code == 2


def test_exit_code_and_one_sentence_for_refused_data(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "app.cli", "data", "index", f"pipe:touch {tmp_path}/executed"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 4 and not (tmp_path / "executed").exists()
    assert answer.stderr.startswith("error: ") and "pipe: runs a shell command" in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("given", [["index", "--cache", "s3://set/index"], ["convert", "s3://set/shards"]])
def test_a_uri_to_write_to_is_refused_and_no_folder_of_its_name_is_made(folder: Path, given: list[str]) -> None:
    answer = RUNNER.invoke(app, [given[0], str(folder), *given[1:]])
    assert answer.exit_code == 2 and "is a URI" in answer.output
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["shards"]
    with pytest.raises(ValueError, match="an index is a local or shared folder"):
        SourceConfig(path=str(folder), index="s3://set/index")


def test_synth_makes_clips_of_the_sizes_and_lengths_that_are_wanted(tmp_path: Path) -> None:
    wanted = ["--size", "48x80", "--size", "32x64", "--frames", "5", "--frames", "7"]
    answer = RUNNER.invoke(app, ["synth", str(tmp_path), *wanted, "--clips", "6", "--images", "2", "--shards", "1"])
    assert answer.exit_code == 0, answer.output
    index = build_index(SourceConfig(path=str(tmp_path / "shards" / "00000.tar")), tmp_path / "cache", Ledger())
    rows = [index.row(number) for number in range(8)]
    assert {(row.height, row.width) for row in rows} == {(48, 80), (32, 64)}
    assert {row.num_frames for row in rows} == {1, 5, 7}
    size = (tmp_path / "shards" / "00000.tar").stat().st_size
    assert f"00000..00000}}.tar ({size / 2**20:.1f} MiB)" in answer.output, "without the table's copies of the clips"


def test_the_help_of_synth_has_the_defaults_of_the_demo_set() -> None:
    told, base = " ".join(run("synth", "--help").split()), SynthConfig()
    *sizes, last = (f"{height}x{width}" for height, width in base.sizes)
    *lengths, longest = map(str, base.frames)
    for shown in (
        f"Video clips; default: {base.clips}.",
        f"Still images; default: {base.images}.",
        f"Shards; default: {base.shards}.",
        f"default: {', '.join(sizes)} and {last}.",
        f"default: {', '.join(lengths)} and {longest}.",
    ):
        assert shown in told


@pytest.mark.parametrize("size", ["480", "480p", "0x832", "480x", "81x480x832"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: str) -> None:
    answer = RUNNER.invoke(app, ["synth", str(tmp_path / "set"), "--size", size])
    assert f"--size {size} is no size; give height and width" in str(answer.exception)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(("hours", "told"), [(0.0, "0 s"), (0.01, "36 s"), (0.12, "7 min"), (1234.5, "1,234.5 h")])
def test_the_length_of_a_set_is_told_in_the_unit_that_fits(folder, capsys, hours: float, told: str) -> None:
    (facts,) = json.loads(run("stats", folder, "--json"))
    print_statistics(facts | {"hours": hours})
    assert f"0 images), {told}, " in capsys.readouterr().out
