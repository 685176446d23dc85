"""What every engine promises: the batches of a step, in item order, the same whatever engine, workers and faults.

from data.engines.blocks import as_batch
from data.engines.engine import make_engine

engine = make_engine(dataset)
engine.start(first_step=41)
for step in range(41, 100):
    batches = [as_batch(value) for value in engine.batches(step)]
    ...
    engine.release(step)
engine.stop()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from data.config import DataConfig
from data.dataset.dataset import Dataset
from data.ledger import LedgerRecord
from data.types import NeedsPixels


class Engine(Protocol):
    """Reads and decodes ahead of the step that trains, within bounds."""

    def start(self, first_step: int, avoid: Sequence[str] = ()) -> None:
        """Begin decoding at a step. May be called again, also to go back: what was held is dropped. Nothing is decoded
        on the Ray nodes to `avoid`, named by their ids."""

    def batches(self, step: int) -> Sequence[object]:
        """One value per item (of this engine's slots), in item order; `as_batch` turns a value into a Batch, for Ray
        engines after ray.get. Waits until all are decoded. Raises DataError when more is bad than data.limits allow,
        DataIOError when storage failed."""

    def release(self, step: int) -> None:
        """The batches of `step` and earlier are no longer needed."""

    def counts(self) -> LedgerRecord:
        """The ledger's summary: indexed, planned, rejected; scheduled, delivered, skipped, by reason."""

    def stop(self) -> None:
        """End all work and processes."""


def make_engine(
    dataset: Dataset, config: DataConfig | None = None, needs_pixels: NeedsPixels = lambda item: True
) -> Engine:
    """The engine that data.engine.kind names. `needs_pixels` is asked as the work on an item begins."""
    if (config or dataset.config).engine.kind == "pool":
        from data.engines.processes import PoolEngine

        return PoolEngine(dataset, config, needs_pixels)
    from data.engines.ray_data import RayEngine  # imports ray.data, which takes seconds

    return RayEngine(dataset, config, needs_pixels)
