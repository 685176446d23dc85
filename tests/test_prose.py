"""Plain English in code and documents: docstrings begin with a noun or a verb, and there is no idiom of our own.

Checked are docstrings, comments and documents, and in the program also its messages. Quotation of code is not prose.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("ops", "data", "actors", "app")
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/map.md",
    "docs/settings.md",
    "docs/words.md",
    "docs/first-lora.md",
    "docs/models.md",
    "docs/clusters.md",
    "docs/records.md",
    "docs/libraries.md",
)

BEHIND = re.compile(r"\bbehind\b", re.IGNORECASE)
PLACES = re.compile(
    r"\b(leave|leaves|leaving|left|stays)\b[^.;]*\bbehind\b"  # what remains when something has gone
    r"|\bhidden behind\b"  # communication, by work that takes as long
    r"|\bbehind (one|the|an) interface\b"
    r"|\bbenchmarks behind the figures\b"
    r"|\bbehind its plan\b"  # late
)
IDIOMS = {
    r"\bso( |-)many\b": "name the number: `count` samples, this number of samples",
    r"\b(is|are|was|were|be|been) told\b": "say what happens: it gets, learns or is called with",
    r"\bof no use\b": "say what cannot be done with it",
    r"\b(of|for|to|by) who\b|\bwhom\b": "name it: which worker, the caller, its reader",
    r"\bwhole or not at all\b": "atomically",
}

Passage = tuple[int, str]  # (line, its words)


@cache
def sources() -> dict[str, str]:
    """Text of every source file of the program and of its tests, by its path from the root."""
    paths = (path for folder in (*LAYERS, "tests") for path in sorted((ROOT / folder).rglob("*.py")))
    own = Path(__file__).resolve()
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths if path.resolve() != own}


def docstrings(tree: ast.AST) -> Iterator[Passage]:
    """Strings that stand as statements: docstrings, and those below a field or a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, " ".join(node.value.value.split())


def messages(tree: ast.AST) -> Iterator[Passage]:
    """Strings of more than one word, parts of f-strings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, " ".join(node.value.split())


def comments(text: str) -> Iterator[Passage]:
    """Comments; those on lines of their own that follow each other are one."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, words, alone = token.start[0], token.string.lstrip("# "), not token.line[: token.start[1]].strip()
        if alone and block and line == last + 1:
            block.append(words)
        else:
            if block:
                yield first, " ".join(block)
            block, first = [words], line
        last = line if alone else 0
    if block:
        yield first, " ".join(block)


def passages(file: str, text: str) -> Iterator[Passage]:
    tree = ast.parse(text)
    yield from comments(text)
    yield from docstrings(tree) if file.startswith("tests/") else messages(tree)


def complaints(words: str) -> list[str]:
    """What is wrong with a passage, each with its remedy."""
    found = [
        f'"{match[0]}": {remedy}'
        for idiom, remedy in IDIOMS.items()
        if (match := re.search(idiom, words, re.IGNORECASE))
    ]
    if BEHIND.search(PLACES.sub("", words)):
        found.append('"behind": after, below or by; of a place it is in PLACES')
    return found


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    bare = [
        f"{file}:{line}: {words[:60]}"
        for file, text in sources().items()
        if '"Of ' in text
        for line, words in docstrings(ast.parse(text))
        if words.startswith("Of ")
    ]
    assert not bare, 'say what it is: "Seconds of a row", not "Of a row":\n' + "\n".join(bare)


def test_code_is_written_in_plain_words() -> None:
    suspects = re.compile("|".join([BEHIND.pattern, *IDIOMS]).replace(" ", r"[\s#]+"), re.IGNORECASE)
    found = [
        f"{file}:{line}: {complaint}"
        for file, text in sources().items()
        if suspects.search(text)
        for line, words in passages(file, text)
        for complaint in complaints(words)
    ]
    assert not found, "\n".join(found)


def test_documents_are_written_in_plain_words() -> None:
    found = []
    for name in DOCUMENTS:
        for block in re.split(r"\n(?=\s*(?:\n|[-|#]))", (ROOT / name).read_text(encoding="utf-8")):
            prose = re.sub(r"`[^`]*`", "", " ".join(block.split()))
            found += [f"{name}: {complaint} in {prose[:60]}" for complaint in complaints(prose)]
    assert not found, "\n".join(found)


def test_what_is_against_the_rules_is_found() -> None:
    text = '''
def seconds(rows):
    """Of so
    many rows."""
    return rows  # comes behind the others


# A worker that is
# told of it leaves nothing behind.
LATE = f"step {seconds} of who waits"
'''
    assert list(docstrings(ast.parse(text))) == [(3, "Of so many rows.")]
    found = [complaint.split(":")[0] for _, words in passages("ops/x.py", text) for complaint in complaints(words)]
    assert sorted(found) == ['"behind"', '"is told"', '"of who"', '"so many"']
    for plain in ("leaves no actor behind", "all-to-all hidden behind layers", "after its last cascade"):
        assert not complaints(plain)
