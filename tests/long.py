"""Which cases of a test the default run leaves to `make long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_default_run(kept: Collection[str], of: Iterable[str]) -> list[Any]:
    """All cases, of which those that are not `kept` are run by `make long`. Raises ValueError where one of `kept` is
    none of them."""
    cases = list(of)
    if unknown := set(kept) - set(cases):
        raise ValueError(f"{sorted(unknown)} are none of {cases}")
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in cases]
