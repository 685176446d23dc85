"""Settings of the runtime refuse what would only fail in the middle of a run."""

from __future__ import annotations

from typing import Literal

import pytest

from actors.config import (
    CheckpointConfig,
    PlannerConfig,
    SnapshotConfig,
    TrainConfig,
    TrainMemoryConfig,
    WorkersConfig,
)
from actors.plan.places import ParameterSetting, StateSetting, chosen, gpu_places


@pytest.mark.parametrize(
    ("config", "values", "named"),
    [
        (SnapshotConfig, {"every": 0}, "snapshot.every 0"),
        (SnapshotConfig, {"copies": 0}, "snapshot.copies 0"),
        (CheckpointConfig, {"keep_last": -1}, "checkpoint.keep_last is -1"),
        (PlannerConfig, {"lookahead": -1}, "planner.lookahead -1"),
        (WorkersConfig, {"heartbeat_s": 0}, "workers.heartbeat_s"),
    ],
)
def test_settings_that_would_fail_in_the_middle_of_a_run_are_refused(config: type, values: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**values)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"every": 200, "keep_last": 0}, 6),  # the last one after the last step, no multiple of 200
        ({"every": 200, "keep_last": 3}, 3),
        ({"every": 200, "keep_last": 3, "keep_every": 500}, 5),  # after 600 and 1,000 steps
        ({"every": 200, "keep_last": 3, "keep_every": 50}, 6),
        ({"every": 0, "keep_last": 3}, 1),
        ({"every": 500, "keep_last": 7}, 3),
    ],
)
def test_how_many_checkpoints_a_run_holds_is_known_before(settings: dict[str, int], kept: int) -> None:
    assert CheckpointConfig(**settings).num_kept(1100) == kept


MANY = 16 << 20  # weights whose gradient is 64 MiB


@pytest.mark.parametrize(
    ("memory", "sync", "weights", "device", "expected"),
    [
        ("auto", "flat", MANY, "cpu", "node"),
        ("auto", "flat", MANY - 1, "cpu", "own"),
        ("auto", "flat", MANY, "cuda", "own node own node"),
        ("node", "flat", MANY, "cuda", "node node"),
        ("auto", "deepspeed", MANY, "cpu", "own"),
        ("own", "flat", MANY, "cpu", "own"),
        ("node", "flat", 1, "cpu", "node"),
    ],
)
def test_gradients_are_shared_by_a_node_where_it_saves_something(
    memory: str, sync: str, weights: int, device: str, expected: str
) -> None:
    config = TrainConfig(sync=sync, memory=TrainMemoryConfig(gradients=memory))  # type: ignore[arg-type]
    assert [one.gradients for one in config.places(weights, device)] == expected.split()


@pytest.mark.parametrize(
    ("tf32", "precision", "allowed"),
    [
        ("auto", {}, False),
        ("auto", {"autocast": "bfloat16"}, True),
        ("auto", {"parameter_dtype": "bfloat16"}, True),
        ("on", {}, True),
        ("off", {"autocast": "bfloat16"}, False),
    ],
)
def test_tf32_is_for_runs_that_compute_in_bfloat16_unless_a_setting_says_otherwise(
    tf32: Literal["auto", "on", "off"], precision: dict, allowed: bool
) -> None:
    assert TrainConfig(tf32=tf32, **precision).allows_tf32 == allowed


def test_deepspeed_does_not_take_state_in_host_memory() -> None:
    with pytest.raises(ValueError, match=r"memory\.state is host\. Set it to auto or device, or train\.sync: flat"):
        TrainConfig(sync="deepspeed", memory=TrainMemoryConfig(state="host"))


def test_deepspeed_does_not_take_parameters_once_per_node() -> None:
    with pytest.raises(ValueError, match=r"memory\.parameters is node\. Set it to auto or replicated, or train\.sync"):
        TrainConfig(sync="deepspeed", memory=TrainMemoryConfig(parameters="node"))


@pytest.mark.parametrize(
    ("setting", "device", "fetchable", "expected"),
    [
        ("auto", "cuda", True, ["replicated"] * 4 + ["node"] * 4),  # the last way out
        ("auto", "cuda", False, ["replicated"] * 4),
        ("replicated", "cuda", True, ["replicated"] * 4),
        ("node", "cuda", True, ["node"] * 4),
        ("auto", "cpu", True, ["replicated"]),
        ("node", "cpu", True, ["node"]),
    ],
)
def test_parameters_leave_a_gpu_where_nothing_else_helps(
    setting: ParameterSetting, device: str, fetchable: bool, expected: list[str]
) -> None:
    places = TrainConfig(memory=TrainMemoryConfig(parameters=setting)).places(MANY, device, fetchable)
    assert [one.parameters for one in places] == expected
    needs = {"replicated": 90.0, "node": 40.0}
    found = chosen(places, [needs[one.parameters] for one in places], 80.0)
    assert found.parameters == expected[-1]
    assert chosen(places, [10.0] * len(places), 80.0).parameters == expected[0]


@pytest.mark.parametrize(
    ("state", "device_gib", "expected"),
    [
        ("auto", 80.0, ("own", "device")),
        ("auto", 60.0, ("node", "device")),
        ("auto", 50.0, ("own", "host")),
        ("auto", 20.0, ("node", "host")),
        ("auto", 1.0, ("node", "host")),  # fits nowhere: what takes least is what a refusal names
        ("auto", 0.0, ("own", "device")),  # of a device of unknown size
        ("host", 80.0, ("own", "host")),
        ("device", 1.0, ("node", "device")),
    ],
)
def test_gradients_and_state_lie_in_the_first_place_that_has_room(
    state: StateSetting, device_gib: float, expected: tuple[str, str]
) -> None:
    needs = {("own", "device"): 79.9, ("node", "device"): 55.0, ("own", "host"): 45.0, ("node", "host"): 20.0}
    places = gpu_places("auto", state)
    found = chosen(places, [needs[one.gradients, one.state] for one in places], device_gib)
    assert (found.gradients, found.state) == expected
