"""Ctrl-C while a command is still importing its modules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from actors.outcome import Exit
from app.start import INTERRUPTED, ended_by_ctrl_c

ROOT = Path(__file__).parents[2]
HEDDLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["heddle"]
MODULE, FUNCTION = HEDDLE.split(":")
SCRIPT = f"import sys; from {MODULE} import {FUNCTION}; sys.exit({FUNCTION}())"  # as an installed one has it
# in place of a module that both import: the signal comes in the middle of an import that catches whatever is raised
_YAML = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except BaseException as error:
    raise ImportError("no yaml") from error
"""


@pytest.mark.parametrize("words", [["-c", SCRIPT, "families"], ["-m", "app.train", "--config", "x.yaml"]])
def test_ctrl_c_while_a_command_starts_is_its_exit_code_and_no_word(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text(_YAML)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stdout, done.stderr) == (Exit.INTERRUPTED, "", "") and INTERRUPTED == Exit.INTERRUPTED


def test_ctrl_c_that_is_ignored_stays_so_and_is_python_s_own_afterwards() -> None:
    with ended_by_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ended_by_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
