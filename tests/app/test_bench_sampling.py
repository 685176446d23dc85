"""What `heddle bench sampling` counts, by the lines that are printed while clips are made."""

from __future__ import annotations

import pytest

from app.bench.sampling import WayTimes, table
from app.sampling.ways import BagWay


def test_clips_count_from_the_moment_at_which_workers_are_ready() -> None:
    """The first worker makes a clip while the others still load."""
    times = WayTimes(way="apart")
    lines = [
        (3.0, "1/5 clips, 0:00:09 left"),
        (4.0, "note: 3 worker(s) have loaded the model"),
        (6.0, "3/5 clips, 0:00:04 left"),
        (10.0, "5/5 clips, 0:00:00 left"),
        (10.1, "workers computed 99%, 98%, 97% of the 8.0 s until the last prompt was given out"),
    ]
    for now, line in lines:
        times.hear(line, now)
    assert times.clips_s == [3.0, 6.0, 6.0, 10.0, 10.0]
    assert times.per_minute == pytest.approx(60 * 4 / 6) and times.first_s == 2.0


def test_the_table_has_what_a_bag_was_expected_to_take() -> None:
    times = WayTimes(way="two halves")
    times.hear(f"note: each clip is made by {BagWay(bags=2, size=1, step_s=0.0125).describe()}", 1.0)
    times.hear("1/1 clips, 0:00:00 left", 1.5)
    assert table([times], steps=20).splitlines()[1].split() == ["two", "halves", "120.0", "0.50", "s", "0.25", "s"]
