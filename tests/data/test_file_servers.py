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
from data.storage import stat


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
