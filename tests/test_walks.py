"""Walks are no longer than they were, and docs/walks.md names functions that call each other."""

from __future__ import annotations

import pytest

from actors.plan.strategies.search import native
from tests.walks import Station, count, inside, is_counted, listed_walks, plan_route, unreached

MOST = {  # files and returns; less is better, and is written here
    "A clip, from a tar to its loss": (43, 4),
    "A gradient, from backward to a committed snapshot": (26, 9),
    "A worker's death, to the next step": (26, 13),
    "A step's calls, through the relays of a large run": (6, 3),
}
MOST_OF_A_PLAN = (20, 15)


def test_every_function_of_a_walk_is_named_by_one_before_it() -> None:
    wrong = {title: found for title, walk in listed_walks().items() if (found := unreached(walk))}
    assert not wrong, "docs/walks.md: mend the line, or mark a function that another process calls"


def test_what_is_listed_is_what_a_trace_would_count() -> None:
    listed = {one.station for walk in listed_walks().values() for one in walk}
    assert [station for station in listed if not is_counted(station)] == []


@pytest.mark.parametrize(
    ("file", "function", "counts"),
    [
        ("actors/pool/membership.py", "Membership.observe", True),
        ("data/engines/ray_data.py", "decode_block", True),
        ("actors/pool/membership_types.py", "View.change_pending", False),  # a property of a record
        ("actors/pool/membership_types.py", "Limits.of", False),  # of a record
        ("actors/messages.py", "SumStart", False),
        ("actors/ray_calls.py", "GONE", False),
        ("actors/step.py", "GenerationLost.__init__", False),  # of an exception
        ("data/errors.py", "DataIOError", False),
        ("actors/outcome.py", "Listener.on_step", False),  # of a protocol
        ("ops/update/own_gradients.py", "OwnGradients.started", False),
        ("ops/update/own_gradients.py", "OwnGradients.leave", False),  # nothing to read
        ("ops/models/base/transformer.py", "PackedTransformer.velocity", False),  # a family does it
        ("ops/update/sync.py", "FlatSync._received_hook.<locals>.received", False),
        ("ops/update/sync.py", "FlatSync.no_such_method", False),
    ],
)
def test_one_rule_says_what_is_read(file: str, function: str, counts: bool) -> None:
    assert is_counted(Station(file, function)) == counts


def test_no_listed_walk_grows() -> None:
    found = {title: count(one.station for one in walk) for title, walk in listed_walks().items()}
    assert found == MOST, "mend docs/walks.md, and these figures where a walk got shorter"


def test_inside_a_chapter_nobody_goes_back() -> None:
    assert {title: inside(walk) for title, walk in listed_walks().items()} == dict.fromkeys(MOST, 0)


@pytest.mark.skipif(native.library() is None, reason="without the compiled search the walk is another one")
def test_the_walk_of_a_plan_does_not_grow() -> None:
    files, returns = count(plan_route())
    assert files <= MOST_OF_A_PLAN[0] and returns <= MOST_OF_A_PLAN[1], "see python -m tests.walks --route"
