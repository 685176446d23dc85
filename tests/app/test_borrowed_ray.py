"""A command that borrows a Ray gives back what it holds, however it is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.run import cluster
from app.run.borrowed_ray import borrowed_ray
from app.run.cluster import RayNotStarted, connect, start_ray_here
from app.run.join import Joining, join_until_told
from app.run.operator import monitor
from app.run.signals import unwinds_on_signal
from app.settings.config import RunConfig
from ops.code_path import ROOT
from ops.typed import ConfigError

RAY = """
import os, signal, time
from app.run.borrowed_ray import borrowed_ray
with borrowed_ray(None, 1):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("unwound")
"""

STARTING = """
import os, signal, threading, time
from app.run.borrowed_ray import borrowed_ray
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
with borrowed_ray(None, 1):
    time.sleep(60)
"""


@pytest.mark.usefixtures("not_under_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_what_is_open_and_leaves_its_handler_as_it_was(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, unwinds_on_signal():
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unwinds_on_signal():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_with_a_ray_of_its_own_ends_by_sigterm_without_ray_aborting_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stdout == "unwound\n"
    assert "SIGTERM received" not in ended.stderr


def test_while_its_ray_starts_a_command_ends_by_sigterm_with_the_same_exit_code() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", STARTING], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr


def train() -> None:
    cluster.connect(RunConfig.from_yaml("run: {name: one}"))


def borrow() -> None:
    with borrowed_ray("auto", 1):
        pass


@pytest.mark.parametrize("start", [train, borrow])
def test_a_submitted_job_may_set_what_we_set_and_keeps_the_rest(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray refused it with a traceback that had all of the job's variables in it."""
    merged: list[dict[str, Any]] = []

    def never_connect(runtime_env: dict[str, Any], skip_hook: bool) -> None:
        merged.append(runtime_env)
        raise ConnectionError

    ours = ["PYTHONUTF8", "RAY_TRAIN_V2_ENABLED", "RAY_DATA_DISABLE_PROGRESS_BARS"]
    theirs = {"PYTHONPATH": "/me/libs", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "7", **dict.fromkeys(ours, "0")}
    given = {"working_dir": "gcs://mine.zip", "env_vars": {**theirs, "WANDB_API_KEY": "a secret"}}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)  # as the process that Ray starts for a job has them
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": given, "metadata": {}}))
    monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "0")
    monkeypatch.setattr("ray._private.worker._maybe_modify_runtime_env", never_connect)
    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        start()
    (found,) = merged
    assert found["working_dir"] == "gcs://mine.zip" and found["env_vars"]["WANDB_API_KEY"] == "a secret"
    path = found["env_vars"]["PYTHONPATH"].split(os.pathsep)
    assert path[0] == str(ROOT) and "/me/libs" in path
    assert found["env_vars"]["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] == "7"
    assert found["env_vars"]["PYTHONUTF8"] == "1"
    assert start is borrow or all(found["env_vars"][name] == "1" for name in ours)


@pytest.mark.parametrize(("given", "found"), [(None, "0"), ("1", "1")])
def test_no_process_is_started_for_each_core_that_no_actor_gets(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two idle ones stayed beside all of a run's actors on two cores; of 64 cores they would take 2.5 GiB."""
    name = "RAY_prestart_worker_first_driver"
    monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name)
    seen: list[str | None] = []
    start_ray_here(lambda address: seen.append(os.environ.get(name)))
    assert seen == [found]


DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"
NOT_LISTENING = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("given", "variable", "sentence"),
    [
        ("2x8", "", r"--cluster 2x8 is no address of a Ray cluster. Give HOST:PORT, .*NODESxGPUS is of heddle plan"),
        (None, "10.0.0.1", "RAY_ADDRESS=10.0.0.1 is no address of a Ray cluster. Give HOST:PORT, .* or auto.$"),
        (None, "http://127.0.0.1:8265", "RAY_ADDRESS=http://127.0.0.1:8265 is no address of a Ray cluster."),
        ("127.0.0.1:99999", "", "--cluster 127.0.0.1:99999 is no address of a Ray cluster."),
        (NOT_LISTENING, "10.0.0.1", rf"answers at --cluster {NOT_LISTENING} \(.*leave out --cluster and RAY_ADDRESS"),
        (None, NOT_LISTENING, rf"answers at RAY_ADDRESS={NOT_LISTENING} \(.*unset RAY_ADDRESS to use this machine"),
    ],
)
def test_a_cluster_that_is_none_is_named_as_it_was_given(
    given: str | None, variable: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(ConfigError, match=sentence), borrowed_ray(given, cpus=1):
        pass


@pytest.mark.parametrize("address", ["10.0.0.1", "2x8"])
def test_a_run_and_its_operator_name_an_address_that_is_none(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    (tmp_path / "run_id").write_text("a")
    for asks in (lambda: connect(RunConfig.load(DEMO)), lambda: monitor(tmp_path)):
        with pytest.raises(ConfigError, match=f"RAY_ADDRESS={address} is no address of a Ray cluster"):
            asks()


@pytest.mark.parametrize("address", ["10.0.0.1", "2x8", "auto", "local", "ray://h:1", ""])
def test_a_machine_that_joins_is_told_the_one_form_that_it_takes(address: str) -> None:
    """`--cluster auto` ended in the words of `int`, `ray://` after three starts."""
    wanted = f"--cluster {address or repr('')} is no address of a Ray cluster to join. Give HOST:PORT\\.( NODES|$)"
    with pytest.raises(ConfigError, match=wanted):
        join_until_told(Joining(cluster=address, wait_s=0.0))


def test_a_temporary_folder_too_long_for_sockets_is_one_sentence() -> None:
    path = "/tmp/" + "d" * 120

    def start(address: str) -> None:
        raise OSError(f"validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: {path}")

    with pytest.raises(ConfigError, match=f"{path}. Set RAY_TMPDIR to a shorter folder"):
        start_ray_here(start)


def test_a_ray_that_does_not_come_up_twice_is_one_sentence_with_its_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/short")
    asked = []

    def start(address: str) -> None:
        asked.append(address)
        raise Exception("The current node timed out during startup.")

    with pytest.raises(RayNotStarted, match=r"timed out during startup.* read /short/ray/session_latest"):
        start_ray_here(start)
    assert asked == ["local", "local"]
