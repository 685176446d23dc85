"""What a tracker is: one place besides a run's files where its curves, and maybe its samples, are seen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.records.events import RunEvent

Scalars = Iterable[tuple[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFiles:
    """The samples of a checkpoint: a clip for each prompt, and a picture of all."""

    clips: tuple[Path, ...]
    prompts: tuple[str, ...]
    sheet: Path

    @classmethod
    def of(cls, folder: Path, names: Sequence[str]) -> SampleFiles:
        """The files that an event of the run in this folder names: the sheet is the last, its prompts lie beside it."""
        *clips, sheet = (folder / name for name in names)
        prompts = json.loads(sheet.with_suffix(".json").read_text(encoding="utf-8"))
        return cls(clips=tuple(clips), prompts=tuple(map(str, prompts)), sheet=sheet)


class Tracker:
    """One place for curves, and for samples where it takes files. Steps come in order; after `forget` from an
    earlier one again. Figures of a checkpoint, and its samples, come late, with its step. What a place does not take is
    not overridden."""

    quiet = ""  # why nobody sees it where it is usually seen; "": it is seen

    def log(self, step: int, time: float, scalars: Scalars) -> None:
        """`time` is in unix seconds."""

    def show(self, step: int, time: float, samples: SampleFiles) -> None:
        """These were made from a checkpoint."""

    def alert(self, event: RunEvent) -> None:
        """Somebody should look at this (`app.records.alerts`)."""

    def forget(self, step: int) -> None:
        """This step and later ones are computed again."""

    def end(self, code: int) -> None:
        """The run has ended with this exit code; `close` comes next."""

    def close(self) -> None:
        """Nothing comes any more."""
