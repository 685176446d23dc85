"""Cases of several sizes and kinds: the default run has every size and every kind, and not all pairs of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def in_turn(cases: Iterable[object], kept: Collection[object]) -> list[object]:
    """The cases for `pytest.mark.parametrize`; those that are not `kept` run on a GPU and in `make long`."""
    every = list(cases)
    assert set(kept) < set(every)
    return [_param(case) if case in kept else _param(case, pytest.mark.long) for case in every]


def _param(case: object, *marks: pytest.MarkDecorator) -> object:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))
