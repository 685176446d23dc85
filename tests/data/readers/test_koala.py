"""Koala-36M and Panda-70M tables: their columns, their traps, both ways to lay out the videos, constant memory."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from data.config import LimitsConfig
from data.ledger import BadSample, Ledger, Reason
from data.readers.catalogue import Catalogue
from data.readers.kinds.koala import parse_range
from data.tools.convert import convert
from data.tools.lint import lint
from tests.data.making import clip, index_of, picture, rejected, shard_faults

COLUMNS = [
    "videoID",
    "url",
    "timestamp",
    "caption",
    "clarity_score",
    "aesthetic_score",
    "motion_score",
    "video_training_suitability_score",
]
CAPTION = 'A man, "Bob",\nwalks; the camera pans.\r\nThe end'


def row(video: str, timestamp: str = "['0:00:00.500', '0:00:01.500']", caption: str = CAPTION) -> list:
    return [video, f"https://www.youtube.com/watch?v={video}", timestamp, caption, 0.9, 5.3, 22.0, 4.5]


def table(path: Path, rows: list[list], columns: list[str] = COLUMNS, bom: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def put(folder: Path, *names: str, data: bytes | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(data or clip())


@pytest.mark.parametrize("bom", [False, True])
def test_clip_files_with_every_column_and_embedded_newlines(tmp_path, bom):
    rows = [row("lwAFSttEqno_96"), row("a_b-c_d-e_f_0"), row("gone_______1_3")]
    path = table(tmp_path / "Koala_36M_1.csv", rows, bom=bom)
    put(tmp_path / "clips", "lwAFSttEqno_96.mp4", "a_b-c_d-e_f_0.mp4")
    index, ledger = index_of(path, tmp_path / "cache", kind="koala")
    assert list(index.columns("key")["key"]) == ["lwAFSttEqno_96", "a_b-c_d-e_f_0"]
    assert index.caption(0) == CAPTION
    assert index.row(1).scores == {
        "clarity_score": 0.9,
        "aesthetic_score": 5.3,
        "motion_score": 22.0,
        "video_training_suitability_score": 4.5,
    }
    assert rejected(ledger) == {"file_missing": 1} and index.missing == 1
    assert index.coverage == pytest.approx(2 / 3)
    assert index.parts[0].file.with_suffix(".missing").read_text() == "gone_______1_3\n"


def test_names_with_the_suitability_score_in_front(tmp_path):
    path = table(tmp_path / "k.csv", [row("lwAFSttEqno_96"), row("4_abcdefghi_1")])
    put(tmp_path, "4.48_lwAFSttEqno_96.mp4", "4_abcdefghi_1.mkv", data=clip(container="matroska"))
    (tmp_path / "4.48_lwAFSttEqno_96.mp4").write_bytes(clip())
    index, ledger = index_of(path, tmp_path / "cache", kind="koala")
    assert [Path(index.row(i).path).name for i in range(2)] == ["4.48_lwAFSttEqno_96.mp4", "4_abcdefghi_1.mkv"]
    assert not ledger.rejected


def test_whole_videos_with_ranges(tmp_path):
    rows = [
        row("a_b-c_d-e_f_0", "['0:00:00', '0:00:01']"),
        row("a_b-c_d-e_f_1", "['0:00:01.500', '0:00:09.000']"),
        row("a_b-c_d-e_f_2", "['0:01:05', '0:01:06.500']"),
        row("a_b-c_d-e_f_3", "['0:00:02', '0:00:01']"),
    ]
    put(tmp_path / "raw", "a_b-c_d-e_f.mp4", data=clip(frames=33, fps=8))
    index, ledger = index_of(table(tmp_path / "k.csv", rows), tmp_path / "cache", kind="koala")
    columns = index.columns("ok", "num_frames", "start_s", "end_s", "duration")
    assert columns["ok"].tolist() == [True, True, False, False]
    assert columns["num_frames"].tolist()[:2] == [8, 21]
    assert columns["start_s"].tolist()[:2] == [0.0, 1.5] and columns["end_s"].tolist()[:2] == [1.0, 4.125]
    assert columns["duration"].tolist()[:2] == [1.0, 2.625]
    assert rejected(ledger) == {"range_outside_video": 1, "bad_timestamp": 1}
    ids = {index.row(i).content for i in range(2)}
    assert len(ids) == 2, "two parts of one video are different content"


def test_ranges_decode_and_convert_to_the_promised_frames(tmp_path):
    rows = [row("a_b-c_d-e_f_0", "['0:00:00', '0:00:01']"), row("a_b-c_d-e_f_1", "['0:00:01.500', '0:00:09.000']")]
    put(tmp_path / "raw", "a_b-c_d-e_f.mp4", data=clip(frames=33, fps=8))
    index, ledger = index_of(table(tmp_path / "k.csv", rows), tmp_path / "cache", kind="koala")
    ledger = Ledger()
    index.file_into(ledger)
    lint([index], ledger)
    assert (ledger.delivered, ledger.pending) == (2, 0)
    written = Ledger()
    index.file_into(written)
    convert(index, tmp_path / "shards", written)
    again, _ = index_of(tmp_path / "shards", tmp_path / "cache")
    assert again.columns("num_frames")["num_frames"].tolist() == [8, 21]
    assert again.caption(0) == CAPTION and again.row(0).scores["aesthetic_score"] == 5.3


def test_a_clip_file_goes_before_the_whole_video(tmp_path):
    put(tmp_path, "abcdefghijk.mp4", data=clip(frames=33))
    put(tmp_path, "abcdefghijk_0.mp4")
    index, _ = index_of(table(tmp_path / "k.csv", [row("abcdefghijk_0")]), tmp_path / "cache", kind="koala")
    assert Path(index.row(0).path).name == "abcdefghijk_0.mp4" and index.row(0).end_s == 0


def test_aliases_and_derived_columns(tmp_path):
    columns = ["id", "videoID", "url", "timestamp", "caption", "vtss", "video_path", "width"]
    path = table(
        tmp_path / "k.csv",
        [
            [
                7,
                "abcdefghijk_0",
                "u",
                "['0:00:00', '0:00:01']",
                "c",
                "4.25",
                "deep/title_segment_00-00-00-000_to_00-00-01-000.mp4",
                9,
            ]
        ],
        columns,
    )
    put(tmp_path / "deep", "title_segment_00-00-00-000_to_00-00-01-000.mp4")
    index, ledger = index_of(path, tmp_path / "cache", kind="koala")
    assert index.row(0).scores == {"video_training_suitability_score": 4.25} and not ledger.rejected
    assert index.filter_mask("vtss >= 4.2").tolist() == [True] and index.filter_mask("vtss > 4.25").tolist() == [False]


def test_a_stated_path_to_the_whole_video_is_cut(tmp_path):
    rows = [
        [*row("a_b-c_d-e_f_0", "['0:00:00.500', '0:00:01.500']"), "raw/a_b-c_d-e_f.mp4"],
        [*row("a_b-c_d-e_f_1"), "raw/a_b-c_d-e_f_1.mp4"],
    ]
    put(tmp_path / "raw", "a_b-c_d-e_f.mp4", data=clip(frames=33, fps=8))
    put(tmp_path / "raw", "a_b-c_d-e_f_1.mp4")
    path = table(tmp_path / "k.csv", rows, [*COLUMNS, "video_path"])
    index, ledger = index_of(path, tmp_path / "cache", kind="koala")
    columns = index.columns("num_frames", "start_s", "end_s")
    assert columns["num_frames"].tolist() == [8, 9] and not ledger.rejected
    assert columns["start_s"].tolist() == [0.5, 0.0] and columns["end_s"].tolist() == [1.5, 0.0]


def test_a_video_with_a_thumbnail_is_a_video(tmp_path):
    put(tmp_path / "raw", "abcdefghijk.jpg", "lmnopqrstuv_0.png", data=picture())
    put(tmp_path / "raw", "abcdefghijk.mp4", "4.48_lmnopqrstuv_0.mp4", data=clip(frames=33, fps=8))
    path = table(tmp_path / "k.csv", [row("abcdefghijk_0"), row("lmnopqrstuv_0")])
    index, ledger = index_of(path, tmp_path / "cache", kind="koala")
    assert [Path(index.row(i).path).name for i in range(2)] == ["abcdefghijk.mp4", "4.48_lmnopqrstuv_0.mp4"]
    assert index.columns("num_frames")["num_frames"].tolist() == [8, 33] and not ledger.rejected


@pytest.mark.parametrize("suffix, container", [("mp4", "mp4"), ("mkv", "matroska")])
def test_max_frames_bounds_the_clip_not_the_video_it_is_cut_from(tmp_path, suffix, container):
    rows = [
        row("a_b-c_d-e_f_0", "['0:00:00', '0:00:01']"),
        row("a_b-c_d-e_f_1", "['0:00:01', '0:00:04']"),
        row("lmnopqrstuv_0"),
    ]
    put(
        tmp_path / "raw",
        f"a_b-c_d-e_f.{suffix}",
        f"lmnopqrstuv_0.{suffix}",
        data=clip(frames=33, fps=8, container=container),
    )
    path, limits = table(tmp_path / "k.csv", rows), LimitsConfig(max_frames=20)
    index, ledger = index_of(path, tmp_path / "cache", kind="koala", limits=limits)
    assert index.columns("ok")["ok"].tolist() == [True, False, False] and index.row(0).num_frames == 8
    assert rejected(ledger) == {"too_many_frames": 2}
    videos = Catalogue(str(tmp_path / "raw"), limits, source_frames=32)
    source = videos.named("a_b-c_d-e_f")
    assert source is not None
    with pytest.raises(BadSample) as found:
        videos.probe(source, ranged=True)
    assert found.value.reason is Reason.TOO_MANY_FRAMES, "the header of the whole video has a bound of its own"


@pytest.mark.parametrize("stated", ["xyz://bucket/a.mp4", "https://x.y/a.mp4", "a\0b.mp4", "x" * 300 + ".mp4"])
def test_a_stated_path_that_is_no_path_is_one_bad_row(tmp_path, stated):
    path = table(
        tmp_path / "k.csv", [[*row("abcdefghijk_0"), stated], [*row("abcdefghijk_1"), ""]], [*COLUMNS, "video_path"]
    )
    put(tmp_path, "abcdefghijk_0.mp4", "abcdefghijk_1.mp4")
    index, ledger = index_of(path, tmp_path / "cache", kind="koala")
    assert rejected(ledger) == {"unsafe_name": 1} and index.num_ok == 1


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("['0:00:16.300', '0:00:20.900']", (16.3, 20.9)),
        ("['0:01:05', '1:00:00.5']", (65.0, 3600.5)),
        ('["00:00:01", "00:00:02"]', (1.0, 2.0)),
        ("['01:05', '02:10']", (65.0, 130.0)),
        ("('0:00:01', '0:00:02')", (1.0, 2.0)),
    ],
)
def test_timestamps_with_and_without_fractions(text, seconds):
    assert parse_range(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None",
        "['0:00:16']",
        "[16, 20]",
        "['a', 'b']",
        "__import__('os').system('x')",
        "['0:00:16.300', '0:00:20.900'",
        "[" * 10_000,
    ],
)
def test_malformed_timestamps_are_refused_not_evaluated(text):
    with pytest.raises(BadSample) as caught:
        parse_range(text)
    assert caught.value.reason is Reason.BAD_TIMESTAMP


def test_malformed_rows_are_counted_and_the_next_ones_still_come(tmp_path):
    path = table(
        tmp_path / "k.csv",
        [
            row("abcdefghijk_0"),
            ["too", "few"],
            row("abcdefghijk_1", caption="  "),
            row(""),
            row("abcdefghijk_0"),
            row("abcdefghijk_2"),
            row("abcdefghijk_3"),
        ],
    )
    put(tmp_path, *(f"abcdefghijk_{i}.mp4" for i in range(4)))
    data = path.read_bytes().replace(b"abcdefghijk_2,https", b"abcdefghijk_2,\xff\xfe")  # a stray byte in the URL
    path.write_bytes(data + b"abcdefghijk_9,u,t,caf\xe9,1,2,3,4\n")
    put(tmp_path, "abcdefghijk_9.mp4")
    index, ledger = index_of(path, tmp_path / "cache", kind="koala")
    columns = index.columns("ok", "key")
    assert list(columns["key"][columns["ok"]]) == ["abcdefghijk_0", "abcdefghijk_2", "abcdefghijk_3"]
    assert rejected(ledger) == {"bad_row": 2, "no_caption": 1, "split_key": 1, "caption_not_utf8": 1}


def test_a_table_without_the_columns_is_one_fault_that_names_them(tmp_path):
    path = table(tmp_path / "k.csv", [["a.mp4", "text"]], ["path", "text"])
    _, ledger = index_of(path, tmp_path / "cache", kind="koala")
    assert shard_faults(ledger) == {"unreadable_manifest": 1}
    assert "no column videoID, timestamp, caption; there are path, text" in ledger.last.detail


def test_files_that_arrive_later_are_found(tmp_path):
    path = table(tmp_path / "k.csv", [row("abcdefghijk_0"), row("abcdefghijk_1")])
    put(tmp_path / "videos", "abcdefghijk_0.mp4")
    first, _ = index_of(path, tmp_path / "cache", kind="koala")
    put(tmp_path / "videos", "abcdefghijk_1.mp4")
    second, _ = index_of(path, tmp_path / "cache", kind="koala")
    assert (len(first), len(second)) == (1, 2) and first.hash != second.hash


def test_panda_rows_hold_lists(tmp_path):
    columns = ["videoID", "url", "timestamp", "caption", "matching_score"]
    stamps = "[['0:00:00.000', '0:00:01.000'], ['0:00:01.500', '0:00:03.000'], ['0:00:59', '0:01:00']]"
    rows = [
        ["abcdefghijk", "u", stamps, str(["one, 'a'", "two", "three"]), "[0.5, 0.25, 0.125]"],
        ["lmnopqrstuv", "u", stamps, "['only one']", "[0.5]"],
        ["wxyzabcdefg", "u", "__import__('os')", "['x']", "[1]"],
        ["notherehere", "u", "[['0:00:00.000', '0:00:01.000']]", "['gone']", "[1]"],
    ]
    path = table(tmp_path / "panda70m_training_2m.csv", rows, columns)
    put(tmp_path / "videos", "abcdefghijk.mp4", data=clip(frames=33))
    put(tmp_path / "videos", "abcdefghijk_1.mp4")
    index, ledger = index_of(path, tmp_path / "cache", kind="panda")
    assert [index.row(i).key for i in range(3)] == ["abcdefghijk_0", "abcdefghijk_1", "abcdefghijk_2"]
    assert index.caption(0) == "one, 'a'" and index.row(1).scores == {"matching_score": 0.25}
    assert index.row(0).num_frames == 8 and index.row(0).end_s == 1.0
    assert Path(index.row(1).path).name == "abcdefghijk_1.mp4" and index.row(1).end_s == 0
    assert rejected(ledger) == {"range_outside_video": 1, "bad_row": 2, "file_missing": 1}


def test_half_a_character_in_a_caption_is_refused(tmp_path):
    stamps = "[['0:00:00.000', '0:00:01.000'], ['0:00:00.000', '0:00:01.000']]"
    path = table(
        tmp_path / "p.csv",
        [["abcdefghijk", "u", stamps, r"['half \ud83d', 'whole \U0001f600']"]],
        ["videoID", "url", "timestamp", "caption"],
    )
    put(tmp_path, "abcdefghijk.mp4")
    index, ledger = index_of(path, tmp_path / "cache", kind="panda")
    assert rejected(ledger) == {"caption_not_utf8": 1} and index.caption(1) == "whole \U0001f600"


MEASURE = """
import sys
from pathlib import Path
from data.config import SourceConfig
from data.dataset.index_build import build_index
from data.ledger import Ledger

