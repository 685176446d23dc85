"""Cutting rows into one contiguous chunk per rank. Imports neither torch nor Ray."""

from __future__ import annotations


def chunk_bounds(tokens: int, degree: int, rank: int, turn: int = 0) -> tuple[int, int]:
    """Rows [start, stop) of a sequence that `rank` of `degree` owns: contiguous, in rank order, lengths differ by at
    most one. `turn` (the index of the sequence in its layout) rotates the ranks that get the longer chunks, so that
    many short sequences do not all burden the same rank."""
    base, longer = divmod(tokens, degree)
    extra = [(r - turn) % degree < longer for r in range(rank + 1)]
    start = base * rank + sum(extra[:rank])
    return start, start + base + extra[rank]
