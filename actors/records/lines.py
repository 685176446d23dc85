"""Frozen dataclasses as objects of JSON and back. Each file of a run has one record type, which writes and reads it.

    line = line_of(record)                    # one key per field, in the order of the fields
    record = record_of(StepMetrics, line)     # also from a file of another version

Reading is tolerant where versions differ: an unknown key is ignored, a missing one gets the field's default, or the
empty value of its type (NaN, 0, "", ()). A value of another type is refused by its key. Writing has no such mercy: a
constructor takes neither an unknown field nor one too few.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R")
_FLAT = frozenset((int, float, str, bool, type(None)))
Convert = Callable[[object, str], Any]  # (value, name of its key) -> value of the field's type, known at run time only


class RecordError(ValueError):
    """A line holds something else than a record of its file. Names the key, its value and what is expected."""


def line_of(record: DataclassInstance) -> dict[str, object]:
    """The fields of a record in their order; records inside it become objects, tuples become lists when written."""
    names, values = parts_of(type(record))
    return dict(zip(names, [v if type(v) in _FLAT else _plain(v) for v in values(record)], strict=True))


@cache
def parts_of(cls: type[DataclassInstance]) -> tuple[tuple[str, ...], Callable[[object], tuple[object, ...]]]:
    """Names of the fields, and what takes their values: a step of a thousand workers writes thousands of spans, of
    which each would take 17 us to look its fields up."""
    names = tuple(f.name for f in dataclasses.fields(cls))
    return names, attrgetter(*names) if len(names) > 1 else lambda record: tuple(getattr(record, n) for n in names)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [child if type(child) in _FLAT else _plain(child) for child in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return line_of(value)
    return value


def record_of(cls: type[R], line: Mapping[str, object], renamed: Mapping[str, str] | None = None) -> R:
    """A record from an object of JSON. `renamed` maps keys of older versions to fields. Raises RecordError."""
    if renamed:
        line = {renamed.get(key, key): value for key, value in line.items()}
    values: dict[str, Any] = {}  # each of its field's type
    for name, convert, empty in _fields(cls):  # type: ignore[arg-type]
        if name in line:
            values[name] = convert(line[name], name)
        elif empty is not None:
            values[name] = empty()
    return cls(**values)


def finite(value: object) -> object:
    """The value, or the mapping of numbers, with None in the place of each that is not finite: JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        if all(map(math.isfinite, value.values())):  # numbers of a thousand workers
            return value
        return {key: finite(child) for key, child in value.items()}
    return value


@cache
def _fields(cls: type[DataclassInstance]) -> tuple[tuple[str, Convert, Callable[[], object] | None], ...]:
    """Name, reader and empty value of each field; no empty value where the field has a default."""
    hints = typing.get_type_hints(cls)
    found = []
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        found.append((f.name, _reader(hints[f.name]), _empty(hints[f.name]) if required else None))
    return tuple(found)


def _empty(kind: object) -> Callable[[], object]:
    """What a required field holds when a file of an older version lacks its key."""
    if kind is float:
        return lambda: math.nan
    if get_origin(kind) in (Union, types.UnionType):
        return lambda: None
    if dataclasses.is_dataclass(kind):
        return lambda: record_of(kind, {})  # type: ignore[arg-type]
    made = get_origin(kind) or kind
    assert isinstance(made, type), f"a record cannot hold {kind}"
    return dict if issubclass(made, Mapping) else made


def _reader(kind: object) -> Convert:
    simple: dict[object, Convert] = {float: _float, int: _int, str: _str, bool: _bool, object: _any}
    if kind in simple:
        return simple[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = [_reader(arg) for arg in args if arg is not type(None)]
        return lambda value, key: None if value is None else inner(value, key)
    if origin is tuple:
        return _tuple(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_reader(args[1]))
    assert dataclasses.is_dataclass(kind), f"a record cannot hold {kind}"
    return lambda value, key: record_of(kind, _object(value, key))  # type: ignore[arg-type]


def _wrong(key: str, value: object, expected: str) -> RecordError:
    return RecordError(f"{key} is {value!r}; expected {expected}.")


def _float(value: object, key: str) -> float:
    """JSON has no NaN: it is written as null."""
    if value is None:
        return math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise _wrong(key, value, "a number")


def _int(value: object, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise _wrong(key, value, "a whole number")


def _str(value: object, key: str) -> str:
    if isinstance(value, str):
        return value
    raise _wrong(key, value, "text")


def _bool(value: object, key: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong(key, value, "true or false")


def _any(value: object, key: str) -> object:
    return value


def _object(value: object, key: str) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return value
    raise _wrong(key, value, "an object")


def _mapping(inner: Convert) -> Convert:
    def read(value: object, key: str) -> dict[str, object]:
        held = {} if value is None else _object(value, key)
        return {name: inner(child, f"{key}.{name}") for name, child in held.items()}

    return read


def _tuple(args: tuple[object, ...]) -> Convert:
    size = None if args[-1] is Ellipsis else len(args)
    inner = _reader(args[0])
    assert size is None or len(set(args)) == 1, f"a record cannot hold tuple{args}"

    def read(value: object, key: str) -> tuple[object, ...]:
        if not isinstance(value, list | tuple) or size not in (None, len(value)):
            raise _wrong(key, value, "a list" if size is None else f"a list of {size}")
        return tuple([inner(child, key) for child in value])

    return read
