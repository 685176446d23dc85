"""Samples during training come from checkpoints, one batch at a time, and their failure never ends the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.sampling import live as live_samples
from app.sampling.live import LiveSamples
from app.settings.config import RunConfig
from tests.rays import local_ray

DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=1, log_to_driver=False):
        yield


def samples(folder: Path, every: int) -> LiveSamples:
    return LiveSamples(RunConfig.load(DEMO, [f"sample.every={every}", f"checkpoint.every={every}"]), folder)


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_samples_are_made_at_multiples_of_every_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(run_dir: str, device: str) -> list[str]:
        """Stands for the sampler: leaves a file for each call."""
        path = Path(run_dir) / f"{len(list(Path(run_dir).iterdir()))}.txt"
        path.touch()
        return [str(path)]

    monkeypatch.setattr(live_samples, "make", touch)
    live = samples(tmp_path, every=40)
    for step in (19, 39, 59):
        live.on_checkpoint(step)
    live.close()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_failure_is_logged_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = samples(tmp_path, every=40)
    with caplog.at_level(logging.WARNING):
        live.on_checkpoint(39)  # there is no checkpoint in this folder
        live.close()
    assert "sampling failed" in caplog.text and "no complete checkpoint" in caplog.text


@pytest.mark.parametrize(("device", "gpus", "used"), [("auto", 1, "cuda"), ("cuda", 1, "cuda"), ("cpu", 0, "cpu")])
def test_the_task_asks_for_the_gpu_that_it_uses(
    device: str, gpus: int, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    import actors.pool.workers  # noqa: F401  before ray.remote is another

    class Task:
        """Stands for a remote function: keeps what is asked for."""

        def options(self, **options: object) -> Task:
            self.gpus = options["num_gpus"]
            return self

        def remote(self, run_dir: str, device: str) -> None:
            self.device = device

    task = Task()
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    monkeypatch.setattr(ray, "remote", lambda function: task)
    config = RunConfig.load(DEMO, ["sample.every=40", "checkpoint.every=40", f"workers.device={device}"])
    LiveSamples(config, tmp_path).on_checkpoint(39)
    assert (task.gpus, task.device) == (gpus, used)
