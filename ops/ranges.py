"""Ranges of numeric settings, for every section's `__post_init__`. Imports neither torch nor Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass

SECONDS = 1e8  # three years: what operating systems still take as a timeout
WHOLE = 2**31 - 1  # what every library below takes as a count
SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included unless `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def fault(self, value: object) -> str:
        """The rule that `value` breaks, in words; empty when it breaks none."""
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return "it must be a number"
        if value < self.low or (self.open_low and value == self.low):
            return f"it must be {'larger than' if self.open_low else 'at least'} {self.low:g}"
        if value > self.high:
            high = f"{self.high:,}" if isinstance(self.high, int) else f"{self.high:g}"
            return f"it must be at most {high}"
        return ""


def between(low: float, high: float = WHOLE) -> Range:
    """low <= value <= high."""
    return Range(low, high)


def above(low: float, high: float = WHOLE) -> Range:
    """low < value <= high."""
    return Range(low, high, open_low=True)


def check_numbers(section: str, settings: object, **ranges: Range) -> None:
    """Raises ValueError naming the first setting, its value and the rule it breaks. Every entry of a list is checked;
    None is a setting that is not given."""
    for name, allowed in ranges.items():
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple | list) else (value,):
            if number is not None and (fault := allowed.fault(number)):
                raise ValueError(f"{section}.{name} is {number}; {fault}.")
