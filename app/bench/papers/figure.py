"""What a paper prints of a table or figure, and what came out here: the words of `heddle bench papers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from app.bench.page import command_of
from ops.code_path import ROOT
from ops.typed import ConfigError

HOME = ROOT / "configs" / "bench" / "papers"
# How a figure came about here: planned and timed by a model; run on this machine's processors; run on its GPU.
Way = Literal["simulation", "this machine's CPU", "GPU"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFigure:
    """One table or figure of a paper, from its data file."""

    id: str
    title: str
    source: str
    unit: str
    published: Mapping[str, float]
    units: Mapping[str, str] = field(default_factory=dict)  # of labels whose unit is another; drawn apart
    better: Literal["less", "more", ""] = ""  # empty: not to be judged, as input or measure differ
    headline: str = ""  # the label that the overview shows; the first that both sides have, unless given
    open: str = ""  # why there is nothing of ours beside it, and what would make it

    def unit_of(self, label: str) -> str:
        return self.units.get(label, self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPaper:
    """A paper, from its data file."""

    name: str
    paper: str
    figures: tuple[PublishedFigure, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """What came out here. `ours` has the labels of `published` where both have a value, and may have others."""

    way: Way
    ours: Mapping[str, float]
    note: str = ""
    series: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)  # a curve: xs, ys
    x_name: str = ""


Row = tuple[str, float | None, float | None]  # label, published, ours
Reproduce = Callable[[bool], Reproduction | None]  # of `quick`: fewer steps; None: this machine cannot (see `open`)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownFigure:
    """A figure of the page."""

    paper: str
    figure: PublishedFigure
    found: Reproduction | None
    seconds: float = 0.0
    quick: bool = False

    @property
    def command(self) -> str:
        """The command line that makes the figure as it stands here."""
        return command_of("papers", [("--paper", self.paper), ("--figure", self.figure.id), ("--quick", self.quick)])

    def rows(self) -> list[Row]:
        """(label, published, ours), in the order of the paper, then what only we have."""
        published, ours = self.figure.published, self.found.ours if self.found else {}
        labels = [*published, *(label for label in ours if label not in published)]
        return [(label, published.get(label), ours.get(label)) for label in labels]

    def rows_by_unit(self) -> dict[str, list[Row]]:
        """The rows that may stand on one scale together, by their unit."""
        found: dict[str, list[Row]] = {}
        for row in self.rows():
            found.setdefault(self.figure.unit_of(row[0]), []).append(row)
        return found

    @property
    def units(self) -> str:
        return ", ".join(self.rows_by_unit() or [self.figure.unit])

    def headline(self) -> tuple[str, float, float] | None:
        """(label, published, ours) of the row that stands for the figure; None where no row has both."""
        both = [(label, theirs, ours) for label, theirs, ours in self.rows() if theirs is not None and ours is not None]
        return next((row for row in both if row[0] == self.figure.headline), both[0] if both else None)


def read_paper(path: Path) -> PublishedPaper:
    """Raises ConfigError for a file that is not a data file of a paper."""
    try:
        # YAML: the constructors refuse other keys, and values are checked below
        tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        figures = tuple(PublishedFigure(**figure) for figure in tree["figures"])
        for label, value in (pair for figure in figures for pair in figure.published.items()):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{label!r} is published as {value!r}, not a number; quote labels with commas")
        if lost := [
            figure.headline for figure in figures if figure.headline and figure.headline not in figure.published
        ]:
            raise TypeError(f"the headline {lost[0]!r} is not among the published values")
        if lost := [label for figure in figures for label in figure.units if label not in figure.published]:
            raise TypeError(f"{lost[0]!r} has a unit and no published value")
        return PublishedPaper(name=path.stem, paper=tree["paper"], figures=figures)
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a data file of a paper ({error}); configs/bench/papers/ has examples."
        ) from None


def papers() -> dict[str, PublishedPaper]:
    """The papers by name."""
    return {path.stem: read_paper(path) for path in sorted(HOME.glob("*.yaml"))}
