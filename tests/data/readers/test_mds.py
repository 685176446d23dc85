"""MosaicML's shards, written here byte by byte as their format says."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.errors import DataError, DataIOError
from data.storage import read_range
from tests.data.making import clip, gone_at, index_of, picture, rejected, shard_faults

ENCODINGS = {
    "caption": "str",
    "fps_class": "int",
    "meta": "json",
    "score": "float32",
    "secret": "pkl",
    "video": "bytes",
}
SIZES = {"int": 8, "float32": 4}
MEDIA = (clip(), picture(), clip(seed=1), clip(seed=2))


def rows() -> list[dict[str, bytes]]:
    return [
        {
            "caption": f" caption {number}".encode(),
            "fps_class": struct.pack("<q", number),
            "meta": json.dumps({"long": [f"long {number}"], "aesthetic": number / 2}).encode(),
            "score": struct.pack("<f", number / 4),
            "secret": b"cos\nsystem\n(S'false'\ntR.",
            "video": data,
        }
        for number, data in enumerate(MEDIA)
    ]


def packed(rows: Sequence[Mapping[str, bytes]], encodings: Mapping[str, str]) -> tuple[bytes, dict[str, object]]:
    """A shard, and what it says of its columns."""
    config: dict[str, object] = {
        "column_names": list(encodings),
        "column_encodings": list(encodings.values()),
        "column_sizes": [SIZES.get(encoding) for encoding in encodings.values()],
        "compression": None,
        "format": "mds",
        "version": 2,
    }
    about = json.dumps(config, sort_keys=True).encode()
    samples = []
    for row in rows:
        sizes = [len(row[name]) for name, encoding in encodings.items() if encoding not in SIZES]
        samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(row[name] for name in encodings))
    offsets = np.cumsum([4 + 4 * (len(rows) + 1) + len(about), *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(rows)) + offsets.tobytes() + about + b"".join(samples), config


def write(folder: Path, shards: Sequence[bytes], config: dict[str, object], compression: str = "") -> Path:
    folder.mkdir()
    listed = []
    for number, data in enumerate(shards):
        name = f"shard.{number:05d}.mds"
        entry = {**config, "raw_data": {"basename": name, "bytes": len(data), "hashes": {}}, "zip_data": None}
        if compression:
            codec = {"gz": "gzip"}.get(compression.partition(":")[0], compression.partition(":")[0])
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, codec) as stream:
                stream.write(data)
            name += f".{compression.partition(':')[0]}"
            entry |= {"compression": compression, "zip_data": {"basename": name, "bytes": 1, "hashes": {}}}
            data = sink.getvalue().to_pybytes()
        (folder / name).write_bytes(data)
        listed.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return folder


@pytest.mark.parametrize("compression", ["", "zstd:7", "gz"])
def test_what_is_read_is_what_was_written(tmp_path: Path, compression: str) -> None:
    halves = [packed(half, ENCODINGS)[0] for half in (rows()[:2], rows()[2:])]
    folder = write(tmp_path / "set", halves, packed(rows(), ENCODINGS)[1], compression)
    for _ in range(2):  # also from the finished index
        index, ledger = index_of(folder, tmp_path / "cache", kind="mds", caption="caption+json:long")
    assert not ledger.rejected and not ledger.shard_faults and index.num_shards == 2
    columns = index.columns("num_frames", "width", "image", "score", "aesthetic", "fps_class", "key")
    assert columns["num_frames"].tolist() == [9, 1, 9, 9] and columns["image"].tolist() == [False, True, False, False]
    assert columns["score"].tolist() == [0, 0.25, 0.5, 0.75] and columns["aesthetic"].tolist() == [0, 0.5, 1, 1.5]
    assert columns["fps_class"].tolist() == [0, 1, 2, 3] and columns["key"].tolist() == ["000000", "000001"] * 2
    for number, data in enumerate(MEDIA):
        row = index.row(number)
        assert read_range(row.path, row.offset, row.size) == data
        assert [index.caption(number, choice) for choice in (0, 1)] == [f"caption {number}", f"long {number}"]
    assert len({index.row(number).content for number in range(4)}) == 4
    if not compression:
        assert index.row(3).path == str(folder / "shard.00001.mds"), "media of a plain shard are not copied"


def test_a_plain_shard_is_read_where_both_are_there(tmp_path: Path) -> None:
    data, config = packed(rows(), ENCODINGS)
    folder = write(tmp_path / "set", [data], config, "zstd")
    (folder / "shard.00000.mds").write_bytes(data)
    index, _ = index_of(folder / "index.json", tmp_path / "cache", kind="mds")
    assert index.num_ok == 4 and index.row(0).path == str(folder / "shard.00000.mds")


def test_bad_samples_are_counted_one_by_one(tmp_path: Path) -> None:
    bad = [{"video": b""}, {"video": b"<html>not found"}, {"caption": b"  "}, {"caption": b"\xff"}, {"meta": b"{"}]
    data, config = packed([{**rows()[0], **change} for change in bad] + rows(), ENCODINGS)
    folder = write(tmp_path / "set", [data[:-100]], config)
    index, ledger = index_of(folder, tmp_path / "cache", kind="mds")
    reasons = ("no_media", "not_media", "no_caption", "caption_not_utf8", "bad_json", "truncated_member")
    assert rejected(ledger) == dict.fromkeys(reasons, 1) and index.num_ok == 3


@pytest.mark.parametrize("damage", [b"", b"\xff" * 4, b"\x01\0\0\0" + b"\xff" * 40, b"\0\0\0\0"])
def test_a_broken_header_is_one_bad_shard(tmp_path: Path, damage: bytes) -> None:
    good, config = packed(rows(), ENCODINGS)
    index, ledger = index_of(write(tmp_path / "set", [damage, good], config), tmp_path / "cache", kind="mds")
    assert shard_faults(ledger) == {"garbage_header": 1} and index.num_ok == 4


def test_a_compressed_shard_of_another_length_is_one_bad_shard(tmp_path: Path) -> None:
    data, config = packed(rows(), ENCODINGS)
    folder = write(tmp_path / "set", [data, data], config, "zstd")
    listed = json.loads((folder / "index.json").read_text())
    listed["shards"][0]["raw_data"]["bytes"] -= 1
    (folder / "index.json").write_text(json.dumps(listed))
    index, ledger = index_of(folder, tmp_path / "cache", kind="mds")
    assert shard_faults(ledger) == {"garbage_header": 1} and index.num_ok == 4


def test_a_compressed_shard_that_goes_while_it_is_read_leaves_no_index_without_it(tmp_path: Path) -> None:
    data, config = packed(rows(), ENCODINGS)
    folder = write(tmp_path / "set", [data], config, "zstd")
    with gone_at(1, ".mds.zstd"), pytest.raises(DataIOError, match=r"index of .*/shard\.00000\.mds\.zstd: "):
        index_of(folder, tmp_path / "cache", kind="mds")
    index, ledger = index_of(folder, tmp_path / "cache", kind="mds")
    assert index.num_ok == 4 and not ledger.shard_faults


def test_damaged_shards_never_crash_and_the_ledger_adds_up(tmp_path: Path) -> None:
    data, config = packed(rows(), ENCODINGS)
    folder, random, bad = write(tmp_path / "set", [data], config), np.random.default_rng(1), 0
    for _ in range(60):
        damaged = bytearray(data)
        for at in random.integers(0, 400, random.integers(1, 8)):  # header, columns, the first captions
            damaged[at] = int(random.integers(0, 256))
        (folder / "shard.00000.mds").write_bytes(bytes(damaged))
        _, ledger = index_of(folder, tmp_path / "cache", kind="mds")  # checks the ledger
        bad += bool(ledger.rejected or ledger.shard_faults)
    assert bad > 30


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"compression": "snappy"}, "compressed with snappy; zstd, gz, bz2, br and plain shards can be read"),
        ({"version": 1}, "a shard of format mds 1"),
        ({"raw_data": {"basename": "../a.mds", "bytes": 1}}, "'../a.mds' is not the name of a file beside it"),
        ({"raw_data": {"basename": "gone.mds", "bytes": 1}}, "gone.mds does not exist, but index.json lists it"),
        ({"raw_data": 3}, "3 where a file is described"),
    ],
)
def test_a_list_that_cannot_be_used_is_one_clear_sentence(tmp_path: Path, change: dict, sentence: str) -> None:
    data, config = packed(rows(), ENCODINGS)
    folder = write(tmp_path / "set", [data], config)
    listed = json.loads((folder / "index.json").read_text())
    listed["shards"][0].update(change)
    (folder / "index.json").write_text(json.dumps(listed))
    if "compression" in change:
        (folder / "shard.00000.mds").unlink()
    with pytest.raises(DataError, match=sentence):
        index_of(folder, tmp_path / "cache", kind="mds")


def test_a_folder_without_a_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index\.json does not exist\. Name the folder"):
        index_of(tmp_path, tmp_path / "cache", kind="mds")
