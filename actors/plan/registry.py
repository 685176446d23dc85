"""The strategies by name: the files of strategies/, which are not loaded to be named."""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

STRATEGIES = tuple(
    sorted(module.name for module in iter_modules([str(Path(__file__).with_name("strategies"))]) if not module.ispkg)
)

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[STRATEGIES]
    """For configs: their reader refuses other names and offers the nearest."""
