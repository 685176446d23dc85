"""`heddle prove` as a user has it: real runs, a real death, and the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.blackbox.place import Place

pytestmark = [pytest.mark.cluster, pytest.mark.faults]


@pytest.mark.timeout(600)
def test_a_run_that_loses_a_worker_and_changes_its_size_is_the_same_training(tmp_path: Path) -> None:
    with closing(Place(tmp_path, steps=8)) as place:
        out = tmp_path / "proof.json"
        words = ["-m", "app.cli", "prove", "--config", str(place.config), "--steps", "8", "--out", str(out)]
        run = subprocess.run(
            [sys.executable, *words], env=place.environment(), capture_output=True, text=True, timeout=540
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        told = json.loads(out.read_text())
    assert [line.split(": ")[1] for line in told["disturbance"]] == [
        "killed w1",
        "asked for 1 worker",
        "asked for 2 workers",
    ]
    seen = told["disturbed"]["workers"]
    assert seen[0] == seen[-1] == 2 and seen.count(1) >= 2 and told["calm"]["workers"] == [2]
    assert len(told["disturbed"]["recovered_s"]) == 1 and told["disturbed"]["computed_again"] == 0
    assert told["same"] and told["loss"] < 1e-5 and told["weights"] < 1e-5
