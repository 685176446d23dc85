"""A short run through a few faults with every test run; hundreds of them by `make faults`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from tests.blackbox.compare import Truth, deviations
from tests.blackbox.damage import Full, small_disk
from tests.blackbox.episode import Result, reference
from tests.blackbox.place import Place
from tests.blackbox.processes import wait_for
from tests.blackbox.run import START_S, Run
from tests.blackbox.soak import STEPS as STEPS_OF_A_RUN
from tests.blackbox.soak import soak, table

STEPS = 5


class Left(Run):
    """What a run has left, without the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, "calm"


@pytest.fixture
def left(tmp_path: Path) -> Left:
    lines = [
        {
            "step": s,
            "time": 1.0 + s,
            "loss": 1 / (1 + s),
            "grad_norm": 1.0,
            "lr": 1e-3,
            "good_weight": 1.0,
            "applied": True,
            "loss_by_bucket": {"1x32x48": 1.0},
        }
        for s in range(STEPS)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    write_lines(tmp_path / "events.jsonl", [{"event": "finish", "ledger": {"delivered": 40}}])
    write_lines(tmp_path / "timeline.jsonl", [])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": {"name": "calm"}, "workers": {"max": 2}}))
    write_checkpoint(tmp_path, STEPS - 1, 1.0)
    return Left(tmp_path)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_checkpoint(folder: Path, step: int, value: float) -> None:
    at = folder / "checkpoints" / f"step-{step}"
    at.mkdir(parents=True, exist_ok=True)
    for low, high in ((0, 6), (6, 10)):
        part = np.arange(low, high, dtype=np.float32) * value
        save_file({"master": part, "ema": part}, at / f"shard-{low}-{high}.safetensors")
    (at / "COMPLETE").write_text("{}")


def change_line(number: int, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines[number].update(values)
        write_lines(folder / "metrics.jsonl", lines)

    return change


def drop_line(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))


HARMS: dict[str, Callable[[Path], object]] = {
    "loss differs in 1 steps": change_line(2, loss=1 / 3 * (1 + 3e-5)),
    "grad_norm differs": change_line(1, grad_norm=1.001),
    "good_weight differs": change_line(1, good_weight=0.75),
    "steps missing [2]": drop_line,
    "twice [3]": change_line(4, step=3),
    "final master differs": lambda folder: write_checkpoint(folder, STEPS - 1, 1.0001),
    "the newest checkpoint is of step 7": lambda folder: write_checkpoint(folder, 7, 1.0),
    "3 checkpoints are left": lambda folder: [write_checkpoint(folder, step, 1.0) for step in (1, 2)],
    "left without COMPLETE": lambda folder: (folder / "checkpoints" / "step-2").mkdir(),
    "ledger: delivered is 36": lambda folder: write_lines(
        folder / "events.jsonl", [{"event": "finish", "ledger": {"delivered": 36}}]
    ),
    "config.yaml: workers.max is 3": lambda folder: (folder / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": "calm"}, "workers": {"max": 3}})
    ),
    ".part is left": lambda folder: (folder / ".x.part").touch(),
    "events.jsonl line 2 is not JSON": lambda folder: (folder / "events.jsonl").open("a").write('{"even'),
}


def test_equal_runs_do_not_deviate(left: Left) -> None:
    assert deviations(left, Truth.of(left), {}) == []


@pytest.mark.parametrize("words", HARMS)
def test_what_is_not_as_it_must_be_is_named(left: Left, words: str) -> None:
    truth = Truth.of(left)
    HARMS[words](left.folder)
    assert any(words in found for found in deviations(left, truth, {}))


def assert_nothing_deviates(results: list[Result], faults: int) -> None:
    print(table(results))
    assert sum(len(r.struck) for r in results) >= faults, table(results)
    assert [words for r in results for words in r.deviations] == [], table(results)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_run_under_kills_is_the_run_that_nobody_disturbed(tmp_path: Path) -> None:
    kills = ("kill worker", "kill feeder")  # quick ones: one of a controller or a cluster costs half a minute
    with closing(Place(tmp_path, steps=30)) as place:
        assert_nothing_deviates(soak(place, reference(place), len(kills), seed=3, only=kills), len(kills))


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.faults
def test_a_run_on_a_full_disk_waits_and_is_the_run_that_nobody_disturbed(tmp_path: Path) -> None:
    """A worker dies meanwhile: nothing of the steps that could not be recorded is lost or stands twice."""
    with closing(Place(tmp_path, steps=30)) as place, small_disk(tmp_path / "disk", mib=64) as own:
        if not own:
            pytest.skip("this machine mounts no file system")
        truth = reference(place)
        run = Run(place, "full", {"workers.min": 2, "workers.max": 2}, folder=tmp_path / "disk")
        with closing(run):
            run.start()
            assert run.wait_for_step(5, START_S), run.said()
            full = Full(tmp_path / "disk")
            assert wait_for(lambda: "waits to be recorded: No space left on device" in run.said(), 60), run.said()
            last = run.step()
            assert run.processes is not None
            os.kill(run.processes.of("worker")[0], signal.SIGKILL)
            listed = run.heddle("workers", "list", str(run.folder)).stdout
            assert f"step {last + 1} waits to be recorded" in listed, listed
            time.sleep(5.0)
            assert run.alive and run.step() == last
            full.back()
            assert run.code(240) == 0, run.said()
            assert deviations(run, truth, run.settings) == []
            (back,) = run.events("storage_back")
            assert back["seconds"] > 5 and len(run.events("storage_wait")) == 1 and run.events("dead")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Truth]]:
    with closing(Place(tmp_path_factory.mktemp("soak"), STEPS_OF_A_RUN)) as place:
        yield place, reference(place)


@pytest.mark.faults
@pytest.mark.cluster
@pytest.mark.timeout(1050)
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_faults_change_nothing(calm: tuple[Place, Truth], part: int) -> None:
    assert_nothing_deviates(soak(*calm, faults=20, seed=100 * part), 20)
