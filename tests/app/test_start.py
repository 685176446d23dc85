"""What comes before the modules of a command: Ctrl-C while they are imported, and the encoding of names of files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from actors.outcome import Exit
from app.start import INTERRUPTED, ended_by_ctrl_c
from tests.data.making import picture

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


@pytest.mark.parametrize("words", [["-c", SCRIPT, "settings"], ["-m", "app.train", "--config", "x.yaml"]])
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


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        (["-c", SCRIPT, "settings"], "2>&-"),
        (["-c", SCRIPT, "settings"], "0<&- 1>&- 2>&-"),
        (["-m", "app.train", "--config", "x.yaml"], "1>&-"),
        (["-m", "app.train", "--config", "x.yaml"], "0<&- 1>&- 2>&-"),
    ],
)
def test_a_command_whose_streams_are_closed_is_as_any_other(words: list[str], closed: str) -> None:
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == (Exit.OK if "settings" in words else Exit.USAGE)
    assert ("data.sources" in done.stdout) == ("settings" in words and "1>" not in closed)
    assert ("error: config x.yaml" in done.stderr) == ("settings" not in words and "2>" not in closed)


def test_what_is_opened_next_gets_the_number_of_no_standard_stream() -> None:
    begin = "from app.start import open_closed_streams; open_closed_streams()"
    script = f"import os, sys; {begin}; print(os.open('/', os.O_RDONLY), file=sys.stderr)"
    command = ["bash", "-c", 'exec "$@" 0<&- 1>&-', "bash", sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stderr) > 2


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}  # as a locale of Latin-1 or GBK, which few machines have
INDEX = ["data", "index", "--json", "--kind", "pairs"]


def test_an_index_is_the_same_in_a_locale_of_another_encoding(tmp_path: Path) -> None:
    folder = tmp_path / "caf\u00e9"
    folder.mkdir()
    (folder / "\u00e9.png").write_bytes(picture())
    (folder / "\u00e9.txt").write_text("a caf\u00e9", encoding="utf-8")
    found = []
    for number, locale in enumerate(({"PYTHONUTF8": "1"}, ASCII)):
        done = subprocess.run(
            [sys.executable, "-P", "-c", SCRIPT, *INDEX, "--cache", str(tmp_path / str(number)), str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **locale},
            capture_output=True,
            encoding="utf-8",
            timeout=150,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["sources"])
    assert found[0] == found[1] and found[0][0]["usable"] == 1


def test_a_run_reads_its_settings_in_a_locale_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {name: \u6570\u636e}\nmodle: {}\n", encoding="utf-8")
    words = ["-P", "-m", "app.train", "--config", str(tmp_path / "run.yaml"), "--set", "run.dir=/tmp/\u6570\u636e"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **ASCII}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, encoding="utf-8", timeout=150)
    assert done.returncode == Exit.USAGE and "modle" in done.stderr
