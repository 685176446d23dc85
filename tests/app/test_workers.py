"""`heddle workers` against a real monitor actor on a local cluster."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import typer

from actors.config import SnapshotConfig
from actors.held_state import HeldShard
from actors.names import NAMESPACE, run_id
from actors.outcome import Exit, Outcome
from actors.plan.types import UNKNOWN_PLACE, GpuPlace
from actors.progress import Progress
from actors.state import keeper as keeper_module
from actors.state import keeper_fleet
from actors.state.keeper import protocol, spawn
from actors.state.keeper_fleet import OtherKeepers
from app.commands.workers import drain, list_workers, scale, stop, warn_if_quiet
from app.run import operator
from app.run.cluster import ClusterAddress, must_answer, not_let_in
from app.run.leftovers import end_leftovers
from app.run.lock import FolderHeld, FolderLock, lock_path
from app.run.operator import address_of, answer, how_it_ended, lives
from app.run.outcomes import ended_run, write_outcome
from app.settings.config import RunConfig
from app.settings.errors import exit_code
from ops.typed import ConfigError
from tests.actors.fakes import Handle
from tests.actors.state.test_checkpoint_files import write as write_checkpoint
from tests.rays import local_ray

DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def live_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A run folder and its monitor, which has heard of two workers."""
    from actors.pool.workers import start_monitor

    folder = tmp_path_factory.mktemp("live")
    with local_ray(num_cpus=1, namespace=NAMESPACE, log_to_driver=False):
        monitor = start_monitor(run_id(folder))
        places = {"w0": GpuPlace(index=3, numa=0, island="A", rail="B", nic="mlx5_1")}
        for name in ("w0", "w1"):
            ray.get(
                monitor.beat.remote(
                    Progress(
                        worker=name,
                        generation=3,
                        step=7,
                        activity="dit 17f 64x96 b4 sp1 s7",
                        phase="backward",
                        since=time.time(),
                        predicted_s=1.0,
                        collectives=4,
                        waiting_in="",
                        place=places.get(name, UNKNOWN_PLACE),
                    )
                )
            )
        yield folder, monitor


