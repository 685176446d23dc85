"""When the attention heads of a rank travel in two halves, and how much of their exchange attention hides. Pure.

`ops/packed/exchange_halves.py` sends them, prices count on it (`actors/plan/costs/halved.py`).
"""

from __future__ import annotations

# What a half has at least, in rows and in scores (the squares of its sequences' lengths) of all its heads: nearly two
# tiles of 128 rows for each multiprocessor of a large GPU, as 81 frames of 480p have by one head, and attention of some
# 0.1 ms, which hides more than two exchanges cost.
_FILLS, _HIDES = 32_000, 2**27


def halves_of(heads: int) -> tuple[slice, slice]:
    """The halves of a rank's heads: the smaller one first, since its way there is not hidden."""
    return slice(0, heads // 2), slice(heads // 2, heads)


def fills_halves(heads: int, rows: int, scores: int) -> bool:
    """Whether the attention of one half of a rank's `heads` alone fills a GPU for long enough, over all `rows` of a bag
    and `scores` of a head."""
    half = heads // 2
    return rows * half >= _FILLS and scores * half >= _HIDES


def exposed_of_halves(heads: int) -> float:
    """The share of their exchanges, there and back, in which nothing is computed, where attention takes as long as they
    do: q, k and v of the first half there, the result of the second one back. The backward is the same reversed.

    >>> exposed_of_halves(4), round(exposed_of_halves(3), 3)
    (0.5, 0.417)
    """
    first = heads // 2 / heads
    return 0.75 * first + 0.25 * (1 - first)