def peak_mib():
    # of this process alone: ru_maxrss would begin with the peak of the parent
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024

before = peak_mib()
index = build_index(SourceConfig(path=sys.argv[1], kind="koala"), Path(sys.argv[2]), Ledger())
print(len(index), index.missing, peak_mib() - before)
"""


def growth_mib(tmp_path: Path, rows: int) -> int:
    """Memory an index of `rows` rows (1.4 KB each) of which one in a hundred has a file adds to the process."""
    folder = tmp_path / str(rows)
    caption = 'a long caption, with "quotes" and\nnewlines ' * 28
    table(folder / "k.csv", [row(f"abcdefghijk_{i}", caption=caption) for i in range(rows)])
    for i in range(0, rows, 100):
        put(folder / "videos", f"abcdefghijk_{i}.mp4")
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder / "k.csv"), str(folder / "cache")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.split()
    assert [int(answer[0]), int(answer[1])] == [rows // 100, rows - rows // 100]
    return int(answer[2])


@pytest.mark.long
def test_a_large_table_is_read_in_constant_memory(tmp_path):
    small, large = growth_mib(tmp_path, 1_000), growth_mib(tmp_path, 40_000)  # 1.4 MB and 57 MB
    assert large < small + 16, f"{small} MiB for 1.4 MB, {large} MiB for 57 MB"
