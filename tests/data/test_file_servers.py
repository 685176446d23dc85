"""Files of NFS, Lustre and the like whose server does not answer for a while."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data import storage
from data.engines.gate import Gate
from data.errors import DataIOError, DataUnreachable
from data.readers import part
from data.storage import stat
from data.tools.convert import check_out
from tests.data.making import good, index_of, shard


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that retries have slept, without sleeping."""
    found: list[float] = []
    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.mark.parametrize(
    ("code", "seconds", "kind"),
    [
        (errno.EIO, [1.0, 2.0, 4.0, 8.0], DataUnreachable),
        (errno.ESTALE, [1.0, 2.0, 4.0, 8.0], DataUnreachable),
        (errno.EKEYEXPIRED, [1.0, 2.0, 4.0, 8.0], DataUnreachable),
        (errno.ELOOP, [0.05, 0.1, 0.2, 0.4], DataIOError),
        (errno.ENOENT, [], FileNotFoundError),
        (errno.ENOTDIR, [], FileNotFoundError),
        (errno.EACCES, [], DataIOError),
    ],
)
def test_a_file_server_that_does_not_answer_has_seconds_as_a_service_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float], code: int, seconds: list[float], kind: type
) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(b"bytes")

    def fail(*given: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    with storage.ReadFile(str(path)) as file:
        monkeypatch.setattr(storage.os, "pread", fail)
        with pytest.raises(kind) as failed:
            file.pread(0, 5)
    assert slept == seconds and type(failed.value) is kind


def test_a_file_server_that_is_back_after_seconds_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(b"bytes")
    real_open, real_stat, real_scandir = os.open, os.stat, os.scandir

    def down(real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            if sum(slept) < 3.0:
                raise OSError(errno.EIO, "Input/output error")
            return real(*given, **named)

        return call

    for name, real in (("open", real_open), ("stat", real_stat), ("scandir", real_scandir)):
        slept.clear()
        monkeypatch.setattr(storage.os, name, down(real))
        if name == "open":
            assert storage.read_range(str(path), 1, 3) == b"yte"
        elif name == "stat":
            found = stat(str(path))
            assert found is not None and found.size == 5 and stat(str(tmp_path)) is None
        else:
            assert [file.uri for file in storage.list_files(str(tmp_path))] == [str(path)]
        assert slept == [1.0, 2.0]
        monkeypatch.setattr(storage.os, name, real)


def test_a_file_that_has_become_shorter_does_not_pass(tmp_path: Path, slept: list[float]) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(b"bytes")
    with storage.ReadFile(str(path)) as file:
        path.write_bytes(b"by")
        with pytest.raises(DataIOError, match="the file had 5 bytes") as failed:
            file.pread(0, 5)
    assert type(failed.value) is DataIOError and sum(slept) < 1


def test_what_a_decode_task_tells_of_storage_keeps_its_kind() -> None:
    gate = Gate()
    assert gate.failure() is None
    gate.fail(pickle.loads(pickle.dumps(DataUnreachable("read 0.tar: Input/output error"))))
    assert type(gate.failure()) is DataUnreachable
    gate.fail(ValueError("no decoder of this name"))
    assert type(gate.failure()) is DataIOError and "no decoder" in str(gate.failure())


def refusing(real: Any, code: int, place: Path, times: float = float("inf")) -> Any:
    """A function of a path whose first `times` calls for what is in this place fail."""
    failed: list[str] = []

    def call(path: Any = ".", *given: Any, **named: Any) -> Any:
        if place in (Path(path), *Path(path).parents) and len(failed) < times:
            failed.append(str(path))
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *given, **named)

    return call


@pytest.mark.parametrize("asked", ["listdir", "opened"])
def test_an_index_whose_folder_does_not_answer_once_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float], asked: str
) -> None:
    """A live run whose feeder was opened anew in that second ended."""
    where: Any = os if asked == "listdir" else part
    (tmp_path / "0.tar").write_bytes(shard([*good(2)]))
    index_of(tmp_path / "0.tar", tmp_path / "cache")
    real = getattr(where, asked)
    with monkeypatch.context() as patched:
        patched.setattr(where, asked, refusing(real, errno.ESTALE, tmp_path / "cache", times=1))
        assert index_of(tmp_path / "0.tar", tmp_path / "cache")[0].num_ok == 2 and slept == [1.0]
    monkeypatch.setattr(where, asked, refusing(real, errno.ESTALE, tmp_path / "cache"))
    with pytest.raises(DataUnreachable, match="Stale file handle"):
        index_of(tmp_path / "0.tar", tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("0.tar", errno.ENOENT, r"index of \S+0\.tar: .*0\.tar'\. Restore it"),
        ("0.tar", errno.EACCES, r"0\.tar may not be read by user"),
        ("b.mp4", errno.EACCES, r"b\.mp4 may not be read by user"),
    ],
)
def test_what_cannot_be_indexed_is_named_and_not_the_folder_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, says: str
) -> None:
    (tmp_path / "0.tar").write_bytes(shard([*good(2)]))
    (tmp_path / "b.mp4").write_bytes(b"")
    (tmp_path / "b.txt").write_text("a clip")
    monkeypatch.setattr(os, "open", refusing(os.open, code, tmp_path / name))
    path, kind = (tmp_path / "0.tar", "webdataset") if name == "0.tar" else (tmp_path, "pairs")
    with pytest.raises(DataIOError, match=says) as failed:
        index_of(path, tmp_path / "cache", kind=kind)
    assert "data.sources index" not in str(failed.value)


@pytest.mark.parametrize("asked", ["listdir", "opened"])
def test_an_index_that_may_not_be_read_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float], asked: str
) -> None:
    """Whoever has a umask of 077 makes `.heddle-index` for himself alone."""
    where: Any = os if asked == "listdir" else part
    (tmp_path / "0.tar").write_bytes(shard([*good(2)]))
    index_of(tmp_path / "0.tar", tmp_path / "cache")
    monkeypatch.setattr(where, asked, refusing(getattr(where, asked), errno.EACCES, tmp_path / "cache"))
    with pytest.raises(DataIOError, match=r"Permission denied.*Name another folder in data\.sources index"):
        index_of(tmp_path / "0.tar", tmp_path / "cache")
    assert not slept


def test_a_folder_for_shards_is_listed_again_and_refused_where_it_may_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    real = os.listdir
    monkeypatch.setattr(os, "listdir", refusing(real, errno.ESTALE, tmp_path, times=1))
    check_out(tmp_path)
    assert slept == [1.0]
    monkeypatch.setattr(os, "listdir", refusing(real, errno.EACCES, tmp_path))
    with pytest.raises(ValueError, match=r"cannot be listed: Permission denied\. Name another folder"):
        check_out(tmp_path)
