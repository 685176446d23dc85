"""Which bank holds which version, and where the next one goes: nothing that is needed is ever written over."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from actors.held_state import Snapshot
from actors.state.versions import Version, VersionBook
from ops.shards import ARRAYS, Distance
from ops.update.state_memory import BankOrder

TOTAL = 100


def room(version: Version) -> bool:
    return True


def no_room(version: Version) -> bool:
    return False


def shard(step: int, generation: int = 1, lo: int = 0, hi: int = TOTAL) -> Snapshot:
    return Snapshot(
        step=step,
        generation=generation,
        rank=0,
        lo=lo,
        hi=hi,
        total=TOTAL,
        bank=0,
        names=ARRAYS,
        updates=step + 1,
        distances=(Distance(d=step / 3, d_max=step / 3, numerator=step / 7),),
    )


def begun(step: int = -1, generation: int = 1, made_in: int = 1) -> VersionBook:
    book = VersionBook()
    book.begin(generation, step, made_in, room)
    return book


def steps(book: VersionBook) -> dict[int, int]:
    """Bank -> step of what lies there."""
    return {bank: version.step for bank, version in book.versions.items()}


def advance(book: VersionBook, step: int, has_room: bool = True) -> BankOrder:
    """A step is computed, held and committed."""
    assert book.add(shard(step, book.generation))
    book.commit(step, None, room if has_room else no_room)
    return book.order


def test_two_banks_take_turns_and_what_is_committed_lies_in_the_one_that_is_not_written() -> None:
    book = begun()
    assert book.order == BankOrder(generation=1, step=-1, held=0, next=1)
    found = [advance(book, step) for step in range(4)]
    assert [(order.held, order.next) for order in found] == [(1, 0), (0, 1), (1, 0), (0, 1)]
    assert steps(book) == {0: 3}, "the one before it is about to be written over"


def test_the_step_that_is_being_filled_takes_no_bank_from_the_one_before_it() -> None:
    book = begun()
    advance(book, 0)
    book.add(shard(1, lo=0, hi=50))
    assert steps(book) == {1: 0, 0: 1} and book.bank_for(1, 1) == 0
    assert book.bank_for(2, 1) is None, "step 1 is not committed: its bank is needed"
    assert not book.add(shard(2)) and not book.add(shard(0, 0)) and not book.add(shard(1, 2))
    assert steps(book) == {1: 0, 0: 1}


def test_a_generation_goes_on_from_its_version_and_forgets_all_others() -> None:
    book = begun()
    for step in range(3):
        advance(book, step)
    book.add(shard(3))
    book.position = (3, {"at": 3})
    book.begin(2, 2, 1, room)
    assert steps(book) == {1: 2} and book.order == BankOrder(generation=2, step=2, held=1, next=0)
    assert book.position is None and not book.add(shard(3, 1)), "late message of the dead generation"
    assert book.add(shard(3, 2)) and steps(book) == {1: 2, 0: 3}
    book.begin(3, 0, 1, room)  # all of step 2 was lost elsewhere, and a checkpoint says 0
    assert book.order.step == 0 and book.base is not None and book.base.ranges == set()


def test_what_a_worker_brings_of_the_version_that_a_generation_goes_on_from_is_held_with_it() -> None:
    book = begun(step=7, generation=4, made_in=3)
    assert book.bank_for(7, 3) == 0
    assert book.add(shard(7, 3, 0, 50)) and book.add(shard(7, 3, 40, TOTAL))
    assert book.base is not None and book.base.covers(0, TOTAL) and book.base.updates == 8


def test_a_version_whose_checkpoint_is_written_stays_and_the_spare_bank_is_used_meanwhile() -> None:
    book = begun()
    advance(book, 0)
    book.pin([0])
    held = [(order.held, order.next) for order in (advance(book, step) for step in (1, 2, 3))]
    assert held == [(0, 2), (2, 0), (0, 2)] and steps(book) == {1: 0, 0: 3}
    book.pin([])
    assert (advance(book, 4).held, book.next) == (2, 0)
    assert [advance(book, step).next for step in (5, 6)] == [1, 0], "the spare one is in use no more"


def test_without_room_for_a_spare_bank_the_newest_version_is_given_up_and_never_the_one_that_is_written() -> None:
    """The state is then updated in place: a loss goes back to the checkpoint."""
    book = begun()
    advance(book, 0)
    book.pin([0])
    for step in (1, 2, 3):
        order = advance(book, step, has_room=False)
        assert order.held == order.next == 0 and steps(book) == {1: 0} and book.base is None
    assert advance(book, 4).next == 2, "as soon as there is room"
    book.pin([])
    assert advance(book, 5).held == 2 and steps(book) == {2: 5}


def test_what_a_generation_is_about_to_take_up_is_not_given_up_for_a_checkpoint() -> None:
    book = begun()
    advance(book, 0)
    book.pin([0])
    book.add(shard(1))
    book.begin(2, 1, 1, no_room)
    assert steps(book) == {0: 1} and book.order == BankOrder(generation=2, step=1, held=0, next=1)


def test_a_shard_of_the_version_that_was_given_up_takes_no_bank_from_the_next_one() -> None:
    """A repair has the newest shards held once more."""
    book = begun()
    advance(book, 0)
    book.pin([0])
    advance(book, 1, has_room=False)
    assert book.base is None
    assert not book.add(shard(1)) and book.bank_for(2, 1) == 0


def test_of_two_versions_whose_checkpoints_are_written_the_newest_stays_where_there_is_no_room_for_both() -> None:
    """That of a run's last step begins while an earlier one is being written: that one is written of a later step."""
    book = begun()
    advance(book, 0)
    book.pin([0, 1])
    assert advance(book, 1, has_room=False) == BankOrder(generation=1, step=1, held=0, next=1)
    assert steps(book) == {0: 1}


