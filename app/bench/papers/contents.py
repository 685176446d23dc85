"""`heddle bench papers`: every table and figure of the four papers that can be had here, beside what was published.

    heddle bench papers                                    # all of it, some minutes; papers.html and papers.md
    heddle bench papers --paper arachne --figure fig8-right --quick

What the papers print are data files in configs/bench/papers/; how Heddle comes to its own number is one function per
figure, in the file of the paper. A figure without one says in its data file what is missing.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from app.bench.page import facts_of, number_of
from app.bench.papers.figure import PublishedFigure, PublishedPaper, Reproduce, ShownFigure
from app.bench.papers.figure import papers as published
from app.bench.papers.page import html, markdown, ratio_of
from app.settings.out_files import check_writable


def known_ids() -> str:
    """What --figure takes, by paper."""
    return "; ".join(f"of {name} {', '.join(one.id for one in paper.figures)}" for name, paper in published().items())


def run(
    paper: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(published())}; all of them unless given.")
    ] = None,
    figure: Annotated[str | None, typer.Option(help=f"One table or figure of the paper: {known_ids()}.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps and smaller budgets.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for papers.html and papers.md.")] = Path("runs/papers"),
) -> None:
    """Make the figures, print a line for each number, and write the page."""
    chosen = choose(published(), paper, figure)
    pages = out / "papers.html", out / "papers.md"
    check_writable(pages)
    shown = []
    for one in chosen:
        known = reproductions(one)
        for entry in one.figures:
            shown.append(show(one.name, entry, known.get(entry.id), quick))
            print(summary(shown[-1]), flush=True)
    facts = facts_of("quick" if quick else "")
    for page, draw in zip(pages, (html, markdown), strict=True):
        page.write_text(draw(chosen, shown, facts), encoding="utf-8")
    print(*pages, sep="  ")


def choose(known: Mapping[str, PublishedPaper], paper: str | None, figure: str | None) -> list[PublishedPaper]:
    """Raises BadParameter for a name that is none."""
    if paper is not None and paper not in known:
        raise typer.BadParameter(f"{paper!r} is none of {', '.join(known)}.", param_hint="--paper")
    chosen = [one for name, one in known.items() if paper in (None, name)]
    if figure is None:
        return chosen
    if paper is None:
        raise typer.BadParameter(f"{figure!r} may be in several papers. Give --paper as well.", param_hint="--figure")
    ids = [entry.id for entry in chosen[0].figures]
    if figure not in ids:
        raise typer.BadParameter(f"{paper} has no {figure!r}; it has {', '.join(ids)}.", param_hint="--figure")
    return [replace(chosen[0], figures=tuple(entry for entry in chosen[0].figures if entry.id == figure))]


def reproductions(paper: PublishedPaper) -> Mapping[str, Reproduce]:
    """The functions of a paper, by the id of its figure."""
    found: Mapping[str, Reproduce] = importlib.import_module(f"app.bench.papers.{paper.name}").FIGURES
    return found


def show(paper: str, figure: PublishedFigure, reproduce: Reproduce | None, quick: bool) -> ShownFigure:
    started = time.perf_counter()
    found = reproduce(quick) if reproduce is not None else None
    return ShownFigure(paper=paper, figure=figure, found=found, seconds=time.perf_counter() - started, quick=quick)


def summary(shown: ShownFigure) -> str:
    """A line per number."""
    head = f"{shown.paper} {shown.figure.id}: {shown.figure.title}"
    if shown.found is None:
        return f"{head}: not run here. {shown.figure.open}"
    lines = [
        f"    {label}: published {number_of(theirs)}, ours {number_of(ours)}, ratio {ratio_of(theirs, ours)}"
        for label, theirs, ours in shown.rows()
    ]
    return "\n".join([f"{head} ({shown.found.way}, {shown.units})", *lines])
