"""One name for one thing: no class name is defined in two files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("ops", "data", "actors", "app")
TWICE: set[str] = set()  # names that may stand in two files, each with its reason


def test_no_class_name_is_defined_in_two_files() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in (p for layer in LAYERS for p in (ROOT / layer).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(str(path.relative_to(ROOT)))
    doubled = {name: sorted(files) for name, files in homes.items() if len(files) > 1 and name not in TWICE}
    assert not doubled, f"name one of each by what it is for: {doubled}"
    assert all(len(homes[name]) > 1 for name in TWICE), "a name in TWICE stands in one file only: take it out"
