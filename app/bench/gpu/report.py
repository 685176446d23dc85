"""report.md: the rows for docs/results.md, then every figure, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch

from app.bench.gpu.catalogue import catalogue
from app.bench.gpu.lines import ResultLine
from app.bench.gpu.measurement import Figure, Place
from app.bench.gpu.targets import judged
from app.bench.gpu.timeline import FOLDER, PREFIX
from app.bench.markdown import markdown_table


def report(lines: Sequence[ResultLine], skipped: Sequence[str]) -> str:
    """The report as Markdown. `skipped` are names for which the budget had no time."""
    parts = [*_heading(lines), "", *_targets(lines), *_timelines(lines), "", *_figures(lines)]
    failed = [f"{line.name}: {line.error}" for line in lines if line.error]
    left_out = [f"{line.name}: {line.left_out}" for line in lines if line.left_out]
    for title, rows in (("Failed", failed), ("Left out", left_out), ("No time for", skipped)):
        if rows:
            parts += ["", f"## {title}", "", *(f"- {row}" for row in rows)]
    return "\n".join(parts) + "\n"


def _heading(lines: Sequence[ResultLine]) -> list[str]:
    if not lines:
        return ["# Figures of one device", "", "Nothing was measured."]
    in_time = sorted(lines, key=lambda line: line.at)
    facts = in_time[-1].facts
    commits = sorted({line.facts.commit or "no git" for line in lines})
    kind = ["", "**A rehearsal**: small shapes on the CPU. It shows that the programme runs; no figure means anything."]
    return [
        f"# Figures of {facts.device}",
        "",
        f"{facts.versions}, Python {facts.python}; commit {', '.join(commits)}; `{facts.command}`; {in_time[0].at} to "
        f"{in_time[-1].at}.",
        *_older(lines, facts.versions),
        *(kind if facts.rehearsal else []),
    ]


def _older(lines: Sequence[ResultLine], newest: str) -> list[str]:
    """Which figures are not of the newest versions: the same command measures them again as it has time."""
    older = sorted({line.facts.versions for line in lines} - {newest})
    names = {one: ", ".join(line.name for line in lines if line.facts.versions == one) for one in older}
    return [text for one in older for text in ("", f"Still by {one}: {names[one]}.")]


def _targets(lines: Sequence[ResultLine]) -> list[str]:
    rows = []
    for target, found in judged(lines):
        if found is None:
            rows.append((target.what, target.wanted(), "-", "open", ""))
            continue
        wanted = {name for name in _names(lines[0].facts.rehearsal) if target.of_all(name)}
        measured = wanted & {line.name for line in lines if not line.left_out}
        open_still = wanted - {line.name for line in lines}
        answer = "**no**" if not target.met(found) else "open" if open_still else "yes"
        where = f"{found.where}; {len(measured)} of {len(wanted)}" if wanted else found.where
        rows.append((target.what, target.wanted(), f"{found.value:{target.form}}", answer, where))
    return ["## Targets", "", markdown_table(("figure", "target", "measured", "met", "by"), rows)]


@cache
def _names(rehearsal: bool) -> list[str]:
    """The names of all measurements."""
    return [one.name for one in catalogue(Place(device=torch.device("cpu"), rehearse=rehearsal))]


def _timelines(lines: Iterable[ResultLine]) -> list[str]:
    """What streams did beside each other, a picture per measurement that was profiled."""
    found = {line.name: [str(v) for name, v in line.figures.items() if name.startswith(PREFIX)] for line in lines}
    parts = [part for name, rows in found.items() if rows for part in ("", f"{name}:", "", "```", *rows, "```")]
    if not parts:
        return []
    told = f"A cell is a sixtieth of the time: `.` idle, `-` busy in part, `#` busy. Whole traces are in {FOLDER}/."
    return ["", "## Timelines", "", told, *parts]


def _figures(lines: Iterable[ResultLine]) -> list[str]:
    rows = [
        (line.name, name, cell(value))
        for line in lines
        for name, value in line.figures.items()
        if not name.startswith(PREFIX)
    ]
    return ["## Every figure", "", markdown_table(("measurement", "figure", "value"), rows)]


def cell(value: Figure) -> str:
    """A figure in a cell: four digits, `yes` and `no`, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
