"""configs/slurm on a real SLURM: nodes that come and go, a job that is cancelled and one that is requeued are the run
that nobody disturbs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.compare import LOSS
from tests.blackbox.episode import reference
from tests.blackbox.place import ROOT, Place
from tests.blackbox.processes import wait_for
from tests.blackbox.slurm import Slurm, why_not

pytestmark = [pytest.mark.faults, pytest.mark.cluster, pytest.mark.timeout(1800)]
STEPS = 300
SCRIPTS = ROOT / "configs" / "slurm"
_COMES_S = 240.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if why := why_not():
        pytest.skip(why)
    with closing(Place(tmp_path_factory.mktemp("calm"), STEPS)) as made:
        yield made


@pytest.fixture
def slurm(place: Place) -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets lie in it
    folder.chmod(0o755)
    os.environ["HEDDLE_BIN"] = str(Path(sys.executable).parent)
    with closing(Slurm(folder, hosts=3)) as made:
        yield made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_nodes_come_and_go_and_a_requeued_job_goes_on(place: Place, slurm: Slurm) -> None:
    truth = [line["loss"] for line in reference(place).metrics]
    run = place.runs / "batch"
    given = ["--config", str(place.config), "--set", "run.name=batch", "--set", "workers.max=3"]
    given += ["--set", "workers.cpus_per_worker=1.0", "--set", "checkpoint.every=1000"]
    options = ["--nodes=2", "--time=30", f"--output={slurm.folder}/run-%j.log"]

    def step() -> int:
        found = lines(run / "metrics.jsonl")
        return found[-1]["step"] if found else -1

    def generation() -> int:
        """Workers of the newest."""
        formed = [event for event in lines(run / "events.jsonl") if event["event"] == "generation"]
        return len(formed[-1]["workers"]) if formed else 0

    def said() -> str:
        return "\n".join(path.read_text()[-3000:] for path in slurm.folder.glob("run-*.log"))

    job = slurm.submit(SCRIPTS / "run.sbatch", *given, options=options)
    assert wait_for(lambda: step() >= 5, _COMES_S), said()
    before = generation()
    joining = ["--partition=low", "--time=30", f"--output={slurm.folder}/join-%j.log"]
    lent = slurm.submit(SCRIPTS / "join.sbatch", str(run), options=joining)
    assert wait_for(lambda: generation() > before, _COMES_S), "the lent node has no worker"
    slurm.run("scancel", "--batch", "--signal=USR1", lent)
    assert wait_for(lambda: not slurm.waiting_or_running(lent), _COMES_S), "the lent node does not leave"
    left = [event["event"] for event in lines(run / "events.jsonl")]
    assert "drain" in left and not {"dead", "fallback"} & set(left), "its workers finished first"
    reached = step()
    slurm.run("scancel", job)
    assert wait_for(lambda: not slurm.waiting_or_running(job) and (run / "outcome.json").exists(), _COMES_S), said()
    assert json.loads((run / "outcome.json").read_text())["code"] == 75
    last = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert last == step() >= reached, "every committed step is on disk"
    again = slurm.submit(SCRIPTS / "run.sbatch", *given, options=options)  # the same command goes on
    assert wait_for(lambda: step() == STEPS - 1 and not slurm.waiting_or_running(again), 2 * _COMES_S), said()
    found = lines(run / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(STEPS))
    assert [line["loss"] for line in found] == pytest.approx(truth, rel=10 * LOSS)
    assert json.loads((run / "outcome.json").read_text())["code"] == 0
