"""How far a reader walks: files of a walk, and returns to a file that was left:  python -m tests.walks [--route]

Counted as a reader goes: every function is read once, in the order in which the work first comes to it. Functions of
one file that follow each other are one stay. `files` are the files of a walk, `returns` its stays less its files.

The walk of a plan is traced: one real search of the cascade strategy, of two steps of a published workload. Properties,
methods of records (frozen dataclasses) and functions inside functions are not counted. The other three go through
several processes; their routes stand in docs/walks.md, and a test has each function of a route named by one before it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
WALKS = ROOT / "docs" / "walks.md"
PROFILE, WORKLOAD, NODES = "configs/profiles/hunyuan-13b-720p-h100.json", "configs/bench/A-16gpu.json", (8, 8)


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


# The walk of a plan ---------------------------------------------------------------------------------------------------


def plan_route() -> list[Station]:
    """Of the cascade strategy, by tracing it."""
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
    return [Station(file_of(code), code.co_qualname) for code in called if is_counted(code)]


def file_of(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(ROOT))


def is_counted(code: CodeType) -> bool:
    """Whether somebody who follows the work stops to read it."""
    if "<" in code.co_qualname:
        return False
    owner, _, name = code.co_qualname.rpartition(".")
    if not owner:
        return True
    home = getattr(importlib.import_module(file_of(code).removesuffix(".py").replace("/", ".")), owner)
    if is_dataclass(home) and home.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return False
    return not isinstance(inspect.getattr_static(home, name), property | cached_property)


# The walks of docs/walks.md -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """A station of docs/walks.md. An `entry` is called by another process, or by PyTorch."""

    station: Station
    line: int
    entry: bool


def listed_walks() -> dict[str, list[Listed]]:
    """Title -> stations, of every walk that is listed."""
    found = {}
    for section in WALKS.read_text(encoding="utf-8").split("\n## ")[1:]:
        lines = re.findall(r"^- `([\w/]+\.py)`: (.*)$", section, re.MULTILINE)
        found[section.partition("\n")[0]] = [
            Listed(Station(file, name), line, bool(slanted))
            for line, (file, told) in enumerate(lines)
            for slanted, name in re.findall(r"(\*?)`([\w.]+)`", told)
        ]
    return found


def unreached(walk: Sequence[Listed]) -> list[Station]:
    """Stations that are not in their file, or that none before them names; on one line, none before them there."""
    named: dict[int, set[str]] = {}  # by line
    wrong = []
    for one in walk:
        body = definition(ROOT / one.station.file, one.station.function)
        owner, _, name = one.station.function.rpartition(".")
        before = named[one.line] if one.line in named else set().union(*named.values())
        if body is None or not (one.entry or before & {name, owner}):
            wrong.append(one.station)
        named.setdefault(one.line, set()).update(words(body) if body is not None else ())
    return wrong


def definition(path: Path, function: str) -> ast.AST | None:
    """The definition of a function, method, class or constant."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for name in function.split("."):
        inside = [child for child in ast.walk(node) if name in defined_by(child)]
        if not inside:
            return None
        node = inside[0]
    return node


def defined_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def words(node: ast.AST) -> set[str]:
    """Names that a definition uses."""
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--route", action="store_true", help="print the stations, too")
    given = parser.parse_args()
    listed = {title: [one.station for one in walk] for title, walk in listed_walks().items()}
    for title, route in {"A plan, inside its strategy": plan_route(), **listed}.items():
        files, returns = count(route)
        print(f"{title:60s} {files:3d} files {returns:3d} returns")
        for stay in stays(route) if given.route else ():
            print(f"    {stay.file}: {' '.join(stay.functions)}")


if __name__ == "__main__":
    main()
