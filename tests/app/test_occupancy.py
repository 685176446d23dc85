"""How busy the workers of `heddle sample --workers` are said to be."""

from __future__ import annotations

import pytest

from app.sampling.occupancy import Occupancy


def test_shares_are_of_the_time_before_the_tail() -> None:
    """Two workers, the second there 2 s later; the last prompt is given out at 10 s, the last clip is there at 14 s."""
    seen = Occupancy()
    seen.ready("a", 0.0)
    seen.given_out(True, 0.0)
    seen.ready("b", 2.0)
    seen.given_out(True, 2.0)
    seen.answered("a", 4.0, 5.0)  # it waited for 1 s
    seen.given_out(True, 5.0)
    seen.answered("b", 8.0, 10.0)
    seen.given_out(False, 10.0)
    seen.answered("a", 6.0, 11.0)  # of which 5 s lie before the tail
    seen.given_out(False, 11.0)
    seen.answered("b", 4.0, 14.0)
    assert seen.shares() == pytest.approx([0.9, 1.0])
    assert seen.summary() == (
        "workers computed 90%, 100% of the 10.0 s until the last prompt was given out; 4.0 s later all clips were there"
    )


def test_prompts_of_the_dead_end_the_tail_and_what_it_did_last_is_left_out() -> None:
    seen = Occupancy()
    for worker in "ab":
        seen.ready(worker, 0.0)
        seen.given_out(worker == "a", 0.0)
    seen.answered("a", 4.0, 4.0)
    seen.given_out(False, 4.0)
    seen.given_out(True, 6.0)  # b has died, its prompt waits again
    seen.died("b")
    seen.ready("c", 8.0)
    seen.given_out(False, 8.0)  # the tail begins now
    seen.answered("c", 2.0, 10.0)
    assert seen.shares() == pytest.approx([0.5])  # a had nothing to do; b made nothing, c came with the tail


def test_nothing_is_said_where_nobody_had_a_turn() -> None:
    seen = Occupancy()
    assert seen.summary() is None
    seen.ready("a", 3.0)
    seen.given_out(False, 3.0)
    seen.answered("a", 1.0, 4.0)
    assert seen.summary() is None
