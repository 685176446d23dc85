"""Which ends of a controller Ray Train answers with another one, and which end the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, OutOfMemoryError, RayTaskError

from app.config import RunConfig
from app.train import OUTCOME, controller_loop
from data.errors import DataIOError

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> dict[str, object]:
    monkeypatch.setattr("actors.controller.Controller", Mock(return_value=Mock(train=Mock(side_effect=error))))
    controller_loop({"yaml": RunConfig.load(DEMO).to_yaml(), "run_dir": str(folder)})
    outcome: dict[str, object] = json.loads((folder / OUTCOME).read_text())
    return outcome


@pytest.mark.parametrize("error", [OutOfMemoryError("killed"), GetTimeoutError("silent"),
                                   ActorUnschedulableError("the monitor's node is gone")])
def test_the_clusters_faults_are_left_to_another_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(type(error)):
        run(tmp_path, monkeypatch, error)
    assert not (tmp_path / OUTCOME).exists()


@pytest.mark.parametrize(("error", "reason"), [
    (DataIOError("s3://clips does not answer"), "s3://clips does not answer"),
    (RayTaskError("plan", "traceback", KeyError("lost")), "see .*error.txt"),
    (ZeroDivisionError("a defect"), "ZeroDivisionError: a defect"),
])
def test_what_a_retry_would_repeat_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    outcome = run(tmp_path, monkeypatch, error)
    assert outcome["code"] == 1 and re.search(reason, str(outcome["reason"]))
