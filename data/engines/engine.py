"""What every engine promises: the batches of a step, in item order, the same whatever engine, workers and faults.

from data.engines.blocks import as_batch
from data.engines.make import make_engine

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

from data.dataset.dataset import Dataset
from data.engines.child import decode_isolated
from data.ledger import LedgerRecord
from data.types import Batch, DataItem


class Engine(Protocol):
    """Reads and decodes ahead of the step that trains, within bounds."""

    def start(self, first_step: int) -> None:
        """Begin decoding at a step. May be called again, also to go back: what was held is dropped."""

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


def with_pixels(dataset: Dataset, item: DataItem, batch: Batch, clip_timeout_s: float) -> Batch:
    """The batch with its pixels, decoded now if they were left out for latents that then could not be read."""
    return batch if batch.video.shape[1] else decode_isolated(dataset.job(item), clip_timeout_s)


def was_denied(dataset: Dataset, item: DataItem) -> bool:
    """Whether the cache named latents of this item that then could not be read."""
    return dataset.latents is not None and dataset.latents.denied(item)
