"""How far a reader walks: files of a walk, and returns to a file that was left:  python -m tests.walks [--route]

Counted as a reader goes: every function is read once, in the order in which the work first comes to it. Functions of
one file that follow each other are one stay. `files` are the files of a walk, `returns` its stays less its files.

One rule says what is read, of a walk that is traced and of one that is listed (`is_counted`): functions and methods
with a statement of their own. Not what stands beside the way: properties, constants, functions inside functions, and
whatever belongs to a record (a frozen dataclass, named tuple, enum or exception) or to a protocol.

The walk of a plan is traced: one real search of the cascade strategy, of two steps of a published workload. The others
go through several processes; their routes stand in docs/walks.md, in chapters of one process each, and a test has
each function of a route named by one before it. A file that two chapters use is entered twice however it is written, as
another process works in between; so returns inside a chapter are counted apart.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
WALKS = ROOT / "docs" / "walks.md"
PROFILE, WORKLOAD, NODES = "configs/profiles/hunyuan-13b-720p-h100.json", "configs/bench/A-16gpu.json", (8, 8)
RECORDS = frozenset(("Enum", "IntEnum", "StrEnum", "NamedTuple", "TypedDict", "Protocol"))


@dataclass(frozen=True, slots=True)
class Station:
    """A function that is read, as `Class.method` or `function`."""

    file: str
    function: str


@dataclass(frozen=True, slots=True)
class Stay:
    """Functions of one file that are read one after the other."""

    file: str
    functions: tuple[str, ...]


def stays(route: Iterable[Station]) -> list[Stay]:
    """The route, file by file; a function that was read before is passed over."""
    found: list[Stay] = []
    for station in dict.fromkeys(route):
        if found and found[-1].file == station.file:
            found[-1] = Stay(station.file, (*found[-1].functions, station.function))
        else:
            found.append(Stay(station.file, (station.function,)))
    return found


def count(route: Iterable[Station]) -> tuple[int, int]:
    """(files, returns)."""
    walked = stays(route)
    files = {stay.file for stay in walked}
    return len(files), len(walked) - len(files)


# What is counted ------------------------------------------------------------------------------------------------------


def is_counted(station: Station) -> bool:
    """Whether somebody who follows the work stops to read it: the rule of this file."""
    *owners, function = definitions(station) or (None,)
    return (
        isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any(isinstance(owner, ast.ClassDef) and is_record(owner, station.file) for owner in owners)
        and not any(name in ("property", "cached_property", "setter") for name in names_of(function.decorator_list))
        and any(not is_nothing(statement) for statement in function.body)
    )


def definitions(station: Station) -> list[ast.AST]:
    """Its class and itself for a method, itself for a function; [] where there is none, or where it is inside
    another."""
    found: list[ast.AST] = [parsed(station.file)]
    for name in station.function.split("."):
        inside = next((child for child in statements(found[-1]) if name in defined_by(child)), None)
        if inside is None or isinstance(found[-1], ast.FunctionDef | ast.AsyncFunctionDef):
            return []
        found.append(inside)
    return found[1:]


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements of the body of a module, class or function, also under its conditions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.With):
            yield from statements(child)


def defined_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def is_record(owner: ast.ClassDef, file: str) -> bool:
    """A frozen dataclass, named tuple, enum, exception or protocol."""
    frozen = any(
        isinstance(one, ast.Call) and any(k.arg == "frozen" and ast.unparse(k.value) == "True" for k in one.keywords)
        for one in owner.decorator_list
    )
    return frozen or any(base in RECORDS or is_exception(base, file) for base in names_of(owner.bases))


def is_exception(base: str, file: str) -> bool:
    """Whether a class of this name is one: Python's, or defined in this file."""
    builtin = getattr(builtins, base, None)
    if isinstance(builtin, type):
        return issubclass(builtin, BaseException)
    here = [child for child in statements(parsed(file)) if isinstance(child, ast.ClassDef) and child.name == base]
    return any(is_exception(one, file) for child in here for one in names_of(child.bases))