def test_list_shows_what_every_worker_does(live_run: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    list_workers(live_run[0])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["w0", "w1"]
    assert "dit 17f 64x96 b4 sp1 s7 (backward)" in lines[1]
    assert lines[1].endswith("[gpu 3, numa 0, island A, rail B (mlx5_1)]") and "[" not in lines[2]


def test_drain_and_scale_reach_the_run(live_run: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, monitor = live_run
    drain(folder, ["w1"], wait_s=0)
    scale(folder, 4)
    wishes = ray.get(monitor.report.remote()).wishes
    assert (wishes.drain, wishes.target) == (("w1",), 4)
    list_workers(folder)
    assert capsys.readouterr().out.splitlines()[-1].endswith("leaving")


@pytest.mark.parametrize(
    ("count", "kept"),
    [(2, "2 workers from"), (9, "3 workers (workers.max, not 9)"), (1, "2 workers (workers.min, not 1)")],
)
def test_scale_says_what_the_limits_make_of_a_count(
    live_run: tuple[Path, Any], capsys: pytest.CaptureFixture[str], count: int, kept: str
) -> None:
    folder = live_run[0]
    (folder / "config.yaml").write_text("workers: {min: 2, max: 3}")
    scale(folder, count)
    assert f"the run keeps {kept}" in capsys.readouterr().out
    (folder / "config.yaml").unlink()


def test_a_run_whose_workers_are_silent_may_be_dead(
    live_run: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, monitor = live_run
    report = ray.get(monitor.report.remote())
    heard = max(seen.at for seen in report.seen.values())
    warn_if_quiet(folder, replace(report, now=heard + 5))
    assert capsys.readouterr().err == ""
    warn_if_quiet(folder, replace(report, now=heard + 60))
    assert "no worker" in (said := capsys.readouterr().err) and "has been heard for 60 s" in said


@pytest.mark.usefixtures("live_run")
def test_a_run_that_loads_has_neither_generation_nor_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from actors.pool.workers import start_monitor

    monitor = start_monitor(run_id(tmp_path))
    ray.get(monitor.beat.remote(Progress.of_start("w0")))
    list_workers(tmp_path)
    ray.kill(monitor)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "no generation yet"
    assert "step -  " in second and "loading for " in second


@pytest.mark.usefixtures("live_run")
def test_list_shows_what_a_run_waits_for_that_cannot_write_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from actors.pool.workers import start_monitor

    monitor = start_monitor(run_id(tmp_path))
    ray.get(monitor.say.remote("step 7 waits to be recorded"))
    list_workers(tmp_path)
    assert capsys.readouterr().out.splitlines()[1] == "step 7 waits to be recorded"
    ray.get(monitor.begin.remote())
    assert ray.get(monitor.trouble.remote()) == "", "another controller may have another disk"
    ray.kill(monitor)


@pytest.mark.parametrize("outcome", ["", "finished after 9 steps"])
def test_a_monitor_that_ends_before_it_answers_is_one_sentence(
    live_run: tuple[Path, Any], tmp_path: Path, outcome: str
) -> None:
    from actors.pool.workers import start_monitor

    if outcome:
        write_outcome(tmp_path, ended_run(Outcome(code=0, reason=outcome, last_step=8)), "")
    monitor = start_monitor(run_id(tmp_path))
    ray.kill(monitor)
    with pytest.raises(ConfigError, match=outcome or "ended before it answered. The run is ending, or starts another"):
        answer(tmp_path, monitor.scale.remote(3))


def test_a_monitor_that_was_ended_for_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(reference: object, timeout: float) -> None:
        raise ray.exceptions.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.")

    monkeypatch.setattr("actors.ray_calls.get", gone)
    with pytest.raises(ConfigError, match="ended before it answered"):
        answer(tmp_path, Handle().scale.remote(3))


def test_a_live_run_is_not_started_a_second_time(live_run: tuple[Path, Any]) -> None:
    folder = live_run[0]
    config = RunConfig.load(DEMO, [f"run.dir={folder.parent}", f"run.name={folder.name}"])
    with pytest.raises(FolderHeld, match="is alive on this cluster; end it with"):
        end_leftovers(config, overwrite=True, alive_s=900.0)  # the workers were heard when this file began


def test_overwriting_a_dead_run_frees_its_actors(tmp_path: Path, live_run: tuple[Path, Any]) -> None:
    from actors.pool.workers import start_monitor

    monitor = start_monitor(run_id(tmp_path))
    end_leftovers(RunConfig.load(DEMO, [f"run.dir={tmp_path.parent}", f"run.name={tmp_path.name}"]), overwrite=True)
    with pytest.raises(ValueError, match="Failed to look up"):
        ray.get_actor(f"{run_id(tmp_path)}/monitor", namespace=NAMESPACE)
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(600):  # its process may answer for a moment longer
            ray.get(monitor.ping.remote(), timeout=30)
            time.sleep(0.05)


def test_keepers_of_another_version_end_the_start_and_stay(
    tmp_path: Path, live_run: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their answers could not be put together, ten controllers in a row, and nobody said that the version which had
    started them could go on from them."""
    node, run = ray.get_runtime_context().get_node_id(), run_id(tmp_path)
    config = RunConfig.load(DEMO, [f"run.dir={tmp_path.parent}", f"run.name={tmp_path.name}"])
    with monkeypatch.context() as before:
        before.setattr(keeper_fleet, "protocol", lambda: "00000000")
        keeper = spawn(keeper_fleet.keeper_on(run, node), node, namespace=NAMESPACE)
        assert list(keeper_fleet.Keepers(run, SnapshotConfig()).find()) == [f"{run}/keeper/{node[:12]}-00000000"]
    with pytest.raises(OtherKeepers, match=r"begin anew: heddle train --overwrite ends them"):
        end_leftovers(config, overwrite=False)
    write_checkpoint(tmp_path / "checkpoints", 9)
    with pytest.raises(OtherKeepers, match=r"Resume with that version; .* --resume --back-to 10 ends them"):
        end_leftovers(config, overwrite=False)
    with pytest.raises(OtherKeepers) as raised:
        keeper_fleet.Keepers(run, SnapshotConfig()).take_over(0.0)
    assert exit_code(raised.value) == Exit.USAGE and ray.get(keeper.standing.remote()).committed == -1
    end_leftovers(config, overwrite=True)  # as --back-to does
    end_leftovers(config, overwrite=False)


def test_what_keepers_exchange_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert protocol.__wrapped__() == protocol()
    another = make_dataclass("HeldShard", [(one.name, one.type) for one in fields(HeldShard)] + [("more", "int")])
    monkeypatch.setattr(keeper_module, "HeldShard", another)
    assert protocol.__wrapped__() != protocol()


def test_a_request_that_a_killed_run_has_not_met_does_not_stop_the_next_start(
    tmp_path: Path, live_run: tuple[Path, Any]
) -> None:
    from actors.pool.workers import start_monitor

    monitor = start_monitor(run_id(tmp_path))
    ray.get([monitor.stop.remote("stopped by `heddle workers stop`"), monitor.scale.remote(2)])
    end_leftovers(RunConfig.load(DEMO, [f"run.dir={tmp_path.parent}", f"run.name={tmp_path.name}"]), overwrite=False)
    wishes = ray.get(monitor.report.remote()).wishes
    ray.kill(monitor)
    assert (wishes.stop, wishes.target) == ("", 2)


def test_stop_reaches_the_run(live_run: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, monitor = live_run
    stop(folder, wait_s=0)
    assert "heddle workers stop" in ray.get(monitor.report.remote()).wishes.stop
    assert "after its running steps" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["stop", "drain"])
def test_a_wait_that_is_over_is_no_success(
    command: str, live_run: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """`heddle workers stop && cp -r` copied a run that lived. Where it alone is mounted, nobody sees its lock."""
    with pytest.raises(typer.Exit) as ended:
        if command == "stop":
            stop(live_run[0], wait_s=0.3)
        else:
            drain(live_run[0], ["w1"], wait_s=0.3)
    assert ended.value.exit_code == Exit.RESUMABLE
    waits = "the running steps" if command == "stop" else "w1 to leave"
    assert f"waiting up to 0.3 s for {waits}" in capsys.readouterr().out


def test_stop_waits_for_no_monitor_of_a_run_that_has_ended(
    live_run: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays where keepers alone hold the last step, and a disk that takes no checkpoint takes no outcome either."""
    run = live_run[0]
    lock = lock_path(run, "driver")
    lock.touch()
    monkeypatch.setattr("app.commands.workers._say_wait", lambda wait_s, what: lock.unlink())
    stop(run, wait_s=60.0)
    assert "the run has ended; continue it" in capsys.readouterr().out


def test_storage_that_does_not_answer_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not lives(tmp_path / "run")
    lock_path(tmp_path / "run", "driver").touch()
    assert lives(tmp_path / "run")

    def stale(path: Path, **options: bool) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "stat", stale)
    assert lives(tmp_path / "run")


@pytest.mark.parametrize("seen", [True, False], ids=["beside its folder", "its folder alone"])
@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it goes on"])
def test_stop_waits_for_what_a_run_writes_after_its_monitor(
    ends: bool, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is gone before the outcome is written, and so the folder was copied without it."""
    gone = Handle(report=lambda: None, stop=lambda why: None, ping=lambda: None)
    run, lock = tmp_path / "run", lock_path(tmp_path / "run", "driver")
    run.mkdir()
    if seen:
        lock.touch()

    def get(reference: object, timeout: float) -> None:
        raise ray.exceptions.RayActorError

    def write(seconds: float) -> None:
        """The end of the run, while the command waits."""
        if ends and not seen:
            write_outcome(run, ended_run(Outcome(code=Exit.RESUMABLE, reason="stopped", last_step=8)), "token")
        elif ends:
            lock.unlink()

    monkeypatch.setattr("app.commands.workers.monitor", lambda run: gone)
    monkeypatch.setattr("app.commands.workers.answer", lambda run, reference: None)
    monkeypatch.setattr("app.commands.workers.warn_if_quiet", lambda run, report: None)
    monkeypatch.setattr("app.commands.workers.time.sleep", write)
    monkeypatch.setattr("actors.ray_calls.get", get)
    if not ends:
        with pytest.raises(typer.Exit) as ended:
            stop(run, wait_s=0.3)
        assert ended.value.exit_code == Exit.RESUMABLE
        assert "the run has ended its steps and is still writing" in capsys.readouterr().out
        return
    stop(run, wait_s=60.0)
    assert "the run has ended; continue it" in capsys.readouterr().out


def test_a_worker_that_is_not_there_is_refused(live_run: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="worker w9 is not in the run; it has w0, w1"):
        drain(live_run[0], ["w9"], wait_s=0)


def test_a_run_that_is_over_is_named(live_run: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "run_id").write_text("ended-1234\n")
    with pytest.raises(ConfigError, match="is not alive on this cluster"):
        list_workers(tmp_path)


def test_a_run_that_has_ended_says_how(tmp_path: Path) -> None:
    """Also where no cluster is: its folder knows."""
    (tmp_path / "run_id").write_text("ended-1234\n")
    (tmp_path / "outcome.json").write_text('{"code": 75, "reason": "stopped by a signal", "last_step": 4}')
    with pytest.raises(ConfigError, match=r"has ended: stopped by a signal \(exit code 75\)"):
        list_workers(tmp_path)


def test_a_run_that_is_resumed_has_not_ended(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text('{"code": 75, "reason": "stopped by a signal", "last_step": 4}')
    with FolderLock(lock_path(tmp_path, "driver")) as lock:
        lock.take(0.0, print)
        assert how_it_ended(tmp_path) == ""
    assert how_it_ended(tmp_path) != ""


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # nobody else gets it as long as it is bound, and nobody listens
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:{port}"):
            must_answer(f"127.0.0.1:{port}")
    must_answer("auto")


def test_an_address_of_ipv6_answers_in_its_brackets() -> None:
    with socket.socket(socket.AF_INET6) as listening:
        try:
            listening.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listening.listen()
        must_answer(f"[::1]:{listening.getsockname()[1]}")


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("RAY_ADDRESS=auto", "no Ray cluster answers at RAY_ADDRESS=auto. Start it, or unset it."),
        ("RAY_ADDRESS=10.0.0.1:6379", "something answers at RAY_ADDRESS=10.0.0.1:6379, and Ray does not get in. If it"),
        ("ray://head:10001", "set RAY_AUTH_MODE=token and give this machine the cluster's token"),
    ],
)
def test_a_cluster_that_answers_is_not_said_to_be_missing(address: str, sentence: str) -> None:
    assert sentence in str(not_let_in(address, "unset it"))


def test_a_run_is_found_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert address_of(tmp_path) == "auto", "a folder of an older version"
    with socket.socket() as open_port:
        open_port.bind(("127.0.0.1", 0))
        open_port.listen()
        own = f"127.0.0.1:{open_port.getsockname()[1]}"
        ClusterAddress(address=own, auth="token").write(tmp_path)
        assert address_of(tmp_path) == own and os.environ["RAY_AUTH_MODE"] == "token"
        monkeypatch.delenv("RAY_AUTH_MODE")
        monkeypatch.setenv("RAY_ADDRESS", own)
        assert address_of(tmp_path) == own and os.environ["RAY_AUTH_MODE"] == "token", "whoever names it needs no more"
        monkeypatch.delenv("RAY_AUTH_MODE")
        monkeypatch.setenv("RAY_ADDRESS", "other:1")
        assert address_of(tmp_path) == "other:1" and "RAY_AUTH_MODE" not in os.environ
    monkeypatch.delenv("RAY_ADDRESS")
    (tmp_path / "cluster.json").write_text('{"address": ')
    assert address_of(tmp_path) == "auto"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A run's folder, and an address where nothing listens any more. Ray's last cluster of this machine is another one,
    which nobody may ask."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("asked a cluster that is not the run's"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run_id").write_text("a")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        yield folder, address


def test_a_run_whose_cluster_has_ended_is_not_looked_for_on_another_one(elsewhere: tuple[Path, str]) -> None:
    folder, address = elsewhere
    ClusterAddress(address=address, auth="token").write(folder)
    said = f"cluster of run {folder} at {address} has ended, or this machine does"
    with FolderLock(lock_path(folder, "driver")), pytest.raises(ConfigError, match=said):
        operator.monitor(folder)
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_run_that_ends_a_moment_after_its_cluster_says_how(
    elsewhere: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = elsewhere
    ClusterAddress(address=address, auth="").write(folder)
    said = ["", "", "the run has ended: by itself"]  # `monitor` asks first of all
    monkeypatch.setattr(operator, "how_it_ended", lambda run: said.pop(0))
    with pytest.raises(ConfigError, match=r"^the run has ended: by itself$"):
        operator.monitor(folder)


def test_a_cluster_of_this_machine_that_has_ended_is_told_at_once(
    elsewhere: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without cluster.json is one that Ray itself looks for."""
    folder, address = elsewhere
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: set())
    with pytest.raises(ConfigError, match=rf"no Ray cluster answers at {address} \(the last one of this machine\)"):
        operator.monitor(folder)
