"""Whether two commits train the same:  python -m tests.compare_commits v0.1 HEAD --steps 12

Both are checked out side by side and do the same work by the command line: plans of the published workloads with every
strategy, searches ended by their counted work and never by the clock, and a small training on one worker and on four
(`--no-plans` leaves out the former, `--workloads` all but some of them, `--steps 0` the latter). Compared are the
plans, the losses (equal bit for bit on one worker, to 1e-7 on four) and the checkpoint of one worker, tensor by tensor.
Prints a table; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.blackbox.place import Place

ROOT = Path(__file__).resolve().parents[1]
PROFILE = "configs/profiles/hunyuan-13b-720p-h100.json"
WORKLOADS = {"A-16gpu": "2x8", "B-32gpu": "4x8", "C-64gpu": "8x8"}
STRATEGIES = ("static", "longest_first", "flexsp", "flexsp_greedy", "knapsack", "knapformer", "genetic", "cascade")
# A clock that counts its calls, and no other end of a search: PATIENCE stood in `clock` in earlier commits.
COUNTED = """
import importlib.util, itertools, sys, time
calls = itertools.count()
time.perf_counter = lambda: next(calls) * 1e-7
room = "actors.plan.strategies.search."
home = room + ("clock" if importlib.util.find_spec(room + "clock") else "step")
importlib.import_module(home).PATIENCE = 1e6
from app.cli import main
sys.exit(main())
"""
BUILD = "from setuptools import setup; setup()"
MEASURED = {"plan_s", "planning_s"}  # seconds that planning took
ON_FOUR = 1e-7  # relative; sums are taken in another order


class Commit:
    """A commit in a folder of its own, run by this interpreter."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, name], cwd=ROOT, check=True)
        # its own search: the installed one may be built from another version of it
        self.run([sys.executable, "-c", BUILD, "build_ext", "--inplace"], dict(os.environ))

    def remove(self) -> None:
        subprocess.run(["git", "worktree", "remove", "--force", self.folder], cwd=ROOT, check=True)

    def run(self, command: list[str], environment: dict[str, str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**environment, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")

    def plans(self, workload: str, strategy: str, out: Path) -> Any:
        """Plans of a workload, without the time that planning took."""
        inputs = ["--workload", f"configs/bench/{workload}.json", "--profile", PROFILE]
        chosen = ["--cluster", WORKLOADS[workload], "--strategy", strategy, "--budget", "0.1", "--json", str(out)]
        self.run([sys.executable, "-c", COUNTED, "plan", *inputs, *chosen], dict(os.environ))
        return without(json.loads(out.read_text()), MEASURED)

    def train(self, place: Place, name: str, workers: int) -> Path:
        """The run's folder."""
        strategy = (
            "static" if workers == 1 else "longest_first"
        )  # of one worker the order must not follow measured times
        settings = {"workers.min": workers, "workers.max": workers, "planner.strategy": strategy}
        self.run(place.command(name, settings=settings), place.environment())
        return place.runs / name


def without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: without(inner, keys) for key, inner in value.items() if key not in keys}
    return [without(inner, keys) for inner in value] if isinstance(value, list) else value


def says_the_same(base: Any, head: Any) -> bool:
    """Whether all that the earlier file says stands in the later one, which may say more."""
    if isinstance(base, dict) and isinstance(head, dict):
        return all(key in head and says_the_same(value, head[key]) for key, value in base.items())
    if isinstance(base, list) and isinstance(head, list):
        return len(base) == len(head) and all(says_the_same(a, b) for a, b in zip(base, head, strict=True))
    return bool(base == head)


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def state(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of the newest checkpoint, by file and name."""
    newest = max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    return {f"{file.name}:{k}": v for file in sorted(newest.glob("*.safetensors")) for k, v in load_file(file).items()}


def differences(
    base: Commit, head: Commit, folder: Path, workloads: Sequence[str], steps: int
) -> Iterator[tuple[str, str, bool]]:
    """(what, how they differ, whether that is allowed)."""
    for workload in workloads:
        for strategy in STRATEGIES:
            first, second = (commit.plans(workload, strategy, folder / "plan.json") for commit in (base, head))
            same = says_the_same(first, second)
            yield f"plan {workload} {strategy}", "equal" if same else "differ", same
    for workers in (1, 4) if steps else ():
        place = Place(folder / f"on-{workers}", steps)
        try:
            runs = [commit.train(place, f"{word}-{workers}", workers) for word, commit in (("a", base), ("b", head))]
        finally:
            place.close()
        first_losses, second_losses = map(losses, runs)
        worst = max(abs(a - b) / abs(a) for a, b in zip(first_losses, second_losses, strict=True))
        what = f"{len(first_losses)} losses on {workers} worker{'s' * (workers > 1)}"
        yield what, f"{worst:.1e}", worst <= (0.0 if workers == 1 else ON_FOUR)
        if workers == 1:
            before, after = map(state, runs)
            equal = before.keys() == after.keys() and all(
                before[key].tobytes() == after[key].tobytes() and before[key].dtype == after[key].dtype
                for key in before
            )
            yield f"{len(before)} tensors of a checkpoint", "equal" if equal else names_or_values(before, after), equal


def names_or_values(before: dict[str, Any], after: dict[str, Any]) -> str:
    only = sorted(set(before) ^ set(after))
    return f"names differ: {only[:6]}" if only else "values differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("head", nargs="?", default="HEAD")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plans", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS), help="to plan")
    given = parser.parse_args()
    same = True
    with tempfile.TemporaryDirectory(prefix="heddle-compare-") as name:
        folder = Path(name)
        commits: list[Commit] = []
        try:
            commits += [Commit(given.base, folder / "base"), Commit(given.head, folder / "head")]
            workloads = given.workloads if given.plans else ()
            for what, how, allowed in differences(commits[0], commits[1], folder, workloads, given.steps):
                print(f"{what:40s} {how:>12s}{'' if allowed else '   NOT ALLOWED'}", flush=True)
                same = same and allowed
        finally:
            for commit in commits:
                commit.remove()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
