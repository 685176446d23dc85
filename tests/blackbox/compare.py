"""A run under faults against the same run undisturbed: everything that must be the same, and what must not be left."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

from tests.blackbox.place import KEPT
from tests.blackbox.run import Run

LOSS, GRADIENT, WEIGHTS, MOMENTS = 1e-5, 1e-4, 1e-5, 1e-4  # sums in fp32 are taken in another order
_ARRAYS = {"master": WEIGHTS, "ema": WEIGHTS}


@dataclass(frozen=True, slots=True)
class Truth:
    """What an undisturbed run has left."""

    metrics: tuple[dict[str, Any], ...]
    state: Mapping[str, np.ndarray]
    ledger: Mapping[str, Any]
    config: Mapping[str, Any]

    @staticmethod
    def of(run: Run) -> Truth:
        return Truth(tuple(run.metrics()), state_of(newest(run.folder)), ledger_of(run), config_of(run.folder))


def deviations(run: Run, truth: Truth, settings: Mapping[str, object]) -> list[str]:
    """Everything in the folder of a run that has ended with code 0 which is not as it must be. `settings` are those
    of its last start."""
    return [
        *_of_steps(run.metrics(), truth.metrics),
        *_of_state(run, truth),
        *_of_ledger(run, truth),
        *_of_config(run, truth, settings),
        *_of_files(run),
    ]


def largest_loss_difference(run: Run, truth: Truth) -> float:
    pairs = zip(run.metrics(), truth.metrics)
    return max((_relative(a["loss"], b["loss"]) for a, b in pairs if a["step"] == b["step"]), default=math.nan)


def _of_steps(found: list[dict[str, Any]], truth: tuple[dict[str, Any], ...]) -> Iterator[str]:
    steps = [line["step"] for line in found]
    if steps != [line["step"] for line in truth]:
        missing = sorted(set(range(len(truth))) - set(steps))
        twice = sorted({s for s in steps if steps.count(s) > 1})
        order = "in order" if steps == sorted(steps) else "not in order"
        yield f"metrics.jsonl has {len(steps)} lines, {order}; steps missing {missing}, twice {twice}"
    expected = {line["step"]: line for line in truth}
    worse: dict[str, list[str]] = {}
    for line in found:
        right = expected.get(line["step"])
        if right is None:
            continue
        for kind in _unlike(line, right):
            worse.setdefault(kind, []).append(f"{line['step']}: {line.get(kind)} not {right.get(kind)}")
    for kind, which in worse.items():
        yield f"{kind} differs in {len(which)} steps, first {which[0]}"


def _unlike(line: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    for name, limit in (("loss", LOSS), ("grad_norm", GRADIENT), ("lr", 1e-9)):
        if line[name] is None or _relative(line[name], right[name]) > limit:
            yield name
    if abs(line["good_weight"] - 1) > 1e-9:
        yield "good_weight"
    if sorted(line["loss_by_bucket"]) != sorted(right["loss_by_bucket"]):
        yield "loss_by_bucket"
    if line["applied"] is not True:
        yield "applied"


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12)


def _of_state(run: Run, truth: Truth) -> Iterator[str]:
    folder = newest(run.folder)
    if folder is None:
        yield "no complete checkpoint is left"
        return
    if (step := int(folder.name.removeprefix("step-"))) != len(truth.metrics) - 1:
        yield f"the newest checkpoint is of step {step}, not of the last"
        return
    for name, array in state_of(folder).items():
        right = truth.state[name]
        difference = float(np.linalg.norm(array - right) / max(float(np.linalg.norm(right)), 1e-30))
        if array.shape != right.shape or not difference <= _ARRAYS.get(name, MOMENTS):
            yield f"final {name} differs by {difference:.1e}"


def _of_ledger(run: Run, truth: Truth) -> Iterator[str]:
    found = ledger_of(run)
    for name in sorted(set(found) | set(truth.ledger)):
        if found.get(name) != truth.ledger.get(name):
            yield f"ledger: {name} is {found.get(name)}, not {truth.ledger.get(name)}"


def _of_config(run: Run, truth: Truth, settings: Mapping[str, object]) -> Iterator[str]:
    expected = {**flat(truth.config), **settings}
    expected["run.name"] = run.name
    for name, value in flat(config_of(run.folder)).items():
        if str(value) != str(expected.get(name)):
            yield f"config.yaml: {name} is {value}, not {expected.get(name)}"


def _of_files(run: Run) -> Iterator[str]:
    kept = sorted(run.folder.glob("checkpoints/*"))
    for folder in kept:
        if not (folder / "COMPLETE").is_file():
            yield f"{folder.relative_to(run.folder)} is left without COMPLETE"
    if len(kept) > KEPT:
        yield f"{len(kept)} checkpoints are left: {[f.name for f in kept]}"
    for path in run.folder.rglob("*"):
        if path.suffix in (".part", ".tmp") or ".part." in path.name:
            yield f"{path.relative_to(run.folder)} is left"
    for name in ("metrics.jsonl", "events.jsonl", "timeline.jsonl"):
        for number, line in enumerate((run.folder / name).read_bytes().splitlines(), 1):
            try:
                json.loads(line)
            except ValueError:
                yield f"{name} line {number} is not JSON: {line[:60]!r}"


# Reading ------------------------------------------------------------------------------------------------------------


def newest(folder: Path) -> Path | None:
    found = [path.parent for path in folder.glob("checkpoints/step-*/COMPLETE")]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def state_of(folder: Path | None) -> dict[str, np.ndarray]:
    """The whole vectors of a checkpoint, put together from its shards."""
    assert folder is not None, "the run has left no checkpoint"
    shards = sorted(folder.glob("shard-*.safetensors"), key=lambda path: int(path.name.split("-")[1]))
    parts = [load_file(path) for path in shards]
    return {name: np.concatenate([part[name] for part in parts]).astype(np.float64) for name in parts[0]}


def ledger_of(run: Run) -> dict[str, Any]:
    """What the run says of its samples at its end. Notes tell of one start, not of the run."""
    finished = run.events("finish")
    return {k: v for k, v in finished[-1]["ledger"].items() if k != "notes"} if finished else {}


def config_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found
