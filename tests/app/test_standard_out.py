"""What a command writes to /dev/stdout another program reads: nothing is said in it, and nothing before it lost."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from app.commands.compare import compare
from app.device.profile import run_profile
from ops.standard_out import is_stdout
from ops.typed import ConfigError
from tests.app.test_plan import PROFILE, WORKLOAD
from tests.data.making import good, sample, shard


def heddle(*words: object, stdout: IO[bytes] | int) -> subprocess.CompletedProcess[bytes]:
    code = "from app.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=300, check=True)


@pytest.mark.parametrize("mode", ["wb", "ab"], ids=[">", ">>"])
def test_a_plan_on_stdout_is_json_alone_and_ends_no_log(tmp_path: Path, mode: str) -> None:
    profile, workload, log = tmp_path / "p.json", tmp_path / "w.json", tmp_path / "log"
    profile.write_text(json.dumps(PROFILE))
    workload.write_text(json.dumps(WORKLOAD))
    log.write_text("earlier\n")
    words = ("plan", "--workload", workload, "--profile", profile, "--cluster", "1x2", "--strategy", "static")
    with log.open(mode) as stream:
        done = heddle(*words, "--json", "/dev/stdout", stdout=stream)
    text = log.read_text()
    if mode == "ab":
        assert text.startswith("earlier\n")
        text = text.removeprefix("earlier\n")
    assert json.loads(text)["strategy"] == "static"
    assert b"5 items in 2 steps on 2 workers" in done.stderr and b"json      /dev/stdout" in done.stderr
    said = heddle(*words, "--json", tmp_path / "o.json", stdout=subprocess.PIPE)
    assert b"5 items in 2 steps on 2 workers" in said.stdout and not said.stderr


def test_a_report_in_a_pipe_ends_with_the_page(run_folder: Path) -> None:
    done = heddle("report", run_folder, "--out", "/dev/stdout", stdout=subprocess.PIPE)
    page = done.stdout.decode()
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert b"report    /dev/stdout" in done.stderr and b"timeline  " in done.stderr


@pytest.mark.parametrize("mode", ["wb", "ab"], ids=[">", ">>"])
def test_a_report_in_a_file_of_any_name_is_what_it_prints(run_folder: Path, tmp_path: Path, mode: str) -> None:
    """It was refused for the name of the file."""
    log = tmp_path / "log"
    log.write_text("earlier\n")
    with log.open(mode) as stream:
        heddle("report", run_folder, "--out", "/dev/stdout", stdout=stream)
    text = log.read_text()
    assert text.startswith("earlier\n<!doctype html>" if mode == "ab" else "<!doctype html>")
    assert text.rstrip().endswith("</html>") and [*tmp_path.glob("*.part")] == []


def test_a_report_goes_over_a_socket(run_folder: Path) -> None:
    """As of a service manager; there /dev/stdout cannot be opened."""
    ours, theirs = socket.socketpair()
    with ours, ThreadPoolExecutor(1) as readers:
        read = readers.submit(lambda: b"".join(iter(lambda: ours.recv(2**16), b"")))
        with theirs:
            heddle("report", run_folder, "--out", "/dev/stdout", stdout=theirs.fileno())
        page = read.result(60).decode()
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")


def test_a_list_of_faults_on_stdout_ends_no_log_and_puts_nothing_beside_it(tmp_path: Path) -> None:
    (source := tmp_path / "shards").mkdir()
    for name in ("00000.tar", "00001.tar"):
        (source / name).write_bytes(shard([*good(2), *sample(2, mp4=None)]))
    (devices := tmp_path / "devices").mkdir()
    (link := devices / "stdout").symlink_to("/dev/stdout")
    (log := tmp_path / "log").write_text("earlier")
    with log.open("ab") as stream:
        done = heddle("data", "lint", source, "--headers-only", "--out", link, stdout=stream)
    text = log.read_text()
    faults = [json.loads(line) for line in text.removeprefix("earlier").splitlines()]
    assert text.startswith("earlier{") and [fault["reason"] for fault in faults] == ["no_media"] * 2
    assert [*devices.iterdir()] == [link] and b"indexed 6 = usable 4 + rejected 2" in done.stderr


def test_runs_that_print_where_the_page_is_to_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.commands.compare._trained", lambda *given: pytest.fail("trained"))
    with pytest.raises(ConfigError, match="--out /dev/stdout is for runs that are there; give a file"):
        compare(out=Path("/dev/stdout"), config=Path("run.yaml"), strategies=["static", "cascade"])


def test_a_profile_is_not_measured_where_it_is_to_be_written_among_what_is_said() -> None:
    with pytest.raises(ConfigError, match="is where this command says what it does; give a file"):
        run_profile(Path("run.yaml"), [], Path("/dev/stdout"), repeats=1, device="cpu")


def test_the_null_device_is_no_stdout_also_where_stdout_is_the_null_device() -> None:
    """As that of cron and services: what they are to write nowhere is refused by no command."""
    code = "import sys; from pathlib import Path; from ops.standard_out import is_stdout; "
    code += "sys.exit(is_stdout(Path('/dev/null')) or is_stdout(Path('/dev/stdout')))"
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


def test_a_file_that_is_not_there_is_not_stdout(tmp_path: Path) -> None:
    assert not is_stdout(None) and not is_stdout(tmp_path / "page.html") and not is_stdout(tmp_path)
