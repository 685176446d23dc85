"""When a process has grown for so long that another one should take its place."""

from __future__ import annotations

from collections.abc import Sequence

from actors.feed.growth import Growth

MIB = 1 << 20


def over_at(growth: Growth, sizes_mib: Sequence[int]) -> list[int]:
    """The steps, of these with their sizes, after which it has grown too much."""
    found = []
    for step, size in enumerate(sizes_mib):
        growth.seen(size * MIB)
        if growth.is_over:
            found.append(step)
    return found


def test_growth_is_counted_from_what_a_process_has_settled_at() -> None:
    growth = Growth(most_bytes=100 * MIB, settling_steps=4, steady_steps=1)
    assert over_at(growth, [200, 900, 500, 800, 950, 1000, 1001]) == [6]
    assert (growth.settled_bytes, growth.now_bytes) == (900 * MIB, 1001 * MIB)


def test_what_comes_and_goes_is_no_growth() -> None:
    growth = Growth(most_bytes=100 * MIB, settling_steps=1, steady_steps=3)
    assert over_at(growth, [10, 500, 500, 20, 500, 500, 500, 500, 20]) == [6, 7]


def test_a_process_that_takes_as_much_from_the_start_is_not_replaced_again_and_again() -> None:
    growth = Growth(most_bytes=100 * MIB, settling_steps=4, steady_steps=2)
    for begun_at in (0, 5000):
        growth.begin()
        assert over_at(growth, [begun_at + 4000] * 40) == []
        assert over_at(growth, [begun_at + 4101] * 3) == [1, 2]


def test_where_the_system_says_nothing_nothing_grows() -> None:
    assert over_at(Growth(settling_steps=1, steady_steps=1, most_bytes=0), [0] * 9) == []
