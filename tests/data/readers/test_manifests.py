"""Manifests of other trainers give the same rows, whatever they call their columns."""

from __future__ import annotations

import csv
import json
import math
import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import storage
from data.config import LimitsConfig
from data.decode import decode_clip
from data.errors import DataError, DataIOError
from data.ledger import BadSample, Ledger, Reason
from data.media_info import CropBox
from data.readers.kinds import manifest
from data.readers.part import read_meta
from data.storage import read_range
from data.tools.convert import convert, cut_clip
from data.types import Bucket, DecodeJob
from tests.data.making import clip, gone_at, hdr, index_of, picture, rejected, shard_faults, turned

NAMES = ["videos/a.mp4", "videos/b.mp4", "videos/c.png"]
TEXTS = ["first, caption", "second\ncaption", "a still image"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "set" / "videos").mkdir(parents=True)
    for name, data in zip(NAMES, (clip(), clip(seed=1), picture()), strict=True):
        (tmp_path / "set" / name).write_bytes(data)
    return tmp_path / "set"


def write_csv(path: Path, columns: list[str], rows: list[list]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


def write(folder: Path, layout: str) -> Path:
    """The three samples as one of the ecosystems lays them out."""
    both = list(zip(NAMES, TEXTS, strict=True))
    if layout == "Open-Sora csv":
        write_csv(
            folder / "meta.csv",
            ["path", "text", "num_frames", "height", "width", "aspect_ratio", "fps"],
            [[str(folder / name), text, 9, 48, 64, 0.75, 8] for name, text in both],
        )
        return folder / "meta.csv"
    if layout == "Open-Sora parquet":
        table = pa.table({"path": NAMES, "text": TEXTS, "score_vmafmotion": [1.0, 2.0, 3.0]})
        pq.write_table(table, folder / "m.parquet")
        return folder / "m.parquet"
    if layout == "DiffSynth":
        write_csv(folder / "metadata.csv", ["video", "prompt"], [list(pair) for pair in both])
        return folder
    if layout == "Hugging Face":
        lines = [json.dumps({"file_name": name, "text": text}) for name, text in both]
        (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
        return folder
    if layout == "VideoX-Fun":
        (folder / "list.json").write_text(
            json.dumps(
                [{"file_path": name, "text": text, "type": "video", "width": 64, "height": 48} for name, text in both]
            )
        )
        return folder / "list.json"
    if layout == "FastVideo":
        (folder / "videos2caption.json").write_text(
            json.dumps(
                [{"path": name, "cap": [text], "resolution": {"width": 64, "height": 48}} for name, text in both]
            )
        )
        return folder
    if layout == "musubi-tuner":
        (folder / "list.jsonl").write_text(
            "\n\n".join(json.dumps({"video_path": name, "caption": text}) for name, text in both)
        )
        return folder / "list.jsonl"
    if layout == "finetrainers":
        (folder / "videos.txt").write_text("\n".join(NAMES) + "\n\n")
        (folder / "prompt.txt").write_text("\n".join(text.replace("\n", " ") for text in TEXTS) + "\n")
        return folder
    if layout == "finetrainers, pictures":
        (folder / "images.txt").write_text("\n".join(NAMES))
        (folder / "caption.txt").write_text("\n".join(text.replace("\n", " ") for text in TEXTS))
        return folder
    if layout == "diffusion-pipe":
        (folder / "captions.json").write_text(json.dumps({NAMES[0]: TEXTS[0], **{n: [t] for n, t in both[1:]}}))
        return folder
    if layout == "bytes":
        held = [(folder / name).read_bytes() for name in NAMES]
        pq.write_table(pa.table({"video": held, "text": TEXTS}), folder / "held.parquet")
        return folder
    if layout == "DFM":
        (folder / "meta.json").write_text(
            json.dumps([{"file_name": name, "width": 64, "height": 48, "vila_caption": text} for name, text in both])
        )
        return folder
    (folder / "annotation.json").write_text(json.dumps([{"path": Path(name).name, "cap": text} for name, text in both]))
    (folder / "data.txt").write_text("videos,annotation.json\n")  # Open-Sora-Plan
    return folder / "data.txt"


LAYOUTS = [
    "Open-Sora csv",
    "Open-Sora parquet",
    "DiffSynth",
    "Hugging Face",
    "VideoX-Fun",
    "FastVideo",
    "musubi-tuner",
    "finetrainers",
    "finetrainers, pictures",
    "diffusion-pipe",
    "bytes",
    "DFM",
    "Open-Sora-Plan",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_ecosystem_gives_the_same_rows(folder, tmp_path, layout):
    index, ledger = index_of(write(folder, layout), tmp_path / "cache", kind="manifest")
    assert not ledger.rejected and not ledger.shard_faults
    texts = [text.replace("\n", " ") for text in TEXTS] if layout.startswith("finetrainers") else TEXTS
    assert [index.caption(i) for i in range(3)] == texts
    for row, name in zip(map(index.row, range(3)), NAMES, strict=True):
        assert read_range(row.path, row.offset, row.size) == (folder / name).read_bytes()
        assert layout == "bytes" or Path(row.path).resolve() == (folder / name).resolve()
    columns = index.columns("width", "height", "num_frames", "image")
    assert columns["num_frames"].tolist() == [9, 9, 1] and columns["image"].tolist() == [False, False, True]


def test_a_folder_whose_tables_lie_deeper_names_them(folder, tmp_path):
    for part in ("train", "test"):
        (folder / part).mkdir()
        write_csv(folder / part / "metadata.csv", ["file_name", "text"], [["../videos/a.mp4", "a"]])
    with pytest.raises(
        DataError, match=r"or other table here, but .*test/metadata\.csv and .*train/metadata\.csv\. Name"
    ):
        index_of(folder, tmp_path / "cache", kind="manifest")


def test_a_list_of_captions_is_told_from_one_of_clips(folder, tmp_path):
    (folder / "list.txt").write_text("videos/a.mp4\n")
    with pytest.raises(
        DataError, match=r"not `root,annotation\.json`\. A list of clips is called videos\.txt or images\.txt"
    ):
        index_of(folder / "list.txt", tmp_path / "cache", kind="manifest")


def test_a_missing_clip_is_named_by_where_it_was_looked_for(folder, tmp_path):
    """Tables of Open-Sora and OpenVid name clips that lie in a folder of their own, which `media` gives."""
    (folder / "tables").mkdir()
    table = folder / "tables" / "t.csv"
    write_csv(table, ["video", "caption"], [["a.mp4", "text"]])
    with pytest.raises(DataError, match=rf"1 file_missing, first {folder}/tables/a\.mp4: no such file\)"):
        index_of(table, tmp_path / "cache", kind="manifest", allow_empty=False)
    index, _ = index_of(table, tmp_path / "cache", kind="manifest", media=str(folder / "videos"))
    assert index.num_ok == 1


def test_numeric_columns_are_scores(folder, tmp_path):
    index, _ = index_of(write(folder, "Open-Sora parquet"), tmp_path / "cache", kind="manifest")
    assert index.scores == ("score_vmafmotion",)
    assert index.filter_mask("score_vmafmotion < 2.5").tolist() == [True, True, False]
    with pytest.raises(DataError, match=r"no column 'score_vmaf_motion'\. Did you mean score_vmafmotion"):
        index.filter_mask("score_vmaf_motion > 1")


def test_frame_ranges(folder, tmp_path):
    (folder / "meta.json").write_text(
        json.dumps(
            [
                {"file_name": NAMES[0], "start_frame": 2, "end_frame": 6, "vila_caption": "part"},
                {"file_name": NAMES[0], "start_frame": 4, "end_frame": 100, "vila_caption": "rest"},
                {"file_name": NAMES[0], "start_frame": 50, "end_frame": 60, "vila_caption": "outside"},
            ]
        )
    )
    index, ledger = index_of(folder, tmp_path / "cache", kind="manifest")
    columns = index.columns("num_frames", "start_s", "key")
    assert columns["num_frames"].tolist()[:2] == [4, 5] and columns["start_s"].tolist()[:2] == [0.25, 0.5]
    assert len(set(columns["key"])) == 3 and rejected(ledger) == {"range_outside_video": 1}


@pytest.mark.parametrize(
    ("row", "frames", "start_s"),
    [
        ({"start_frame": 2}, 7, 0.25),
        ({"start_frame": 2, "end_frame": ""}, 7, 0.25),
        ({"start_frame": 2, "end_frame": math.nan}, 7, 0.25),
        ({"end_frame": 6}, 6, 0.0),
        ({"start_frame": math.nan, "end_frame": math.nan}, 9, 0.0),
        ({"start_frame": math.nan, "end_frame": math.nan, "cut": [2, 6]}, 4, 0.25),
        ({"cut": math.nan, "crop": math.nan}, 9, 0.0),
    ],
)
def test_one_bound_of_a_range_counts_and_an_empty_one_does_not(folder, tmp_path, row, frames, start_s):
    (folder / "list.json").write_text(json.dumps([{"path": NAMES[0], "cap": "a", **row}]))
    index, ledger = index_of(folder / "list.json", tmp_path / "cache", kind="manifest")
    assert not ledger.rejected and index.row(0).num_frames == frames and index.row(0).start_s == start_s


@pytest.mark.parametrize(
    "row",
    [
        {"start_frame": 0},
        {"start_frame": 0.0, "end_frame": None},
        {"start_frame": 0, "end_frame": math.nan},
        {"end_frame": -1},
        {"end_frame": 9},
        {"end_frame": 100},
    ],
)
def test_a_range_that_says_nothing_leaves_the_name_of_a_clip(folder, tmp_path, row):
    """An index and a cache of before go on being used."""
    (folder / "list.json").write_text(
        json.dumps([{"path": NAMES[0], "cap": "a"}, {"path": NAMES[0], "cap": "a", **row}])
    )
    index, ledger = index_of(folder / "list.json", tmp_path / "cache", kind="manifest")
    plain, same = index.row(0), index.row(1)
    assert not ledger.rejected and same.content == plain.content
    assert (same.start_s, same.end_s, same.num_frames) == (0.0, 0.0, plain.num_frames)


def test_open_sora_plan_cuts(folder, tmp_path):
    cuts = [{"cut": [2, 6]}, {"cut": [2, 6], "num_frames": 3}, {"cut": [4, 100]}, {"cut": None}, {"num_frames": 5}]
    (folder / "annotation.json").write_text(
        json.dumps(
            [{"path": NAMES[0], "cap": ["text"], **cut} for cut in cuts]
            + [{"path": NAMES[2], "cap": "c", "cut": [0, 1]}]
        )
    )
    (folder / "data.txt").write_text(f"{folder},annotation.json\n")
    index, ledger = index_of(folder / "data.txt", tmp_path / "cache", kind="manifest")
    columns = index.columns("num_frames", "start_s", "image")
    assert columns["num_frames"].tolist() == [4, 3, 5, 9, 9, 1] and not ledger.rejected
    assert columns["start_s"].tolist() == [0.25, 0.25, 0.5, 0, 0, 0]


@pytest.mark.parametrize(
    "cut",
    [
        [2],
        [2, 4, 6],
        ["a", 6],
        [2, None],
        [6, 2],
        [-3, 2],
        [float("nan"), 2],
        [[2], 6],
        {"start": 2},
        "2-6",
        5,
        True,
        [],
    ],
)
def test_a_malformed_cut_is_one_bad_row(folder, tmp_path, cut):
    rows = [{"path": NAMES[0], "cap": "bad", "cut": cut}, {"path": NAMES[0], "cap": "good", "cut": [2, 6]}]
    (folder / "list.json").write_text(json.dumps(rows))
    index, ledger = index_of(folder / "list.json", tmp_path / "cache", kind="manifest")
    assert rejected(ledger) == {"bad_timestamp": 1} and index.caption(1) == "good"


def test_open_sora_plan_crops_count_as_the_size_of_the_clip(folder, tmp_path):
    crops = [[8, 40, 0, 48], [0, 64, 0, 48], None, [], [8, 40, 16, 48]]
    rows = [{"path": NAMES[0], "cap": "a", "crop": crop} for crop in crops] + [
        {"path": NAMES[2], "cap": "c", "crop": [1, 63, 2, 46]}
    ]
    (folder / "annotation.json").write_text(json.dumps(rows))
    (folder / "data.txt").write_text(f"{folder},annotation.json\n")
    index, ledger = index_of(folder / "data.txt", tmp_path / "cache", kind="manifest")
    sizes = index.columns("width", "height")
    assert not ledger.rejected
    assert sizes["width"].tolist() == [32, 64, 64, 64, 32, 62] and sizes["height"].tolist() == [48, 48, 48, 48, 32, 44]
    assert [index.row(i).crop for i in (0, 1, 2)] == [CropBox(8, 40, 0, 48), None, None]
    assert len({index.row(i).content for i in (0, 1, 4)}) == 3  # a crop is part of the key of cached latents
    assert index.row(1).content == index.row(2).content


OUTSIDE = ("range_outside_video", "is empty or not inside the frame of 64x48")
NO_LIST = ("bad_row", "is not a list of pixels [start_x, end_x, start_y, end_y]")


@pytest.mark.parametrize(
    ("crop", "reason", "sentence"),
    [
        ([0, 65, 0, 48], *OUTSIDE),
        ([-1, 30, 0, 48], *OUTSIDE),
        ([0, 64, 100, 200], *OUTSIDE),
        ([8, 8, 0, 48], *OUTSIDE),
        ([40, 8, 0, 48], *OUTSIDE),
        ([8, 40, 0], *NO_LIST),
        ([8, 40, 0, None], *NO_LIST),
        ([0, 1.5, 0, 9], *NO_LIST),
        ([0, float("nan"), 0, 9], *NO_LIST),
        ([0, float("inf"), 0, 9], *NO_LIST),
        ("8-40", *NO_LIST),
        (True, *NO_LIST),
    ],
)
def test_a_bad_crop_is_one_bad_row(folder, tmp_path, crop, reason, sentence):
    rows = [{"path": NAMES[0], "cap": "bad", "crop": crop}, {"path": NAMES[0], "cap": "good", "crop": [0, 32, 0, 48]}]
    (folder / "list.json").write_text(json.dumps(rows))
    index, ledger = index_of(folder / "list.json", tmp_path / "cache", kind="manifest")
    assert rejected(ledger) == {reason: 1} and index.caption(1) == "good"
    assert ledger.last.detail == f"crop {crop} {sentence}"


def test_converted_shards_hold_the_cropped_part(folder, tmp_path):
    rows = [{"path": name, "cap": "text", "crop": [8, 40, 16, 48]} for name in (NAMES[0], NAMES[2])]
    (folder / "list.json").write_text(json.dumps(rows))
    index, _ = index_of(folder / "list.json", tmp_path / "cache", kind="manifest")
    ledger = Ledger()
    convert(index, tmp_path / "shards", ledger, crf=1)
    again, _ = index_of(tmp_path / "shards", tmp_path / "cache")
    assert ledger.delivered == 2 and again.columns("num_frames")["num_frames"].tolist() == [9, 1]
    job = DecodeJob(item="", bucket=Bucket(1, 32, 32), clips=(), fps=0.0, crop=False, limits=LimitsConfig(), decoder="")
    for number, tolerance in enumerate((4.0, 0.0)):  # levels: video is encoded again, a picture is not
        made, original = (decode_clip(found.row(number).clip(), job).astype(float) for found in (again, index))
        assert abs(made - original).mean() <= tolerance


@pytest.mark.parametrize(
    ("says", "aspect", "pixels"),
    [
        ((1, 1), 1, "yuv420p"),
        ((1, 2), 1, "yuv420p"),
        ((5, 2), 1, "yuv420p"),
        ((5, 1), Fraction(4, 3), "yuv420p"),
        ((0, 2), 1, "rgb24"),
        ((2, 0), 1, "yuv420p"),
    ],
    ids=["709", "709 full", "601 full", "wide pixels", "rgb", "says nothing"],
)
@pytest.mark.parametrize("rotation", [0, 90])
def test_a_part_that_is_encoded_again_keeps_its_colours_and_its_aspect(tmp_path, says, aspect, pixels, rotation):
    with av.open(str(tmp_path / "a.mp4"), "w") as out:
        codec = "libx264rgb" if pixels == "rgb24" else "libx264"
        stream = out.add_stream(codec, rate=8, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, pixels
        context = stream.codec_context
        context.colorspace, context.color_range, context.sample_aspect_ratio = *says, aspect
        for i in range(9):
            if pixels == "rgb24":
                frame = av.VideoFrame.from_ndarray(np.full((64, 96, 3), [220, 40, 10], np.uint8), format=pixels)
            else:
                planes = np.repeat(np.uint8([82, 90, 220]), [64, 16, 16])[:, None].repeat(96, 1)
                frame = av.VideoFrame.from_ndarray(planes, format=pixels)
                frame.colorspace, frame.color_range = says
            frame.pts = i
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    (tmp_path / "a.mp4").write_bytes(turned((tmp_path / "a.mp4").read_bytes(), rotation))
    (tmp_path / "list.json").write_text(json.dumps([{"path": "a.mp4", "cap": "a", "cut": [2, 6]}]))
    index, _ = index_of(tmp_path / "list.json", tmp_path / "cache", kind="manifest")
    convert(index, tmp_path / "shards", Ledger(), crf=1)
    rows = [index.row(0), index_of(tmp_path / "shards", tmp_path / "cache")[0].row(0)]
    assert rows[0].rotation == rotation and rows[1].rotation == 0
    assert (rows[0].width, rows[0].height) == (rows[1].width, rows[1].height)
    job = DecodeJob(item="", bucket=Bucket(1, 32, 32), clips=(), fps=0.0, crop=False, limits=LimitsConfig(), decoder="")
    original, made = (decode_clip(row.clip(), job)[0, 16, 16].astype(int) for row in rows)
    assert abs(made - original).max() <= 3  # levels: it is encoded again


@pytest.mark.parametrize("part", [{"cut": [2, 6]}, {"crop": [8, 40, 16, 48]}])
@pytest.mark.parametrize("rotation", [0, 90])
def test_hdr_is_not_encoded_again_as_what_it_is_not(tmp_path, part, rotation):
    (tmp_path / "a.mp4").write_bytes(turned(hdr(told=False), rotation))
    (tmp_path / "list.json").write_text(json.dumps([{"path": "a.mp4", "cap": "a", **part}]))
    index, _ = index_of(tmp_path / "list.json", tmp_path / "cache", kind="manifest")
    assert index.num_ok == 1
    with pytest.raises(BadSample, match="HLG; tone-map it") as caught:
        cut_clip(index.row(0), index, crf=18)
    assert caught.value.reason is Reason.HDR
    ledger = Ledger()
    convert(index, tmp_path / "shards", ledger)
    assert (ledger.delivered, ledger.skipped) == (0, {Reason.HDR: 1})


def test_max_frames_bounds_what_is_left_of_a_cut(folder, tmp_path):
    rows = [
        {"path": NAMES[0], "cap": "a", "cut": [2, 6]},
        {"path": NAMES[0], "cap": "b", "cut": [2, 8]},
        {"path": NAMES[0], "cap": "c"},
    ]
    (folder / "list.json").write_text(json.dumps(rows))
    index, ledger = index_of(
        folder / "list.json", tmp_path / "cache", kind="manifest", limits=LimitsConfig(max_frames=5)
    )
    assert index.columns("ok")["ok"].tolist() == [True, False, False]
    assert rejected(ledger) == {"too_many_frames": 2} and index.row(0).num_frames == 4


@pytest.mark.parametrize(
    "path", ["xyz://bucket/a.mp4", "ftp://x.y/a.mp4", "a\0b.mp4", "\ud83d.mp4", "x" * 300 + ".mp4"]
)
def test_a_path_that_is_none_is_one_bad_row(folder, tmp_path, path):
    (folder / "list.json").write_text(json.dumps([{"path": path, "cap": "bad"}, {"path": NAMES[0], "cap": "good"}]))
    index, ledger = index_of(folder / "list.json", tmp_path / "cache", kind="manifest")
    assert rejected(ledger) == {"unsafe_name": 1} and index.num_ok == 1


@pytest.mark.parametrize("kind", ["manifest", "koala"])
def test_a_row_does_not_say_by_which_service_it_is_asked(tmp_path, monkeypatch, kind):
    paths = [
        "gs://endpoint_override=evil.example&scheme=http@b/x.mp4",
        "s3://endpoint_override=evil.example&scheme=http&region=us-east-1@b/x.mp4",
        "s3://b?endpoint_override=evil.example&region=us-east-1/x.mp4",
        "s3://b/x.mp4?endpoint_override=evil.example",
        "abfs://account@evil.example/b/x.mp4",
        "abfss://account@evil:443/b/x.mp4",
        "fsspec+http://169.254.169.254/x.mp4",
        "./fsspec+http://169.254.169.254/x.mp4",
        "hf://datasets/a/b/x.mp4::http://169.254.169.254/x.mp4",
    ]
    asked = []
    monkeypatch.setattr(storage, "resolve", lambda uri: asked.append(uri) or storage.pafs.FileSystem.from_uri("mock:/"))
    rows = [[path, f"{'x' * 11}_{i}", "['0:00:00', '0:00:01']", "text"] for i, path in enumerate(paths)]
    write_csv(tmp_path / "t.csv", ["video_path", "videoID", "timestamp", "caption"], rows)
    index, ledger = index_of(tmp_path / "t.csv", tmp_path / "cache", kind=kind)
    assert asked == [] and rejected(ledger) == {"unsafe_name": len(paths)} and len(index) == len(paths)


@pytest.mark.parametrize(
    "line",
    ["gs://endpoint_override=evil.example@b/videos,annotation.json", "videos,fsspec+http://169.254.169.254/a.json"],
)
def test_a_list_of_tables_does_not_say_by_which_service_they_are_asked(folder, tmp_path, monkeypatch, line):
    monkeypatch.setattr(storage, "resolve", None)
    (folder / "data.txt").write_text(f"{line}\n")
    with pytest.raises(DataError, match=r"data\.txt: .* says of which service it is asked"):
        index_of(folder / "data.txt", tmp_path / "cache", kind="manifest")


def test_storage_that_fails_is_no_bad_row(folder, tmp_path, monkeypatch):
    (folder / "list.json").write_text(json.dumps([{"path": "/elsewhere/a.mp4", "cap": "text"}]))
    plain = storage.stat

    def failing(uri, retries=4):
        if uri == "/elsewhere/a.mp4":
            raise DataIOError("stat: Connection reset (5 attempts)")
        return plain(uri, retries)

    monkeypatch.setattr(storage, "stat", failing)
    with pytest.raises(DataIOError, match="Connection reset"):
        index_of(folder / "list.json", tmp_path / "cache", kind="manifest")


def test_bad_rows_are_counted_one_by_one(folder, tmp_path):
    lines = [
        json.dumps({"video": NAMES[0], "caption": "good"}),
        "{broken",
        "[1, 2]",
        json.dumps({"caption": "x"}),
        json.dumps({"video": "videos/gone.mp4", "caption": "x"}),
        json.dumps({"video": NAMES[1]}),
        json.dumps({"video": "pipe:touch x", "caption": "x"}),
        json.dumps({"video": "list.jsonl", "caption": "x"}),
        json.dumps({"video": NAMES[1], "caption": "also good"}),
    ]
    (folder / "list.jsonl").write_text("\n".join(lines))
    index, ledger = index_of(folder / "list.jsonl", tmp_path / "cache", kind="manifest")
    assert rejected(ledger) == {"bad_row": 3, "no_caption": 1, "file_missing": 1, "unsafe_name": 1, "not_media": 1}
    assert index.num_ok == 2 and ledger.indexed == 9


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("t.csv", f"clip,caption\n{NAMES[0]},a cat\n", "among clip, caption; rename clip to path"),
        ("t.csv", "url,caption\nhttps://a.b/c.mp4,a cat\n", "url has addresses, download the clips"),
        ("t.csv", f"{NAMES[0]},a cat\n{NAMES[1]},a dog\n", "the table has no header, put a line path,caption"),
        ("t.jsonl", json.dumps({NAMES[0]: "a cat"}), "rename the column of the clips to path"),
        ("t.csv", f"path;caption\n{NAMES[0]};a cat, or two\n", "separated by semicolons; save it with commas"),
        ("t.tsv", f"path,caption\n{NAMES[0]},a cat\n", "separated by commas; save it with tabs"),
    ],
)
def test_a_table_without_a_column_of_clips_is_told_what_to_do(folder, tmp_path, name, text, says):
    """It said which names were not there, and that data.sources caption names others."""
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=says):
        index_of(folder / name, tmp_path / "cache", kind="manifest", allow_empty=False)
    index, _ = index_of(folder / name, tmp_path / "cache", kind="manifest")
    assert index.unread == (), "nothing of a row without a clip is read"


def test_a_table_whose_column_is_known_in_other_letters_and_of_no_use_is_read_once(folder, tmp_path, caplog):
    (folder / "t.jsonl").write_text('{"path": "a.mp4", "Caption": {"en": "a dog"}}\n')
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO"):
            index, ledger = index_of(folder / "t.jsonl", tmp_path / "cache", kind="manifest")
        assert ledger.rejected and index.unread == ("Caption",)
    assert "to read" not in caplog.text and len([*(tmp_path / "cache").glob("t*.parquet")]) == 1


def test_columns_in_other_letters_are_those_that_are_known(folder, tmp_path):
    (folder / "t.csv").write_text(f"Path,Caption,Note\n{NAMES[0]},a cat,blurred\n")
    index, ledger = index_of(folder / "t.csv", tmp_path / "cache", kind="manifest")
    assert not ledger.rejected and index.caption(0) == "a cat" and index.unread == ("Note",)
    (folder / "t.csv").write_text(f"Path,path,Caption,caption\n{NAMES[1]},{NAMES[0]},a dog,a cat\n")
    index, _ = index_of(folder / "t.csv", tmp_path / "cache", kind="manifest")
    assert index.row(0).key == "videos/a" and index.caption(0) == "a cat", "names as they are known go first"
    assert index.unread == ("Caption", "Path")
    pq.write_table(pa.table({"Video": [{"bytes": clip(), "path": "a.mp4"}], "TEXT": ["a cat"]}), folder / "t.parquet")
    index, _ = index_of(folder / "t.parquet", tmp_path / "cache", kind="manifest")
    assert index.num_ok == 1 and index.caption(0) == "a cat"


@pytest.mark.parametrize("header, reason", [("Path,caption", "bad_row"), ("path,Caption", "no_caption")])
def test_a_table_whose_columns_were_not_known_is_read_again(folder, tmp_path, monkeypatch, header, reason):
    (folder / "t.csv").write_text(f"{header}\n{NAMES[0]},a cat\n")
    with monkeypatch.context() as before:
        before.setattr(manifest, "_columns", lambda names, row: names)
        before.setattr(manifest, "_without_clip", lambda *_: BadSample(Reason.BAD_ROW, ""))
        _, ledger = index_of(folder / "t.csv", tmp_path / "cache", kind="manifest")
        assert rejected(ledger) == {reason: 1}
    (file,) = (tmp_path / "cache").glob("*.parquet")
    meta = read_meta(file) | {"unread": [name for name in header.split(",") if name.istitle()], "revision": 1}
    pq.write_table(pq.read_table(file).replace_schema_metadata({"heddle": json.dumps(meta)}), file)
    index, ledger = index_of(folder / "t.csv", tmp_path / "cache", kind="manifest")
    assert not ledger.rejected and index.caption(0) == "a cat"


def test_a_sign_of_inches_is_no_quote_in_a_row_of_several_lines(folder, tmp_path):
    (folder / "list.csv").write_text(f'path,note,text\n{NAMES[0]},a 5" screen,"two\nlines"\n')
    index, ledger = index_of(folder / "list.csv", tmp_path / "cache", kind="manifest")
    assert not ledger.rejected and index.caption(0) == "two\nlines"


@pytest.mark.parametrize("ends", ["", f'{NAMES[1]},"closed"\n'])
def test_a_quote_that_is_not_closed_is_counted_with_the_lines_it_takes(folder, tmp_path, ends):
    lines = [f'{NAMES[0]},"two\nlines, ""quoted"""', f'{NAMES[2]},"not closed', *(f"{NAMES[0]},{i}" for i in range(3))]
    (folder / "list.csv").write_text("\n".join(["path,text", *lines, ends]))
    index, ledger = index_of(folder / "list.csv", tmp_path / "cache", kind="manifest")
    assert rejected(ledger) == {"bad_row": 1} and index.num_ok == 1
    assert index.caption(0) == 'two\nlines, "quoted"' and "line 4" in index.row(1).detail


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.json", b"{"),
        ("a.json", b"3"),
        ("a.parquet", b"PAR1xxxxPAR1"),
        ("a.csv", b""),
        ("a.jsonl", b""),
        ("a.csv", "path,text\na.mp4,b\n".encode("utf-16")),
    ],
)
def test_unreadable_manifests_are_shard_faults(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    index, ledger = index_of(tmp_path / name, tmp_path / "cache", kind="manifest")
    assert shard_faults(ledger) == {"unreadable_manifest": 1} and len(index) == 0


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_damaged_tables_never_crash_and_the_ledger_adds_up(folder, tmp_path, suffix):
    rows = [{"path": NAMES[i % 3], "caption": TEXTS[i % 3], "score": i / 10} for i in range(20)]
    path = tmp_path / f"table.{suffix}"
    if suffix == "csv":
        write_csv(path, list(rows[0]), [list(row.values()) for row in rows])
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if suffix == "jsonl" else json.dumps(rows))
    whole, random, bad = path.read_bytes(), np.random.default_rng(1), 0
    for _ in range(40):
        data = bytearray(whole)
        for at in random.integers(0, len(data), random.integers(1, 8)):
            data[at] = int(random.integers(0, 256))
        path.write_bytes(bytes(data))
        _, ledger = index_of(path, tmp_path / "cache", kind="manifest", media=str(folder))  # checks the ledger
        bad += bool(ledger.rejected or ledger.shard_faults)
    assert bad > 10


