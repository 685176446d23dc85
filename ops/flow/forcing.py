"""In which windows and steps a clip is made whose latent frames have noise levels of their own, as Diffusers'
SkyReelsV2DiffusionForcingPipeline makes it. No torch inside.

    schedule = ForcingSchedule(base_num_frames=49, overlap_history=17, ar_step=5)
    for window in windows_of(schedule, frames=25, stride=4):       # latent frames 0..12, 8..20, 16..24
        for row in block_steps(window.frames, steps=30, lag=schedule.ar_step, ready=window.history):
            ...                                                    # one forward; block b takes step row[b]
"""

from __future__ import annotations

from dataclasses import dataclass

from ops.config import ForcingSchedule

WAITS = -1  # in a row: the block is noise and has not begun


@dataclass(frozen=True, slots=True)
class FrameWindow:
    """Latent frames that go through the transformer together."""

    first: int
    frames: int
    history: int  # of them, those that the window before has made

    @property
    def end(self) -> int:
        return self.first + self.frames


def windows_of(schedule: ForcingSchedule, frames: int, stride: int) -> list[FrameWindow]:
    """The windows of a clip of `frames` latent frames of `stride` frames each. Raises ValueError for windows that are
    not whole blocks."""
    base, history = ((count - 1) // stride + 1 for count in (schedule.base_num_frames, schedule.overlap_history))
    if history >= base:
        raise ValueError(
            f"overlap_history {schedule.overlap_history} and base_num_frames {schedule.base_num_frames} are both "
            f"{base} latent frames; a window must add some. Take over fewer frames."
        )
    found = [FrameWindow(0, min(frames, base), 0)]
    while found[-1].end < frames:
        first = found[-1].end - history
        found.append(FrameWindow(first, min(base, frames - first), history))
    size = schedule.causal_block_size
    for window in found:
        if window.frames % size or window.history % size:
            taken = f", {window.history} of them taken over," if window.history else ""
            raise ValueError(
                f"a window of {window.frames} latent frames{taken} is not of whole blocks of {size} "
                f"(causal_block_size). Choose frames, base_num_frames and overlap_history, of which n stand for "
                f"(n - 1) // {stride} + 1 latent frames, so that these are multiples of {size}."
            )
    return found


def block_steps(blocks: int, steps: int, lag: int, ready: int) -> list[list[int]]:
    """For each forward, which step, 0 .. steps - 1, each block takes; `WAITS`: it has not begun; `steps`: it is done,
    as the first `ready` blocks are from the beginning. A block begins `lag` steps after the one before it, or when that
    is done."""
    taken = [steps] * ready + [WAITS] * (blocks - ready)
    rows = []
    while any(step < steps - 1 for step in taken):
        row: list[int] = []
        for block, step in enumerate(taken):
            follows = block > 0 and taken[block - 1] < steps - 1
            row.append(row[block - 1] - lag if follows else step + 1)
        taken = [min(max(step, WAITS), steps) for step in row]
        rows.append(taken)
    return rows


def forwards(schedule: ForcingSchedule, frames: int, stride: int, steps: int) -> int:
    """How often a clip, or a window of it, goes through the transformer with its prompt."""
    size = schedule.causal_block_size
    return sum(
        len(block_steps(window.frames // size, steps, schedule.ar_step, window.history // size))
        for window in windows_of(schedule, frames, stride)
    )
