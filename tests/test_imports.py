"""Imports point one way, and what must load fast does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("ops", "data", "actors", "app")  # each may import itself and those before it
PURE = (
    "ops/geometry.py",
    "ops/config.py",
    "ops/typed.py",
    "ops/spatial_temporal/simulate.py",
    "ops/models/config.py",
    "ops/models/folders.py",
    "data/config.py",
    "actors/config.py",
    "app/settings/config.py",
    "app/settings/files.py",
)
WITHOUT_TORCH = (  # one process each, some on every node: torch is 1.5 CPU seconds and 150 MB of each
    "actors.planning.actor",
    "actors.state.keeper",
    "actors.state.checkpoint_writer",
    "actors.feed.feeder",
    "actors.pool.monitor",
    "data.engines.ray_data",
    "app.run.controller_process",
)
HEAVY = ("torch", "ray", "diffusers", "transformers", "deepspeed", "pandas", "pyarrow", "av", "matplotlib")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def imported_modules(path: Path) -> set[str]:
    """Every module a file imports, at any depth of its code."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
    return modules


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_itself_and_layers_below(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    for path in sources(layer):
        upward = {name for name in imported_modules(path) if name.split(".")[0] in above}
        assert not upward, f"{path.relative_to(ROOT)} imports upward: {sorted(upward)}"


def test_ops_never_imports_ray() -> None:
    for path in sources("ops"):
        assert not {name for name in imported_modules(path) if name.split(".")[0] == "ray"}, path


def test_init_files_are_empty() -> None:
    for layer in LAYERS:
        for path in (ROOT / layer).rglob("__init__.py"):
            assert path.read_text().strip() == "", f"{path.relative_to(ROOT)} is not empty"


def test_no_files_import_each_other_in_a_ring_not_even_inside_functions() -> None:
    edges = {module_of(path): modules_imported_by(path) for layer in LAYERS for path in sources(layer)}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import ring: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name in done or name not in edges:
            return
        for child in sorted(edges[name] - {name}):
            visit(child, (*trail, name))
        done.add(name)

    for name in edges:
        visit(name, ())


def test_rooms_import_what_the_map_allows() -> None:
    direct = rooms_of_the_map()
    allowed = {room: below(room, direct) for room in direct}
    for path in (p for layer in LAYERS for p in sources(layer) if p.name != "__init__.py"):
        room = room_of(module_of(path))
        assert room in allowed, f"{path.relative_to(ROOT)} lies in {room}/, which docs/map.md does not name"
        entered = {room_of(module) for module in modules_imported_by(path)} - {room}
        inside = {other for other in entered if other.split("/")[0] == room.split("/")[0]}  # layers have their own rule
        assert inside <= allowed[room], (
            f"{path.relative_to(ROOT)} in {room}/ imports from {sorted(inside - allowed[room])}; by docs/map.md it may "
            f"import from {sorted(allowed[room])}"
        )


def test_the_map_names_every_room_and_has_no_ring() -> None:
    allowed = rooms_of_the_map()
    assert set(allowed) == {room_of(module_of(p)) for layer in LAYERS for p in sources(layer) if p.stat().st_size}
    placed: set[str] = set()
    while ready := {room for room, lower in allowed.items() if room not in placed and lower <= placed}:
        placed |= ready
    assert placed == set(allowed), f"rooms in a ring: {sorted(set(allowed) - placed)}"


def rooms_of_the_map() -> dict[str, set[str]]:
    """Room -> rooms of its layer that it may import from: the first and last column of the tables of docs/map.md.

    `ops/models/*/` stands for every folder there that has no row of its own.
    """
    rows = re.findall(r"^\| `([a-z0-9_/*]+)/` \|.*\|([^|]*)\|$", (ROOT / "docs" / "map.md").read_text(), re.MULTILINE)
    assert rows
    named = {room for room, _ in rows}
    alike = {room: folders_of(room) - named if room.endswith("*") else {room} for room in named}
    return {
        one: {low for name in re.findall(r"`([a-z0-9_/*]+)/`", below) for low in alike[name]}
        for room, below in rows
        for one in alike[room]
    }


def folders_of(pattern: str) -> set[str]:
    return {str(file.parent.relative_to(ROOT)) for file in ROOT.glob(f"{pattern}/__init__.py")}


def below(room: str, direct: dict[str, set[str]]) -> set[str]:
    """The rooms that a room may import from, and those that these may import from."""
    found: set[str] = set()
    ahead = set(direct[room])
    while ahead:
        found |= ahead
        ahead = {other for one in ahead for other in direct[one]} - found
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The folder of a module, as "actors/run"."""
    return module.replace(".", "/") if not module_file(module) else "/".join(module.split(".")[:-1])


@cache
def modules_imported_by(path: Path) -> set[str]:
    """Modules of this project that the file imports, at any depth of its code."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name for name in submodules if module_file(name)} or {node.module}
    return {name for name in modules if name.split(".")[0] in LAYERS}


def module_file(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).with_suffix(".py").is_file()


def loaded_by(modules: list[str]) -> tuple[set[str], int]:
    """Heavy modules present after importing these in a fresh interpreter, and how many there are in all."""
    code = f"import sys, {', '.join(modules)}\nprint(([m for m in {HEAVY!r} if m in sys.modules], len(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    heavy, count = ast.literal_eval(result.stdout.strip())
    return set(heavy), count


def test_configs_and_pure_planning_load_without_torch_or_ray() -> None:
    modules = [path.removesuffix(".py").replace("/", ".") for path in PURE]
    modules.append("actors.plan.types")
    heavy, count = loaded_by(modules)
    assert not heavy
    assert count < 400  # imports are what a start takes: 272 are 0.2 s of work


def test_processes_that_need_no_torch_start_without_it() -> None:
    heavy, _ = loaded_by(list(WITHOUT_TORCH))
    assert "torch" not in heavy


def test_pure_planning_never_imports_torch_or_ray() -> None:
    for path in sources("actors/plan"):
        heavy = {name for name in imported_modules(path) if name.split(".")[0] in ("torch", "ray")}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"
