"""Pages of benchmarks: pictures first, the command beneath each, then numbers. One HTML file, no external assets."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from app.drawing.style import CSS
from app.drawing.svg import BarRow, bars
from ops.code_path import ROOT
from ops.environment import commit_of

LOOK = """
.way { display: inline-block; border: 1px solid var(--rule); border-radius: 999px; padding: 0 10px; font-size: 12.5px;
  color: var(--soft); margin-left: 8px; }
.way.none { color: var(--bad); }
svg rect.theirs { fill: var(--soft); fill-opacity: .45; } svg rect.ours { fill: var(--accent); }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; margin: 10px 0; }
"""
GREY, BLUE = "var(--soft);opacity:.45", "var(--accent)"  # of `theirs` and `ours`


def document(title: str, facts: str, lead: str, parts: Sequence[str]) -> str:
    """`facts`: where and when it was made, plain text; `lead` and `parts` are HTML."""
    head = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{CSS}{LOOK}</style><main>",
        f"<h1>{escape(title)}</h1>",
        f"<p class=soft>{escape(facts)}</p>",
        f"<p>{lead}</p>",
    ]
    return "\n".join([*head, *parts, "</main></html>\n"])


def section(
    title: str, pictures: Sequence[tuple[str, str]], command: str, numbers: str = "", notes: Sequence[str] = ()
) -> str:
    """`pictures` are (words above it, HTML), `numbers` is HTML, the others are plain text."""
    parts = [f"<section><h2>{escape(title)}</h2>"]
    for words, picture in pictures:
        parts += [f"<h3>{escape(words)}</h3>"] if words else []
        parts.append(picture)
    parts.append(f"<code class=command>{escape(command)}</code>")
    parts += [numbers, *(f"<p class=soft>{escape(note)}</p>" for note in notes)]
    return "\n".join([*parts, "</section>"])


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """The figures to read first: (number, what it is)."""
    shown = "".join(f"<div class=figure><b>{escape(n)}</b><span>{escape(what)}</span></div>" for n, what in figures)
    return f"<div class=figures>{shown}</div>"


def single_bars(rows: Iterable[tuple[str, str, float, str]]) -> str:
    """Rows of one bar: (label, `theirs` or `ours`, value, text)."""
    return bars([BarRow(label=label, bars=[(css, value, text)]) for label, css, value, text in rows])


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Entries are (CSS colour, words); without a colour only the words are shown."""
    swatches = [f"<i style='background:{colour}'></i>" if colour else "" for colour, _ in entries]
    shown = [f"<span>{swatch}{escape(words)}</span>" for swatch, (_, words) in zip(swatches, entries, strict=True)]
    return f"<div class=legend>{''.join(shown)}</div>"


def folded(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of numbers that opens at a click; the first column has words."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<details><summary>numbers</summary><div class=wide><table><tr>{top}</tr>{body}</table></div></details>"


def number_of(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def command_of(name: str, options: Sequence[tuple[str, object]]) -> str:
    """The command line of a benchmark: of each option its value, a list once for each, a flag alone where it is set."""
    words = ["heddle", "bench", name]
    for option, value in options:
        if isinstance(value, bool):
            words += [option] if value else []
        elif value is not None:
            words += [word for one in (value if isinstance(value, list) else [value]) for word in (option, str(one))]
    return shlex.join(words)


def facts_of(note: str = "") -> str:
    """The machine, the commit and the day of a page, and a note where there is one."""
    commit = commit_of(ROOT)[:8]
    named = f"commit {commit}" if commit else "not in a repository"
    facts = (f"{os.cpu_count()} cores, {platform.machine()}", named, f"{datetime.now(UTC):%Y-%m-%d}", note)
    return "; ".join(filter(None, facts))
