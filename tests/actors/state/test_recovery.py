"""Which of the held training states a generation starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.messages import Snapshot
from actors.state.commit_log import CommitLog
from actors.state.keeper import HeldShard
from actors.state.recovery import origin_of, recoverable

TOTAL = 100


class HeldHere:
    """Stands for the keepers of a run: what each holds, by name."""

    def __init__(self, **inventories: list[HeldShard]) -> None:
        self._inventories = inventories

    silent = ()

    def inventories(self, patience_s: float, enough: Any) -> dict[str, list[HeldShard]]:
        return self._inventories

    def handles(self, names: list[str]) -> tuple[str, ...]:
        return tuple(names)


def held(step: int, lo: int = 0, hi: int = TOTAL, generation: int = 1) -> HeldShard:
    return HeldShard(step=step, generation=generation, lo=lo, hi=hi, total=TOTAL, num_bytes=0)


def snapshot(step: int, lo: int = 0, hi: int = TOTAL) -> Snapshot:
    return Snapshot(step=step, generation=1, lo=lo, hi=hi, total=TOTAL, shard=f"shard {step}")


def origin(
    keepers: Any, exports: list[Snapshot], checkpoint: tuple[int, Path] | None, newest: int | None = None
) -> Any:
    return origin_of(keepers, exports, checkpoint, patience_s=1, newest=newest)


def test_newest_step_that_all_keepers_together_hold_is_recovered() -> None:
    inventories = {
        "a": [held(1, 0, 50), held(2, 0, 50), held(3, 0, 50)],
        "b": [held(1, 50, TOTAL), held(2, 50, TOTAL)],
    }
    assert recoverable(inventories) == (2, 1)
    assert recoverable({"a": inventories["a"]}) is None, "half of the keepers is lost"


def test_halves_of_two_generations_are_not_a_step() -> None:
    inventories = {"a": [held(1, 0, TOTAL), held(2, 0, 50, 1)], "b": [held(2, 50, TOTAL, 2)]}
    assert recoverable(inventories) == (1, 1)


def test_the_newest_whole_step_counts_wherever_its_parts_are() -> None:
    keepers = HeldHere(a=[held(6), held(7, 0, 50)], b=[held(7, 50, 70)])
    assert origin(keepers, [], None).step == 6
    found = origin(keepers, [snapshot(7, 70, 100)], None)
    assert (found.step, found.keepers, found.exports) == (7, ("a", "b"), ("shard 7",))


def test_a_step_that_all_finished_but_nobody_reported_is_computed_again() -> None:
    """Its state is held, its metrics were lost with a worker: going on after it would leave a hole in the metrics."""
    keepers = HeldHere(a=[held(7), held(8)])
    assert origin(keepers, [snapshot(8)], None, newest=7).step == 7
    assert CommitLog(committed=7).newest == 7


def test_exports_are_asked_only_where_the_keepers_have_gaps(tmp_path: Path) -> None:
    found = origin(HeldHere(a=[held(7)]), [snapshot(7)], (6, tmp_path))
    assert found.exports == () and found.checkpoint is None


def test_a_newer_checkpoint_wins_and_nothing_is_a_new_run(tmp_path: Path) -> None:
    assert origin(HeldHere(a=[held(3)]), [], (9, tmp_path)).checkpoint == str(tmp_path)
    assert origin(HeldHere(), [], (9, tmp_path)).step == 9
    assert origin(HeldHere(), [], None) is None
