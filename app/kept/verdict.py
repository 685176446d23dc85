"""That a cache had every entry a run asks for, kept beside the entries: of ten million clips to find that out takes
hours and every caption, and each start and resume of the run would again.

    verdict = WholeVerdict.of(root, key, listed)     # `key` of what is asked for, and what is there now
    verdict.told() or ...                       # "" where nobody has found that for these
    verdict.keep("cache     has all of ...")

An entry that vanishes between a look and a draw is a bad draw (`ItemCache.results`), with a verdict as without.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data.cache import Listing
from ops.environment import digest_of_program
from ops.whole_file import write_whole

log = logging.getLogger(__name__)

_FOLDER = "whole"
_LOOKS = ("data", "actors/feed", "app/kept")  # whose files say which entries are asked for, and whether one is there


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeVerdict:
    """Whether somebody has found all of these entries. Whoever has it found by another version, also by one between two
    releases, looks again."""

    path: Path  # of the last one on a run that asks for the same
    there: list[str]  # what holds as long as it is equal

    @classmethod
    def of(cls, root: Path, key: str, listed: Iterable[Listing]) -> WholeVerdict:
        return cls(
            path=root / _FOLDER / f"{key}.json",
            there=[digest_of_program(folders=_LOOKS), *(one.digest() for one in listed)],
        )

    def told(self) -> str:
        """What was kept; "" where that is of other entries, or cannot be read."""
        try:
            kept = json.loads(self.path.read_bytes())
            return str(kept["told"]) if kept["there"] == self.there else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def keep(self, told: str) -> None:
        """Where the folder takes it: else the next start looks again."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({"there": self.there, "told": told}))
        except OSError as error:
            log.warning("that the cache is whole cannot be kept there (%s): the next start looks at every clip", error)
