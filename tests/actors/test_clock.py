"""The seconds by which workers are judged."""

from __future__ import annotations

import time

import pytest

from actors.clock import PatientClock


def test_time_in_which_nobody_was_looked_at_is_held_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    clock, seen = PatientClock(), []
    for now in (100.2, 102.0, 702.0, 702.2):  # the data took ten minutes to open
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        seen.append(clock.now())
    assert seen == pytest.approx([100.2, 102.0, 107.0, 107.2])
