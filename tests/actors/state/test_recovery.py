"""Which of the held training states a generation starts from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.held_state import HeldShard
from actors.state.recovery import CommitLog, KeeperInventory, Recovery, newest_whole, recovery_of
from tests.actors.fakes import collected, inventories_of

TOTAL = 8


def held(step: int, lo: int = 0, hi: int = TOTAL, generation: int = 1) -> HeldShard:
    return HeldShard(step=step, generation=generation, lo=lo, hi=hi, total=TOTAL, num_bytes=0)


def log_of(committed: int, *finished: int) -> CommitLog:
    return CommitLog(committed=committed, finished=tuple(collected(step, 1) for step in finished))


def origin(keepers: Sequence[KeeperInventory], checkpoint: tuple[int, Path] | None, newest: int = 99) -> Any:
    return recovery_of(keepers, checkpoint, log_of(newest)).origin


def test_newest_step_that_all_keepers_together_hold_is_recovered() -> None:
    a = [held(1, 0, 5), held(2, 0, 5), held(3, 0, 5)]
    b = [held(1, 5, TOTAL), held(2, 5, TOTAL)]
    assert newest_whole([*a, *b]) == (2, 1)
    assert newest_whole(a) is None, "half of the keepers is lost"


def test_halves_of_two_generations_are_not_a_step() -> None:
    assert newest_whole([held(1), held(2, 0, 5, 1), held(2, 5, TOTAL, 2)]) == (1, 1)


def test_the_newest_whole_step_counts_wherever_its_parts_are() -> None:
    keepers = inventories_of(a=[held(6), held(7, 0, 5)], b=[held(7, 5, 6)])
    assert origin(keepers, None).step == 6
    found = origin([*keepers, *inventories_of(c=[held(7, 6, TOTAL)])], None)
    assert (found.step, found.generation, found.keepers) == (7, 1, ("a", "b", "c"))


def test_a_step_that_all_finished_but_nobody_reported_is_computed_again() -> None:
    """Its state is held, its metrics were lost with a worker: going on after it would leave a hole in the metrics."""
    assert origin(inventories_of(a=[held(7), held(8)]), None, newest=7).step == 7


def test_a_step_whose_line_is_written_counts_also_if_keepers_never_heard_of_it() -> None:
    """Its controller died between. Of the step before it a lost node had the only shard."""
    keepers = inventories_of(a=[held(7, 0, 5), held(8, generation=2), held(9, generation=2)])

    def found(recorded: tuple[int, int] | None) -> Any:
        return recovery_of(keepers, None, CommitLog(committed=7, recorded=recorded)).step

    assert found(None) == -1
    assert found((8, 2)) == 8
    assert found((8, 1)) == -1, "a line of another generation is one of another state"


def test_a_newer_checkpoint_wins_and_nothing_is_a_new_run(tmp_path: Path) -> None:
    assert origin(inventories_of(a=[held(7)]), (6, tmp_path)).checkpoint is None
    assert origin(inventories_of(a=[held(7)]), (7, tmp_path)).checkpoint is None, "memory is nearer than a disk"
    assert origin(inventories_of(a=[held(3)]), (9, tmp_path)).checkpoint == str(tmp_path)
    assert origin([], (9, tmp_path)).step == 9
    assert origin([], None) is None


def test_a_generation_goes_on_from_what_is_held_and_says_what_is_lost() -> None:
    log = log_of(6, 7, 8)

    def follows(*keepers: HeldShard) -> tuple[int, list[int], int]:
        found = recovery_of(inventories_of(a=list(keepers)), None, log)
        return found.step, [done.running.step for done in found.newly_safe], found.lost_steps

    assert follows(held(7)) == (7, [7], 0)
    assert follows(held(4)) == (4, [], 2)
    assert follows() == (-1, [], 7)


def test_finished_steps_count_only_as_far_as_their_reports_have_no_hole() -> None:
    assert log_of(6, 7, 8).newest == 8
    assert log_of(5, 7).newest == 5, "the line of step 6 could not be written"
    assert log_of(7).newest == 7
    assert [done.running.step for done in log_of(4, 5, 6, 7).until(6)] == [5, 6]


# Any holders, as a plain reference sees them -------------------------------------------------------------------------

PIECES = st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(0, TOTAL - 1), st.integers(1, TOTAL)).filter(
    lambda piece: piece[2] < piece[3]
)  # step, generation, lo, hi
HOLDERS = st.lists(st.lists(PIECES, max_size=5), max_size=4)


def covers(pieces: Iterable[tuple[int, int, int, int]], state: tuple[int, int]) -> bool:
    """Whether every element of the vector is in one of the pieces of this step and generation."""
    return all(any(piece[:2] == state and piece[2] <= at < piece[3] for piece in pieces) for at in range(TOTAL))


@settings(max_examples=200, deadline=None)
@given(HOLDERS, st.none() | st.integers(0, 3), st.integers(-1, 3), st.integers(0, 2))
def test_the_newest_state_that_covers_the_vector_is_found_whoever_holds_its_parts(
    holders: list[list[tuple[int, int, int, int]]],
    disk: int | None,
    committed: int,
    num_finished: int,
) -> None:
    def recovered(keepers: Sequence[list[tuple[int, int, int, int]]]) -> Recovery:
        inventories: Any = [
            KeeperInventory(keeper=keeper, shards=[held(s, lo, hi, g) for s, g, lo, hi in pieces])  # type: ignore[arg-type]
            for keeper, pieces in enumerate(keepers)
        ]
        return recovery_of(inventories, None if disk is None else (disk, Path("disk")), log)

    log = log_of(committed, *range(committed + 1, committed + 1 + num_finished))
    kept = [piece for pieces in holders for piece in pieces]
    states = [(s, g) for s in range(log.newest + 1) for g in (1, 2) if covers(kept, (s, g))]
    found = recovered(holders)
    assert found.step == max([-1 if disk is None else disk, *(step for step, _ in states)])
    assert [done.running.step for done in found.newly_safe] == [
        step for step in range(committed + 1, committed + 1 + num_finished) if step <= found.step
    ]
    assert found.lost_steps == max(0, committed - found.step)
    if found.origin is not None and found.origin.checkpoint is None:
        state = max(states)
        told = [piece for keeper in found.origin.keepers for piece in holders[keeper]]  # type: ignore[index]
        assert state == (found.origin.step, found.origin.generation)
        assert covers(told, state), "a worker finds its range among those that it is sent to"
        assert all(any(piece[:2] == state for piece in holders[keeper]) for keeper in found.origin.keepers)  # type: ignore[index]
    assert recovered(holders[1:]).step <= found.step, "a lost keeper takes nothing away from what others hold"
