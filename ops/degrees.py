"""Which degrees a bag may have beside the number of attention heads, and what they send. Imports neither torch nor Ray.

H heads, k ranks of a bag (its degree). Any degree is exact; those that divide the heads send the least (Ulysses).
"""

from __future__ import annotations

import math
import re
from typing import Literal

BagRanks = tuple[int, ...]  # of one bag, in its order
MOST_DEGREE = 64  # that is planned where nobody names degrees
SequenceSetting = Literal["auto", "ulysses"]  # any degree, as priced / those that divide the heads


def head_copies(heads: int, degree: int) -> int:
    """T, pairs of a head and a rank that computes a part of it, where every rank gets H / k heads: H + k - gcd(H, k).

    No even dealing has fewer: heads and ranks that are connected by shares make at most gcd(H, k) sets, and one of
    x heads and y ranks has x + y - 1 pairs at least.
    """
    return heads + degree - math.gcd(heads, degree)


def surplus(heads: int, degree: int) -> float:
    """(T - H) / H: keys and values that a bag holds beyond one copy of each head; 0 where the degree divides them."""
    return head_copies(heads, degree) / heads - 1


def exchanged(heads: int, degree: int) -> float:
    """What a rank sends, over what Ulysses would: of q, k, v and the output two travel once, two with every copy."""
    return 1 + surplus(heads, degree) / 2


def default_degrees(heads: int, setting: SequenceSetting = "auto", most: int = MOST_DEGREE) -> tuple[int, ...]:
    """What is planned where nobody names degrees, ascending, at most H: divisors of the heads and, with `auto`, powers
    of two, which fill nodes."""
    return tuple(
        k for k in range(1, min(heads, most) + 1) if heads % k == 0 or (setting == "auto" and k & (k - 1) == 0)
    )


def bags_of(topology: str) -> dict[int, int]:
    """Size of a bag -> number of such bags, of a topology such as g1n4+g8n1. Raises ValueError."""
    counts: dict[int, int] = {}
    for term in topology.split("+"):
        match = re.fullmatch(r"\s*g([1-9]\d*)n([1-9]\d*)\s*", term)
        if match is None:
            raise ValueError(
                f"topology {topology!r}: {term.strip()!r} is not gSIZEnCOUNT, for example g1n16+g2n4+g8n1."
            )
        size, count = int(match[1]), int(match[2])
        if size in counts:
            raise ValueError(f"topology {topology!r} names size {size} twice. Add the counts up.")
        counts[size] = count
    return counts
