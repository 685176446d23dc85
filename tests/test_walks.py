"""Walks are no longer than they were, and docs/walks.md names functions that call each other."""

from __future__ import annotations

import pytest

from actors.plan.strategies.search import native
from tests.walks import count, listed_walks, plan_route, unreached

MOST = {  # files and returns; less is better, and is written here
    "A clip, from a tar to its loss": (37, 13),
    "A gradient, from backward to a committed snapshot": (28, 10),
    "A worker's death, to the next step": (26, 11),
}
MOST_OF_A_PLAN = (19, 16)  # one of each above what it is, as the trace follows what a search happens to call


def test_every_function_of_a_walk_is_named_by_one_before_it() -> None:
    wrong = {title: found for title, walk in listed_walks().items() if (found := unreached(walk))}
    assert not wrong, "docs/walks.md: mend the line, or mark a function that another process calls"


def test_no_listed_walk_grows() -> None:
    found = {title: count(one.station for one in walk) for title, walk in listed_walks().items()}
    assert found == MOST, "mend docs/walks.md, and these figures where a walk got shorter"


@pytest.mark.skipif(native.library() is None, reason="without the compiled search the walk is another one")
def test_the_walk_of_a_plan_does_not_grow() -> None:
    files, returns = count(plan_route())
    assert files <= MOST_OF_A_PLAN[0] and returns <= MOST_OF_A_PLAN[1], "see python -m tests.walks --route"
