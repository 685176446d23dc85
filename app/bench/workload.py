"""The published workloads of configs/bench/: their items, the latencies that are published, and a feeder of items."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from actors.feed.pulse import AnsweringActor
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import Cluster, Item
from actors.step import DrawnItem, Position
from app.inputs.workload import drawn_items, read_workload
from ops.code_path import ROOT

CONFIGS = ROOT / "configs"
PROFILE = CONFIGS / "profiles" / "hunyuan-13b-720p-h100.json"  # latencies that Arachne has published
TEXT_S = 0.2  # of a text encode, which the profile does not have


def set_file(name: str) -> Path:
    """A published workload, and what published planners made of it."""
    return CONFIGS / "bench" / f"{name}.json"


def published_set(name: str, every: int = 1) -> tuple[list[list[Item]], Cluster]:
    """One step of every N of a published workload, and its cluster."""
    known = read_workload(set_file(name))
    return [list(step) for step in known.steps[::every]], Cluster.parse(known.cluster)


def scaled_profile(speed: float) -> Profile:
    """The published latencies in time that runs `speed` times as fast, and a text encode for every batch."""
    told = json.loads(PROFILE.read_text())
    texts = [
        {"module": "text", "batch": b, "frames": 0, "height": 0, "width": 0, "degree": 1, "seconds": TEXT_S}
        for b in range(1, 17)
    ]
    latency = [point | {"seconds": point["seconds"] / speed} for point in [*told["latency"], *texts]]
    return read_profile({**told, "latency": latency, "degrees": {**told["degrees"], "text": [1]}})


class ItemFeeder(AnsweringActor):
    """Hands out the items of steps that are known; what stands for their batches is a subclass's."""

    def __init__(self, steps: Sequence[Sequence[Item]]) -> None:
        self._steps = steps

    def start(self, first_step: int, token: Position | None = None, avoid: Sequence[str] = ()) -> dict[str, int]:
        return {"steps": len(self._steps)}

    def items(self, step: int) -> tuple[DrawnItem, ...]:
        return drawn_items(step, self._steps[step])

    def resize(self, record: object) -> None: ...
    def release(self, step: int) -> None: ...

    def ledger(self) -> dict[str, int]:
        return {}

    def token(self, step: int) -> Position:
        return {"step": step}
