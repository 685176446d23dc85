"""configs/slurm: the scripts do what they say, with stand-ins for SLURM, Ray and Heddle that write down their calls."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "configs" / "slurm"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

RAY = """#!/bin/bash
echo "ray $*" >> calls
[ "$1" = start ] && exec sleep 60
"""
# `run` is a file of what the run does: seconds that it takes, its exit code, the one after SIGTERM, and which step was
# its newest before
HEDDLE = """#!/bin/bash
echo "heddle $* RAY_ADDRESS=${RAY_ADDRESS:-}" >> calls
[ "$1" = train ] || exec sleep 60
read -r seconds code stopped before < run
[ -n "$before" ] && printf '%s\\n%s\\n' "$before" "$PWD" > "$HEDDLE_START_NOTE"
trap 'echo stopped >> calls; exit $stopped' TERM
touch trains
sleep "$seconds" & wait $!
exit "$code"
"""
NOTED = """#!/bin/bash
echo "$(basename "$0") $*" >> calls
[ "$(basename "$0") $2" = "scontrol node" ] && echo "   NodeAddr=127.0.0.1 NodeHostName=one"
exit 0
"""


class Job:
    """A batch script under way in a folder, whose stand-ins note their calls there."""

    def __init__(self, folder: Path, run: str, nodes: int = 2) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in {
            "ray": RAY,
            "heddle": HEDDLE,
            **dict.fromkeys(("srun", "scontrol", "scancel"), NOTED),
        }.items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        (folder / "run").write_text(run)
        (folder / ".ray").mkdir()
        self._listener = socket.create_server(("127.0.0.1", 0))  # the head answers
        port = self._listener.getsockname()[1]
        self.head = f"127.0.0.1:{port}"
        slurm = {"JOB_ID": "7", "JOB_NUM_NODES": str(nodes), "CPUS_ON_NODE": "8"}
        given = {f"SLURM_{name}": value for name, value in slurm.items()} | {"SLURMD_NODENAME": "one"}
        path = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HEDDLE_BIN": str(bin_folder), "HOME": str(folder)}
        script = folder / "run.sbatch"
        text = re.sub(r"^port=.*$", f"port={port}", (SCRIPTS / "run.sbatch").read_text(), flags=re.MULTILINE)
        script.write_text(text.replace("/tmp/ray-", f"{folder}/ray-"))
        self.process = subprocess.Popen(
            ["bash", str(script), "--config", "a.yaml", "--set", "train.steps=3"],
            cwd=folder,
            env={**os.environ, **given, **path},
            start_new_session=True,
        )

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []

    def wait_until_it_trains(self) -> None:
        until = time.monotonic() + 30
        while not (self.folder / "trains").exists():
            assert time.monotonic() < until and self.process.poll() is None, self.calls()
            time.sleep(0.05)

    def end(self) -> None:
        self._listener.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def job(folder: Path, run: str, nodes: int = 2) -> Iterator[Job]:
    made = Job(folder, run, nodes)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("name", ["run.sbatch", "join.sbatch"])
def test_the_scripts_are_bash_and_speak_of_options_that_there_are(name: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
    text = (SCRIPTS / name).read_text()
    assert "heddle" in text and "--signal=B:USR1@" in text and "--requeue" in text


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (3, False), (75, True), (143, False)])
def test_a_run_that_asks_to_be_continued_is_requeued_and_its_exit_code_kept(
    code: int, requeued: bool, tmp_path: Path
) -> None:
    with job(tmp_path, f"0 {code} 75") as made:
        assert made.process.wait(20) == code
        calls = made.calls()
    assert any(call == f"scontrol requeue {call.split()[-1]}" for call in calls) == requeued
    (train,) = [call for call in calls if call.startswith("heddle train")]
    assert train == f"heddle train --resume --config a.yaml --set train.steps=3 RAY_ADDRESS={made.head}"
    (head,) = [call for call in calls if call.startswith("ray start")]
    assert f"--node-ip-address=127.0.0.1 --port={made.head.split(':')[1]}" in head
    (joins,) = [call for call in calls if "workers join" in call]
    assert "--nodes=1 --ntasks=1 --exclude=one" in joins and "--cpus-per-task=8" in joins
    assert joins.endswith(f"workers join --cluster {made.head} --to-the-end")
    assert calls.index("ray stop --force") > calls.index(train), "Ray goes after the run"


@pytest.mark.parametrize(
    ("code", "before", "requeued"),
    [(1, "6", True), (1, "-1", True), (1, "7", False), (1, "9", False), (1, "", False), (3, "6", False)],
)
def test_a_run_that_failed_is_requeued_if_it_got_any_further(
    code: int, before: str, requeued: bool, tmp_path: Path
) -> None:
    """A start that meets the same fault at the same step is left to a person."""
    lines = "".join(f'{{"step": {step}, "step_s": 99.5, "loss": 1.0}}\n' for step in range(8))
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 8, torn'[: 5 if before == "7" else 0])
    with job(tmp_path, f"0 {code} 75 {before}") as made:
        assert made.process.wait(20) == code
        calls = made.calls()
    assert any(call.startswith("scontrol requeue") for call in calls) == requeued


@pytest.mark.parametrize(("code", "logs"), [(0, False), (75, False), (1, True), (3, True)])
def test_rays_files_go_with_the_job_and_its_logs_stay_where_the_run_failed(
    code: int, logs: bool, tmp_path: Path
) -> None:
    session = tmp_path / "ray-7" / "session_2026"
    for name in ("logs", "ray_spilled_objects_of_a_node"):
        (session / name).mkdir(parents=True)
        (session / name / "file").write_text("bytes")
    with job(tmp_path, f"0 {code} 75 3") as made:
        assert made.process.wait(20) == code
        calls = made.calls()
    assert (session / "logs" / "file").exists() == logs
    assert (tmp_path / "ray-7").exists() == logs and not (session / "ray_spilled_objects_of_a_node").exists()
    assert not (tmp_path / "ray-7-start").exists()
    (elsewhere,) = [call for call in calls if "rm -rf" in call]
    assert elsewhere.startswith("srun") and elsewhere.endswith(f"{tmp_path}/ray-7") != logs
    assert calls.index(elsewhere) > calls.index("ray stop --force")


def test_one_node_needs_no_other_step(tmp_path: Path) -> None:
    with job(tmp_path, "0 0 75", nodes=1) as made:
        assert made.process.wait(20) == 0
        assert not [call for call in made.calls() if call.startswith(("srun", "scancel"))]


@pytest.mark.parametrize(
    ("number", "requeued"),
    [(signal.SIGUSR1, True), (signal.SIGTERM, False)],
    ids=["time limit", "scancel or preemption"],
)
def test_the_run_hears_of_its_end_and_is_waited_for(number: int, requeued: bool, tmp_path: Path) -> None:
    with job(tmp_path, "50 0 75") as made:
        made.wait_until_it_trains()
        os.kill(made.process.pid, number)
        assert made.process.wait(20) == 75
        calls = made.calls()
    assert "stopped" in calls
    assert any(call.startswith("scontrol requeue") for call in calls) == requeued, "SLURM requeues what it preempts"


def test_who_is_told_before_the_run_begins_tells_it(tmp_path: Path) -> None:
    with job(tmp_path, "50 0 75") as made:
        until = time.monotonic() + 30
        while not any(call.startswith("srun") for call in made.calls()):
            assert time.monotonic() < until
        made.process.send_signal(signal.SIGUSR1)
        assert made.process.wait(20) in (75, 143), "a run may be told before it listens"


def test_a_run_that_was_complete_when_it_was_told_is_not_requeued(tmp_path: Path) -> None:
    with job(tmp_path, "50 0 0") as made:
        made.wait_until_it_trains()
        os.kill(made.process.pid, signal.SIGUSR1)
        assert made.process.wait(20) == 0
        assert not [call for call in made.calls() if call.startswith("scontrol requeue")]


def test_a_node_that_joins_has_rays_files_in_a_folder_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "heddle").write_text('#!/bin/sh\necho "$RAY_AUTH_MODE" "$@"\n')
    (tmp_path / "heddle").chmod(0o755)
    given = {**os.environ, "HEDDLE_BIN": str(tmp_path), "SLURM_JOB_ID": "7"}
    script = tmp_path / "join.sbatch"
    script.write_text((SCRIPTS / "join.sbatch").read_text().replace("/tmp/ray-", f"{tmp_path}/ray-"))
    (tmp_path / "ray-7" / "session_1").mkdir(parents=True)  # of a start that was killed
    (tmp_path / "ray-77").mkdir()
    command = ["bash", str(script), "runs/a b", "--leave-s", "9"]
    told = subprocess.run(command, env=given, check=True, capture_output=True, text=True).stdout
    assert told == f"token workers join --temp-dir {tmp_path}/ray-7 runs/a b --leave-s 9\n"
    assert [path.name for path in tmp_path.glob("ray-*")] == ["ray-77"]
