"""A number with its noun, as people read it."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """'1 step', '2 steps', '1,024 workers'."""
    return f"{number:,} {noun_of(number, noun)}"


def noun_of(number: int, noun: str) -> str:
    """The noun alone, for a place where the number stands above it: 'step', 'steps'."""
    return noun + "s" * (number != 1)
