"""What a run on a virtual cluster is: machines, items and costs, and what happens to them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.config import CheckpointConfig, PlannerConfig, RuntimeConfig, SnapshotConfig, TrainConfig, WorkersConfig
from actors.plan.types import Cluster, Item
from app.bench.cluster.physics import Physics
from app.bench.workload import set_file
from app.inputs.workload import read_workload
from data.config import DataConfig, SourceConfig
from ops.models.config import ModelConfig
from ops.typed import ConfigError

WORKLOAD = set_file("A-16gpu")
RELAY_FROM = 128
GPUS_OF_AN_ITEM = 4  # the workload has four items for 16 GPUs
SETTLED = 2  # the first step that counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """What happens to the machines when `step` has been committed."""

    step: int
    what: str  # worker: one dies, and its place is free; node: one is lost; join: a new node comes


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A run on a virtual cluster, with items of the `workload`, or with its very steps (`published`)."""

    nodes: int
    gpus: int = 8
    steps: int = 50
    strategy: str = "cascade"
    static_degree: int = 4
    budget_s: float = 0.2  # real seconds of planning
    physics: Physics = field(default_factory=Physics)
    workload: Path = WORKLOAD
    lookahead: int = PlannerConfig().lookahead
    published: bool = False  # the workload's steps as they are, of items that need no text encode, as it has none
    disturbances: tuple[Disturbance, ...] = ()
    relay_from: int = RELAY_FROM  # workers.relay_from; 0: every worker is called by itself

    @classmethod
    def of_published(cls, path: Path, physics: Physics) -> Setup:
        """All steps of a published workload on its own cluster. Raises ConfigError, and PlanError for a cluster that is
        none."""
        known = read_workload(path)
        if not known.cluster:
            raise ConfigError(f"workload {path} must name its cluster, such as 2x8.")
        sizes = Cluster.parse(known.cluster).nodes
        return cls(
            nodes=len(sizes),
            gpus=sizes[0],
            steps=len(known.steps),
            physics=physics,
            workload=path,
            published=True,
        )


def runtime_config(setup: Setup) -> RuntimeConfig:
    """As a run of the config would have it."""
    most = setup.nodes * setup.gpus
    return RuntimeConfig(
        run_dir="runs/virtual",
        model=ModelConfig(),
        data=DataConfig(sources=(SourceConfig(path="nowhere"),)),
        train=TrainConfig(steps=setup.steps),
        workers=WorkersConfig(
            min=max(1, most // 2),
            max=most,
            device="cpu",
            suspect_s=120.0,
            collective_timeout_s=600.0,
            relay_from=setup.relay_from,
        ),
        planner=planner_config(setup),
        snapshot=SnapshotConfig(every=1),
        checkpoint=CheckpointConfig(every=0),
    )


def planner_config(setup: Setup) -> PlannerConfig:
    return PlannerConfig(
        strategy=setup.strategy,
        budget_s=setup.budget_s,
        static_degree=setup.static_degree,
        lookahead=setup.lookahead,
    )


def workload(setup: Setup) -> list[list[Item]]:
    """Items of every step: those of the published workload, or one for every four GPUs, drawn from all of its steps."""
    if setup.published:
        return [
            [replace(item, id=f"s{step}.{item.id}", cached=("text",)) for item in items]
            for step, items in enumerate(read_workload(setup.workload).steps)
        ]
    known = [item for step in json.loads(setup.workload.read_text())["steps"] for item in step]
    luck = random.Random(setup.physics.seed)
    fields = ("batch", "frames", "height", "width")
    return [
        [
            Item(
                id=f"s{step}.{n}",
                text_tokens=setup.physics.text_tokens,
                **{name: item[name] for name in fields},
            )
            for n, item in enumerate(luck.choices(known, k=max(1, setup.nodes * setup.gpus // GPUS_OF_AN_ITEM)))
        ]
        for step in range(setup.steps)
    ]
