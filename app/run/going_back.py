"""`heddle train --resume --back-to N`: a run goes on from an earlier checkpoint of its own, and no file is deleted.

What came after it lies in RUN/later-than-N-steps/ from then on: later checkpoints, plans, samples and LoRA files are
moved there, metrics.jsonl and workers.jsonl copied, as their lines of later steps go when those steps are taken again
(and are `recomputed` then). Where one of these folders is a link to another file system, its files stay on that, in a
folder later-than-N-steps/ to which the one of the run has a link. The position of the data and its counts are those of
the checkpoint. Where a start was cut short while it moved them, and the run has gone on without going back, what had
been moved lies in later-than-N-steps-2/.
"""

from __future__ import annotations

import errno
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from actors.state.checkpoint_files import root_of, step_of
from app.inputs.checkpoints import later_folder, steps_of
from app.records.rundir import METRICS, OLDER_WORKERS, WORKERS
from app.settings.run_folder import LORA
from ops.counted import counted

_STEP = re.compile(r"step-(\d+)")
_COPIED = (METRICS, WORKERS, OLDER_WORKERS)
_READ_BYTES = 1 << 20
_BESIDE = ("samples", "plans", LORA)  # folders of the run with files that are named after steps


def set_aside(folder: Path, checkpoint: Path) -> str:
    """Make this checkpoint the run's newest. Returns what to tell of it; "" where nothing came after it. If it is cut
    short, the run goes on from this checkpoint or a later one."""
    later = _later(root_of(folder), checkpoint)
    other = [path for name in _BESIDE for path in _later(folder / name, checkpoint)]
    aside = later_folder(folder, checkpoint)
    part = aside.with_name(f".{aside.name}.part")  # until all is in it: one that was cut short is gone on with
    if not later and not other and not part.exists():
        return ""
    copied = [folder / name for name in _COPIED if (folder / name).is_file()]
    moved = {path: part / path.parent.name for path in [*other, *later]}
    before = ""
    if any((place / path.name).exists() for path, place in moved.items()) or not _begin(part, copied):
        # the run has gone on since: these are of steps that it has taken again
        apart = next(filter(_is_free, (aside.with_name(f"{aside.name}{more}") for more in islice(_endings(), 1, None))))
        part.rename(apart)
        before = f"; what an earlier start had moved when it was cut short lies in {apart}"
    part.mkdir(exist_ok=True)
    for path in copied:
        shutil.copy2(path, part / path.name)
    for path, place in moved.items():
        _move(path, place, aside.name)
    part.rename(aside)
    names = ", ".join(path.name for path in reversed(later)) or "samples, plans or LoRA files"
    steps = counted(steps_of(checkpoint), "step")
    return f"the run goes back to {steps}: what came later ({names}) lies in {aside}, with its metrics so far{before}"


def _begin(part: Path, copied: Sequence[Path]) -> bool:
    """Whether the files are those of which `part` has copies, or such as have grown since, or the copies are torn."""
    return all(_begins(part / path.name, path) for path in copied if (part / path.name).is_file())


def _begins(copy: Path, path: Path) -> bool:
    with copy.open("rb") as begin, path.open("rb") as whole:
        while read := begin.read(_READ_BYTES):
            if whole.read(len(read)) != read:
                return False
    return True


def _move(path: Path, place: Path, aside: str) -> None:
    """Into the folder `place` of the run. What is on another file system, as its folder is a link, stays there, for
    checkpoints may be hundreds of GB: it goes into a folder `aside` beside it, to which `place` becomes a link."""
    place.mkdir(exist_ok=True)
    try:
        path.rename(place / path.name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        there = next(filter(_is_free, (path.parent.resolve() / f"{aside}{more}" for more in _endings())))
        there.mkdir(exist_ok=True)
        place.rmdir()
        place.symlink_to(there)
        path.rename(place / path.name)


def _endings() -> Iterator[str]:
    """Endings to try until a name is free: some are taken where the run went back to this checkpoint before."""
    yield ""
    yield from (f"-{number}" for number in itertools.count(2))


def _is_free(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


def _later(folder: Path, checkpoint: Path) -> list[Path]:
    """What in it is named after a later step than the checkpoint, the latest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.match(path.name))]
    return [path for step, path in sorted(found, reverse=True) if step > step_of(checkpoint)]
