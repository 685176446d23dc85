"""A run's checkpoints as storage gives them: which is the newest whole one, what is wrong with others, and which it
does not give now."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from actors.outcome import Tell
from actors.records.events import CheckpointDamaged, CheckpointPassedOver
from actors.state.checkpoint_files import (
    COMPLETE,
    LaterFormat,
    Meta,
    damage,
    is_complete,
    load,
    put_aside,
    root_of,
    step_folder,
    step_folders,
    step_of,
)
from ops.passing import UNREACHABLE

log = logging.getLogger(__name__)

T = TypeVar("T")

_STORAGE_S = 60.0  # for storage to answer again, before what it does not give counts as lost
_AGAIN_S = 1.0  # until it is asked again
_LATER = "it is later than the newest line of metrics"


class CheckpointsOnDisk:
    """The checkpoints of one run. The bytes of each are read once. Why one is passed over is said once, and once more
    when it is moved aside."""

    def __init__(self, run_dir: Path, tell: Tell) -> None:
        self._root, self._tell = root_of(run_dir), tell
        self._verdicts: dict[tuple[Path, int], str] = {}  # of checkpoints that were read: what is wrong with each
        # Checkpoints that storage has not given for long, and why; those of them of which it has not given the bytes.
        self._withheld: dict[Path, OSError] = {}
        self._unread: set[Path] = set()
        # The run goes on without those of later steps, but for its own: the ones that it has written since, or writes.
        self._goes_on_after = math.inf
        self._own: set[int] = set()
        # Of these steps an old one could not be moved. They are written anew, whatever is there, and there is none of
        # them until the writer, which has this set too, has taken them out of it.
        self.unmoved: set[int] = set()
        # Steps of all that lay there at the last listing; None: it failed. Of others storage is asked nothing when they
        # are written: the controller would hang with it.
        self._there: set[int] | None = None

    @property
    def withheld(self) -> OSError | None:
        """What kept storage from giving one of them, at the last look."""
        return next(iter(self._withheld.values()), None)

    def newest(self, until: float = math.inf) -> tuple[int, Path] | None:
        """The newest complete checkpoint up to this step that has not been found damaged; older ones are not asked for.
        Raises what keeps storage from saying which there are, and LaterFormat where a later version has written it. One
        whose bytes storage has not given is read here."""
        deadline = time.monotonic() + _STORAGE_S
        there = self._look(deadline)
        folders = [
            folder
            for folder in there
            if not self._goes_on_without(step_of(folder)) and step_of(folder) not in self.unmoved
        ]
        self._withheld = {folder: why for folder, why in self._withheld.items() if folder in folders}
        self._unread &= self._withheld.keys()
        for folder in reversed(folders):
            usable = step_of(folder) <= until and not self._verdicts.get(_stamp(folder))
            if usable and self._is_whole(folder, deadline):
                return step_of(folder), folder
        return None

    def newest_step(self, until: float = math.inf) -> int:
        """The step of the newest complete checkpoint up to this step; -1 without one, or while storage does not say."""
        try:
            found = self.newest(until)
        except (OSError, LaterFormat) as error:
            log.warning("which checkpoints are on disk is not known: %s", error)
            return -1
        return found[0] if found is not None else -1

    def is_damaged(self, folder: Path) -> bool:
        """Reads it, once per checkpoint. One whose bytes storage does not give for long is passed over as well, until
        they are there again: it may be all that the run has."""
        try:
            return bool(_answer(lambda: self._what_is_wrong(folder)))
        except OSError as error:
            self._pass_over(folder, error)
            self._unread.add(folder)
            return True

    def meta(self, folder: Path) -> Meta:
        """What a whole checkpoint says about itself. Raises what keeps storage from giving it."""
        return _answer(lambda: load(folder))[0]

    def tell_passed_over(self, newest: int) -> None:
        """Says why checkpoints after step `newest` are not used."""
        deadline = time.monotonic() + _STORAGE_S
        for folder in _answer(lambda: step_folders(self._root), deadline):
            if step_of(folder) <= newest or self._verdicts.get(_stamp(folder)):
                continue
            try:
                why = _LATER if self._is_whole(folder, deadline) else "it is not complete"
            except LaterFormat as error:
                why = str(error)
            if folder not in self._withheld:
                log.warning("%s is passed over: %s", folder, why)
                self._tell(CheckpointPassedOver(folder=folder.name, why=why))

    def go_back(self, step: int, writing: Collection[int] = ()) -> None:
        """The run goes on after this step: whole checkpoints of later steps, but for those that are being written, are
        moved aside, as soon as storage gives them. When the run comes to such a step it would else take the old one for
        its own."""
        self._goes_on_after = min(self._goes_on_after, step)
        given_up = self.unmoved.difference(writing)
        self.unmoved.difference_update(given_up)  # the writer has the same one
        self._own = {own for own in self._own - given_up if own <= step}.union(writing)
        try:
            self._look(deadline=-math.inf)
        except OSError as error:
            log.warning("which checkpoints are on disk is not known: %s", error)

    def make_way(self, step: int) -> None:
        """A checkpoint of this step is about to be written: what lies there afterwards is the run's own. What storage
        does not give is moved unseen: it may be whole, and would be taken for what was to be written. Where it cannot
        be moved now, whoever writes the step does so."""
        if self._goes_on_without(step):
            may_lie_there = self._there is None or step in self._there
            if may_lie_there and not self._move_aside([step_folder(self._root, step)], unseen=True):
                self.unmoved.add(step)
            self._own.add(step)

    def disown(self, step: int) -> None:
        """An attempt to write this step has failed. An old one that could not be moved before lies there still, and is
        moved by the next look: this set of them ends with this process, and the next one would take it for the run's
        own. Asks storage nothing, which may hang."""
        if step in self.unmoved:
            self.unmoved.remove(step)
            self._own.discard(step)

    def _look(self, deadline: float) -> list[Path]:
        """All that are there, once those that the run goes on without are moved. Raises what keeps storage from saying
        it until then."""
        self._there = None
        there = _answer(lambda: step_folders(self._root), deadline)
        self._there = {step_of(folder) for folder in there}
        self._move_aside(there)
        return there

    def _goes_on_without(self, step: int) -> bool:
        return step > self._goes_on_after and step not in self._own

    def _move_aside(self, folders: Sequence[Path], unseen: bool = False) -> bool:
        """Moves those of them that the run goes on without, as far as storage gives them now. Damaged and incomplete
        ones stay: they count as none. Returns whether storage gave all of them."""
        given = True
        for folder in folders:
            if not self._goes_on_without(step_of(folder)):
                continue
            try:
                if self._may_count(folder, unseen):
                    aside = put_aside(folder)
                    why = f"the run goes on from an earlier one; it lies in {aside.name} now"
                    log.warning("%s is passed over: %s", folder, why)
                    self._tell(CheckpointPassedOver(folder=folder.name, why=why))
            except OSError as error:
                given = False
                log.info("%s is not moved aside yet: %s", folder, error)
        return given

    def _may_count(self, folder: Path, unseen: bool) -> bool:
        """Whether a checkpoint is whole, as far as is known; `unseen`: True also where storage does not say."""
        try:
            return is_complete(folder) and not self._verdicts.get(_stamp(folder))
        except LaterFormat:
            return True
        except OSError:
            if not unseen:
                raise
            return True

    def _is_whole(self, folder: Path, deadline: float) -> bool:
        """Whether a checkpoint is complete. One that storage does not give until `deadline` is passed over, and asked
        for once by each later call, until it is there again."""

        def ask() -> bool:
            return is_complete(folder) and not (folder in self._unread and self._what_is_wrong(folder))

        try:
            whole = _answer(ask, -math.inf if folder in self._withheld else deadline)
        except OSError as error:
            self._pass_over(folder, error)
            return False
        self._withheld.pop(folder, None)
        self._unread.discard(folder)
        return whole

    def _pass_over(self, folder: Path, error: OSError) -> None:
        if folder not in self._withheld:
            log.warning("%s is passed over: %s", folder, error)
            self._tell(CheckpointPassedOver(folder=folder.name, why=f"storage does not give it: {error}"))
        self._withheld[folder] = error

    def _what_is_wrong(self, folder: Path) -> str:
        """What is wrong with the bytes of a complete checkpoint, or "". Raises what keeps storage from giving them."""
        if (stamp := _stamp(folder)) not in self._verdicts:
            self._verdicts[stamp] = why = damage(folder)
            if why:
                log.warning("%s is passed over: %s", folder, why)
                self._tell(CheckpointDamaged(folder=folder.name, why=why))
        return self._verdicts[stamp]


def _answer(question: Callable[[], T], deadline: float | None = None) -> T:
    """What storage says, which may not answer for a moment. Raises what keeps it from that after `deadline` (monotonic
    seconds; None: in a minute)."""
    deadline = time.monotonic() + _STORAGE_S if deadline is None else deadline
    while True:
        try:
            return question()
        except OSError as error:
            if error.errno not in UNREACHABLE or time.monotonic() > deadline:
                raise
            log.warning("checkpoints are looked at once more: %s", error)
            time.sleep(_AGAIN_S)


def _stamp(folder: Path) -> tuple[Path, int]:
    """A key of a checkpoint that changes when it is written again."""
    try:
        return folder, (folder / COMPLETE).stat().st_mtime_ns
    except OSError:
        return folder, 0