def test_a_checkpoint_of_a_later_step_keeps_no_version_that_a_generation_computes_anew() -> None:
    book = begun()
    advance(book, 0)
    advance(book, 1)
    book.pin([1])
    book.begin(2, 0, 1, room)  # all of step 1 was lost elsewhere
    assert steps(book) == {0: 0}


def test_a_keeper_that_holds_nothing_of_a_step_lets_older_ones_go_too() -> None:
    book = begun()
    advance(book, 0)
    book.commit(1, {"at": 2}, room)
    assert book.committed == 1 and [version.ranges for version in book.versions.values()] == [set()]
    book.commit(1, {"at": 2}, room)  # told once more, after it was started again
    assert book.order == BankOrder(generation=1, step=1, held=0, next=1)


def test_a_commit_of_a_step_of_which_nothing_is_here_does_not_take_a_later_one_for_it() -> None:
    book = begun()
    advance(book, 0)
    book.add(shard(2))  # its workers are ahead of the commit of 1, of which no shard came
    book.commit(1, None, room)
    assert book.base is not None and (book.base.step, book.base.ranges) == (1, set())
    assert book.find(2, 1) is None


def test_a_commit_without_a_position_leaves_the_last_one_and_a_book_without_any_has_none_after_json() -> None:
    book = begun()
    assert VersionBook.from_json(json.loads(json.dumps(book.to_json()))).position is None
    book.commit(0, {"at": 1}, room)
    advance(book, 1)
    assert book.position == (0, {"at": 1})


def test_what_a_book_knows_is_all_there_after_json() -> None:
    book = begun()
    for step in range(3):
        advance(book, step)
    book.commit(2, {"step": 3}, room)
    book.position = (2, {"step": 3})
    book.pin([2])
    book.add(shard(3, lo=20, hi=60))
    other = VersionBook.from_json(json.loads(json.dumps(book.to_json())))
    assert other == book and other.order == book.order and other.to_json() == book.to_json()


def test_pages_are_garbage_where_neither_a_version_nor_a_range_of_this_generation_lies() -> None:
    book = begun()
    book.add(shard(0, lo=0, hi=60))
    book.commit(0, None, room)
    assert [book.garbage(bank, TOTAL) for bank in range(3)] == [[(60, 100)], [(60, 100)], [(0, 100)]]
    book.begin(2, 0, 1, room)
    book.expected.add((0, 80))  # a worker has joined
    assert [book.garbage(bank, TOTAL) for bank in range(2)] == [[(80, 100)], [(80, 100)]]
    advance_part(book, 1, 0, 30)
    book.begin(3, 1, 2, room)
    book.expected.add((0, 30))
    assert [book.garbage(bank, TOTAL) for bank in range(2)] == [[(30, 100)], [(30, 100)]]


def advance_part(book: VersionBook, step: int, lo: int, hi: int) -> None:
    assert book.add(shard(step, book.generation, lo, hi))
    book.commit(step, None, room)


@given(st.lists(st.sampled_from(["step", "commit", "pin", "unpin", "loss", "full", "roomy"]), min_size=10, max_size=40))
def test_whatever_happens_the_next_bank_is_none_that_anybody_needs(events: list[str]) -> None:
    """A model of two rules: what training goes on from stays until the next is committed, unless there is no room
    beside a checkpoint; what a checkpoint is written of stays until it is written, unless that would take the base."""
    book = begun()
    committed, pinned, has_room, generation = -1, None, room, 1
    book.add(shard(-1))
    for event in events:
        if event == "step":
            book.add(shard(committed + 1, generation))
        elif event == "commit" and any(v.step == committed + 1 for v in book.versions.values()):
            committed += 1
            book.pin([] if pinned is None else [pinned])
            book.commit(committed, None, has_room)
        elif event == "pin" and pinned is None and committed in {v.step for v in book.versions.values()}:
            pinned = committed
            book.pin([pinned])
        elif event == "unpin":
            pinned = None  # keepers hear of it with the next commit
        elif event == "loss":
            whole = max((v.step for v in book.versions.values() if v.ranges and v.step <= committed), default=None)
            if whole is None:
                continue
            (made_in,) = {v.generation for v in book.versions.values() if v.step == whole}
            generation, committed = generation + 1, whole
            book.begin(generation, whole, made_in, has_room)
            assert whole in {v.step for v in book.versions.values()}
            pinned = pinned if pinned in {v.step for v in book.versions.values()} else None
        elif event in ("full", "roomy"):
            has_room = room if event == "roomy" else no_room
        kept = {v.step: v.bank for v in book.versions.values() if v.step <= committed}
        assert book.next not in kept.values(), "something that is held would be written over"
        assert kept, "nothing is left to go on from"
        if pinned is not None:
            assert pinned in kept
        elif has_room is room and event == "commit":
            assert committed in kept


def test_a_commit_of_an_older_step_or_of_another_generation_is_late() -> None:
    book = begun(generation=3)
    advance(book, 0)
    advance(book, 1)
    assert [book.takes(3, step) for step in (0, 1, 2)] == [False, True, True]
    assert not book.takes(2, 2) and not book.takes(4, 2)
