"""A number with its noun, a loss, the first of many names, and the order of names with numbers, as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """'1 step', '2 steps', '1,024 workers'."""
    return f"{number:,} {noun_of(number, noun)}"


def noun_of(number: int, noun: str) -> str:
    """The noun alone, for a place where the number stands above it: 'step', 'steps'."""
    return noun + "s" * (number != 1)


def loss_in_words(value: float) -> str:
    """'0.1234'; of a run that has diverged 'not finite'."""
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def by_numbers(name: str) -> tuple[tuple[int, str], ...]:
    """Key of an order of names by the numbers in them: 9x64x96 stands before 17x64x96."""
    return tuple((int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name))


def first_of(names: Sequence[str], most: int = 4) -> str:
    """'a, b', and of more than `most` names 'a, b, c, d and 60 more'."""
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most:,} more" if len(names) > most else listed
