"""Which cases of a test the default run leaves to `make long`. Of several sizes and kinds it has every size and every
kind, and not all pairs of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_default_run(kept: Collection[object], of: Iterable[object]) -> list[Any]:
    """All cases, for `pytest.mark.parametrize`; those that are not `kept` run in `make long`, and on a GPU where they
    have tests for one. Raises ValueError where one of `kept` is none of them."""
    cases = list(of)
    if unknown := [case for case in kept if case not in cases]:
        raise ValueError(f"{unknown} are none of {cases}")
    return [_param(case) if case in kept else _param(case, pytest.mark.long) for case in cases]


def _param(case: object, *marks: pytest.MarkDecorator) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))
