"""Which checkpoints of a run stay on its storage, and the removal of others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from actors.state import checkpoint_files as checkpoint

log = logging.getLogger(__name__)


def prune(
    root: Path,
    keep_last: int,
    keep_every: int = 0,
    until: int | None = None,
    writing: Collection[int] = (),
    known: dict[Path, int] | None = None,
) -> list[Path]:
    """Remove old checkpoints; returns what was removed.

    Kept are the `keep_last` newest complete ones (0: all of them), the first complete one at or after each multiple of
    `keep_every` steps, those of steps in `writing`, and whatever is newer than the newest complete one (it may be in
    the making). Those after step `until` count as none, and stay: a run that passed them over because they are damaged
    would else lose the one that it has just written. What the storage does not let go now, or says nothing about, goes
    next time. Those of later versions stay.

    Sizes of files are asked for only where a checkpoint is kept in the place of others: of the `keep_last` newest, and
    of those that stand for the same multiple. Elsewhere COMPLETE is enough: an old one is removed whether it is whole
    or not, and one that alone stands for its multiple takes nothing but room if it is torn.

    `known` are those that an earlier call has seen whole (with `keep_last` 0: that have COMPLETE), and when COMPLETE
    was written; this one adds its own, and takes out what is gone. Their files are not asked for again: of thousands of
    checkpoints that are kept there are 100,000 and more.
    """
    known = {} if known is None else known
    try:
        there = checkpoint.step_folders(root)
    except OSError as error:
        log.warning("no old checkpoint is removed now: %s", error)
        return []
    for gone in known.keys() - set(there):
        del known[gone]
    look = _Asking(known)
    if not keep_last:
        keep = [folder for folder in _until(there, until) if look.is_marked(folder, again=False)]
        newest = keep[-1:]
    else:
        marked = [folder for folder in _until(there, until) if look.is_marked(folder)]
        newest = list(islice(filter(look.is_whole, reversed(marked)), keep_last))
        keep = [*newest, *_milestones(marked, keep_every, look.is_whole)]
    if not newest:
        return []
    kept = look.withheld.union(keep) | {folder for folder in there if checkpoint.step_of(folder) in writing}
    old = [folder for folder in _until(there, checkpoint.step_of(newest[0])) if folder not in kept]
    return [folder for folder in old if not checkpoint.may_be_later(folder) and _try_to_remove(folder)]


def _until(folders: Sequence[Path], step: int | None) -> list[Path]:
    return [folder for folder in folders if step is None or checkpoint.step_of(folder) <= step]


class _Asking:
    """What a call of `prune` asks of each checkpoint, once. What storage says nothing about is none, and `withheld`."""

    def __init__(self, known: dict[Path, int]) -> None:
        self._known, self._marked_at = known, dict[Path, int]()
        self.withheld: set[Path] = set()

    def is_marked(self, folder: Path, again: bool = True) -> bool:
        """Whether it has COMPLETE. With `again` False a known one is not asked, and one that has it becomes known."""
        if not again and folder in self._known:
            return True
        try:
            self._marked_at[folder] = (folder / checkpoint.COMPLETE).stat().st_mtime_ns
        except OSError as error:
            self._known.pop(folder, None)
            self._withhold(folder, error)
            return False
        if not again:
            self._known[folder] = self._marked_at[folder]
        return True

    def is_whole(self, folder: Path) -> bool:
        """`is_complete` of one that is marked, whose answer stays until COMPLETE is another one."""
        if self._known.get(folder) == self._marked_at[folder]:
            return True
        self._known.pop(folder, None)
        try:
            found = folder not in self.withheld and checkpoint.is_complete(folder)
        except (OSError, checkpoint.LaterFormat) as error:
            self._withhold(folder, error)
            return False
        if found:
            self._known[folder] = self._marked_at[folder]
        return found

    def _withhold(self, folder: Path, error: OSError | checkpoint.LaterFormat) -> None:
        if checkpoint.may_pass(error):
            log.warning("%s is not removed now: %s", folder, error)
            self.withheld.add(folder)


def stands_for_multiple(step: int, every: int, before: int | None) -> bool:
    """Whether the checkpoint of `step` is the first at or after a multiple of `every` steps: where storage is slower
    than checkpoints are due, that of the multiple itself was put off. `before` is the step of the checkpoint that was
    taken before it, -1 if it is the first; None: not known. A run that goes back takes some again: then `before` is no
    earlier one, and those of multiples alone stand for them."""
    steps = step + 1
    if steps % every == 0:
        return True
    return before is not None and steps // every > (before + 1) // every


def _milestones(folders: Sequence[Path], every: int, is_whole: Callable[[Path], bool]) -> set[Path]:
    """The first whole one of them, which are in order, at or after each multiple of `every` steps; none for 0. Where
    there is one alone, it is not asked."""
    standing: dict[int, list[Path]] = {}
    for folder in folders if every else ():
        standing.setdefault((checkpoint.step_of(folder) + 1) // every, []).append(folder)
    standing.pop(0, None)
    found = (next(filter(is_whole, some), None) if len(some) > 1 else some[0] for some in standing.values())
    return {folder for folder in found if folder is not None}


def remove_torn(folder: Path) -> None:
    """Remove what an attempt that has failed has left. A complete checkpoint stays."""
    with suppress(OSError, checkpoint.LaterFormat):  # storage does not say whether it is one
        if folder.exists() and not checkpoint.is_complete(folder):
            _try_to_remove(folder)


def _try_to_remove(folder: Path) -> bool:
    try:
        checkpoint.remove(folder)
    except OSError as error:  # a file that somebody on NFS still reads, for one
        log.warning("%s could not be removed: %s", folder, error)
        return False
    return True
