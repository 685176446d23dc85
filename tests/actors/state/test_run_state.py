"""Where a run's state is held, which of it is newest, and where the data goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from actors.state import checkpoint_files as checkpoint
from actors.state.checkpoint_writer import root_of
from actors.state.keeper import HeldShard, Standing
from actors.state.recovery import CommitLog
from actors.state.run_state import Stuck
from actors.state.survivors import Survivors
from actors.step import GenerationLost, Seat
from ops.shards import ShardState
from tests.actors.exactness import MODEL
from tests.actors.fakes import Handle, KeepersHere, Writing, collected, snapshot, source_of, state_of

ANOTHER_POSITION = {"step": 3}


def held(step: int) -> HeldShard:
    return HeldShard(step=step, generation=3, lo=0, hi=10, total=10, num_bytes=0)


def write_checkpoint(run_dir: Path, step: int, token: dict[str, Any]) -> None:
    folder = checkpoint.step_folder(root_of(run_dir), step)
    checkpoint.begin(folder)
    shard = ShardState(updates=step, lo=0, hi=4, total=4, arrays={"master": np.zeros(4, np.float32)})
    file = checkpoint.write_shard(folder, shard)
    checkpoint.seal(folder, {"step": step, "data_token": token, "parameters": []}, [(0, 4)], [file])


@pytest.mark.parametrize("open_", [True, False])
def test_a_checkpoint_of_a_run_whose_data_is_not_open_has_the_position_that_is_known(open_: bool) -> None:
    keepers = KeepersHere(Standing(committed=7, position=(7, ANOTHER_POSITION)), a=[held(7)])
    positions = SimpleNamespace(token=lambda step: {"step": step}) if open_ else source_of(None)
    written: list[Any] = []
    writer = Writing()
    writer.save_origin = lambda origin, meta: written.append(meta["data_token"])  # type: ignore[method-assign]
    state_of(keepers=keepers, positions=positions, writer=writer, model=MODEL).keep_last((), CommitLog(committed=7))
    assert written == [{"step": 8} if open_ else ANOTHER_POSITION]


@pytest.mark.parametrize(
    ("keepers", "disk", "expected"),
    [
        (7, None, "keepers"),
        (7, 7, "keepers"),
        (7, 5, "keepers"),
        (3, 7, "disk"),
        (3, 5, "disk"),
        (None, 5, "disk"),
        (8, 5, "disk"),
        (3, 8, "keepers"),
        (8, None, None),
        (None, None, None),
    ],
)
def test_data_goes_on_from_the_position_that_is_nearest_to_the_committed_step(
    tmp_path: Path, keepers: int | None, disk: int | None, expected: str | None
) -> None:
    position = (keepers, {"from": "keepers"}) if keepers is not None else None
    if disk is not None:
        write_checkpoint(tmp_path, disk, {"from": "disk"})
    state = state_of(tmp_path, keepers=KeepersHere(Standing(position=position)))
    assert state.data_token(7) == ({"from": expected} if expected else None)


@pytest.mark.parametrize("generation", [3, 4])
def test_the_state_a_generation_starts_from_survives_the_commits_on_the_way(generation: int) -> None:
    """A loss finds finished steps that nobody has committed yet: they are, when their state is found to be whole."""
    survivors, keepers = Survivors(), KeepersHere(a=[held(7)])
    state = state_of(keepers=keepers, survivors=survivors)
    survivors.ended(3)
    survivors.part(0, Handle(hand_over=lambda step: "w0"))  # type: ignore[arg-type]
    survivors.exports = (snapshot(7),)
    recovery = state.recover((), CommitLog(committed=6, finished=(collected(7, 3),)))
    assert recovery.step == 7 and [done.running.step for done in recovery.newly_safe] == [7]
    for done in recovery.newly_safe:
        state.committed(done, {})
    state.begin(recovery, 4)
    assert survivors.exports == (snapshot(7),) and keepers.told == [("rollback", 7, 4)]
    state.committed(collected(8, generation), {})
    assert bool(survivors.exports) == (generation < 4), "the new generation's first commit lets them go"


def test_a_shard_that_died_with_its_worker_is_a_lost_generation_not_a_keeper_to_repair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = snapshot(7, "newest shard of w1")
    answers: dict[str, Any] = {"w0": None, "w1": ray.exceptions.ActorDiedError()}
    world = [Seat(name=name, node="n", handle=Handle(set_keepers=lambda given, name=name: name)) for name in answers]  # type: ignore[arg-type]

    def get(reference: str) -> Any:
        if isinstance(answers[reference], Exception):
            raise answers[reference]
        return answers[reference]

    monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: (references[:1], references[1:]))
    monkeypatch.setattr(ray, "get", get)
    stuck = Stuck(why="w1 is gone")
    with pytest.raises(GenerationLost) as lost:
        state_of(model=MODEL).repair_keepers(stuck, world, True, CommitLog(committed=6))
    assert lost.value.dead == ("w1",)
    answers["w1"] = newest
    assert state_of(model=MODEL).repair_keepers(stuck, world, True, CommitLog(committed=6)) == [newest]
