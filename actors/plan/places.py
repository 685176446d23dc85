"""Whether optimizer state lies on a worker's device or in host memory: one rule for runs, plans and previews."""

from __future__ import annotations

from typing import Literal

StateSetting = Literal["auto", "device", "host"]
StatePlace = Literal["device", "host"]


def state_place(wanted: StateSetting, device_gib: float, least_gib: float) -> StatePlace:
    """Where optimizer state lies on a worker whose device has `device_gib` (0: unknown, or no limit), of which training
    needs `least_gib` with the state on it. Workers of one run may differ: they send each other parameters alone.

    >>> state_place("auto", 79.2, 64.0), state_place("auto", 23.6, 64.0), state_place("device", 23.6, 64.0)
    ('device', 'host', 'device')
    """
    if wanted != "auto":
        return wanted
    return "host" if 0 < device_gib < least_gib else "device"