def test_a_parquet_table_that_goes_while_it_is_read_leaves_no_index_without_its_rows(folder, tmp_path):
    """It was taken for one that is not Parquet, and back with the same size and time it had no rows for good."""
    pq.write_table(pa.table({"path": NAMES, "caption": TEXTS}), tmp_path / "t.parquet")
    source = {"kind": "manifest", "media": str(folder)}
    with gone_at(0, ".parquet") as reads:
        index_of(tmp_path / "t.parquet", tmp_path / "whole", **source)
        last = next(reads) - 1
    assert last >= 3
    for number in range(1, last + 1):
        with gone_at(number, ".parquet"), pytest.raises(DataIOError, match=r"index of .*/t\.parquet: "):
            index_of(tmp_path / "t.parquet", tmp_path / "cache", **source)
        assert not [*(tmp_path / "cache").glob("*.parquet")]
    index, ledger = index_of(tmp_path / "t.parquet", tmp_path / "cache", **source)
    assert index.num_ok == len(NAMES) and not ledger.shard_faults


def test_lists_of_unequal_length_are_refused(folder, tmp_path):
    (folder / "videos.txt").write_text("\n".join(NAMES))
    (folder / "prompt.txt").write_text("one\ntwo\n")
    _, ledger = index_of(folder, tmp_path / "cache", kind="manifest")
    assert shard_faults(ledger) == {"unreadable_manifest": 1}
    assert "3 videos but 2 lines in prompt.txt" in ledger.last.detail


