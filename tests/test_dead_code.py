"""Everything that is defined is used by the program itself, not by its tests alone, and tests use it as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("ops", "data", "actors", "app")
PUBLIC = {  # for other programs: the README's "Parts of it as libraries"
    *("route", "unroute", "replicate"),
    *("FusedGateAdaLN", "FusedQKNormRope", "unfuse"),
}
CALLED_BY_OTHERS = {
    *("readable", "readinto", "seekable"),  # io.RawIOBase
    "extra_repr",  # torch.nn.Module, for its repr
    "_serialize",  # ray.job_config.JobConfig
    "chunk_lengths",  # what a program that routes knows its rows by
    "verify_clip",  # a decoder, named to the engine as "data.tools.lint:verify_clip"
}
CONSTANT = re.compile(r"(?!CDLL$)_?[A-Z][A-Z0-9_]+")  # CDLL is a class of ctypes
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Reader:
    """What files define, and which names they read outside of the definitions of these names.

    Read is a name as such, as an attribute, a keyword or a whole string (`getattr`), or when it is imported under
    another one. What a decorator with arguments takes is for that decorator to use, but for dataclasses.
    """

    def __init__(self, sources: dict[str, str]) -> None:
        self.defined: list[tuple[str, str]] = []  # (file, name)
        self.read: set[str] = set()
        for file, text in sources.items():
            tree = ast.parse(text)
            for statement in tree.body:
                self._values(file, statement)
            self._visit(file, tree, frozenset())

    def unused(self) -> list[str]:
        return [f"{file}: {name}" for file, name in self.defined if name not in self.read]

    def _values(self, file: str, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                names = []
        self.defined += [(file, name) for name in names if not name.startswith("__")]

    def _visit(self, file: str, node: ast.AST, within: frozenset[str]) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                calls = [one for one in node.decorator_list if isinstance(one, ast.Call)]
                taken = [one for one in calls if not (isinstance(one.func, ast.Name) and one.func.id == "dataclass")]
                if not taken and not node.name.startswith("__"):
                    self.defined.append((file, node.name))
                within |= {node.name}
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                self.read |= {name} - within
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                self.read |= {name} - within
            case ast.alias(name=name, asname=str()):
                self.read.add(name)
        for child in ast.iter_child_nodes(node):
            self._visit(file, child, within)


def test_nothing_is_defined_for_tests_alone() -> None:
    files = (file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py")))
    code = Reader({str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files})
    allowed = PUBLIC | CALLED_BY_OTHERS
    found = [line for line in code.unused() if line.split(": ")[1] not in allowed]
    assert not found, f"delete, or use: {found}"
    assert allowed <= {line.split(": ")[1] for line in code.unused()}, "take out of the lists what is used or gone"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(name in readme for name in PUBLIC), "the README names what is for other programs"


def test_what_names_only_itself_is_found() -> None:
    text = "LIMIT = 3\ndef used(): return LIMIT\ndef again(n): return again(n - 1)\nprint(used())\nLOST: int = 1\n"
    assert Reader({"a.py": text}).unused() == ["a.py: LOST", "a.py: again"]
    assert Reader({"a.py": text, "b.py": "from a import again as more"}).unused() == ["a.py: LOST"]


def overwritten(text: str) -> list[str]:
    """Names of constants that code sets on something else: an argument or an own class would say it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr") | ast.Name(id="setattr"), args=arguments):
                texts = [one.value for one in arguments[:2] if isinstance(one, ast.Constant)]
                names = [str(text).rpartition(".")[2] for text in texts]
            case ast.Assign(targets=targets):
                names = [target.attr for target in targets if isinstance(target, ast.Attribute)]
            case _:
                continue
        found += [name for name in names if CONSTANT.fullmatch(name)]
    return found


def test_no_test_overwrites_a_constant() -> None:
    """The last import of a process would win, and the program have a value that nobody can give it."""
    files = (ROOT / "tests").rglob("*.py")
    assert {str(file): names for file in files if (names := overwritten(file.read_text(encoding="utf-8")))} == {}


def test_a_constant_that_is_overwritten_is_found() -> None:
    calls = 'm.setattr("data.decode.VERSION", 3)\nm.setattr(relay, "_ENDED_S", 1)\nm.setattr(torch.cuda, "Event", 1)\n'
    assert sorted(overwritten(f"{calls}relay.LATE_S = 2")) == ["LATE_S", "VERSION", "_ENDED_S"]
