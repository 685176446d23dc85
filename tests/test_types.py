"""`Any` in annotations: how many lines have it in each layer, and that each says why."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST = {"ops": 38, "data": 6, "actors": 14, "app": 23}  # lines with `Any`; lower them as lines go, never raise them


def lines_with_any(text: str) -> Iterator[tuple[int, bool]]:
    """(number of the line, whether a comment gives a reason: on it, or on lines of their own just above) of every line
    that names `Any`, imports apart."""
    if "Any" not in text:
        return
    comments: dict[int, bool] = {}  # line -> whether nothing else stands on it
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:")):
            comments[token.start[0]] = not token.line[: token.start[1]].strip()
    named = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and node.id == "Any"}
    for line in sorted(named):
        yield line, line in comments or comments.get(line - 1, False)


def lines_of(layer: str) -> Iterator[tuple[str, int, bool]]:
    for path in sorted((ROOT / layer).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for line, reasoned in lines_with_any(path.read_text(encoding="utf-8")):
            yield name, line, reasoned


@pytest.mark.parametrize("layer", MOST)
def test_every_any_of_a_layer_has_its_reason_and_they_do_not_become_more(layer: str) -> None:
    found = list(lines_of(layer))
    bare = [f"{name}:{line}" for name, line, reasoned in found if not reasoned]
    assert not bare, f"give a type, or say in a comment on the line or above it why there is none: {bare}"
    assert len(found) <= MOST[layer], f"{layer} has {len(found)} lines with Any, more than {MOST[layer]}: type the new"


def test_annotations_are_seen_and_comments_of_other_lines_are_not_their_reason() -> None:
    text = '''
from typing import Any
plain: Any = 3  # Ray gives it no type
"""Any word of a text."""
# its values are those of a file
above: dict[str, Any] = {}
size = 4  # of another line
def bare(value: Any) -> "Any":  # noqa: F821
    return cast(Any, "# no comment")
'''
    assert list(lines_with_any(text)) == [(3, True), (6, True), (8, False), (9, False)]