def names_of(nodes: Sequence[ast.expr]) -> list[str]:
    """Last parts of these names, without what is called or subscripted of them."""
    plain = [node.func if isinstance(node, ast.Call) else node for node in nodes]
    plain = [node.value if isinstance(node, ast.Subscript) else node for node in plain]
    return [ast.unparse(node).rpartition(".")[2] for node in plain]


def is_nothing(statement: ast.stmt) -> bool:
    """A docstring, `...`, `pass`, or that somebody else implements it."""
    if isinstance(statement, ast.Raise):
        return statement.exc is not None and names_of([statement.exc]) == ["NotImplementedError"]
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


# The walk of a plan ---------------------------------------------------------------------------------------------------


def plan_route() -> list[Station]:
    """The route of the cascade strategy, by tracing it."""
    from actors.plan.costs.profile_json import read_profile
    from actors.plan.schedule.problem import PlanOptions, Problem
    from actors.plan.strategies.cascade import CascadeSearch
    from actors.plan.types import Cluster
    from app.inputs.workload import read_workload

    options = PlanOptions(budget_s=0.05, counted=True, replans=True, least_gain=0.1)
    steps = read_workload(ROOT / WORKLOAD).steps[:2]
    strategy = CascadeSearch()
    problem = Problem(steps, read_profile(ROOT / PROFILE), Cluster(nodes=NODES), options)
    called: dict[CodeType, None] = {}
    ours = tuple(f"{ROOT / package}/" for package in ("actors", "app", "data", "ops"))  # not what is installed below it

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            called[frame.f_code] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        strategy.plan(problem, 0)
    finally:
        sys.setprofile(before)
    return [station for station in map(station_of, called) if is_counted(station)]


def station_of(code: CodeType) -> Station:
    return Station(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname)


# The walks of docs/walks.md -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """A station of docs/walks.md. An `entry` is called by another process, PyTorch, an objective or a setting."""

    station: Station
    chapter: int
    line: int
    entry: bool


def listed_walks() -> dict[str, list[Listed]]:
    """Title -> stations, of every walk that is listed."""
    found: dict[str, list[Listed]] = {}
    for section in WALKS.read_text(encoding="utf-8").split("\n## ")[1:]:
        walk = found[section.partition("\n")[0]] = []
        for chapter, text in enumerate(section.split("\n### ")[1:]):
            lines = re.findall(r"^- `([\w/]+\.py)`: (.*)$", text, re.MULTILINE)
            first = walk[-1].line + 1 if walk else 0
            walk += [
                Listed(Station(file, name), chapter, line, bool(slanted))
                for line, (file, told) in enumerate(lines, first)
                for slanted, name in re.findall(r"(\*?)`([\w.]+)`", told)
            ]
    return found


def unreached(walk: Sequence[Listed]) -> list[Station]:
    """Stations that are not in their file, or that none before them names; on one line, none before them there."""
    named: dict[int, set[str]] = {}  # by line
    wrong = []
    for one in walk:
        body = definitions(one.station)
        owner, _, name = one.station.function.rpartition(".")
        before = named[one.line] if one.line in named else set().union(*named.values())
        if not body or not (one.entry or before & {name, owner}):
            wrong.append(one.station)
        named.setdefault(one.line, set()).update(words(body[-1]) if body else ())
    return wrong


def inside(walk: Sequence[Listed]) -> int:
    """Returns inside a chapter, where no other process has worked meanwhile."""
    chapters = dict.fromkeys(one.chapter for one in walk)
    return sum(count(one.station for one in walk if one.chapter == chapter)[1] for chapter in chapters)


def words(node: ast.AST) -> set[str]:
    """Names that a definition uses."""
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--route", action="store_true", help="print the stations, too")
    given = parser.parse_args()
    walks = listed_walks()
    told = {title: f", {inside(walk)} inside a chapter" for title, walk in walks.items()}
    listed = {title: [one.station for one in walk] for title, walk in walks.items()}
    for title, route in {"A plan, inside its strategy": plan_route(), **listed}.items():
        files, returns = count(route)
        print(f"{title:50s} {files:3d} files {returns:3d} returns{told.get(title, '')}")
        for stay in stays(route) if given.route else ():
            print(f"    {stay.file}: {' '.join(stay.functions)}")


if __name__ == "__main__":
    main()
