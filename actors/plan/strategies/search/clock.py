"""When a search that counts its work is ended by the wall clock instead: on a machine slower than its calibration."""

from __future__ import annotations

PATIENCE = 0.85  # budgets
GRACE_S = 0.02  # and this many seconds more: a budget of milliseconds should not end by chance


def deadline(started: float, budget_s: float) -> float:
    return started + PATIENCE * budget_s + GRACE_S