def test_edited_prompts_beside_a_list_of_videos_are_read_again(folder, tmp_path):
    write(folder, "finetrainers")
    first, _ = index_of(folder, tmp_path / "cache", kind="manifest")
    prompts = folder / "prompt.txt"
    before = prompts.stat()
    prompts.write_text(prompts.read_text().replace("first", "FIRST"))
    os.utime(prompts, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    second, _ = index_of(folder, tmp_path / "cache", kind="manifest")
    assert second.caption(0) == "FIRST, caption" and second.hash != first.hash


def test_converted_shards_hold_the_same_samples(folder, tmp_path):
    index, _ = index_of(write(folder, "FastVideo"), tmp_path / "cache", kind="manifest")
    ledger = Ledger()
    index.file_into(ledger)
    shards = convert(index, tmp_path / "shards", ledger, shard_count=2)
    ledger.check()
    assert len(shards) == 2 and ledger.delivered == 3
    again, _ = index_of(tmp_path / "shards", tmp_path / "cache")
    assert [again.caption(i) for i in range(3)] == TEXTS
    for name in ("width", "height", "num_frames", "size", "image"):
        assert again.columns(name)[name].tolist() == index.columns(name)[name].tolist()
    with pytest.raises(ValueError, match="already holds shards"):
        convert(index, tmp_path / "shards", ledger)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_row_and_its_file_may_write_an_accent_in_two_ways(tmp_path, absolute):
    whole, parts = "caf\u00e9", "cafe\u0301"  # as Linux writes it, and as a Mac does
    folder = tmp_path / "set"
    folder.mkdir()
    for name, seed in ((f"{parts}1", 0), (f"{whole}2", 0), (f"{parts}3", 0), (f"{whole}3", 1)):
        (folder / f"{name}.mp4").write_bytes(clip(seed=seed))
    rows = [f"{whole}1", f"{parts}2", f"{parts}3", f"{whole}3", f"{whole}4"]
    before = f"{folder}/" if absolute else ""
    write_csv(folder / "meta.csv", ["path", "text"], [[f"{before}{name}.mp4", "a clip"] for name in rows])
    index, _ = index_of(folder / "meta.csv", tmp_path / "cache", kind="manifest")
    found = [Path(index.row(row).path).stem for row in range(len(index))]
    assert found == [f"{parts}1", f"{whole}2", f"{parts}3", f"{whole}3"] and index.missing == 1


@pytest.mark.parametrize("held", [{"bytes": "text"}, {"bytes": [1, 2]}, {"path": 5}, {"bytes": None, "path": ["a"]}])
def test_media_that_are_held_as_something_else_are_one_bad_row(folder, tmp_path, held):
    rows = [{"video": held, "caption": "bad"}, {"video": NAMES[0], "caption": "good"}]
    (folder / "list.json").write_text(json.dumps(rows))
    index, ledger = index_of(folder / "list.json", tmp_path / "cache", kind="manifest")
    assert rejected(ledger) == {"bad_row": 1} and index.caption(1) == "good"


def test_rows_that_hold_their_media_themselves_are_trained(tmp_path):
    """As Hugging Face's datasets write them."""
    rows = [
        {"bytes": clip(), "path": "a.mp4"},
        {"bytes": picture(), "path": None},
        {"bytes": clip(seed=1), "path": ""},
        {"bytes": b"<html>", "path": None},
        {"bytes": b"", "path": "beside.mp4"},
        {"bytes": None, "path": None},
    ]
    (tmp_path / "beside.mp4").write_bytes(clip())
    pq.write_table(
        pa.table({"video": pa.array(rows), "text": [f"caption {i}" for i in range(len(rows))]}),
        tmp_path / "train-00000.parquet",
    )
    for _ in range(2):  # also from the finished index
        index, ledger = index_of(tmp_path / "train-00000.parquet", tmp_path / "cache", kind="manifest")
    assert rejected(ledger) == {"not_media": 1, "bad_row": 1}
    assert index.columns("image")["image"].tolist()[:3] == [False, True, False]
    assert [index.caption(row) for row in (0, 1, 2)] == ["caption 0", "caption 1", "caption 2"]
    for row, held in enumerate(rows[:3]):
        found = index.row(row)
        assert read_range(found.path, found.offset, found.size, 0) == held["bytes"]
    assert len({index.row(row).content for row in range(3)}) == 3
    written = Ledger()
    convert(index, tmp_path / "shards", written)
    assert written.delivered == 4
