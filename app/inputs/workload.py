"""Workload files: items of consecutive steps, as a person or another program has written them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.plan.types import Item, refuse_below
from actors.step import DrawnItem
from ops.typed import ConfigError, as_plain, build, node_of, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadItem:
    """An item as a workload file gives it."""

    id: str
    batch: int
    frames: int
    height: int
    width: int
    text_tokens: int = 0

    def __post_init__(self) -> None:
        refuse_below(1, self, "batch", "frames", "height", "width")
        refuse_below(0, self, "text_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Items of consecutive steps; `cluster` is the one the file names, or empty."""

    steps: tuple[tuple[Item, ...], ...]
    cluster: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadFile:
    """A workload as it is written."""

    steps: tuple[tuple[WorkloadItem, ...], ...]
    cluster: str = ""

    def __post_init__(self) -> None:
        for number, step in enumerate(self.steps):
            if not step:
                raise ValueError(f"step {number} is empty; give it at least one item.")
            ids = [item.id for item in step]
            if twice := sorted({name for name in ids if ids.count(name) > 1}):
                raise ValueError(f"step {number} has the id {twice[0]!r} twice; give each its own.")


def read_workload(path: Path) -> Workload:
    """A workload file: {"steps": [[{"id", "batch", "frames", "height", "width", "text_tokens"}, ...], ...]}.

    Raises ConfigError for anything malformed.
    """
    data = read_json(path, "workload")
    if not isinstance(data, Mapping) or not isinstance(data.get("steps"), list) or not data["steps"]:
        raise ConfigError(f'workload {path} must be an object with a list "steps" of at least one step.')
    held = {key: data[key] for key in ("steps", "cluster") if key in data}
    try:
        found = build(WorkloadFile, node_of(held))
    except ConfigError as error:
        raise ConfigError(f"workload {path}: {error}") from None
    steps = tuple(tuple(Item(**as_plain(item)) for item in step) for step in found.steps)
    return Workload(steps=steps, cluster=found.cluster)


def drawn_items(step: int, items: Sequence[Item]) -> tuple[DrawnItem, ...]:
    """These items as a feeder without data describes them: every sample has a key of its own."""
    return tuple(DrawnItem(plan=i, keys=tuple(f"0/{step}/{i.id}.{n}" for n in range(i.batch))) for i in items)
