"""One name for one thing: no class or type alias has a name that stands in two files."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("ops", "data", "actors", "app")
TWICE: set[str] = set()  # names that may stand in two files, each with its reason


def names_of_types(tree: ast.Module) -> Iterator[str]:
    """Classes, and values of the module in camel case: aliases of types. A type variable is no type of its own."""
    for node in tree.body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from names_of_types(ast.Module(node.body, []))
            case ast.ClassDef(name=name):
                yield name
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                variable = isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")
                if name[0].isupper() and not name.isupper() and not variable:
                    yield name


def test_no_type_has_a_name_that_stands_in_two_files() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in (p for layer in LAYERS for p in (ROOT / layer).rglob("*.py")):
        for name in names_of_types(ast.parse(path.read_text(encoding="utf-8"))):
            homes[name].add(str(path.relative_to(ROOT)))
    doubled = {name: sorted(files) for name, files in homes.items() if len(files) > 1 and name not in TWICE}
    assert not doubled, f"name one of each by what it is for: {doubled}"
    assert all(len(homes[name]) > 1 for name in TWICE), "a name in TWICE stands in one file only: take it out"


def test_classes_and_aliases_are_seen() -> None:
    text = """
class Shape: ...
Bag = tuple[int, ...]
Kind: TypeAlias = Literal["a"]
T, LIMIT, R_co = TypeVar("T"), 3, 4
R = TypeVar("R")
if TYPE_CHECKING:
    Known = Bag | Kind
"""
    assert list(names_of_types(ast.parse(text))) == ["Shape", "Bag", "Kind", "Known"]
