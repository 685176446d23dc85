"""How the process that starts a run waits for its end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import WorkerGroupError

from app.run import cluster, ray_train
from app.run.cluster import NodeSigns, RayGone, wait_while_ray_lives
from app.run.outcomes import OUTCOME, EndedRun, read_outcome, write_outcome
from app.run.ray_train import ask_own_cluster, fit_while_progressing
from tests.rays import local_ray

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_watch_node", lambda result, lost: None)


@pytest.mark.timeout(60)
def test_a_run_that_is_over_is_not_held_up_by_a_ray_train_that_does_not_end() -> None:
    asked = iter([False, True])
    wait_while_ray_lives(Future[int](), lambda: next(asked), grace_s=0.0)
    assert next(asked, None) is None


def test_what_comes_within_the_grace_is_waited_for() -> None:
    result = Future[int]()

    def is_over() -> bool:
        result.set_result(3)
        return True

    wait_while_ray_lives(result, is_over)
    assert result.result(timeout=0) == 3


@pytest.mark.timeout(60)
def test_a_run_that_another_controller_goes_on_with_is_waited_for() -> None:
    """The one before it had written its end, and was lost before Ray Train knew."""
    result, asked = Future[int](), list[bool]()

    def is_over() -> bool:
        asked.append(len(asked) < 2)
        if len(asked) == 5:
            result.set_result(3)
        return asked[-1]

    wait_while_ray_lives(result, is_over, grace_s=2.5)
    assert result.result(timeout=0) == 3


def test_a_node_that_is_gone_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_watch_node", lambda result, lost: lost.set())
    with pytest.raises(RayGone):
        wait_while_ray_lives(Future[int]())


@pytest.mark.parametrize(
    ("answered_at", "now", "gone"),
    [(100.0, 145.0, False), (100.0, 151.0, True), (129.0, 129.5, False), (129.0, 131.0, True)],
    ids=["the GCS stands still", "and does not come back", "it says that the node is dead", "and goes on saying so"],
)
def test_ray_that_says_nothing_is_waited_for_longer_than_ray_that_calls_the_node_dead(
    answered_at: float, now: float, gone: bool
) -> None:
    assert NodeSigns(alive_at=100.0, answered_at=answered_at).is_gone(now) is gone


@pytest.mark.timeout(60)
def test_a_node_that_is_gone_ends_the_wait_also_while_storage_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, ends = threading.Event(), threading.Event()

    def is_over() -> bool:
        hangs.set()
        return not ends.wait(30)

    def gone(result: Future[int], lost: threading.Event) -> None:
        hangs.wait()
        lost.set()

    monkeypatch.setattr(cluster, "_watch_node", gone)
    try:
        with pytest.raises(RayGone):
            wait_while_ray_lives(Future[int](), is_over, grace_s=0.0)
    finally:
        ends.set()


def test_a_folder_that_cannot_be_read_now_ends_no_wait(tmp_path: Path) -> None:
    """Storage of a cluster may fail for a moment, and the run does not end by it."""
    with pytest.raises(OSError):
        (tmp_path / ("x" * 300) / OUTCOME).is_file()
    assert read_outcome(tmp_path / ("x" * 300), "a") is None and read_outcome(tmp_path, "a") is None
    write_outcome(tmp_path, EndedRun(code=0, reason="done", last_step=3), "a")
    assert read_outcome(tmp_path, "a") is not None and read_outcome(tmp_path, "another start") is None


def test_a_process_ends_with_its_code_and_without_freeing_what_it_holds() -> None:
    code = """
import atexit
from app.run.cluster import leave
class Large:
    def __del__(self):
        print("freed")
held = Large()
atexit.register(print, "exit handler")
print("said")
leave(75)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "said\nexit handler\n"), done.stderr


def test_a_run_that_goes_on_between_the_deaths_of_its_controllers_outlives_more_than_ray_train_counts(
    tmp_path: Path,
) -> None:
    """In the first two lives of Ray Train a step was committed, the same one twice; in the third none."""
    committed = iter(['{"step": 3, "time": 1}\n', '{"step": 3, "time": 2}\n', ""])
    asked, said = list[int](), list[str]()

    def fit(number: int) -> None:
        asked.append(number)
        with (tmp_path / "metrics.jsonl").open("a") as metrics:
            metrics.write(next(committed))
        raise WorkerGroupError("the controller died", {})

    with pytest.raises(WorkerGroupError):
        fit_while_progressing(fit, tmp_path, said.append)
    assert asked == [0, 1, 2] and len(said) == 2


def test_what_ray_train_itself_does_wrong_is_not_tried_again(tmp_path: Path) -> None:
    def fit(number: int) -> None:
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}, "time": 1}}\n')
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        fit_while_progressing(fit, tmp_path, print)
    assert fit_while_progressing(lambda number: number, tmp_path, print) == 0


@pytest.mark.parametrize(
    ("left", "said"), [("5 steps are only in memory", "5 steps are only in memory"), ("", "cannot be read now")]
)
def test_checkpoints_that_cannot_be_read_hide_nothing_of_what_was_rescued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, said: str
) -> None:
    def dead(root: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(root))

    monkeypatch.setattr("app.run.ray_train.runtime_config", lambda config, folder: None)
    monkeypatch.setattr("actors.run.rescue.rescue", lambda config, recorded: left)
    monkeypatch.setattr("actors.state.checkpoint_files.latest", dead)
    config: Any = None
    outcome = ray_train._rescue_outcome(config, tmp_path, RuntimeError("it died"))
    assert "it died" in outcome.reason and said in outcome.reason and "could not be saved" not in outcome.reason


def test_ray_train_is_told_to_look_more_often_by_a_name_it_knows() -> None:
    from ray.train.v2._internal.constants import DEFAULT_HEALTH_CHECK_INTERVAL_S, HEALTH_CHECK_INTERVAL_S_ENV_VAR

    told = cluster._worker_environment()[HEALTH_CHECK_INTERVAL_S_ENV_VAR]
    assert float(told) < DEFAULT_HEALTH_CHECK_INTERVAL_S


@pytest.mark.long
@pytest.mark.cluster
def test_what_ray_train_starts_asks_its_own_cluster_whether_an_actor_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it asks the cluster that was started last on the host."""
    from ray.dashboard import utils
    from ray.train.v2._internal import constants

    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://shared:8265")  # as in a shell from which jobs are submitted

    @ray.remote(num_cpus=0)
    def asked() -> str:
        utils.ray_address_to_api_server_url = lambda address: f"http://as {address} says"
        return utils.get_address_for_submission_client(None)

    @ray.remote(num_cpus=0)
    class Starter:
        """As Ray Train's controller, which starts what looks after it."""

        def started(self) -> str:
            return ray.get(asked.remote())

    with local_ray(num_cpus=1):
        ask_own_cluster()
        own = ray.get_runtime_context().gcs_address
        starter = Starter.options(runtime_env={"env_vars": constants.get_env_vars_to_propagate()}).remote()
        assert ray.get(starter.started.remote()) == f"http://as {own} says"
        assert os.environ["RAY_API_SERVER_ADDRESS"] == own
    constants.ENV_VARS_TO_PROPAGATE.discard("RAY_API_SERVER_ADDRESS")
