"""The scripts of docs/libraries.md, as a stranger runs them: in a folder of their own, by their own processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECONDS = 120


def scripts() -> dict[str, str]:
    """Code of the document by the name in its first line."""
    text = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in scripts().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [*sorted(scripts().keys() - {"block.py", "route.py", "swap.py"}), pytest.param("swap.py", marks=pytest.mark.long)],
)
def test_a_script_runs(name: str, folder: Path) -> None:
    printed = run(folder, name)
    if name == "swap.py":
        promised = re.findall(r"Counter\(.*?\)", scripts()[name])
        assert promised == [printed.strip()]


@pytest.mark.long
def test_routed_training_is_the_same_under_any_topology(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "route.py")
    printed = {run(folder, *torchrun, topology) for topology in ("g1n2+g2n1", "g4n1")}
    assert len(printed) == 1 and re.match(r"loss \d", printed.pop())
