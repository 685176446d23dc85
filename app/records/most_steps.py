"""How many steps a run has ever had: where it takes some again, as after a crash, their lines of the metrics go."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ops.whole_file import write_whole

MOST_STEPS = "most_steps"  # in the run's folder


def noted_steps(run_dir: Path) -> int:
    """The most that has been noted; 0 without a note."""
    with suppress(OSError, ValueError):
        return int((run_dir / MOST_STEPS).read_text(encoding="utf-8"))
    return 0


def note_steps(run_dir: Path, steps: int) -> None:
    """The run has had as many. Raises OSError."""
    write_whole(run_dir / MOST_STEPS, f"{max(steps, noted_steps(run_dir))}\n")
