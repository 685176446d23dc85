"""One writer for a run folder, on one machine and on several."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.outcome import Exit
from app.run import lock
from app.run.lock import FolderHeld, FolderLock, holder, lock_path
from app.settings.errors import exit_code
from ops.typed import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def ignore(text: str) -> None:
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return lock_path(tmp_path / "demo", "driver")


@contextmanager
def other_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from app.run.lock import FolderLock
        FolderLock(Path({str(path)!r})).take(5.0, print)
        print("held", flush=True)
        time.sleep(600)
    """)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_live_run_is_not_joined_and_is_named(path: Path) -> None:
    with other_process(path) as process, pytest.raises(FolderHeld, match=r"demo is alive \(process") as refused:
        FolderLock(path).take(0.5, ignore)
    assert exit_code(refused.value) == Exit.USAGE and f"process {process.pid} on " in str(refused.value)


def test_a_folder_that_is_reached_by_a_link_has_one_lock(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "demo").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "scratch" / "demo")
    by_link = lock_path(tmp_path / "runs" / "mine", "driver")
    with FolderLock(lock_path(tmp_path / "scratch" / "demo", "driver")) as first, FolderLock(by_link) as second:
        first.take(0.0, ignore)
        with pytest.raises(FolderHeld):
            second.take(0.0, ignore)


def test_of_a_link_to_a_place_that_takes_no_files_the_lock_lies_beside_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch" / "mine").mkdir(parents=True)
    (tmp_path / "demo").symlink_to(tmp_path / "scratch" / "mine")
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path / "scratch")
    assert lock_path(tmp_path / "demo", "driver") == tmp_path / ".demo.driver.lock"


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_refused_and_its_target_untouched(path: Path, tmp_path: Path, there: bool) -> None:
    target = tmp_path / "theirs"
    if there:
        target.write_text("kept")
    path.symlink_to(target)
    with pytest.raises(ConfigError, match=r"driver\.lock, the lock of a run, is a link; remove it"):
        FolderLock(path).take(0.5, ignore)
    assert target.read_text() == "kept" if there else not target.exists()


def test_a_lock_that_has_become_a_link_is_not_put_back_into_its_target(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "theirs"
    target.write_text("kept")
    with FolderLock(path, beat_s=0.2) as ours:
        ours.take(0.5, ignore)
        beside = path.with_suffix(".link")
        beside.symlink_to(target)
        beside.rename(path)  # at once, so that no beat falls between
        time.sleep(1.0)
    assert target.read_text() == "kept"


def test_a_killed_run_blocks_nobody(path: Path) -> None:
    with other_process(path) as process:
        process.kill()
        process.wait()
        said: list[str] = []
        with FolderLock(path) as ours:
            ours.take(5.0, said.append)
        assert said == [], "the kernel knows: nothing had to be watched"


def test_a_stopped_process_still_holds_its_folder(path: Path) -> None:
    with other_process(path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(FolderHeld):
            FolderLock(path).take(0.5, ignore)


def test_nothing_is_left_of_a_lock_that_was_given_back(path: Path) -> None:
    with FolderLock(path) as ours:
        ours.take(1.0, ignore)
        assert path.exists()
    assert list(path.parent.iterdir()) == []


def foreign(path: Path, beat: int) -> None:
    """The stamp of a process on another machine, whose flock this kernel does not see. Written as a lock writes its
    own, over the one before: nobody ever finds the file empty."""
    stamp = lock.Stamp(token="theirs", host="far", kernel="other", pid=7, beat=beat, since="today")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    lock._write(file, stamp)
    os.close(file)


def test_a_stamp_of_another_machine_that_keeps_changing_is_alive(path: Path) -> None:
    foreign(path, 0)
    beats = threading.Event()

    def beat() -> None:
        number = 0
        while not beats.wait(0.1):
            foreign(path, number := number + 1)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(FolderHeld, match="process 7 on far"):
            FolderLock(path, stale_s=60.0).take(0.0, ignore)
    finally:
        beats.set()
        thread.join()


def test_a_stamp_of_another_machine_that_stands_still_is_taken_over_and_told(path: Path) -> None:
    foreign(path, 3)
    said: list[str] = []
    with FolderLock(path, stale_s=1.0) as ours:
        ours.take(0.0, said.append)
        found = holder(path)
        assert found is not None and found.token == ours.token
    assert any("process 7 on far is not alive" in line for line in said)


@pytest.fixture
def held_elsewhere(path: Path) -> Iterator[int]:
    """The lock's file, held by the file system for another machine."""
    path.parent.mkdir(exist_ok=True)
    foreign(path, 3)
    file = os.open(path, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    yield file
    os.close(file)


def test_a_lock_that_the_file_system_keeps_for_a_dead_machine_is_taken_over(path: Path, held_elsewhere: int) -> None:
    said: list[str] = []
    with FolderLock(path, stale_s=0.5) as ours:
        ours.take(0.0, said.append)
        found = holder(path)
        assert found is not None and found.token == ours.token
        with pytest.raises(FolderHeld):
            FolderLock(path, stale_s=0.5).take(0.0, ignore)
    assert [line for line in said if "process 7 on far is not alive" in line] and list(path.parent.iterdir()) == []


def test_who_lost_the_file_to_another_machine_that_believed_it_dead_learns_it(path: Path) -> None:
    with FolderLock(path, beat_s=0.1) as ours:
        ours.take(0.0, ignore)
        os.replace(moved(path), path)
        deadline = time.monotonic() + 120
        while not ours.lost:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert path.exists(), "the file is the other one's now"


def moved(path: Path) -> Path:
    """Another machine's file, that is about to stand there."""
    aside = path.with_name("aside")
    foreign(aside, 0)
    return aside


def test_a_machine_that_beats_keeps_the_lock_that_the_file_system_holds_for_it(path: Path, held_elsewhere: int) -> None:
    beats = threading.Event()

    def beat() -> None:
        number = 3
        while not beats.wait(0.1):
            foreign(path, number := number + 1)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(FolderHeld, match="process 7 on far"):
            FolderLock(path, stale_s=60.0).take(0.0, ignore)
    finally:
        beats.set()
        thread.join()


def test_on_a_full_disk_a_silent_machine_keeps_its_lock(
    path: Path, held_elsewhere: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may live, and not be able to change its stamp."""

    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock, "write_whole", full)
    with pytest.raises(FolderHeld, match="process 7 on far"):
        FolderLock(path, stale_s=0.5).take(0.0, ignore)


def test_an_error_of_the_file_system_ends_no_beats(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the run would count as dead."""
    failures = iter([OSError(errno.EIO, "Input/output error")])
    flock = lock._flock

    def failing(file: int) -> bool | None:
        if (error := next(failures, None)) is not None:
            raise error
        return flock(file)

    with FolderLock(path, beat_s=0.1) as ours:
        ours.take(0.0, ignore)
        monkeypatch.setattr(lock, "_flock", failing)
        path.unlink()
        beats_on(path, 5)


def test_a_stamp_that_fails_when_its_file_is_closed_ends_neither_beats_nor_a_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and quotas tell of it so late."""
    close, told = os.close, []

    def failing(file: int) -> None:
        is_lock = os.fstat(file).st_size == lock._BYTES
        close(file)
        if is_lock:
            told.append(file)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with FolderLock(path, beat_s=0.1) as ours:
        ours.take(0.0, ignore)
        monkeypatch.setattr(os, "close", failing)
        with pytest.raises(FolderHeld):
            FolderLock(path).take(0.0, ignore)
        path.unlink()
        beats_on(path, 5)
    assert len(told) == 3 and not path.exists()


def test_beats_that_the_file_system_held_up_do_not_go_on_when_the_lock_was_given_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They made the file anew, and the lock was held by nobody's run until its process had ended."""
    hangs, goes_on, close = threading.Event(), threading.Event(), os.close

    def slow(file: int) -> None:
        close(file)
        goes_on.set()  # while an unlock is awaited
        if threading.current_thread() is not ours._beats and ours._beats is not None:
            ours._beats.join(5)

    def hanging(looked_at: Path) -> lock.Stamp | None:
        if threading.current_thread() is ours._beats:
            hangs.set()
            goes_on.wait(60)
        return holder(looked_at)

    monkeypatch.setattr(lock, "holder", hanging)
    with FolderLock(path, beat_s=0.1) as ours:
        ours.take(0.0, ignore)
        assert ours._beats is not None and hangs.wait(60)
        monkeypatch.setattr(os, "close", slow)
    monkeypatch.setattr(os, "close", close)
    ours._beats.join(60)
    assert not path.exists() and not ours.lost
    with FolderLock(path) as again:
        again.take(0.0, ignore)


def test_a_look_that_the_file_server_does_not_answer_loses_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refused the lock of the file, opened anew, to the process that holds it, and the run ended as lost."""
    failures = iter([OSError(errno.EIO, "Input/output error"), OSError(errno.ETIMEDOUT, "Connection timed out")])
    stat = Path.stat

    def failing(self: Path, **options: bool) -> os.stat_result:
        if self == path and (error := next(failures, None)) is not None:
            raise error
        return stat(self, **options)

    with FolderLock(path, beat_s=0.1) as ours:
        ours.take(0.0, ignore)
        monkeypatch.setattr(Path, "stat", failing)
        beats_on(path, 5)
        assert next(failures, None) is None and not ours.lost
        with pytest.raises(FolderHeld):
            FolderLock(path).take(0.0, ignore)
    assert not path.exists(), "it was ours to the end"


def test_a_lock_whose_open_file_the_server_has_forgotten_is_ours_while_the_stamp_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FolderLock(path, beat_s=0.1) as ours:
        ours.take(0.0, ignore)
        held, fstat, answers = ours._file, os.fstat, [0]

        def stale(file: int) -> os.stat_result:
            if file == held and answers[0] < 4:
                answers[0] += 1
                raise OSError(errno.ESTALE, "Stale file handle")
            return fstat(file)

        monkeypatch.setattr(os, "fstat", stale)
        beats_on(path, 5)
        assert answers == [4] and not ours.lost


def test_a_file_server_that_is_away_is_told_of_once_and_once_when_it_is_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each beat said so: tens of thousands of lines after a night."""
    write, away = os.pwrite, [0]

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if away[0] < 6:
            away[0] += 1
            raise OSError(errno.EIO, "Input/output error")
        return write(file, data, offset)

    with FolderLock(path, beat_s=0.05) as ours:
        ours.take(0.0, ignore)
        monkeypatch.setattr(os, "pwrite", pwrite)
        beats_on(path, 9)
    first, last = (record.getMessage() for record in caplog.records)
    assert "its stamp was not written" in first and "Input/output error" in first
    assert last.endswith("is written again")


def beats_on(path: Path, beat: int) -> None:
    """Returns when the holder has written this beat."""
    deadline = time.monotonic() + 120
    while (found := holder(path)) is None or found.beat < beat:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_kernel_locks_a_live_stamp_of_this_machine_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_flock", lambda file: None)
    with FolderLock(path, beat_s=0.1) as first:
        first.take(0.0, ignore)
        with pytest.raises(FolderHeld):
            FolderLock(path, stale_s=30.0).take(0.0, ignore)


def test_one_that_was_believed_dead_learns_that_it_has_lost_its_folder(path: Path) -> None:
    with FolderLock(path, beat_s=0.1) as ours:
        ours.take(0.0, ignore)
        deadline = time.monotonic() + 120
        while not ours.lost:
            assert time.monotonic() < deadline
            foreign(path, 0)  # again: ours may have been about to write over it
            time.sleep(0.05)
    assert path.exists(), "the file is the other one's now"


def test_a_lock_file_that_somebody_removed_is_put_back(path: Path) -> None:
    with FolderLock(path, beat_s=0.1) as ours:
        ours.take(0.0, ignore)
        path.unlink()
        deadline = time.monotonic() + 120
        while holder(path) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(FolderHeld):
            FolderLock(path).take(0.0, ignore)


def test_a_start_that_may_not_write_there_is_told_so(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        FolderLock(lock_path(tmp_path / "demo", "driver")).take(0.0, ignore)
