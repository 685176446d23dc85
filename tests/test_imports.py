"""Imports point one way, and what must load fast does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("ops", "data", "actors", "app")  # each may import itself and those before it
PURE = ("ops/geometry.py", "ops/config.py", "data/config.py", "actors/config.py", "app/config.py", "app/settings.py")
HEAVY = ("torch", "ray", "diffusers", "transformers", "deepspeed", "pandas", "pyarrow", "av", "matplotlib")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


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


def test_packages_have_no_import_circle() -> None:
    edges = {}
    for layer in LAYERS:
        for path in sources(layer):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            edges[name] = top_level_imports(path)
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import circle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name in done or name not in edges:
            return
        for child in sorted(edges[name]):
            visit(child, (*trail, name))
        done.add(name)

    for name in edges:
        visit(name, ())


def top_level_imports(path: Path) -> set[str]:
    """Modules of this project that load when the file is imported (not inside functions or TYPE_CHECKING)."""
    modules = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name for name in submodules if module_file(name)} or {node.module}
    return {name for name in modules if name.split(".")[0] in LAYERS}


def module_file(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).with_suffix(".py").is_file()


def loaded_by(modules: list[str]) -> tuple[set[str], float]:
    """Heavy modules present after importing these in a fresh interpreter, and the CPU seconds it took."""
    code = (
        f"import sys, time, {', '.join(modules)}\n"
        f"print(([m for m in {HEAVY!r} if m in sys.modules], time.process_time()))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    heavy, seconds = ast.literal_eval(result.stdout.strip())
    return set(heavy), seconds


def test_configs_and_pure_planning_load_without_torch_or_ray() -> None:
    modules = [path.removesuffix(".py").replace("/", ".") for path in PURE]
    modules.append("actors.plan.types")
    heavy, seconds = loaded_by(modules)
    assert not heavy
    assert seconds < 1.0  # 0.2 s of work


def test_pure_planning_never_imports_torch_or_ray() -> None:
    for path in sources("actors/plan"):
        heavy = {name for name in imported_modules(path) if name.split(".")[0] in ("torch", "ray")}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"
