"""Where sources lie: local paths, patterns, remote file systems; and what happens when storage fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from app.settings.config import RunConfig
from data import storage
from data.config import LimitsConfig, SourceConfig
from data.dataset.index_build import build_index
from data.errors import DataError, DataIOError
from data.kinds import KINDS
from data.ledger import Ledger
from data.readers.catalogue import Catalogue, composed
from data.readers.kinds import pairs
from data.readers.kinds.pairs import SUFFIXES
from data.readers.registry import guess_kind, reader_of
from data.storage import ByteRange, FileStat, ReadFile, expand, list_files, read_range, retried, stat
from ops.typed import ConfigError
from tests.data.making import clip, good, index_of, picture, rejected, shard

WHOLE, PARTS = "caf\u00e9", "cafe\u0301"  # as Linux writes it, and as a Mac does
DEMO = Path(__file__).resolve().parents[3] / "configs" / "runs" / "demo.yaml"


@pytest.fixture
def shards(tmp_path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i:05d}.tar").write_bytes(shard(good(2)))
    (folder / "00000_stats.json").write_text("{}")
    (folder / "00000.parquet").write_bytes(b"sidecar of img2dataset")
    return folder


@pytest.mark.parametrize(
    "pattern, count",
    [
        ("{shards}", 3),
        ("{shards}/{{00000..00002}}.tar", 3),
        ("{shards}/0000[01].tar", 2),
        ("{shards}/*.tar", 3),
        ("{shards}/00000.tar::{shards}/00002.tar", 2),
        ("{shards}/{{00001,00002}}.tar::{shards}/00001.tar", 2),
        ("file://{shards}/{{00000..00001}}.tar", 2),
        ("file://{shards}", 3),
    ],
)
def test_patterns(shards, tmp_path, pattern, count):
    index, _ = index_of(pattern.format(shards=shards), tmp_path / "cache")
    assert index.num_shards == count and index.num_ok == 2 * count


def test_a_missing_shard_of_a_range_is_named(shards, tmp_path):
    with pytest.raises(DataError, match=r"00003\.tar does not exist.*Check the range in"):
        index_of(f"{shards}/{{00000..00003}}.tar", tmp_path / "cache")


@pytest.mark.parametrize(
    "path, sentence",
    [
        ("{shards}/nothing-*.tar", "no files with .tar here"),
        ("{shards}/nothing.csv", r"table .*/nothing\.csv does not exist"),
        ("{shards}/nothing.parquet", r"table .*/nothing\.parquet does not exist"),
        ("http://x.y/a.tar", "no PyArrow file system serves http://.* or, by fsspec, fsspec\\+http://"),
        ("nosuch://x/a.tar", "no PyArrow file system serves nosuch://"),
    ],
)
def test_sources_that_are_nowhere(shards, tmp_path, path, sentence):
    with pytest.raises(DataError, match=sentence):
        index_of(path.format(shards=shards), tmp_path / "cache", kind="auto")


MEMORY = "fsspec+memory:/"


def remote(folder: Path) -> None:
    memory = MemoryFileSystem()
    for file in folder.rglob("*"):
        if file.is_file():
            memory.pipe(f"/{file.relative_to(folder)}", file.read_bytes())


def test_any_pyarrow_file_system(shards, tmp_path):
    remote(tmp_path)
    local, _ = index_of(shards, tmp_path / "local")
    for pattern in ("shards", "shards/{00000..00002}.tar", "shards/*.tar"):
        index, _ = index_of(f"{MEMORY}/{pattern}", tmp_path / "remote")
        assert index.hash == local.hash, "the same shards elsewhere are the same index"
        row = index.row(3)
        assert row.path == f"{MEMORY}/shards/00001.tar" and index.caption(3) == "caption 1"
        assert read_range(row.path, row.offset, row.size) == clip(seed=1)
    index.verify()


def test_tables_and_folders_on_a_remote_file_system(tmp_path):
    (tmp_path / "set" / "clips").mkdir(parents=True)
    (tmp_path / "set" / "clips" / "a.mp4").write_bytes(clip())
    (tmp_path / "set" / "clips" / "a.txt").write_text("a clip")
    (tmp_path / "set" / "metadata.csv").write_text("video,prompt\nclips/a.mp4,from the table\nclips/b.mp4,gone\n")
    remote(tmp_path)
    index, ledger = index_of(f"{MEMORY}/set", tmp_path / "cache", kind="manifest")
    assert index.caption(0) == "from the table" and rejected(ledger) == {"file_missing": 1}
    index, _ = index_of(f"{MEMORY}/set/clips", tmp_path / "cache", kind="pairs")
    assert index.caption(0) == "a clip" and index.row(0).path == f"{MEMORY}/set/clips/a.mp4"


class Flaky(MemoryFileSystem):
    """Fails every second read, and leaves the handle advanced."""

    failures = 0
    protocol = "flaky"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _open(self, path, mode="rb", **options):
        file, outer = super()._open(path, mode, **options), self
        read = file.read

        class Handle:
            def __getattr__(self, name):
                return getattr(file, name)

            def read(self, size=-1):
                outer.failures += 1
                data = read(size)
                if outer.failures % 2:
                    raise OSError("AWS Error SLOW_DOWN")
                return data

        return Handle()


def test_storage_errors_are_retried_with_a_fresh_handle_and_lose_nothing(shards, tmp_path):
    flaky = Flaky()
    for file in shards.glob("*.tar"):
        flaky.pipe(f"/flaky/{file.name}", file.read_bytes())
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    index, ledger = index_of("fsspec+flaky://flaky", tmp_path / "cache")
    local, _ = index_of(shards, tmp_path / "local")
    assert flaky.failures > 2 and index.hash == local.hash and not ledger.rejected


class Silent(MemoryFileSystem):
    """Lists names alone, as fsspec does of a web server."""

    protocol = "silent"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("silent://", "memory://"))

    def find(self, path, **options):
        return {name: about | {"size": None} for name, about in super().find(path, **options).items()}


@pytest.mark.parametrize("pattern", ["shards", "shards/*.tar"])
def test_shards_whose_listing_says_no_size_are_asked_for_it(tmp_path, pattern):
    silent = Silent()
    fsspec.register_implementation("silent", Silent, clobber=True)
    silent.pipe("/silent/shards/0.tar", shard(good(2)))
    first, _ = index_of(f"fsspec+silent://silent/{pattern}", tmp_path / "cache")
    silent.pipe("/silent/shards/0.tar", shard(good(5)))
    index, _ = index_of(f"fsspec+silent://silent/{pattern}", tmp_path / "cache")
    assert (first.num_ok, index.num_ok) == (2, 5)
    index.verify()


def test_storage_that_stays_broken_stops_the_run_and_is_no_bad_data():
    attempts = []

    def fail():
        attempts.append(1)
        raise OSError("connection reset")

    with pytest.raises(DataIOError, match=r"connection reset \(3 attempts\).*The storage failed, not the data"):
        retried("read s3://b/0.tar", fail, retries=2, retry_s=0.001)
    assert len(attempts) == 3


def test_a_file_that_shrinks_while_it_is_read_is_a_storage_error(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1000)
    with ReadFile(str(path), retries=1, retry_s=0.001) as file:
        os.truncate(path, 10)
        assert file.pread(0, 10) == b"x" * 10
        with pytest.raises(DataIOError, match="the file had 1000 bytes when it was opened"):
            file.pread(500, 100)


def test_a_failing_disk_is_read_again_with_a_fresh_handle(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1000)
    handles, read = [], os.pread

    def failing(handle, count, offset):
        handles.append(handle)
        if len(handles) < 3:
            raise OSError(5, "Input/output error")
        return read(handle, count, offset)

    with ReadFile(str(path), retry_s=0.001) as file:
        monkeypatch.setattr(storage.os, "pread", failing)
        opened, plain = [], os.open
        monkeypatch.setattr(storage.os, "open", lambda *rest: opened.append(rest) or plain(*rest))
        assert file.pread(10, 20) == b"x" * 20
    assert len(handles) == 3 and len(opened) == 1


def test_linked_folders_are_followed_but_not_in_a_circle(tmp_path):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "deep" / "a.mp4").write_bytes(b"")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "videos").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "circle").symlink_to(tmp_path / "real")
    assert [Path(file.uri).name for file in list_files(str(tmp_path / "set"))] == ["a.mp4"]


def test_missing_files_are_told_apart_from_failing_storage(tmp_path):
    assert stat(str(tmp_path / "none")) is None and stat(str(tmp_path)) is None
    with pytest.raises(FileNotFoundError):
        ReadFile(str(tmp_path / "none"))


def test_a_full_disk_is_one_clear_sentence(shards, tmp_path, monkeypatch):
    import data.readers.part

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.readers.part.os, "replace", full)
    with pytest.raises(DataIOError, match=r"No space left on device\. Free space or name another folder"):
        index_of(shards, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_byte_range_is_a_seekable_stream(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    with ReadFile(str(path)) as file:
        stream = ByteRange(file, 10, 50)
        assert stream.read(3) == bytes([10, 11, 12]) and stream.tell() == 3
        assert stream.seek(-2, os.SEEK_END) == 48 and stream.read() == bytes([58, 59]) and stream.read() == b""
        buffer = bytearray(4)
        stream.seek(0)
        assert stream.readinto(memoryview(buffer)) == 4 and buffer == bytes([10, 11, 12, 13])


def test_hidden_files_are_not_listed(tmp_path):
    for name in ("a.tar", ".hidden.tar", ".heddle-index/b.tar", "sub/c.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert [Path(file.uri).name for file in list_files(str(tmp_path))] == ["a.tar", "c.tar"]
    assert [Path(uri).name for uri in expand(str(tmp_path), (".tar",))] == ["a.tar", "c.tar"]


def test_folders_of_pairs(tmp_path):
    folder = tmp_path / "pairs"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.mp4").write_bytes(clip())
    (folder / "a.txt").write_text("\ufeffa clip", encoding="utf-8")
    (folder / "sub" / "b.png").write_bytes(picture())
    (folder / "sub" / "b.json").write_text('{"caption": ["short", "long"], "aesthetic_score": 5}')
    (folder / "c.mp4").write_bytes(clip())
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert rejected(ledger) == {"no_caption": 1}
    assert list(index.columns("key")["key"]) == ["a", "c", "sub/b"]
    assert index.caption(0) == "a clip" and [index.caption(2, i) for i in (0, 1)] == ["short", "long"]
    assert index.columns("image")["image"].tolist() == [False, False, True]
    (folder / "c.txt").write_text("now it has one")
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert not ledger.rejected and index.caption(1) == "now it has one"


def test_of_one_name_the_video_is_a_sample_and_its_thumbnail_is_not(tmp_path):
    """The picture was trained with the clip's caption, under the same key."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("thumb.mp4", "twice.mp4", "twice.mov"):
        (folder / name).write_bytes(clip())
    for name in ("thumb.jpg", "twice.mp4.jpg", "alone.jpg"):
        (folder / name).write_bytes(picture(kind="jpeg"))
    for stem in ("thumb", "twice", "alone"):
        (folder / f"{stem}.txt").write_text(f"of {stem}")
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert not ledger.rejected and index.unread == ("jpg",)
    rows = [(index.row(row).key, index.row(row).path[-4:], index.caption(row)) for row in range(len(index))]
    twice = [("twice", ".mov", "of twice"), ("twice#2", ".mp4", "of twice")]
    assert rows == [("alone", ".jpg", "of alone"), ("thumb", ".mp4", "of thumb"), *twice]


