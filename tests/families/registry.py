"""What the families declare for the tests that all of them pass: `CASES` of tests/families/test_NAME.py, by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from tests.families.kit import FamilyCases


def declared(name: str) -> FamilyCases:
    """The cases of one family. Raises FileNotFoundError where its test file is missing."""
    if not (Path(__file__).parent / f"test_{name}.py").is_file():
        raise FileNotFoundError(f"tests/families/test_{name}.py does not exist: CASES there says how {name} is tested.")
    cases: FamilyCases = import_module(f"tests.families.test_{name}").CASES
    return cases


CASES: dict[str, FamilyCases] = {name: declared(name) for name in FAMILIES}
VARIANTS: dict[str, DiTConfig] = {
    f"{name} {variant}".strip(): config for name, cases in CASES.items() for variant, config in cases.variants.items()
}
ONE_EACH: tuple[str, ...] = tuple(f"{name} {next(iter(cases.variants))}".strip() for name, cases in CASES.items())
"""The usual variant of each family."""
MODELS: dict[str, ModelConfig] = {
    f"{name} {variant}".strip(): model for name, cases in CASES.items() for variant, model in cases.models.items()
}
WHOLE_RUNS: tuple[str, ...] = tuple(
    f"{name} {variant}".strip()
    for name, cases in CASES.items()
    for variant in (cases.models if cases.whole_runs is None else cases.whole_runs)
)
"""The `MODELS` that are run through Ray: at least one of each family."""
