"""Every kind of event has a name of its own, is read back from its line, and is shown or knowingly left out."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from actors.records.events import (
    KINDS,
    DataAwaited,
    GenerationEnded,
    GenerationFormed,
    KeeperLost,
    MemoryShort,
    RunEvent,
    RunStarted,
    SamplesDropped,
    SettingsChanged,
    SnapshotsForecast,
    SpeedsLearned,
    StackDumped,
    StepSkipped,
    StepsLost,
    UnknownEvent,
    WorkerDied,
    event_of,
)
from actors.records.lines import RecordError
from data.errors import DataUnreachable
from data.storage import retried

OLD = Path(__file__).parent / "old"
UNTOLD = {GenerationEnded, StackDumped}  # the next generation tells it; a stack is read in the file
WORDS = {  # a value for every field that an event has
    "worker": "w1",
    "gradients": "node",
    "parameters": "node",
    "gib_per_node": 26.5,
    "host": "h",
    "node": "n",
    "pid": 4,
    "workers": ("w0",),
    "cluster": (1,),
    "clean": False,
    "stack": "File ...",
    "step": 4,
    "seconds": 1.5,
    "why": "it died",
    "detail": "waiting for w1",
    "to_step": 3,
    "lost_steps": 2,
    "loss": 1.5,
    "grad_norm": 2.0,
    "samples": ("shard-0/clip-2",),
    "files": ("lora/step-9/comfyui_lora_weights.safetensors",),
    "from_step": 0,
    "origin": "new",
    "data": {"indexed": 3},
    "ledger": {"delivered": 3},
    "settings": ("train.steps 20 -> 40",),
    "target": 3,
    "code": 75,
    "mib_per_keeper": 1.5,
    "keepers": 2,
    "enabled": False,
    "keeper": "run/keeper/a",
    "silent": ("run/keeper/a",),
    "repairs": 3,
    "every": 20,
    "mib_needed": 9,
    "settled_mib": 700,
    "grown_mib": 1800,
    "mib_room": 1,
    "cascade": "dit 17f 64x96 b2 sp1 s4",
    "degree": 1,
    "peak_gib": 3.5,
    "room_gib": 3.0,
    "folder": "step-9",
    "speed": {"w0": 1.0},
    "sizes": {"17x64x96": (4, 6)},
    "change": 0.15,
    "target_s": 2.0,
    "applied": True,
    "nodes": {"h": "2 GPUs, NVLink AA, numa 00, rails AB"},
    "nccl": {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": ""},
    "from_file": True,
    "cpus": 1.0,
    "nodes_avoided": 1,
    "cpus_avoided": 6.0,
    "clips": 12,
    "unread": 1,
    "no_room": {"81x720x1280": 5},
    "asides": ("step-19 prompt 0",),
    "limit_s": 600.0,
    "longest_s": 43200.0,
    "indexed": 12,
    "planned": 5,
    "reasons": {"too short": 7},
    "listed": 7,
    "by_bucket": {"17x64x96": 0.5},
    "by_noise": {"0-0.25": 0.5},
    "other": "i",
    "others": (3, 4),
    "mib_per_s": 8.5,
    "usual_mib_per_s": 110.0,
    "busy_s": 21.0,
    "over_s": 30.5,
    "more": 3,
    "end": "h",
    "software": {"commit": "84264bc162f783fbcecdb8c3a60619f309da7d86", "torch": "2.13.0"},
    "gpus": {"NVIDIA H100 80GB HBM3": 8},
    "hosts": ("h", "i"),
    "changed": ("torch 2.12.0 -> 2.13.0",),
    "tracker": "wandb",
    "ever": True,
}


def example(kind: type[RunEvent]) -> Any:
    own = {f.name for f in dataclasses.fields(kind)} - {"time", "generation"}
    return kind(time=1.5, generation=2, **{name: WORDS[name] for name in own})  # type: ignore[arg-type]


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (OLD / name).read_text().splitlines()]


def test_every_kind_has_a_name_of_its_own() -> None:
    kinds = set(RunEvent.__subclasses__()) - {UnknownEvent}
    assert set(KINDS.values()) == kinds and len(kinds) >= 26


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_event_is_read_back_from_its_line_and_told_or_knowingly_not(kind: type[RunEvent]) -> None:
    event = example(kind)
    line = json.loads(json.dumps(event.line()))
    assert list(line)[:3] == ["time", "event", "generation"]
    assert event_of(line) == event
    assert bool(event.describe()) == (kind not in UNTOLD)


def test_a_misspelt_or_missing_detail_is_an_error_where_the_event_is_made() -> None:
    with pytest.raises(TypeError, match="wy"):
        WorkerDied(worker="w1", wy="lost")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="why"):
        WorkerDied(worker="w1")  # type: ignore[call-arg]


def test_what_makes_a_step_slow_is_a_property_of_the_kind() -> None:
    assert {name for name, kind in KINDS.items() if kind.disturbs} == {
        "dead", "lost", "replace", "stall", "wait", "generation", "fallback", "feeder_lost", "keeper_lost",
        "feeder_renewed", "memory", "decode_wait", "storage_wait", "data_unreachable",
    }  # fmt: skip


def test_a_line_has_time_name_generation_and_then_the_details_in_order() -> None:
    formed = GenerationFormed(
        time=1.5,
        generation=3,
        workers=("w0", "w2"),
        cluster=(1, 1),
        why="w1 died",
        from_step=4,
        seconds=0.5,
        gradients="node",
        parameters="node",
    )
    assert formed.describe() == "generation 3: 2 workers, one gradient per node, weights once per node (w1 died)"
    assert json.dumps(formed.stamped(2).line() | {"time": 1.5}) == (
        '{"time": 1.5, "event": "generation", "generation": 3, "workers": ["w0", "w2"], "cluster": [1, 1], '
        '"why": "w1 died", "from_step": 4, "seconds": 0.5, "gradients": "node", "parameters": "node"}'
    )
    assert SettingsChanged(time=2.0, settings=("a",)).line() == {"time": 2.0, "event": "changed", "settings": ["a"]}
    assert StepsLost(to_step=3, lost_steps=2).stamped(7).line()["generation"] == 7


@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_events_of_earlier_versions_are_read_and_told(version: str) -> None:
    for line in lines(f"events-{version}.jsonl"):
        event = event_of(line)
        assert not isinstance(event, UnknownEvent) and event.time == line["time"]
        assert event.describe() or type(event) in UNTOLD


def test_what_an_earlier_version_did_not_write_is_empty() -> None:
    events = [event_of(line) for line in lines("events-0.1.jsonl")]
    assert WorkerDied(time=1795391317.9952602, generation=1, worker="w0", why="") in events
    assert next(e for e in events if isinstance(e, KeeperLost)).keeper == ""
    assert next(e for e in events if isinstance(e, StepSkipped)).describe() == (
        "step 5 skipped: loss nan, gradient norm inf"
    )


def test_an_event_of_a_later_version_is_kept_and_not_told() -> None:
    line = {"time": 1.0, "event": "eclipse", "generation": 2, "shadow": [1]}
    event = event_of(line)
    assert event.line() == line and event.describe() == ""
    assert event_of({"time": 1.0, "event": "dead", "worker": "w1", "shadow": 2}).describe() == "worker w1 died"


def test_a_value_of_another_type_is_refused_by_its_key() -> None:
    with pytest.raises(RecordError, match="step is 'four'; expected a whole number"):
        event_of({"time": 1.0, "event": "checkpoint", "step": "four"})
    with pytest.raises(RecordError, match="workers is 'w0'; expected a list"):
        event_of({"time": 1.0, "event": "generation", "workers": "w0"})


def test_equal_speeds_and_snapshots_that_are_off_are_told_in_words() -> None:
    assert SpeedsLearned(speed={}).describe() == "plans now count on workers of equal speed"
    assert SpeedsLearned(speed={"w1": 0.7}).describe() == "plans now count on speeds w1 0.70"
    kept = SnapshotsForecast(keepers=1, mib_per_keeper=2.0, enabled=False).describe()
    assert kept == "snapshots are off; what checkpoints are written from takes 2.0 MiB of host memory on the node"
    assert SnapshotsForecast(keepers=2, mib_per_keeper=2.0).describe().endswith(" of host memory on each of 2 nodes")
    assert MemoryShort(host="a", mib_needed=9, mib_room=1).describe().startswith("warning: snapshots take 9 MiB on a")


def test_a_fallback_names_the_steps_that_run_again() -> None:
    assert StepsLost(to_step=3, lost_steps=2).describe().endswith("steps 4 to 5 run again")


def test_dropped_samples_are_told_with_why_and_where_they_are_named() -> None:
    data = {"indexed": 120, "planned": 83, "reasons": {"too small": 31, "too short": 6}, "listed": 37}
    dropped = SamplesDropped.of(data)
    assert dropped is not None
    assert dropped.describe() == "37 of 120 samples are dropped: 31 too small, 6 too short; dropped.jsonl names them"
    most = dataclasses.replace(dropped, planned=20, listed=50).describe()
    assert most.startswith("warning: 100 of 120 samples") and most.endswith("; dropped.jsonl names the first 50")
    assert dataclasses.replace(dropped, listed=0).describe().endswith("6 too short"), "no list was written"
    assert SamplesDropped.of({"indexed": 5, "planned": 5}) is None
    assert SamplesDropped.of({"indexed": 5, "planned": 4, "details": {}}) is not None, "of an earlier version"


def test_a_start_tells_how_often_the_run_draws_its_samples() -> None:
    forecast = {"steps": 2000, "draws": 8000, "samples": 30, "sources": {"clips": 266.7}, "exact": True}
    start = RunStarted(from_step=4, pid=1, data={"forecast": forecast}, origin="step-3")
    line = json.loads(json.dumps(start.line()))
    said = "data is ready; starting at step 4 (state: step-3)"
    assert event_of(line).describe() == f"{said}; 2,000 steps draw 8,000 samples, each of the 30 about 267 times"
    assert dataclasses.replace(start, data={"indexed": 3}).describe() == said


def test_a_run_that_waits_for_its_storage_asks_nobody_to_resume_it() -> None:
    with pytest.raises(DataUnreachable) as failed:
        retried("shard 4", refused, retries=0)
    told = DataAwaited(step=4, why=str(failed.value), seconds=0.0, longest_s=43200.0).describe()
    assert "Connection refused" in told and "Training goes on by itself" in told
    assert ".." not in told and "resume when" not in told.lower()


def refused() -> None:
    raise OSError(errno.ECONNREFUSED, "Connection refused")
