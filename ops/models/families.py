"""The model families, found by their folders beside this file; and the autoencoders.

A family is a folder with `config.py`, `model.py` and `family.py`, whose last statement names its `FAMILY`.
`tests/families/test_NAME.py` declares sizes with which the tests of all families run it. Imports neither torch
nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal, Union

from ops.models.base.config import DiTConfig
from ops.models.base.family import Family, TextRecipe, VAEClass

_USUAL = "wan"  # meant where a config names no architecture
_FOLDERS = [module.name for module in iter_modules([str(Path(__file__).parent)]) if module.ispkg]
_NAMES = sorted(set(_FOLDERS) - {"base"}, key=lambda name: (name != _USUAL, name))

FAMILIES: dict[str, Family] = {  # by model.dit.architecture
    name: import_module(f"ops.models.{name}.family").FAMILY for name in _NAMES
}

TEXT_RECIPES: dict[str, TextRecipe] = {  # by model.text.kind
    kind: recipe for family in FAMILIES.values() for kind, recipe in family.texts.items()
}

PUBLISHED_HEADS: dict[str, int] = {  # attention heads by the names of published models in profiles
    name: heads for family in FAMILIES.values() for name, heads in family.published_heads.items()
}

if TYPE_CHECKING:
    AnyDiT = DiTConfig
    TextKind = str
else:
    TextKind = Literal[("t5", *TEXT_RECIPES)]
    """For configs: T5 or UMT5 alone, or the text encoders of a family that has two."""
    AnyDiT = Union[tuple(family.config for family in FAMILIES.values())]  # noqa: UP007  (of types known at run time)
    """For configs: their reader tells the families apart by `architecture`, and refuses other names."""


VAE_CLASSES: dict[str, VAEClass] = {family.vae.name: family.vae for family in FAMILIES.values()}
