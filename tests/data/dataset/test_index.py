"""The index is made once, read again only where shards changed, and answers by column and by row."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.config import LimitsConfig, SourceConfig
from data.dataset.index import FOOTERS_KEPT, Index
from data.dataset.index_build import build_index, index_folder
from data.errors import DataError
from data.ledger import Ledger
from data.readers import catalogue, part
from data.storage import ReadFile, read_range
from data.tools.stats import statistics
from tests.data.making import clip, good, index_of, picture, sample, shard


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "shards"
    path.mkdir()
    for i in range(3):
        (path / f"{i:05d}.tar").write_bytes(shard(good(4)))
    return path


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """URIs that are opened."""
    seen: list[str] = []
    plain = ReadFile.__init__

    def counting(self, uri, retries=4):
        seen.append(Path(uri).name)
        plain(self, uri, retries)

    monkeypatch.setattr(ReadFile, "__init__", counting)
    return seen


def test_unchanged_shards_are_not_read_again(folder, tmp_path, opened):
    first, _ = index_of(folder, tmp_path / "cache")
    assert opened == ["00000.tar", "00001.tar", "00002.tar"]
    opened.clear()
    second, ledger = index_of(folder, tmp_path / "cache")
    assert opened == [] and second.hash == first.hash and ledger.indexed == 12


def test_only_a_changed_shard_is_read_again(folder, tmp_path, opened):
    first, _ = index_of(folder, tmp_path / "cache")
    opened.clear()
    (folder / "00001.tar").write_bytes(shard(good(5)))
    second, _ = index_of(folder, tmp_path / "cache")
    assert opened == ["00001.tar"]
    assert second.shard_bounds.tolist() == [0, 4, 9, 13] and second.hash != first.hash


def test_an_open_index_stays_as_it_was_when_its_table_changes(tmp_path, opened):
    path = with_own_captions(tmp_path / "pictures")
    table = path / "metadata.jsonl"
    first = table.read_text()
    live, _ = index_of(path, tmp_path / "cache", kind="manifest")
    table.write_text(json.dumps({"file_name": "2.png", "text": "one more, of other words"}) + "\n" + first)
    other, _ = index_of(path, tmp_path / "cache", kind="manifest")
    assert captions_of(other) == ["one more, of other words", *(f"caption number {i}" for i in range(3))]
    assert [live.row(i).key for i in range(3)] == ["0", "1", "2"]
    assert captions_of(live) == [f"caption number {i}" for i in range(3)]
    opened.clear()
    again, _ = index_of(path, tmp_path / "cache", kind="manifest")
    assert again.hash == other.hash and not [name for name in opened if name.endswith(".png")]


@pytest.mark.parametrize("place", ["absolute", "relative", "inside"])
def test_files_outside_of_a_tables_folder_are_looked_at_again(tmp_path, opened, place):
    table, videos = tmp_path / "set" / "list.csv", tmp_path / ("set/videos" if place == "inside" else "videos")
    videos.mkdir(parents=True)
    table.parent.mkdir(exist_ok=True)
    named = "../videos" if place == "relative" else videos
    table.write_text("path,caption\n" + "".join(f"{named}/{name}.mp4,a clip\n" for name in "ab"))
    (videos / "a.mp4").write_bytes(clip())
    live, _ = index_of(table, tmp_path / "cache", kind="manifest")
    assert (len(live), live.missing) == (1, 1)
    (videos / "b.mp4").write_bytes(clip(seed=1))
    both, _ = index_of(table, tmp_path / "cache", kind="manifest")
    assert (len(both), both.missing) == (2, 0)
    (videos / "a.mp4").write_bytes(clip(frames=5))
    later, _ = index_of(table, tmp_path / "cache", kind="manifest")
    assert [later.row(i).num_frames for i in range(2)] == [5, 9] and later.row(0).content != both.row(0).content
    assert [both.row(i).num_frames for i in range(2)] == [9, 9] and live.row(0).num_frames == 9
    opened.clear()
    assert index_of(table, tmp_path / "cache", kind="manifest")[0].hash == later.hash
    assert not [name for name in opened if name.endswith(".mp4")]


@pytest.mark.parametrize("mount_point", [False, True])
def test_an_index_is_opened_where_the_folders_outside_are_not_mounted(tmp_path, mount_point):
    videos, table = tmp_path / "videos", tmp_path / "set" / "list.csv"
    videos.mkdir()
    table.parent.mkdir()
    (videos / "a.mp4").write_bytes(clip())
    table.write_text(f"path,caption\n{videos}/a.mp4,a clip\n")
    for frames in (9, 7, 5):
        (videos / "a.mp4").write_bytes(clip(frames=frames))
        first, _ = index_of(table, tmp_path / "cache", kind="manifest")
        os.utime(first.parts[0].file, (time.time() - 60 * frames,) * 2)
    videos.rename(tmp_path / "elsewhere")
    if mount_point:
        videos.mkdir()
    index, _ = index_of(table, tmp_path / "cache", kind="manifest")
    assert (index.hash, index.missing, index.parts[0].file) == (first.hash, 0, first.parts[0].file)


@pytest.mark.parametrize("what", ["many folders", "many files"])
def test_folders_that_take_too_long_to_list_are_named_and_left_out(tmp_path, caplog, what):
    (tmp_path / "set").mkdir()
    (tmp_path / "v0").mkdir()
    many = what == "many folders"
    for number in range(0 if many else catalogue.FEW_FILES + catalogue.FEW_OF + 1):
        (tmp_path / "v0" / f"{number}.mp4").touch()
    rows = [f"../v{number}/a.mp4,one\n" for number in range(catalogue.MOST_OUTSIDE + 1 if many else 1)]
    (tmp_path / "set" / "list.csv").write_text("path,caption\n" + "".join(rows))
    index, _ = index_of(tmp_path / "set" / "list.csv", tmp_path / "cache", kind="manifest")
    assert index.missing == len(rows) and index.parts[0].meta["outside"] == {}
    assert f"files in {'more than 1024 folders, such as ' if many else ''}{tmp_path}/set/../v0" in caplog.text


def test_folders_outside_are_remembered_by_their_number_and_digest(tmp_path):
    """Not every file of each: a table may name clips among millions of others."""
    (tmp_path / "v0").mkdir()
    for number in range(3):
        (tmp_path / "v0" / f"{number}.mp4").touch()
    found = catalogue.Catalogue(str(tmp_path / "set"), LimitsConfig())
    for number in range(catalogue.MOST_OUTSIDE + 9):
        found.at(f"{tmp_path}/v{number}/a.mp4")
    assert found._outside[f"{tmp_path}/v0"] == (3, catalogue.listing(f"{tmp_path}/v0"))
    assert len(found._named) == len(found._outside) + 1 == catalogue.MOST_OUTSIDE + 1 and found.outside() == {}


def test_what_a_part_was_before_goes_a_month_after_it_changed(tmp_path):
    path = with_own_captions(tmp_path / "pictures")
    states = []
    for number, days in enumerate((80, 40, 20, 0)):
        (path / "metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "text": "a" * (number + 1)}))
        states.append(index_of(path, tmp_path / "cache", kind="manifest")[0].parts[0].file)
        os.utime(states[-1], (time.time() - days * 86400,) * 2)
    left = {file.stem for file in (tmp_path / "cache").iterdir()}
    assert left == {file.stem for file in states[1:]} and len(list((tmp_path / "cache").iterdir())) == 6


def test_a_state_that_came_back_stays_for_the_run_that_opened_it(tmp_path):
    path = with_own_captions(tmp_path / "pictures")

    def state(text: str, days: float) -> Index:
        table = path / "metadata.jsonl"
        table.write_text(json.dumps({"file_name": "0.png", "text": text}))
        os.utime(table, (1.7e9 - days * 86400,) * 2)
        return index_of(path, tmp_path / "cache", kind="manifest")[0]

    for text, days in (("a", 80), ("bb", 40)):
        os.utime(state(text, days).parts[0].file, (time.time() - days * 86400,) * 2)
    live = state("a", 80)
    state("ccc", 0)
    assert live.parts[0].file.exists() and captions_of(live) == ["a"]


def test_hash_is_of_the_content_not_of_place_or_time(folder, tmp_path):
    first, _ = index_of(folder, tmp_path / "cache")
    shutil.copytree(folder, tmp_path / "moved")
    os.utime(folder / "00000.tar", (1, 1))
    assert index_of(folder, tmp_path / "cache")[0].hash == first.hash
    assert index_of(tmp_path / "moved", tmp_path / "cache")[0].hash == first.hash
    (tmp_path / "moved" / "00002.tar").write_bytes(shard([*good(3), *sample(3, mp4=clip(seed=7))]))
    assert index_of(tmp_path / "moved", tmp_path / "cache")[0].hash != first.hash


def written(path, data, second):
    """A file as of this second: two versions that are written within a tick of the clock would have one time."""
    path.write_bytes(data)
    os.utime(path, (second, second))


def test_an_edited_caption_or_clip_of_equal_length_is_another_index(tmp_path):
    hashes = set()
    versions = (sample(0), sample(0, txt=b"caption 1"), sample(0, json=b'{"caption": "j"}'), sample(0))
    for second, members in enumerate(versions):
        written(tmp_path / "a.tar", shard(members), second)
        hashes.add(index_of(tmp_path / "a.tar", tmp_path / "cache", caption="txt+json:caption")[0].hash)
    assert len(hashes) == 3


def test_an_edited_score_is_another_index(tmp_path):
    hashes = set()
    for second, about in enumerate((b'{"aesthetic": 4.5}', b'{"aesthetic": 5.4}', b'{"aesthetics": 4.5}')):
        written(tmp_path / "a.tar", shard(sample(0, json=about)), second)
        hashes.add(index_of(tmp_path / "a.tar", tmp_path / "cache")[0].hash)
    assert len(hashes) == 3


def test_an_index_of_another_version_is_made_again(folder, tmp_path, opened):
    first, _ = index_of(folder, tmp_path / "cache")
    for indexed in first.parts:
        meta = {**part.read_meta(indexed.file), "version": part.VERSION - 1}
        table = pq.read_table(indexed.file).replace_schema_metadata({"heddle": json.dumps(meta)})
        pq.write_table(table, indexed.file)
        assert b"heddle" in pq.read_metadata(indexed.file).metadata
    opened.clear()
    second, _ = index_of(folder, tmp_path / "cache")
    assert opened == ["00000.tar", "00001.tar", "00002.tar"] and second.hash == first.hash


def test_caption_setting_and_limits_are_part_of_the_key(folder, tmp_path):
    plain, _ = index_of(folder, tmp_path / "cache")
    other, _ = index_of(folder, tmp_path / "cache", caption="json:caption")
    assert plain.caption(0) == "caption 0" and other.caption(0) == "json caption 0"
    assert index_of(folder, tmp_path / "cache")[0].caption(0) == "caption 0"


def test_torn_index_files_are_made_again(folder, tmp_path):
    first, _ = index_of(folder, tmp_path / "cache")
    for i, indexed in enumerate(first.parts):
        data = indexed.file.read_bytes()
        indexed.file.write_bytes(data[: len(data) * i // 2])
    assert index_of(folder, tmp_path / "cache")[0].hash == first.hash


def with_own_captions(folder: Path) -> Path:
    """Three pictures whose captions are in a table, so that the index keeps them."""
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.png").write_bytes(picture(16, 16))
    lines = [json.dumps({"file_name": f"{i}.png", "text": f"caption number {i}"}) for i in range(3)]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def captions_of(index) -> list[str]:
    return [index.caption(number) for number in range(len(index))]


@pytest.mark.parametrize("size", [None, 0, 20], ids=["gone", "empty", "cut"])
def test_captions_that_became_shorter_are_made_again(tmp_path, size):
    path = with_own_captions(tmp_path / "pictures")
    first, _ = index_of(path, tmp_path / "cache", kind="manifest")
    kept = first.parts[0].file.with_suffix(".captions")
    if size is None:
        kept.unlink()
    else:
        os.truncate(kept, size)
    again, _ = index_of(path, tmp_path / "cache", kind="manifest")
    assert captions_of(again) == [f"caption number {i}" for i in range(3)] and again.hash == first.hash


def test_captions_cut_while_the_index_is_open_are_not_trained(tmp_path):
    index, _ = index_of(with_own_captions(tmp_path / "pictures"), tmp_path / "cache", kind="manifest")
    os.truncate(index.parts[0].file.with_suffix(".captions"), 20)
    assert index.caption(0) == "caption number 0"
    with pytest.raises(DataError, match=r"\.captions has 4 of the 16 bytes of the caption at 16.*Delete .*\.parquet"):
        index.caption(1)


def without_sizes(indexed) -> None:
    """As indexes were written before they had the sizes of the files beside them."""
    meta = {name: value for name, value in part.read_meta(indexed.file).items() if name != "beside"}
    pq.write_table(pq.read_table(indexed.file).replace_schema_metadata({"heddle": json.dumps(meta)}), indexed.file)


def test_an_index_without_the_sizes_of_its_files_is_taken_as_it_is(tmp_path, opened):
    path = with_own_captions(tmp_path / "pictures")
    without_sizes(index_of(path, tmp_path / "cache", kind="manifest")[0].parts[0])
    opened.clear()
    assert captions_of(index_of(path, tmp_path / "cache", kind="manifest")[0])[2] == "caption number 2"
    assert not [name for name in opened if name.endswith(".png")]


OUTDATED = {
    "nothing": ([], False),
    "matroska": (sample(2, mp4=None, mkv=clip(container="matroska")), True),
    "split keys": (sample(0), False),
    "split by macOS": (sample(0), True),
}


@pytest.mark.parametrize("what", OUTDATED)
def test_a_part_of_before_is_read_again_only_where_it_may_be_another_one(tmp_path, opened, what):
    members, again = OUTDATED[what]
    (tmp_path / "a.tar").write_bytes(shard([*good(2), *members]))
    first, _ = index_of(tmp_path / "a.tar", tmp_path / "cache")
    file = first.parts[0].file
    meta = {name: value for name, value in part.read_meta(file).items() if name != "revision"}
    table = pq.read_table(file)
    if what == "split by macOS":
        table = table.set_column(0, table.schema.field(0), pa.array(["clips/"] * len(table)))
    pq.write_table(table.replace_schema_metadata({"heddle": json.dumps(meta)}), file)
    opened.clear()
    second, _ = index_of(tmp_path / "a.tar", tmp_path / "cache")
    assert bool(opened) is again and second.hash == first.hash
    opened.clear()
    index_of(tmp_path / "a.tar", tmp_path / "cache")
    assert not opened


def test_files_of_an_index_are_on_disk_before_they_have_their_names(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(f"{old} named"), replace(old, new)))
    index_of(with_own_captions(tmp_path / "pictures"), tmp_path / "cache", kind="manifest")
    assert [Path(name).suffix for name in done] == [".captions", ".captions named", ".parquet", ".parquet named"]
    assert done[1::2] == [f"{name} named" for name in done[::2]]


def zeroed(data: bytes) -> bytes:
    """A Parquet file whose footer is zeros; its length and the mark at its end are left."""
    length = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - length] + bytes(length) + data[-8:]


@pytest.mark.parametrize(
    "damage",
    [
        zeroed,
        lambda data: data.replace(b'{"version"', b'{"version:'),
        lambda data: data.replace(b'{"version"', b'{"versio\xff"'),
        lambda data: data.replace(b'"digest"', b'"digesT"'),
    ],
    ids=["zeros", "no json", "no utf-8", "a key is missing"],
)
def test_a_part_with_a_damaged_footer_is_made_again(folder, tmp_path, damage):
    first, _ = index_of(folder, tmp_path / "cache")
    file = first.parts[1].file
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole and part.read_meta(file) is None
    assert index_of(folder, tmp_path / "cache")[0].hash == first.hash


def test_storage_that_fails_is_no_damaged_footer(tmp_path):
    (tmp_path / "a.parquet").symlink_to(tmp_path / "a.parquet")
    with pytest.raises(OSError) as caught:
        part.read_meta(tmp_path / "a.parquet")
    assert caught.value.errno == errno.ELOOP


def test_two_writers_of_one_part_do_not_write_into_one_file(tmp_path):
    """Containers on one shared folder have equal process ids."""
    path = tmp_path / "a.parquet"
    one, other = (part.PartWriter(path, part.IndexPart("a", 1, 1), []) for _ in range(2))
    for writer, texts in ((one, ["first"]), (other, ["x"]), (one, ["second"])):
        for text in texts:
            writer.add(part.IndexedSample(text, captions=[writer.put_caption(text)]))
    other.close()
    one.close()
    assert path.with_suffix(".captions").read_text() == "firstsecond" and part.read_meta(path)["rows"] == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.captions", "a.parquet"]


def test_what_a_killed_writer_has_left_goes_a_day_later(tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    killed, alive = (part.PartWriter(folder / "a[1].parquet", part.IndexPart("a", 1, 1), []) for _ in range(2))
    for writer, age_s in ((killed, 90_000), (alive, 3_600)):
        writer.put_media(b"a clip")
        writer.missing("one key, which stays in the buffer")
        os.utime(writer._scratch(".media"), (time.time() - age_s,) * 2)
        os.utime(writer._scratch(".missing"), (time.time() - 90_000,) * 2)
    others = folder / ".notes.0123456789ab.txt"
    others.touch()
    os.utime(others, (0, 0))
    (tmp_path / "0.tar").write_bytes(shard(good(1)))
    index_of(tmp_path / "0.tar", folder)
    assert others.exists() and not any(killed._scratch(suffix).exists() for suffix in (".media", ".missing"))
    alive.close()
    assert part.read_meta(alive.path)["missing"] == 1


@pytest.mark.parametrize("name", ["\u5b57".encode() * 80, "\u00e9".encode() * 110, b"caf\xe9", b"x" * 251])
def test_a_shard_of_any_name_is_indexed(tmp_path, name):
    path = tmp_path / "shards" / os.fsdecode(name + b".tar")
    path.parent.mkdir()
    path.write_bytes(shard(good(2)))
    index, _ = index_of(path.parent, tmp_path / "cache")
    row = index.row(1)
    assert row.path == str(path) and read_range(row.path, row.offset, row.size) == clip(seed=1)
    assert len(os.fsencode(index.parts[0].file.name)) < 120
    assert index_of(path.parent, tmp_path / "cache")[0].hash == index.hash


def test_verify_names_the_shard_that_changed(folder, tmp_path):
    index, _ = index_of(folder, tmp_path / "cache")
    index.verify()
    (folder / "00001.tar").write_bytes(shard(good(1)))
    with pytest.raises(DataError, match=r"shard .*00001\.tar changed .* since it was indexed. Run `heddle data index`"):
        index.verify()
    (folder / "00001.tar").unlink()
    with pytest.raises(DataError, match=r"shard .*00001\.tar is gone since it was indexed"):
        index.verify()


def test_rows_agree_with_columns_and_with_the_bytes(folder, tmp_path):
    index, _ = index_of(folder, tmp_path / "cache")
    names = (
        "ok",
        "image",
        "width",
        "height",
        "fps",
        "num_frames",
        "duration",
        "rotation",
        "num_keyframes",
        "start_s",
        "end_s",
        "offset",
        "size",
        "caption_chars",
        "num_captions",
        "aesthetic_score",
    )
    columns = index.columns(*names)
    assert all(len(values) == len(index) == 12 for values in columns.values())
    for number in np.random.default_rng(0).permutation(12):
        row = index.row(int(number))
        assert row.key == f"{number % 4:06d}" and row.shard.endswith(f"{number // 4:05d}.tar")
        assert read_range(row.path, row.offset, row.size) == clip(seed=number % 4 % 3)
        for name in names[1:-2]:
            assert getattr(row, name, len(row.captions)) == columns[name][number]
        assert row.scores["aesthetic_score"] == columns["aesthetic_score"][number] == 4.0 + number % 4 / 10
        assert index.caption(int(number)) == f"caption {number % 4}" and row.caption_chars == 9
    assert len({index.row(i).content for i in range(12)}) == 12
    with pytest.raises(IndexError, match="row 12 of source"):
        index.row(12)


def test_a_folder_may_have_a_name_that_is_not_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"raw\xff")
    folder.mkdir()
    (folder / "a.tar").write_bytes(shard([*good(2), *sample(2, mp4=b"broken")]))
    index, _ = index_of(folder, index_folder(SourceConfig(path=str(folder))))
    assert index.num_ok == 2 and index.row(1).key == "000001" and index.caption(1) == "caption 1"
    assert [fault.key for fault in index.faults()] == ["000002"] and "aesthetic_score" in index.scores
    again, _ = index_of(folder, folder / ".heddle-index")
    assert again.hash == index.hash and [file.parent.name for file in folder.glob(".*/*")] == [".heddle-index"]


@pytest.fixture
def footers(monkeypatch) -> list[str]:
    """Index files whose footers are parsed."""
    seen: list[str] = []

    def counting(file: Path, footer: pq.FileMetaData | None = None) -> AbstractContextManager[pq.ParquetFile]:
        if footer is None:
            seen.append(file.name)
        return part.opened(file, footer)

    monkeypatch.setattr("data.dataset.index.opened", counting)
    return seen


def test_many_rows_in_one_shard_cross_row_groups(tmp_path, footers):
    path = tmp_path / "a.tar"
    image = picture(16, 16)
    path.write_bytes(shard([member for i in range(4200) for member in sample(i, mp4=None, png=image, json=None)]))
    index, _ = index_of(path, tmp_path / "cache")
    footers.clear()
    for number in (0, 4096, 4095, 4199, 1):
        index._groups.clear()  # as after rows of 64 others
        assert index.row(number).key == f"{number:06d}" and index.caption(number) == f"caption {number}"
    assert len(footers) == 1, "that of a large part takes ten times as long as a row"
    numbers = [0, 1, 1023, 1024, 4095, 4199]
    assert list(index.rows(np.array(numbers))) == [index.row(number) for number in numbers]
    assert list(index.rows(np.array([], int))) == []


@pytest.mark.parametrize("rows_per_group", [None, 4096], ids=["as it is made", "as it was made before"])
def test_a_draw_from_a_large_part_decodes_few_rows_and_those_that_are_held_are_bounded(
    tmp_path, monkeypatch, rows_per_group
):
    """For a table of a million rows three draws of four decoded 4,096 for one."""
    path = tmp_path / "a.tar"
    image = picture(16, 16)
    path.write_bytes(shard([member for i in range(8200) for member in sample(i, mp4=None, png=image, json=None)]))
    index, _ = index_of(path, tmp_path / "cache")
    if rows_per_group is not None:
        (file,) = {one.file for one in index.parts}
        pq.write_table(pq.read_table(file), file, row_group_size=rows_per_group)
    decoded: list[int] = []
    read = pq.ParquetFile.read_row_group

    def counting(file: pq.ParquetFile, group: int) -> pa.Table:
        table = read(file, group)
        decoded.append(table.num_rows)
        return table

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counting)
    index.rows_kept = 4096
    for number in (*range(0, 8200, 1000), *range(0, 8200, 1000)):
        assert index.row(number).key == f"{number:06d}"
        assert sum(table.num_rows for table in index._groups.values()) <= 4096
    assert max(decoded) <= (rows_per_group or 1024) and len(decoded) <= 18


def test_row_groups_of_many_small_parts_that_are_held_are_bounded(tmp_path):
    (tmp_path / "shards").mkdir()
    for number in range(5):
        (tmp_path / "shards" / f"{number:05d}.tar").write_bytes(shard(good(2)))
    index, _ = index_of(tmp_path / "shards", tmp_path / "cache")
    index.groups_kept = 3
    assert [index.row(2 * number).key for number in range(5)] == ["000000"] * 5
    assert [shard for shard, _ in index._groups] == [2, 3, 4]


def test_footers_of_a_few_parts_are_kept(tmp_path, footers):
    (tmp_path / "shards").mkdir()
    for number in range(FOOTERS_KEPT + 1):
        (tmp_path / "shards" / f"{number:05d}.tar").write_bytes(shard(good(2)))
    index, _ = index_of(tmp_path / "shards", tmp_path / "cache")
    footers.clear()
    for number in (*range(FOOTERS_KEPT), *range(FOOTERS_KEPT), FOOTERS_KEPT, 1, 0):
        index._groups.clear()
        assert index.row(2 * number + 1).key == "000001"
    assert [int(name[:5]) for name in footers] == [*range(FOOTERS_KEPT + 1), 0]


def test_filters(folder, tmp_path):
    index, _ = index_of(folder, tmp_path / "cache")
    assert index.filter_mask("aesthetic_score >= 4.2").tolist() == [False, False, True, True] * 3
    assert index.filter_mask("aesthetic score>=4.2").sum() == 6
    assert index.filter_mask("width == 64").all() and not index.filter_mask("num_frames<9").any()
    with pytest.raises(DataError, match="Did you mean aesthetic_score"):
        index.filter_mask("aestetic_score >= 4.2")
    with pytest.raises(DataError, match="is not COLUMN OPERATOR NUMBER"):
        index.filter_mask("__import__('os')")


def test_a_score_that_some_samples_lack_fails_the_rule(tmp_path):
    path = tmp_path / "shards"
    path.mkdir()
    (path / "0.tar").write_bytes(shard([*sample(0), *sample(1, json=b'{"other": 1}')]))
    (path / "1.tar").write_bytes(shard(sample(2, json=None)))
    index, _ = index_of(path, tmp_path / "cache")
    assert index.filter_mask("aesthetic_score > 0").tolist() == [True, False, False]
    assert np.isnan(index.columns("aesthetic_score")["aesthetic_score"]).tolist() == [False, True, True]
    assert index.scores == ("aesthetic_score", "other")


def test_processes_give_the_same_index(folder, tmp_path):
    one, _ = index_of(folder, tmp_path / "one")
    ledger = Ledger()
    two = build_index(SourceConfig(path=str(folder)), tmp_path / "two", ledger, workers=2)
    assert two.hash == one.hash and ledger.indexed == 12


def test_empty_sources_say_why(tmp_path):
    (tmp_path / "a.tar").write_bytes(shard([*sample(0, mp4=None), *sample(1, txt=None, json=None)]))
    with pytest.raises(
        DataError, match=r"none of its 2 .* 1 shard can be used \(1 no_media, first 0+: members .*; 1 no_c"
    ):
        index_of(tmp_path / "a.tar", tmp_path / "cache", allow_empty=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no files with \.tar here"):
        index_of(tmp_path / "empty", tmp_path / "cache")


def test_default_place_of_the_index(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert index_folder(SourceConfig(path=f"{folder}/{{00000..00002}}.tar")) == folder / ".heddle-index"
    assert index_folder(SourceConfig(path=str(folder))) == folder / ".heddle-index"
    brackets = tmp_path / "pairs [v2]"
    brackets.mkdir()
    for name in ("", "/*.tar", "/{00000..00002}.tar"):
        assert index_folder(SourceConfig(path=f"{brackets}{name}")) == brackets / ".heddle-index"
    assert index_folder(SourceConfig(path="s3://bucket/x.tar")) == tmp_path / "home" / "heddle" / "index"
    assert index_folder(SourceConfig(path=str(folder), index="/elsewhere")) == Path("/elsewhere")


def test_statistics(folder, tmp_path):
    (folder / "00003.tar").write_bytes(shard([*sample(0, mp4=None, png=picture(80, 40)), *sample(1, mp4=b"")]))
    facts = statistics(index_of(folder, tmp_path / "cache")[0], repeated=3)
    assert (facts["indexed"], facts["usable"], facts["videos"], facts["images"]) == (14, 13, 12, 1)
    assert facts["rejected"] == {"empty_member": 1}
    assert facts["shapes"] == [{"width": 64, "height": 48, "count": 12}, {"width": 80, "height": 40, "count": 1}]
    assert facts["frames"][3] == 9 and facts["fps"][3] == pytest.approx(8) and facts["aspect"][-1] == 2.0
    assert facts["scores"]["aesthetic_score"][0] == 4.0
    assert facts["hours"] == pytest.approx(12 * 9 / 8 / 3600)


def test_what_is_read_is_counted_by_its_name(folder, tmp_path, caplog):
    (tmp_path / "table.csv").write_text("path,caption\n")
    with caplog.at_level("INFO", "data"):
        index_of(folder, tmp_path / "cache")
        index_of(tmp_path / "table.csv", tmp_path / "cache", kind="manifest")
    told = [one.message.partition(": ")[2] for one in caplog.records if one.message.startswith("index of")]
    assert told == ["3 of 3 shards to read", "1 of 1 table to read"]
