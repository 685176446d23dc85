"""Functions that torch.compile leaves as they are: attention and its exchanges, by lengths that the host knows.

Compiled code goes on with their results, and is made for how a tensor lies in memory and, if it is a view, of what.
That differs by degree and by backend, so compiled code gets rows one after the other in a tensor of their own. What
they are given beside tensors is no frozen dataclass: torch 2.11 makes code for the fields of one, so for each number of
sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_functions: dict[str, Callable[..., object]] = {}
_left: dict[str, Callable[..., object]] = {}  # what compiled code calls instead


def opaque(function: Callable[P, R]) -> Callable[P, R]:
    """A function that code compiled after `leave_opaque` calls and does not look into."""
    name = f"{function.__module__}.{function.__qualname__}"
    _functions[name] = function

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> R:
        result: R = _left.get(name, function)(*given, **named)  # type: ignore[assignment]
        return result

    return call


def leave_opaque() -> None:
    """From now on torch.compile leaves them as they are. Not at import: the compiler's own takes a second."""
    for name, function in _functions.items():
        if name not in _left:
            _left[name] = torch.compiler.disable(_giving_rows(function))  # type: ignore[no-untyped-call]


def _giving_rows(function: Callable[..., object]) -> Callable[..., object]:
    """The function with a contiguous tensor, which is no view, as its result. Without a copy where it is one already,
    as blocks make it one next."""

    @wraps(function)
    def call(*given: object, **named: object) -> object:
        result = function(*given, **named)
        assert isinstance(result, Tensor), f"{function} gives one tensor"
        rows = result.contiguous()
        return _Owned.apply(rows) if rows._is_view() else rows  # type: ignore[no-untyped-call]

    return call


class _Owned(torch.autograd.Function):
    """The same memory, by a tensor that is no view of another."""

    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        return rows.data

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad
