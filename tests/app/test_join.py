"""`heddle workers join`: a machine belongs to a run's cluster for a while, and leaves when its workers are done."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TextIO

import psutil
import pytest
import ray

from actors.names import NAMESPACE, is_monitor, monitor_name, run_id
from actors.pool.monitor import Monitor
from actors.progress import Progress
from app.run.cluster import ClusterAddress
from app.run.join import Joining, _drained, _is_over, _leave, _told_to_leave, join_until_told
from app.run.lock import lock_path
from ops.typed import ConfigError
from tests.actors.fakes import Handle
from tests.rays import local_ray

pytestmark = pytest.mark.cluster


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A run folder that names this cluster, and its monitor."""
    from actors.pool.workers import start_monitor

    with local_ray(num_cpus=1, namespace=NAMESPACE, log_to_driver=False):
        address = ray.get_runtime_context().gcs_address
        (tmp_path / "cluster.json").write_text(json.dumps({"address": address, "auth": "token"}))
        yield tmp_path, start_monitor(run_id(tmp_path))


def wait_for(what: Callable[[], bool], seconds: float = 150.0) -> bool:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.3)
    return True


def alive() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def joined(run: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "app.cli", "workers", "join", str(run), *more]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)
def test_a_machine_joins_and_leaves_when_its_workers_have_finished(live_run: tuple[Path, Any]) -> None:
    folder, monitor = live_run
    (home,) = alive()
    process = joined(folder)
    assert wait_for(lambda: len(alive()) == 2), "it did not join"
    (new,) = [node for node in alive() if node != home]
    tree = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in " ".join(one.cmdline()) for one in tree)
    for name, node in (("w0", home), ("w1", new)):
        ray.get(monitor.beat.remote(Progress.of_start(name, "host", node)))
    for one in tree:  # as a batch system does
        one.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert len(alive()) == 2, "Ray's own processes do not hear it"
    process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: ray.get(monitor.report.remote()).wishes.drain == ("w1",)), "the one on the new machine"
    time.sleep(1)
    assert process.poll() is None, "w1 is still there"
    ray.get(monitor.remove.remote("w1"))
    assert process.wait(60) == 0
    assert wait_for(lambda: alive() == [home])
    assert process.stdout is not None
    assert "leaving: w1 of this machine finishes first" in process.stdout.read()
    assert not [one for one in tree if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.timeout(300)
@pytest.mark.long
def test_it_goes_with_a_run_that_has_ended(live_run: tuple[Path, Any]) -> None:
    folder, _ = live_run
    process = joined(folder)
    assert wait_for(lambda: len(alive()) == 2)
    (folder / "outcome.json").write_text(json.dumps({"code": 0, "reason": "done", "last_step": 9}))
    ray.shutdown()  # and with it the cluster
    assert process.wait(120) == 0


def test_where_no_cluster_comes_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert join_until_told(Joining(cluster="127.0.0.1:9", wait_s=0.1)) == 75
    said = capsys.readouterr()
    assert (
        "waiting up to 0.1 s for a Ray cluster at 127.0.0.1:9" in said.out and "did not come within 0.1 s" in said.err
    )
    (tmp_path / "outcome.json").write_text(json.dumps({"code": 0, "reason": "done", "last_step": 9}))
    assert join_until_told(Joining(run=tmp_path, wait_s=60)) == 0, "the run is over"


def test_a_run_whose_folder_does_not_answer_for_a_moment_is_not_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is resumed after an end, which its folder tells of until Ray is there; machines that wait left it."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "outcome.json").write_text(json.dumps({"code": 1, "reason": "failed", "last_step": 9}))
    assert _is_over(Joining(run=run, wait_s=60))
    lock, exists = lock_path(run, "driver"), Path.exists
    lock.touch()

    def stale(path: Path, **options: bool) -> bool:
        if path == lock:
            raise OSError(errno.ESTALE, "Stale file handle")
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", stale)
    assert not _is_over(Joining(run=run, wait_s=60))


@pytest.fixture
def cluster_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Put a script that `does` this in the place of `ray`. Returns the address of a cluster that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def made(does: str) -> str:
            script = tmp_path / "bin" / "ray"
            script.parent.mkdir()
            script.write_text(f"#!/bin/sh\n{does}\n")
            script.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(script.parent / "python"))
            (tmp_path / "cluster.json").write_text(json.dumps({"address": address, "auth": ""}))
            return address

        yield made


def test_a_machine_that_cannot_join_ends_after_a_few_tries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster_for: Callable[[str], str]
) -> None:
    address = cluster_for("echo another version of Ray >&2\nexit 1")
    assert join_until_told(Joining(run=tmp_path, wait_s=60), ended_s=0.0) == 1
    assert f"cannot join {address}: another version of Ray" in capsys.readouterr().err


SECONDS = f"300.{os.getpid()}"  # that processes of these tests sleep, and nobody else's


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process sleeps for this time after the block."""

    def left() -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if SECONDS in (one.info["cmdline"] or [])]

    try:
        yield
        assert left() == []
    finally:
        for process in left():
            process.kill()


def test_nothing_stays_of_ray_that_ends_before_what_it_has_started(
    tmp_path: Path, cluster_for: Callable[[str], str]
) -> None:
    """`ray start --block` is killed: its raylet and workers are nobody's children then."""
    cluster_for(f"sleep {SECONDS} &\nsh -c 'sleep {SECONDS} & sleep {SECONDS}' &\nsleep 1\nexit 1")
    with nothing_left():
        assert join_until_told(Joining(run=tmp_path, wait_s=60), ended_s=0.0) == 1


@pytest.mark.usefixtures("not_under_nohup")
def test_nothing_stays_of_a_machine_whose_terminal_goes(tmp_path: Path, cluster_for: Callable[[str], str]) -> None:
    cluster_for(f"kill -HUP {os.getpid()}\nsleep {SECONDS}")
    with nothing_left(), pytest.raises(SystemExit) as ended:
        join_until_told(Joining(run=tmp_path, wait_s=60))
    assert ended.value.code == 128 + signal.SIGHUP


def test_a_notice_may_come_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came while the wait for it held its lock had `heddle workers join` hang for good."""
    held: list[bool] = []
    enter, sleep, here = threading.Condition.__enter__, time.sleep, threading.current_thread()

    def entered(condition: threading.Condition) -> bool:
        if threading.current_thread() is not here:  # one that an earlier test has left
            return enter(condition)
        assert not held, "the handler waits for what the thread holds that it interrupts"
        held.append(True)
        taken = enter(condition)
        signal.raise_signal(signal.SIGTERM)
        return taken

    def slept(seconds: float) -> None:
        if threading.current_thread() is here:
            signal.raise_signal(signal.SIGTERM)
        sleep(seconds)

    with _told_to_leave(False) as leaves:
        assert not leaves.wait(0.01)
        monkeypatch.setattr(threading.Condition, "__enter__", entered)
        monkeypatch.setattr(time, "sleep", slept)
        assert leaves.wait(60) and leaves.is_set()


def test_the_next_notice_does_not_end_a_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch system tells by SIGUSR1 and then by SIGTERM, of which Ray has handlers of its own."""
    began: list[str] = []

    def connect(address: str, **more: object) -> None:
        began.append(address)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        if len(began) == 1:
            signal.raise_signal(signal.SIGTERM)

    def goes_on(address: str, node: str, seconds: float, why: str) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", connect)
    monkeypatch.setattr("actors.ray_calls.nodes", list)
    monkeypatch.setattr("actors.ray_calls.drain", goes_on)
    monkeypatch.setattr("app.run.join._drained", lambda node: [])
    node: Any = SimpleNamespace(id_among=lambda cluster: "here")
    with _told_to_leave(False) as leaves:
        _leave(ClusterAddress(address="127.0.0.1:9", auth=""), node, 60.0)
        assert leaves.is_set() and began == ["127.0.0.1:9"] * 2
    assert "leaving: no worker of this machine" in capsys.readouterr().out