def test_a_picture_beside_a_clip_that_has_a_caption_of_its_own_is_a_sample(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(clip())
    (folder / "a.jpg").write_bytes(picture(kind="jpeg"))
    for name in ("a.mp4", "a.jpg"):
        (folder / f"{name}.txt").write_text(f"of {name}")
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert not ledger.rejected and [index.caption(row) for row in range(len(index))] == ["of a.jpg", "of a.mp4"]


@pytest.mark.parametrize(
    "names, texts, rows",
    [
        ("a.jpg a.mp4", {"a.txt": "clip", "a.jpg.txt": "own"}, ["own", "clip"]),
        ("a.mov a.mp4", {"a.txt": "both", "a.mov.txt": "own"}, ["own", "both"]),
        ("a.jpg a.png", {"a.txt": "both", "a.jpg.json": '{"caption": "own"}'}, ["own", "both"]),
        ("a.mp4 a.mp4.jpg", {"a.mp4.txt": "clip"}, ["clip"]),
        ("a.mp4 a.mp4.jpg", {"a.mp4.txt": "clip", "a.mp4.jpg.txt": "own"}, ["clip", "own"]),
        ("a.jpg a.mp4", {"a.txt": "clip", "a.jpg.json": '{"caption": "own"}'}, ["own", "clip"]),
        ("a.jpg a.mp4", {"a.txt": "clip", "a.jpg.json": '{"id": 1}'}, ["clip"]),  # as gallery-dl has it
        ("a.jpg a.mp4", {"a.txt": "clip", "a.mp4.txt": "not this"}, ["clip"]),
        ("a.jpg a.mp4", {"a.txt": "clip", "a.jpg.txt": " "}, ["no_caption", "clip"]),
        ("a.jpg a.mp4", {"a.txt": "clip", "a.jpg.json": "["}, ["bad_json", "clip"]),
    ],
)
def test_of_media_of_one_name_each_has_its_own_caption_first(tmp_path, names, texts, rows):
    """A picture beside a clip was trained with the clip's caption where it had one of its own."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in names.split():
        made = {"jpg": picture(kind="jpeg"), "png": picture()}
        (folder / name).write_bytes(made.get(name.rpartition(".")[2], clip()))
    for name, text in texts.items():
        (folder / name).write_text(text)
    index, _ = index_of(folder, tmp_path / "cache", kind="pairs")
    assert [index.row(row).reject or index.caption(row) for row in range(len(index))] == rows
    assert index.row(0).key == "a", "a thumbnail in front of it takes no key"


def test_no_two_clips_of_a_folder_have_one_key(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("b.mov", "b.mp4", "b#2.mp4", "b#2.mov"):
        (folder / name).write_bytes(clip())
        (folder / f"{name}.txt").write_text("a clip")
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert not ledger.rejected and len({index.row(row).key for row in range(4)}) == 4


def test_a_caption_may_have_the_whole_name_of_its_clip(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in "abcd":
        (folder / f"{name}.mp4").write_bytes(clip())
    texts = {"a.mp4.txt": "of a", "b.mp4.txt": "not this", "b.txt": "of b", "c.mp4.json": '{"caption": "of c", "s": 2}'}
    for name, text in (texts | {"c.json": '{"s": 1, "t": 3}', "d.mp4.prompt": "elsewhere"}).items():
        (folder / name).write_text(text)
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert [index.caption(row) for row in range(3)] == ["of a", "of b", "of c"]
    assert index.columns("s")["s"].tolist()[2] == 1 and index.columns("t")["t"].tolist()[2] == 3
    assert rejected(ledger) == {"no_caption": 1} and "|prompt, as text is in prompt" in index.row(3).detail
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs", caption="txt|prompt|json:caption")
    assert not ledger.rejected and index.caption(3) == "elsewhere"


@pytest.mark.parametrize(
    "names, again",
    [
        (("a.mp4", "a.json", "a.mp4.cap"), True),
        (("a.mp4", "a.txt", "a.mp4.json"), False),  # as gallery-dl has it
        (("a.mp4", "a.txt", "b.jpg", "b.jpg.json", "b.caption"), False),
        (("a.mp4", "a.txt", "a.jpg"), True),
        (("a.mp4", "a.txt", "a.mp4.jpg"), True),
        (("a.mp4", "a.mp4.txt"), True),
        (("a.mp4", "a.mp4.json"), True),
        (("a.mp4", "a.json", "a.mp4.json"), True),  # of which one has the caption
        (("a.mp4", "a.txt", "a.mp4.txt"), True),
    ],
)
def test_a_folder_is_read_again_only_where_it_was_read_otherwise(tmp_path, names, again):
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    source = SourceConfig(path=str(tmp_path), kind="pairs", caption="txt|cap")
    (part,) = reader_of(source, LimitsConfig()).parts()
    plain = Catalogue(str(tmp_path), LimitsConfig(), frozenset(SUFFIXES | {"cap"})).fingerprint
    assert (part.fingerprint != plain) is again
    assert not part.fingerprint.endswith("|by video and whole name"), "pictures took their clip's caption"


NAMES = st.builds(
    "{}.{}".format,
    st.sampled_from(
        ["a", "b", "a.mp4", "a.jpg", WHOLE, PARTS, f"{PARTS}/a", f"{WHOLE}/a", f"{PARTS}.mp4", "K", "\u212a"]
    ),
    st.sampled_from(["mp4", "mov", "jpg", "txt", "json", "cap", "caption", "mp4.txt", "jpg.txt", "mp4.json"]),
)


@given(st.sets(NAMES, min_size=1, max_size=6))
def test_what_was_read_otherwise_is_told_by_names_alone(names):
    """As by all that reading a folder makes of them, which takes eight times as long."""
    files = {name: FileStat(name, 1, 1) for name in sorted(names)}
    catalogue: Any = SimpleNamespace(files=lambda: files, in_parts=any(composed(name) != name for name in names))
    captions, beside = frozenset({"txt", "cap", "caption"}), pairs._beside(catalogue)

    def is_plain(one: pairs._Medium) -> bool:
        stem = one.name.rpartition(".")[0]
        of_stem, of_name = beside.get(stem, {}).keys(), beside.get(one.name, {}).keys()
        decided = not of_name or (captions.isdisjoint(of_name) and not captions.isdisjoint(of_stem))
        return one.key == stem == one.texts[0] and decided

    assert bool(pairs._ambiguous(catalogue, captions)) != all(map(is_plain, pairs._media(catalogue, ())))


def test_a_plain_folder_is_opened_without_a_table_of_its_captions(tmp_path, monkeypatch):
    """Each start opens it: of 300,000 clips that took 5 s, and takes 0.6."""
    for name in ("a.mp4", "a.txt", f"{WHOLE}.mp4", f"{WHOLE}.txt"):
        (tmp_path / name).touch()
    monkeypatch.setattr(pairs, "_beside", lambda catalogue: pytest.fail("made"))
    (part,) = reader_of(SourceConfig(path=str(tmp_path), kind="pairs"), LimitsConfig()).parts()
    assert "|" not in part.fingerprint


@pytest.mark.parametrize(
    "names, captions",
    [
        ([f"{PARTS}.mp4", f"{WHOLE}.txt"], [WHOLE]),  # a clip that a Mac has named
        ([f"{WHOLE}.mp4", f"{PARTS}.txt"], [PARTS]),
        ([f"{PARTS}.mp4", f"{WHOLE}.mp4.txt"], [f"{WHOLE}.mp4"]),
        ([f"{PARTS}/a.mp4", f"{WHOLE}/a.txt"], [f"{WHOLE}/a"]),
        ([f"{PARTS}.mp4", f"{WHOLE}.mp4", f"{PARTS}.txt", f"{WHOLE}.txt"], [PARTS, WHOLE]),
        ([f"{PARTS}.mp4", f"{WHOLE}.mp4", f"{WHOLE}.txt"], [None, WHOLE]),  # the caption is of the other one
        ([f"{PARTS}.mp4", f"{PARTS}.txt", f"{WHOLE}.txt"], [PARTS, None]),  # whose clip is gone
    ],
)
def test_a_clip_and_its_caption_may_write_an_accent_in_two_ways(tmp_path, names, captions):
    folder = tmp_path / "pairs"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(clip() if name.endswith(".mp4") else name.rpartition(".")[0].encode())
    index, _ = index_of(folder, tmp_path / "cache", kind="pairs")
    assert [index.caption(row) or None for row in range(len(index))] == captions


def test_a_file_is_found_by_either_way_and_only_a_folder_with_the_one_of_macs_is_read_again(tmp_path):
    limits, fingerprints = LimitsConfig(), []
    for name in ("cafe", WHOLE, PARTS):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.mp4").write_bytes(b"")
        catalogue = Catalogue(str(tmp_path / name), limits)
        fingerprints.append(catalogue.fingerprint)
        assert name == "cafe" or catalogue.named(WHOLE) == catalogue.named(PARTS) == catalogue.at(f"{PARTS}.mp4")
    assert [len(found) for found in fingerprints[:2]] == [32, 32] and len(fingerprints[2]) > 32


def test_file_names_that_are_not_utf8_are_refused(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for stem in (b"good", b"caf\xe9"):
        (folder / os.fsdecode(stem + b".mp4")).write_bytes(clip())
        (folder / os.fsdecode(stem + b".txt")).write_text("a clip")
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert index.num_ok == 1 and rejected(ledger) == {"unsafe_name": 1}


@pytest.mark.parametrize("kind, gone", [("pairs", "c.png"), ("pairs", "c.txt"), ("manifest", "c.png")])
def test_a_file_that_vanishes_while_its_folder_is_indexed_is_named_and_no_index_is_kept(
    tmp_path, monkeypatch, kind, gone
):
    """As a mount that drops takes all: an index without them would stay when they are back."""
    for name in "abcd":
        (tmp_path / f"{name}.png").write_bytes(picture())
        (tmp_path / f"{name}.txt").write_text("a picture")
    (tmp_path / "t.csv").write_text("path,caption\n" + "".join(f"{name}.png,a picture\n" for name in "abcd"))
    read, away = Catalogue.header, tmp_path.with_name("away")

    def header(catalogue: Catalogue, uri: str, ranged: bool = False):
        if uri.endswith("c.png"):
            (tmp_path / gone).rename(away)
        return read(catalogue, uri, ranged)

    given = (tmp_path if kind == "pairs" else tmp_path / "t.csv", tmp_path / "index")
    with monkeypatch.context() as vanishing:
        vanishing.setattr(Catalogue, "header", header)
        with pytest.raises(DataIOError, match=rf"{gone}.*then index again"):
            index_of(*given, kind=kind)
    away.rename(tmp_path / gone)
    index, ledger = index_of(*given, kind=kind)
    assert (index.num_ok, rejected(ledger)) == (4, {})


def test_several_captions_by_policy(tmp_path):
    from tests.data.making import sample

    path = tmp_path / "a.tar"
    about = b'{"caption": "j", "captions": ["one", "", "two"]}'
    path.write_bytes(shard([*sample(0, json=about), *sample(1, txt=None, json=about), *sample(2, json=b"{}")]))

    def captions(policy: str) -> list[list[str]]:
        index, _ = index_of(path, tmp_path / "cache", caption=policy)
        return [[index.caption(i, k) for k in range(len(index.row(i).captions))] for i in range(3)]

    assert captions("txt|json:caption") == [["caption 0"], ["j"], ["caption 2"]]
    assert captions("txt+json:caption") == [["caption 0", "j"], ["j"], ["caption 2"]]
    assert captions("json:captions|txt") == [["one", "two"], ["one", "two"], ["caption 2"]]


@pytest.mark.parametrize(
    "files, kind",
    [
        ({"0.tar": b""}, "webdataset"),
        ({"index.json": b"{}", "shard.00000.mds.zstd": b""}, "mds"),
        ({"metadata.csv": b"video,prompt\n"}, "manifest"),
        ({"Koala_36M_1.csv": b"videoID,url,timestamp,caption\nx_1,u,\"['0:00:01', '0:00:02']\",c\n"}, "koala"),
        ({"panda.csv": b"videoID,url,timestamp,caption\nx,u,\"[['0:00:01', '0:00:02']]\",\"['c']\"\n"}, "panda"),
        ({"a.mp4": b"", "a.txt": b""}, "pairs"),
        ({"a.mp4": b"", "a.json": b"{}", "b.MOV": b"", "b.json": b"{}"}, "pairs"),  # these are captions
        ({"a.mp4": b"", "a.mp4.json": b"{}"}, "pairs"),
        ({"a.mp4": b"", "a.caption": b"", "list.csv": b"path,text\n"}, "pairs"),
        ({"a.mp4": b"", "list.json": b"[]"}, "manifest"),
        ({"list.csv": b"path,text\n"}, "manifest"),
    ],
)
def test_kind_is_guessed_from_the_files(tmp_path, files, kind):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert guess_kind(str(tmp_path)) == kind
    shutil.rmtree(tmp_path)


def test_a_table_that_goes_while_its_kind_is_guessed_is_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of Koala that was put anew on a network disk was read as a manifest by that start."""
    file = pq.ParquetFile

    def gone(source: Any) -> pq.ParquetFile:
        monkeypatch.setattr(pq, "ParquetFile", file)
        raise FileNotFoundError(2, "Stale file handle")

    columns = {"videoID": ["x_1"], "url": ["u"], "timestamp": ["['0:00:01', '0:00:02']"], "caption": ["c"]}
    pq.write_table(pa.table(columns), table := tmp_path / "a.parquet")
    monkeypatch.setattr(pq, "ParquetFile", gone)
    with pytest.raises(DataError, match=r"table .*/a\.parquet does not exist"):
        guess_kind(str(table))
    assert guess_kind(str(table)) == "koala"


def test_a_single_clip_is_no_source(tmp_path):
    (tmp_path / "a.MP4").write_bytes(clip())
    with pytest.raises(DataError, match=r"a\.MP4 is one clip or picture; give the folder"):
        guess_kind(str(tmp_path / "a.MP4"))


def test_a_file_with_a_caption_that_cannot_be_trained_is_counted(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(clip())
    for name in ("a.txt", "scan.txt", "whole.tiff.txt", "a.zip.json"):
        (folder / name).write_text("a caption")
    for name in ("scan.tiff", "whole.tiff", "a.zip", "a.srt", "Thumbs.db"):  # two were meant to be trained, others not
        (folder / name).write_bytes(b"x")
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    rows = [index.row(row) for row in range(len(index))]
    assert rejected(ledger) == {"not_media": 2} and [row.key for row in rows] == ["a", "scan", "whole"]
    assert [row.detail for row in rows[1:]] == ["suffix 'tiff'"] * 2


def test_captions_of_pairs_by_suffix_in_any_case(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for stem, suffix in (("a", ".caption"), ("b", ".TXT"), ("c", ".Json")):
        (folder / f"{stem}.MP4").write_bytes(clip())
        (folder / f"{stem}{suffix}").write_text('{"caption": "of c"}' if stem == "c" else f"of {stem}")
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert not ledger.rejected and [index.caption(row) for row in range(3)] == ["of a", "of b", "of c"]


def test_a_caption_whose_clip_is_gone_is_counted(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(clip())
    (folder / "linked.mp4").symlink_to(tmp_path / "deleted.mp4")
    for name in ("a.txt", "linked.txt", "gone.caption", "about.json"):  # about.json may be of the whole folder
        (folder / name).write_text("a caption" if name != "about.json" else "{}")
    index, ledger = index_of(folder, tmp_path / "cache", kind="pairs")
    assert index.num_ok == 1 and rejected(ledger) == {"no_media": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_a_file_that_a_config_may_name(kind: str) -> None:
    config = SourceConfig(path="clips", kind=kind)
    assert reader_of(config, LimitsConfig()).config is config
    assert RunConfig.load(DEMO, [f"data.sources=[{{path: clips, kind: {kind}}}]"]).data.sources[0].kind == kind


def test_a_source_of_no_kind_is_what_its_files_are(tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(clip())
    (folder / "a.txt").write_text("a caption")
    given = build_index(SourceConfig(path=str(folder), kind="pairs"), tmp_path / "cache", Ledger())
    assert build_index(SourceConfig(path=str(folder)), tmp_path / "cache", Ledger()).config == given.config
    with pytest.raises(DataError, match="nowhere does not exist: neither a folder of clips or tars nor a table"):
        build_index(SourceConfig(path=str(tmp_path / "nowhere")), tmp_path / "cache", Ledger())


@pytest.mark.parametrize(
    "name, remedy",
    [("dataset.toml", "folders and tables that it names"), ("t.xlsx", "save it as CSV"), ("a.zip", "unpack")],
)
def test_a_file_of_another_kind_is_no_tar(tmp_path: Path, name: str, remedy: str) -> None:
    (tmp_path / name).write_text("[[datasets]]")
    with pytest.raises(DataError, match=rf"{name} is no data set that Heddle reads: .*{remedy}"):
        guess_kind(str(tmp_path / name))


def test_captions_may_have_any_suffix_that_the_setting_names(tmp_path: Path) -> None:
    """As musubi-tuner's caption_extension."""
    folder = tmp_path / "set"
    folder.mkdir()
    for name, text in (("a", "cap"), ("b", "txt")):
        (folder / f"{name}.mp4").write_bytes(clip())
        (folder / f"{name}.{text}").write_text(f"text of {name}")
    source = SourceConfig(path=str(folder), caption="cap|txt")
    index = build_index(source, tmp_path / "cache", Ledger())
    assert [index.caption(row) for row in range(2)] == ["text of a", "text of b"]


def test_clips_without_captions_hear_of_the_table_among_them(tmp_path: Path) -> None:
    """As of OpenVid-1M, whose table lies two folders deeper."""
    (tmp_path / "set" / "data").mkdir(parents=True)
    (tmp_path / "set" / "a.mp4").write_bytes(clip())
    (tmp_path / "set" / "data" / "t.csv").write_text("video,caption\na.mp4,text\n")
    with pytest.raises(
        DataError, match=r"1 no_caption, first a: .*; a table \(data/t\.csv\) is given as the source itself"
    ):
        build_index(SourceConfig(path=str(tmp_path / "set")), tmp_path / "cache", Ledger())


def test_a_kind_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean koala"):
        RunConfig.load(DEMO, ["data.sources=[{path: clips, kind: koalas}]"])
