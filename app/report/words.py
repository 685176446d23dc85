"""Numbers as the report writes them."""

from __future__ import annotations

import math


def short(value: float) -> str:
    """Three digits, or all before the point from 100 on; "-" for what is not finite."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float) -> str:
    """0.123 -> "12.3%"; "-" for what is not finite."""
    return f"{100 * value:.1f}%" if math.isfinite(value) else "-"
