"""Optional packages that settings ask for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from ops.typed import ConfigError

PACKAGES = {"mlflow": "mlflow-skinny"}  # the client alone, which the whole package brings too


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError for a tracker whose package is not here."""
    for name in names:
        try:
            importlib.metadata.distribution(PACKAGES.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"track has {name}, whose package is not installed. Install it with "
                f'pip install -c constraints.txt -e ".[{name}]", or take it out of track.'
            ) from None
