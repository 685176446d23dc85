"""Files of a part are looked at several at a time, and its rows are those that one after the other gives."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path

import pytest

from data import media, storage
from data.config import LimitsConfig
from data.errors import DataIOError
from data.media_info import MediaInfo
from data.readers.ahead import HEAVY_AHEAD, in_order
from data.storage import ReadFile
from tests.data.making import clip, index_of, picture, rejected

CLIPS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Clips, broken ones and pictures; a table of them, one with files elsewhere, and one of ranges."""
    (tmp_path / "set").mkdir()
    (tmp_path / "elsewhere").mkdir()
    told, there, ranges = ["path,caption"], ["path,caption"], ["videoID,url,timestamp,caption"]
    for i in range(CLIPS):
        name, data = (f"{i:02d}.png", picture()) if i % 5 == 1 else (f"{i:02d}.mp4", clip(frames=4 + i % 3))
        data = b"broken" if i % 7 == 3 else data
        if i % 11 != 4:
            (tmp_path / "set" / name).write_bytes(data)
            (tmp_path / "set" / f"{i:02d}.txt").write_text(f"of {i}")
            (tmp_path / "elsewhere" / name).write_bytes(data)
        told += [f"{name},of {i}", f"./{name},of {i} again"]
        there += [f"../elsewhere/{name},of {i}", f"{tmp_path}/elsewhere/{name},of {i}", "http://a.b/c.mp4,no"]
        ranges += [f"{i:02d}_{part},u,\"['0:00:00.{part}', '0:00:00.5']\",{i}" for part in range(3)]
    for name, lines in (("told.csv", told), ("there.csv", there), ("ranges.csv", ranges)):
        (tmp_path / "set" / name).write_text("\n".join(lines))
    return tmp_path / "set"


@pytest.mark.parametrize(
    "kind, name", [("pairs", ""), ("manifest", "told.csv"), ("manifest", "there.csv"), ("koala", "ranges.csv")]
)
def test_an_index_has_the_bytes_of_one_that_is_made_row_by_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    plain, order = media.probe, random.Random(1)

    def uneven(file: ReadFile, offset: int, size: int, suffix: str, limits: LimitsConfig) -> MediaInfo:
        time.sleep(order.choice((0.0, 0.0, 0.01)))
        return plain(file, offset, size, suffix, limits)

    monkeypatch.setattr(media, "probe", uneven)
    index_of(folder / name, tmp_path / "several", kind=kind)
    monkeypatch.setattr(f"data.readers.kinds.{kind}.in_order", partial(in_order, at_once=1))
    index, ledger = index_of(folder / name, tmp_path / "one", kind=kind)
    assert index.num_ok and rejected(ledger)
    made = [
        {file.name: file.read_bytes() for file in (tmp_path / cache).iterdir() if file.is_file()}
        for cache in ("several", "one")
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("kind, name", [("pairs", ""), ("manifest", "told.csv"), ("koala", "ranges.csv")])
def test_several_clips_of_one_part_are_looked_at_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    plain, under_way, most = media.probe, threading.Semaphore(2), threading.Event()

    def waiting(file: ReadFile, offset: int, size: int, suffix: str, limits: LimitsConfig) -> MediaInfo:
        if not under_way.acquire(blocking=False):
            most.set()
            return plain(file, offset, size, suffix, limits)
        most.wait(0.05)
        try:
            return plain(file, offset, size, suffix, limits)
        finally:
            under_way.release()

    monkeypatch.setattr(media, "probe", waiting)
    index_of(folder / name, tmp_path / "cache", kind=kind)
    assert most.is_set(), "two wait, and a third one is looked at"


def test_storage_that_fails_for_one_clip_is_named_and_a_broken_clip_is_its_own_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, _ = index_of(folder / "told.csv", tmp_path / "cache", kind="manifest")
    for number in range(len(index)):
        row = index.row(number)
        stem = Path(row.path).stem
        assert row.key in (stem, f"./{stem}") and index.columns("ok")["ok"][number] == (int(stem) % 7 != 3)
    plain = ReadFile.pread

    def failing(file: ReadFile, offset: int, count: int, **named: bool) -> bytes:
        if file.uri.endswith("17.mp4"):
            raise DataIOError(f"read {file.uri}: Connection reset")
        return plain(file, offset, count, **named)

    monkeypatch.setattr(storage.ReadFile, "pread", failing)
    for kind, name in (("pairs", ""), ("manifest", "told.csv"), ("manifest", "there.csv"), ("koala", "ranges.csv")):
        with pytest.raises(DataIOError, match=r"17\.mp4: Connection reset"):
            index_of(folder / name, tmp_path / "other", kind=kind, limits=LimitsConfig(max_pixels=10**8))
        assert not [*(tmp_path / "other").glob("*.parquet")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("files ahead")]


def test_rows_come_before_the_error_that_ends_them_and_none_waits_without_need() -> None:
    read: list[int] = []

    def rows() -> Iterator[int]:
        for number in range(5):
            read.append(number)
            yield number
        raise ValueError("cut off")

    def held(row: int, pool: Executor) -> Future[int] | None:
        return None

    def slow(row: int, pool: Executor) -> Future[int] | None:
        return pool.submit(later, row)

    def later(row: int) -> int:
        time.sleep(0.01 * (5 - row))
        return row

    came: list[int] = []
    with pytest.raises(ValueError, match="cut off"):
        for row, _ in in_order(rows(), held, "a"):
            came.append(row)
            assert read[-1] == row, "rows may hold their clips"
    with pytest.raises(ValueError, match="cut off"):
        for _, future in in_order(rows(), slow, "a"):
            assert future is not None
            came.append(future.result())
    assert came == [*range(5), *range(5)]


def test_of_rows_that_hold_their_clips_few_are_held() -> None:
    """Where an earlier one waits for its file."""
    free, read = threading.Event(), list[int]()

    def rows() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    def begin(row: int, pool: Executor) -> Future[bool] | None:
        return pool.submit(free.wait, 60) if row == 0 else None

    threading.Timer(0.2, free.set).start()
    for _, future in in_order(rows(), begin, "a", is_heavy=lambda row: row > 0):
        if future is not None:
            assert future.result() and read[-1] == HEAVY_AHEAD
    assert len(read) == 100


def test_of_files_that_are_not_there_none_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def noted(uri: str, retries: int) -> ReadFile:
        opened.append(uri)
        return ReadFile(uri, retries)

    monkeypatch.setattr("data.readers.catalogue.ReadFile", noted)
    (tmp_path / "t.csv").write_text("path,caption\n" + "".join(f"gone/{n}.mp4,a clip\n" for n in range(30)))
    assert index_of(tmp_path / "t.csv", tmp_path / "cache", kind="manifest")[0].num_ok == 0
    assert opened == []


def test_a_long_part_says_how_far_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("data.readers.kinds.manifest.in_order", partial(in_order, told_every_s=0.0))
    with caplog.at_level(logging.INFO):
        index_of(folder / "told.csv", tmp_path / "cache", kind="manifest")
    assert f"index of {folder}/told.csv: {2 * CLIPS} rows are read in" in caplog.text
