"""Messages that are sent often arrive as they were, and what is put together of them cannot be changed."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from actors import letters, messages
from actors.messages import Piece, Span
from actors.plan import types
from actors.pool import monitor
from ops.sending import sent_often

SPAN = Span(
    name="dit",
    module="dit",
    cascade="c",
    step=3,
    start=1.5,
    end=2.5,
    pieces=(Piece(item="i", bucket=(17, 64, 96), batch=2),),
    phases={"forward": 0.5},
)


def test_a_message_arrives_as_it_was_sent_whoever_pickles_it() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(SPAN, protocol)) == SPAN
    assert copy.deepcopy(SPAN) == SPAN == copy.copy(SPAN) and replace(SPAN, step=4).step == 4
    with pytest.raises(FrozenInstanceError):
        pickle.loads(pickle.dumps(SPAN)).step = 4


def test_it_is_not_looked_up_field_by_field() -> None:
    sent = {cls for room in (letters, messages, types, monitor) for cls in vars(room).values() if is_sent_often(cls)}
    assert {cls.__name__ for cls in sent} >= {"Span", "CascadeTask", "StepReport", "RelayedCall", "LastHeartbeat"}
    for cls in sent:
        made = object.__new__(cls)
        values = tuple(range(len(fields(cls))))
        made.__setstate__(values)
        assert made.__getstate__() == values and [getattr(made, one.name) for one in fields(cls)] == list(values)


def is_sent_often(cls: object) -> bool:
    return (
        isinstance(cls, type) and getattr(cls.__dict__.get("__setstate__"), "__module__", "") == sent_often.__module__
    )


def test_a_message_of_one_field_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Short:
        only: int = 0

    with pytest.raises(AssertionError, match="Short must have more than one field"):
        sent_often(Short)