def test_workers_finish_also_where_nobody_reads_what_is_said(unread: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the `tee` of `heddle workers join RUN | tee log`, too."""
    left = [["w1"], ["w1"], []]
    monkeypatch.setattr(sys, "stdout", unread)
    monkeypatch.setattr(ray, "init", lambda address, **more: None)
    monkeypatch.setattr("actors.ray_calls.nodes", list)
    monkeypatch.setattr("actors.ray_calls.drain", lambda *given: None)
    monkeypatch.setattr("app.run.join._drained", lambda node: left.pop(0))
    node: Any = SimpleNamespace(id_among=lambda cluster: "here", lives=True)
    _leave(ClusterAddress(address="127.0.0.1:9", auth=""), node, 60.0)
    assert not left


def test_nothing_stays_of_a_machine_whose_leave_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster_for: Callable[[str], str]
) -> None:
    cluster_for(f"kill -TERM {os.getpid()}\nsleep 60")  # a notice to leave at once

    def cut_short(*given: Any) -> NoReturn:
        raise SystemExit(15)  # Ray's answer to a second SIGTERM while it connects

    (aside := tmp_path / "aside").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(aside))
    monkeypatch.setattr("app.run.join._leave", cut_short)
    with pytest.raises(SystemExit):
        join_until_told(Joining(run=tmp_path, wait_s=60))
    lives = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    assert list(aside.iterdir()) == [] and not [one for one in lives if str(tmp_path) in " ".join(one.cmdline())]


# Ray's files, in the folder that it is given
FILES = """
for word in "$@"; do case $word in --temp-dir=*) temp=${word#--temp-dir=} ;; esac; done
mkdir -p $temp/session_1/logs $temp/session_1/ray_spilled_objects_of_a_node
ln -sfn session_1 $temp/session_latest
touch $temp/ray_current_cluster $temp/session_1/logs/raylet.out $temp/session_1/ray_spilled_objects_of_a_node/pixels
"""


@pytest.mark.parametrize(("code", "logs"), [(0, False), (1, True)])
def test_rays_files_go_with_the_machine_and_its_logs_stay_where_the_run_has_failed(
    code: int, logs: bool, tmp_path: Path, cluster_for: Callable[[str], str]
) -> None:
    temp = tmp_path / "temp"
    outcome = json.dumps({"code": code, "reason": "it has ended", "last_step": 9})
    cluster_for(f"{FILES}\nls $temp/session_1 > {tmp_path}/seen\necho '{outcome}' > {tmp_path}/outcome.json")
    assert join_until_told(Joining(run=tmp_path, wait_s=60, temp_dir=temp)) == 0
    assert (tmp_path / "seen").read_text().split() == ["logs", "ray_spilled_objects_of_a_node"]
    assert (temp / "session_1" / "logs" / "raylet.out").exists() == logs
    assert temp.exists() == logs and not list(temp.glob("session_1/ray_spilled*"))


def test_rays_files_go_when_a_machine_is_told_to_leave_and_what_others_have_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster_for: Callable[[str], str]
) -> None:
    cluster_for(f"{FILES}\nkill -USR1 {os.getpid()}\nsleep 60")
    monkeypatch.setattr("app.run.join._leave", lambda *given: None)
    temp = tmp_path / "temp"
    temp.mkdir()
    (temp / "notes").touch()
    assert join_until_told(Joining(run=tmp_path, wait_s=60, temp_dir=temp)) == 0
    assert [one.name for one in temp.iterdir()] == ["notes"]


def test_logs_of_ray_stay_where_a_machine_cannot_even_start_it(
    tmp_path: Path, cluster_for: Callable[[str], str]
) -> None:
    cluster_for(f"{FILES}\nchmod a-x $0\nexit 1")  # the second start is refused by the system
    temp = tmp_path / "temp"
    with pytest.raises(PermissionError):
        join_until_told(Joining(run=tmp_path, wait_s=60, temp_dir=temp), ended_s=0.0)
    assert (temp / "session_1" / "logs" / "raylet.out").exists() and not list(temp.glob("session_1/ray_spilled*"))


def test_a_folder_with_files_of_another_ray_is_refused_and_they_stay(tmp_path: Path) -> None:
    (socket_file := tmp_path / "session_2026" / "sockets" / "raylet").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to("session_2026")
    (tmp_path / "ray_current_cluster").touch()
    with pytest.raises(ConfigError, match=r"has files of another Ray \(session_2026\).*; give a folder of its own"):
        join_until_told(Joining(cluster="127.0.0.1:9", wait_s=0.0, temp_dir=tmp_path))
    assert socket_file.exists() and (tmp_path / "session_latest").is_symlink()
    assert (tmp_path / "ray_current_cluster").exists()


def test_a_run_that_ends_while_a_machine_leaves_does_not_end_the_workers_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone, monitor = ray.exceptions.ActorDiedError(), Monitor()
    for worker, node in (("w0", "here"), ("w1", "elsewhere")):
        monitor.beat(Progress.of_start(worker, "host", node))
    ended: Any = Handle(report=lambda: gone)
    lives: Any = Handle(report=monitor.report, drain=monitor.drain)

    def get(value: Any, timeout: float) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr("app.run.join._monitors", lambda: iter([ended, lives]))
    assert _drained("here") == ["w0"] and monitor.report().wishes.drain == ("w0",)


def test_signals_are_as_before_when_it_has_ended(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    join_until_told(Joining(cluster="127.0.0.1:9", wait_s=0.0))
    assert signal.getsignal(signal.SIGTERM) is before and os.getpid()


def test_monitors_are_known_by_their_names() -> None:
    assert is_monitor(monitor_name("demo-1")) and not is_monitor("demo-1/keeper/abc")
