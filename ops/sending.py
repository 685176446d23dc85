"""Messages of which a step sends thousands, put together for a process boundary without looking their fields up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import TypeVar

C = TypeVar("C", bound=type)


def sent_often(message: C) -> C:
    """A frozen dataclass with slots, two fields or more, which pickle takes apart and puts together in half the time:
    dataclasses ask for their fields anew for every object (3,000 spans: 21 and 22 ms; so 10 and 10)."""
    names = [field.name for field in fields(message)]
    assert len(names) > 1, f"{message.__name__} must have more than one field"
    values: Callable[[object], tuple[object, ...]] = attrgetter(*names)
    setters = tuple(message.__dict__[name].__set__ for name in names)  # those of its slots: it is frozen

    def put_together(self: object, state: tuple[object, ...]) -> None:
        for put, value in zip(setters, state, strict=True):
            put(self, value)

    def taken_apart(self: object) -> tuple[object, ...]:
        return values(self)

    setattr(message, "__getstate__", taken_apart)  # noqa: B010  # mypy knows neither of a class
    setattr(message, "__setstate__", put_together)  # noqa: B010
    return message
