"""Rounds of work beside a run (`app.run.asides`): what its workers make of one checkpoint after the other."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from actors.aside_turns import AsideWork

log = logging.getLogger(__name__)

Work = TypeVar("Work", bound=AsideWork)
Made = TypeVar("Made")


@dataclass(kw_only=True)
class CheckpointRound(Generic[Work, Made]):
    """The works of one checkpoint on their way."""

    step: int  # -1: of the first weights
    held_at: Path  # links to the checkpoint's files; the first weights have none
    works: Mapping[str, Work]  # by name
    made: dict[str, Made] = field(default_factory=dict)
    since: float = 0.0  # monotonic; when the checkpoint was whole, or workers could begin with the first weights

    @property
    def is_made(self) -> bool:
        return len(self.made) == len(self.works)

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.since, 3)

    def let_go(self) -> None:
        shutil.rmtree(self.held_at, ignore_errors=True)


class CheckpointRounds(Generic[Work, Made]):
    """One round at a time, while at most one waits, that of the newest checkpoint."""

    def __init__(self) -> None:
        self.now: CheckpointRound[Work, Made] | None = None
        self.next: CheckpointRound[Work, Made] | None = None
        self.dropped: Collection[str] = ()  # works of the last round that has ended: none is wanted any more
        self._wanted: list[Work] = []

    def put(self, due: CheckpointRound[Work, Made]) -> CheckpointRound[Work, Made] | None:
        """The round begins, or waits. Returns the one that waited until now, which is dropped for it."""
        due.since = time.monotonic()
        late, self.next = self.next, due
        if late is not None:
            late.let_go()
        if self.now is None:
            self.begin_next()
        return late

    def wanted(self) -> list[Work]:
        """Works of the round that has begun since the last call."""
        found, self._wanted = self._wanted, []
        if found and self.now is not None and self.now.step < 0:
            self.now.since = time.monotonic()  # no checkpoint was awaited; Ray and the workers were starting
        return found

    def of(self, work: str) -> CheckpointRound[Work, Made] | None:
        """The round of now, where this is one of its works, and is not made."""
        now = self.now
        return now if now is not None and work in now.works and work not in now.made else None

    def begin_next(self) -> None:
        """The round of now has ended."""
        if self.now is not None:
            self.now.let_go()
            self.dropped = frozenset(self.now.works)
        self.now, self.next = self.next, None
        self._wanted = list(self.now.works.values()) if self.now is not None else []

    def end(self) -> list[CheckpointRound[Work, Made]]:
        """Nothing is wanted any more. Returns the rounds that have not ended."""
        left = [one for one in (self.now, self.next) if one is not None]
        for one in left:
            one.let_go()
        self.next = None
        self.begin_next()
        return left


def held_checkpoint(checkpoint: Path, at: Path) -> Path:
    """Links to the files of a checkpoint, `at` a place where nothing is, which stay when the run removes it before the
    last aside has read it; the checkpoint itself where the file system has no links."""
    try:
        files = list(checkpoint.iterdir())
        at.mkdir(parents=True)
        for file in files:
            os.link(file, at / file.name)
    except OSError as error:
        log.info("%s is read where it is: %s", checkpoint.name, error)
        shutil.rmtree(at, ignore_errors=True)
        return checkpoint
    return at
