"""A user's app.py, actors.py, data.py or ops.py in the current folder is never taken for Heddle's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.code_path import ROOT, code_path

OURS = ("app", "actors", "data", "ops")
# As `heddle` does, whose path does not begin with the current folder.
ALONE = [sys.executable, "-P", "-c"]
WORKER = """
import os
import ray
from app.run.borrowed_ray import borrowed_ray

def places():
    import sys
    import app, data, decoders
    with open(os.environ["GOOGLE_APPLICATION_CREDENTIALS"]) as key:
        return app.__file__, data.__file__, decoders.MINE, key.read(), sys.flags.utf8_mode

with borrowed_ray(None, 1):
    print(*ray.get(ray.remote(places).remote()))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in OURS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user has a module of this name')\n")
    (tmp_path / "decoders.py").write_text("MINE = 'mine'\n")
    (tmp_path / "key.json").write_text("{}")
    return tmp_path


def printed(code: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "0", "GOOGLE_APPLICATION_CREDENTIALS": "key.json"}
    done = subprocess.run([*ALONE, code], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_of_its_own_runs_heddle(folder: Path) -> None:
    assert (
        "usage"
        in printed(
            "from app.run.apart import run_apart; raise SystemExit(run_apart(['-m', 'app.train', '--help']))", folder
        ).lower()
    )


@pytest.mark.long
def test_workers_of_ray_import_heddle_and_then_what_is_in_the_current_folder(folder: Path) -> None:
    app, data, mine, key, utf8 = printed(WORKER, folder).split()
    assert [Path(app).parents[1], Path(data).parents[1]] == [ROOT, ROOT]
    assert mine == "mine"
    assert key == "{}", "files in variables are named against the user's folder"
    assert utf8 == "1", "no locale of a node decides which names can be read"


def test_relative_folders_go_where_the_current_one_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("lib", "/elsewhere", "lib")))
    assert code_path().split(os.pathsep) == [str(ROOT), str(gone / "lib"), "/elsewhere", str(gone)]
    gone.rmdir()
    assert code_path().split(os.pathsep) == [str(ROOT), "/elsewhere"]
