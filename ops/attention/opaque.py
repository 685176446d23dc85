"""Functions that torch.compile leaves as they are: attention and its exchanges, by lengths that the host knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

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
    """From now on. Not before: it imports the compiler, which takes a second."""
    for name, function in _functions.items():
        if name not in _left:
            _left[name] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
