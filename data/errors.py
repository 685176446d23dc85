"""Why the data layer stops a run. One bad sample never raises these: it is skipped and counted (data/ledger.py)."""

from __future__ import annotations


class DataError(RuntimeError):
    """The data cannot be used as it is: one sentence with value, rule and remedy. Exit code 4."""


class DataIOError(RuntimeError):
    """Storage failed after retries with fresh handles. Never counted as bad data; the run stops and can be resumed."""


class DataUnreachable(DataIOError):
    """Storage does not answer, and may later: a run waits for it."""
