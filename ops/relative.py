"""How far two figures are apart that shall be the same."""

from __future__ import annotations

import math


def relative(value: float, expected: float) -> float:
    """|value - expected| / |expected|. Infinite where one alone is no number; 0 where both are none: a step whose
    losses are not finite in two runs was left out by both."""
    if math.isfinite(value) and math.isfinite(expected):
        return abs(value - expected) / (abs(expected) or 1.0)
    return 0.0 if math.isfinite(value) == math.isfinite(expected) else math.inf
