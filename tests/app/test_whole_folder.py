"""What a command writes into a folder is seen when it is complete, whatever the folder is."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from app.commands.export import export
from app.export.whole_folder import check_free, whole_folder
from ops.typed import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def write(to: Path) -> None:
    """As an export does."""
    check_free(to)
    with whole_folder(to, last="index") as work:
        seen = [name for name in os.listdir(to) if not name.startswith(".")] if to.is_dir() else to.exists()
        assert not seen, "nothing is seen yet"
        (work / "part").mkdir()
        (work / "part" / "weights").write_text("1")
        (work / "index").touch()


@pytest.mark.parametrize("kind", ["none", "folder", "link", "link to none", "here", "mount", "object storage"])
def test_all_of_it_stands_there_in_the_end(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = real = tmp_path / "out"
    if kind in ("folder", "here", "mount", "object storage"):
        to.mkdir()
    elif kind.startswith("link"):
        real = tmp_path / "disk" / "real"
        real.mkdir(parents=True)
        to.symlink_to(real)
        if kind == "link to none":
            real.rmdir()
    if kind == "here":
        monkeypatch.chdir(to)
        to = Path(".")
    rename, moved = os.rename, list[str]()

    def rename_within(path: Path, place: Path) -> None:
        if kind == "mount" and real in (path, place):
            raise OSError(errno.EBUSY, "Device or resource busy")
        moved.append(place.name)
        if kind == "object storage" and path.is_dir():
            raise OSError(errno.ENOTSUP, "Operation not supported")
        rename(path, place)

    def keep(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    rmdir = Path.rmdir
    monkeypatch.setattr(os, "rename", rename_within)
    monkeypatch.setattr(Path, "rmdir", lambda path: keep(path) if path == real else rmdir(path))
    write(to)
    assert sorted(os.listdir(real)) == ["index", "part"] and (to / "part" / "weights").read_text() == "1"
    assert moved[-1] == ("index" if kind not in ("none", "link to none") else real.name), (
        "what names the others is last"
    )
    assert [name for name in os.listdir(real.parent) if name.startswith(".")] == []
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        check_free(to)


@pytest.mark.parametrize("there", [True, False])
def test_what_fails_leaves_nothing_and_what_was_killed_does_not_stay(there: bool, tmp_path: Path) -> None:
    to = tmp_path / "out"
    if there:
        to.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt), whole_folder(to, last="index") as work:
        (work / "left").touch()
        raise KeyboardInterrupt
    assert sorted(tmp_path.rglob("*")) == before
    work.mkdir()
    (work / "left").touch()  # by one that was killed
    write(to)
    assert sorted(os.listdir(to)) == ["index", "part"] and os.listdir(tmp_path) == ["out"]


def test_an_export_that_is_asked_to_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(checkpoint: Path, to: Path, **given: object) -> None:
        with whole_folder(to, last="index") as work:
            (work / "weights").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("app.export.export.run", run)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # its default would end the tests
    try:
        with pytest.raises(SystemExit) as ended:
            export(tmp_path, to=tmp_path / "out")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_one_export_at_a_time_writes_a_folder(there: bool, tmp_path: Path) -> None:
    to = tmp_path / "out"
    if there:
        to.mkdir()
    with whole_folder(to, last="index") as work:
        (work / "index").write_text("first")
        with pytest.raises(ConfigError, match="another export writes"), whole_folder(to, last="index"):
            pass
    assert (to / "index").read_text() == "first" and os.listdir(to) == ["index"] and os.listdir(tmp_path) == ["out"]
    with pytest.raises(ConfigError, match="is not an empty folder"), whole_folder(to, last="index"):
        pass  # one that asked before the first had ended


@pytest.mark.parametrize("there", [True, False])
def test_of_exports_on_two_machines_one_alone_reports_success(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda folder, operation: None)  # each sees its own machine's alone
    to = tmp_path / "out"
    if there:
        to.mkdir()
    with pytest.raises(ConfigError, match="is not an empty folder"), whole_folder(to, last="index"):
        write(to)
    assert sorted(os.listdir(to)) == ["index", "part"] and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("there", [True, False])
def test_what_an_export_on_another_machine_writes_stays(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is not seen here: the folder that it was writing was removed."""
    to, now = tmp_path / "out", time.time()
    if there:
        to.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda folder, operation: None)
        on_machine(patch, "gpu-node-7.cluster", "7")
        with whole_folder(to, last="index") as work:
            (work / "index").write_text("theirs")
            on_machine(patch, "gpu-node-8.cluster", "8")
            with pytest.raises(
                ConfigError, match=r"an export on gpu-node-7 has been writing .* remove that folder"
            ) as no:
                write(to)
            assert str(work) in str(no.value) and (work / "index").read_text() == "theirs"
            patch.setattr(time, "time", lambda: now - 3600)
            with pytest.raises(ConfigError, match="an export on gpu-node-7"):
                write(to)  # a clock that is late
    assert (to / "index").read_text() == "theirs" and os.listdir(to) == ["index"] and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("host", "kernel", "hours"), [("gpu-7", "8", 1), ("gpu-8", "7", 1), ("gpu-8", "8", 25)], ids=str
)
def test_what_was_killed_before_a_restart_in_a_container_or_long_ago_does_not_stay(
    host: str, kernel: str, hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, now = tmp_path / "out", time.time()
    on_machine(monkeypatch, "gpu-7", "7")
    with pytest.raises(KeyboardInterrupt), whole_folder(to, last="index") as work:
        raise KeyboardInterrupt
    work.mkdir()
    on_machine(monkeypatch, host, kernel)
    monkeypatch.setattr(time, "time", lambda: now + 3600 * hours)
    write(to)
    assert os.listdir(tmp_path) == ["out"]


def on_machine(patch: pytest.MonkeyPatch, host: str, kernel: str) -> None:
    patch.setattr(socket, "gethostname", lambda: host)
    patch.setattr("app.export.whole_folder.this_kernel", lambda: kernel)


@pytest.mark.parametrize("there", [True, False])
def test_what_somebody_puts_there_meanwhile_stays_as_it_is(there: bool, tmp_path: Path) -> None:
    to = tmp_path / "out"
    if there:
        to.mkdir()
    with pytest.raises(ConfigError, match="is not an empty folder"), whole_folder(to, last="index") as work:
        (work / "vae").mkdir()
        (to / "vae").mkdir(parents=True)
    assert list(tmp_path.rglob("*")) == [to, to / "vae"]


def test_where_no_lock_can_be_held_an_export_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(folder: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    write(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["index", "part"]


def test_what_cannot_be_moved_up_leaves_an_empty_folder_for_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"), whole_folder(tmp_path, "z") as work:
        for name in ("a", "z"):
            (work / name).touch()
        rename = os.rename
        patch.setattr(os, "rename", lambda path, place: (full if path.name == "z" else rename)(path, place))
        patch.setattr("shutil.copyfile", full)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path)


def killed_at_move(number: int, to: Path, copies: bool) -> None:
    """An export of a, b, c and index whose process is killed after as many moves; with `copies` in the midst of the
    next one, which copies."""
    code = textwrap.dedent(f"""
        import os, shutil, signal
        from pathlib import Path
        from app.export.whole_folder import whole_folder
        move, moves = shutil.move, []

        def until_killed(source, target, **given):
            if len(moves) == {number}:
                if {copies}:
                    shutil.copytree(source, target)
                os.kill(os.getpid(), signal.SIGKILL)
            moves.append(move(source, target, **given))

        shutil.move = until_killed
        with whole_folder(Path({str(to)!r}), last="index") as work:
            for name in ("a", "b", "c", "index"):
                (work / name).mkdir()
                (work / name / "weights").write_text("killed")
    """)
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("number", "copies"), [(0, False), (1, True), (3, False)])
def test_an_export_killed_in_its_move_is_begun_anew_by_the_same_command(
    number: int, copies: bool, tmp_path: Path
) -> None:
    killed_at_move(number, tmp_path, copies)
    assert {"a", "b", "c"} & set(os.listdir(tmp_path)) == set("abc"[: number + copies])
    write(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["index", "part"]


@pytest.mark.parametrize("name", ["a", "c", "notes.txt"])
def test_what_somebody_has_put_beside_a_killed_export_is_refused_and_stays(name: str, tmp_path: Path) -> None:
    killed_at_move(1, tmp_path, copies=False)
    if name == "a":  # instead of the one that was moved
        (tmp_path / "a" / "weights").unlink()
        (tmp_path / "a").rmdir()
    (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="is not an empty folder"):
        write(tmp_path)
    with pytest.raises(ConfigError, match="is not an empty folder"), whole_folder(tmp_path, last="index"):
        pass
    assert sorted(tmp_path.rglob("*")) == before
