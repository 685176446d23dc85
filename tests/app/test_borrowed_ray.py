"""A command that borrows a Ray gives back what it holds, however it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from app.run.cluster import RayNotStarted, start_ray_here
from app.run.signals import unwinds_on_signal
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
