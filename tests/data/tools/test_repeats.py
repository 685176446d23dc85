"""Samples that have the clip of another are found without decoding, and no others."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from data.config import SourceConfig
from data.dataset.index import Index
from data.dataset.index_build import build_index
from data.ledger import Ledger
from data.tools.repeats import PIECE, repeated_samples, write_repeated
from tests.data.making import clip, index_of, picture, sample, shard


def index(path: Path, ordinal: int = 0) -> Index:
    return build_index(SourceConfig(path=str(path)), path.parent / f"cache{ordinal}", Ledger(), ordinal=ordinal)


def pairs(folder: Path, **clips: bytes) -> Path:
    folder.mkdir()
    for name, data in clips.items():
        (folder / f"{name}.mp4").write_bytes(data)
        (folder / f"{name}.txt").write_text(f"caption of {name}")
    return folder


def named(*indexes: Index) -> list[tuple[int, str, int, str]]:
    found = repeated_samples(indexes)
    return [(one.row.source, one.row.key, one.first.source, one.first.key) for one in found]


def test_the_same_file_under_another_name_and_in_another_source(tmp_path: Path) -> None:
    first = index(pairs(tmp_path / "a", one=clip(), two=clip(seed=1), three=clip()))
    tar = tmp_path / "b.tar"
    tar.write_bytes(shard([*sample(0, mp4=clip(seed=2)), *sample(1, mp4=clip(seed=1)), *sample(2, mp4=clip(frames=8))]))
    assert named(first) == [(0, "three", 0, "one")]
    assert named(first, index(tar, 1)) == [(0, "three", 0, "one"), (1, "000001", 0, "two")]


def test_ranges_and_crops_of_one_file_are_samples_of_their_own_unless_they_are_listed_twice(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip(frames=33))
    rows = [
        {"path": "a.mp4", "cap": "x", "cut": [0, 9]},
        {"path": "a.mp4", "cap": "x", "cut": [9, 18]},
        {"path": "a.mp4", "cap": "x", "cut": [0, 9], "crop": [0, 32, 0, 48]},
        {"path": "a.mp4", "cap": "x", "cut": [9, 18], "crop": [0, 32, 0, 48]},
        {"path": "a.mp4", "cap": "y", "cut": [9, 18]},
    ]
    (tmp_path / "m.json").write_text(json.dumps(rows))
    assert named(index(tmp_path / "m.json")) == [(0, "a#5", 0, "a#2")]


def padded(middle: bytes) -> bytes:
    """A clip with a box of bytes that no decoder reads, in which the middle of the file lies."""
    data = bytes(PIECE) + middle + bytes(PIECE)
    return clip() + struct.pack(">I", len(data) + 8) + b"free" + data


def test_clips_of_one_size_that_differ_in_their_middle_are_two(tmp_path: Path) -> None:
    first, second = b"first-one!", b"second-one"
    folder = pairs(tmp_path / "a", a=padded(first), b=padded(second), c=padded(first))
    assert len({path.stat().st_size for path in folder.glob("*.mp4")}) == 1
    assert named(index(folder)) == [(0, "c", 0, "a")]


def test_only_rows_that_are_trained_count(tmp_path: Path) -> None:
    source = index(pairs(tmp_path / "a", a=clip(), b=clip(), c=clip()))
    found = repeated_samples([source], [np.array([False, True, True])])
    assert [(one.row.key, one.first.key) for one in found] == [("c", "b")]
    assert repeated_samples([source], [np.zeros(3, bool)]) == []


def test_only_what_the_index_cannot_tell_apart_is_read(tmp_path: Path) -> None:
    """A clip that is gone cannot be read: it says nothing, and no clip of another length is looked at."""
    folder = pairs(tmp_path / "a", a=clip(), b=clip(), c=clip(frames=8))
    source = index(folder)
    for name in ("a", "c"):
        (folder / f"{name}.mp4").unlink()
    assert repeated_samples([source]) == []


def test_a_line_for_each(tmp_path: Path) -> None:
    source = index(pairs(tmp_path / "a", a=clip(), b=clip()))
    out = tmp_path / "repeated.jsonl"
    write_repeated(out, repeated_samples([source]))
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["key"], line["first_key"], line["first_shard"]) == ("b", "a", str(tmp_path / "a"))
    write_repeated(out, [])
    assert not out.exists()


def test_what_beside_a_clip_is_not_read_is_named(tmp_path: Path) -> None:
    """Columns of words in tables, and members of shards, that nobody takes; numbers are there for filters."""
    (tmp_path / "a.mp4").write_bytes(clip())
    rows = [
        {"video": "a.mp4", "caption": "x", "short_caption": "y", "control_video": "d.mp4", "score": 3, "mask": ""},
        {"video": "a.mp4", "caption": "x", "image": "a.png", "cut": [0, 8], "camera": [[1.0, 0.0]], "pose": None},
    ]
    (tmp_path / "m.json").write_text(json.dumps(rows))
    assert index(tmp_path / "m.json").unread == ("camera", "control_video", "image", "short_caption")
    both = index_of(tmp_path / "m.json", tmp_path / "other", "manifest", caption="caption+short_caption")[0]
    assert both.unread == ("camera", "control_video", "image")
    tar = tmp_path / "b.tar"
    tar.write_bytes(shard([*sample(0), *sample(1, **{"mask.png": picture(), "v2.txt": b"more", "pose.npy": b"1"})]))
    assert index(tar).unread == ("mask.png", "pose.npy")


def test_an_index_of_before_names_nothing(tmp_path: Path) -> None:
    source = index(pairs(tmp_path / "a", a=clip()))
    del source.parts[0].meta["unread"]
    assert source.unread == ()
