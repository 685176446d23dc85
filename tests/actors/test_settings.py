"""Settings of the runtime refuse what would only fail in the middle of a run."""

from __future__ import annotations

import pytest

from actors.config import CheckpointConfig, PlannerConfig, SnapshotConfig, WorkersConfig


@pytest.mark.parametrize(
    ("config", "values", "named"),
    [
        (SnapshotConfig, {"every": 0}, "snapshot.every 0"),
        (SnapshotConfig, {"copies": 0}, "snapshot.copies 0"),
        (CheckpointConfig, {"keep_last": 0}, "checkpoint.keep_last 0"),
        (PlannerConfig, {"lookahead": -1}, "planner.lookahead -1"),
        (WorkersConfig, {"heartbeat_s": 0}, "workers.heartbeat_s"),
    ],
)
def test_settings_that_would_fail_in_the_middle_of_a_run_are_refused(config: type, values: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**values)
