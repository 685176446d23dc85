"""What a run tells while storage of its data does not answer, and when that is tried again."""

from __future__ import annotations

import pytest

from actors.records.events import DataAwaited, DataBack, RunEvent
from actors.run.data_wait import DataWait
from data.errors import DataUnreachable

ERROR = DataUnreachable("open /nfs/0.tar: Input/output error (5 attempts)")


def test_it_is_tried_ever_less_often_and_told_every_ten_minutes() -> None:
    told: list[RunEvent] = []
    said: list[str] = []
    wait = DataWait(told.append, said.append)
    tries: list[float] = []
    wait.failed(7, ERROR, 100.0)
    for now in range(100, 1000):
        if wait.is_due(now):
            tries.append(now)
            wait.tried()
            assert not wait.closed and not wait.is_due(now)
            wait.failed(7, ERROR, now)
    assert tries[:6] == [105, 115, 135, 175, 235, 295]
    first, second = told
    assert isinstance(first, DataAwaited) and isinstance(second, DataAwaited)
    assert (first.step, first.seconds, second.seconds) == (7, 0.0, 615.0)
    assert said[0] == (
        "step 7 waits for its clips: open /nfs/0.tar: Input/output error (5 attempts). Training goes on by itself as "
        "soon as they can be read; after 12 h the run ends"
    )
    wait.tried()
    assert not wait.came(6, 999.0) and wait.came(7, 1000.0) and not wait.came(8, 1001.0)
    assert isinstance(told[-1], DataBack) and told[-1].seconds == 900.0 and said[-1] == ""


def test_after_twelve_hours_the_error_is_raised_and_a_later_fault_has_as_long_again() -> None:
    wait = DataWait(lambda event: None, lambda text: None)
    wait.failed(7, ERROR, 0.0)
    wait.failed(7, ERROR, 12 * 3600.0)
    with pytest.raises(DataUnreachable):
        wait.failed(7, ERROR, 12 * 3600.0 + 1)
    wait.came(7, 13 * 3600.0)
    wait.failed(8, ERROR, 13 * 3600.0)
