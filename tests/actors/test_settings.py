"""Settings of the runtime refuse what would only fail in the middle of a run."""

from __future__ import annotations

import pytest

from actors.config import (
    CheckpointConfig,
    PlannerConfig,
    SnapshotConfig,
    TrainConfig,
    TrainMemoryConfig,
    WorkersConfig,
)
from actors.plan.places import StateSetting, state_place


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


MANY = 16 << 20  # weights whose gradient is 64 MiB


@pytest.mark.parametrize(
    ("memory", "sync", "weights", "device", "expected"),
    [
        ("auto", "flat", MANY, "cpu", "node"),
        ("auto", "flat", MANY - 1, "cpu", "own"),
        ("auto", "flat", MANY, "cuda", "own"),
        ("auto", "deepspeed", MANY, "cpu", "own"),
        ("own", "flat", MANY, "cpu", "own"),
        ("node", "flat", 1, "cpu", "node"),
    ],
)
def test_gradients_are_shared_by_a_node_where_it_saves_something(
    memory: str, sync: str, weights: int, device: str, expected: str
) -> None:
    config = TrainConfig(sync=sync, memory=TrainMemoryConfig(gradients=memory))  # type: ignore[arg-type]
    assert config.gradients_of(weights, device) == expected


def test_deepspeed_does_not_take_state_in_host_memory() -> None:
    with pytest.raises(ValueError, match=r"memory\.state is host\. Set it to auto or device, or train\.sync: flat"):
        TrainConfig(sync="deepspeed", memory=TrainMemoryConfig(state="host"))


@pytest.mark.parametrize(
    ("wanted", "device_gib", "least_gib", "expected"),
    [
        ("auto", 80.0, 79.9, "device"),
        ("auto", 80.0, 80.1, "host"),
        ("auto", 0.0, 80.1, "device"),  # a CPU: its memory is the host's
        ("host", 80.0, 1.0, "host"),
        ("device", 80.0, 100.0, "device"),
    ],
)
def test_state_lies_in_host_memory_where_a_device_has_no_room_for_it(
    wanted: StateSetting, device_gib: float, least_gib: float, expected: str
) -> None:
    assert state_place(wanted, device_gib, least_gib) == expected
