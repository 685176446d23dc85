"""Batch sizes that a run has decided on, in `batches.json` of its folder: written before they hold, read by any start.

Decisions follow from measured times, which no other machine repeats. That is why they are kept and never made again: a
resume, also from an old checkpoint, forms the batches that the run had.
"""

from __future__ import annotations

import json
from pathlib import Path

from data.dataset.order_state import BatchSizes, SizesRecord
from data.errors import DataError
from ops.whole_file import write_whole

DECISIONS = "batches.json"


class BatchDecisions:
    """The decisions of one run folder, in the order of their steps."""

    def __init__(self, run_dir: Path) -> None:
        """Raises DataError where the file is there and cannot be read: other batches would be trained."""
        self._path = run_dir / DECISIONS
        self.records: list[SizesRecord] = []
        if not self._path.is_file():
            return
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.records = [BatchSizes.from_json(one).to_json() for one in found]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError) as error:
            raise DataError(
                f"{self._path} cannot be read ({error}); it says which batches this run forms. Restore it, or start "
                f"a new run."
            ) from None

    def add(self, record: SizesRecord) -> None:
        """Keep a decision for later steps than all before, on disk when this returns. Raises OSError; then it is not
        kept."""
        records = [*self.records, record]
        write_whole(self._path, json.dumps(records, indent=1), synced=True)
        self.records = records
