"""Python processes that see torch, triton, numpy, pyyaml, pytest and what these need, and nothing else installed."""

from __future__ import annotations

import os
from pathlib import Path

SEEN = (
    *("torch", "torchgen", "functorch", "triton", "numpy", "yaml", "_yaml"),
    *("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "typing_extensions", "setuptools"),
    *("_distutils_hack", "pkg_resources", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"),
)

_SITE = f"""
import sys
from importlib.machinery import PathFinder

class FewPackages(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        place = str(getattr(spec, "origin", None) or list(getattr(spec, "submodule_search_locations", None) or [""])[0])
        hidden = "site-packages" in place and name.split(".")[0] not in {SEEN!r}
        return None if hidden else spec

sys.meta_path[sys.meta_path.index(PathFinder)] = FewPackages
"""


def few_packages(folder: Path) -> dict[str, str]:
    """The environment of such processes; `folder` gets a file that every one of them loads when it starts."""
    (folder / "sitecustomize.py").write_text(_SITE)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
