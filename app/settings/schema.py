"""The JSON schema of run files, by which editors complete and check them: configs/heddle.schema.json.

    schema = json_schema(RunConfig)        # draft 2020-12, as `heddle settings --schema` writes it

It knows names and types; rules between settings are `heddle train --dry-run`'s.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Union, get_args, get_origin

from app.settings.reference import comment_of, first_paragraph, sentences
from ops.typed import AUTO, as_plain, dataclasses_in

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Schema = dict[str, object]

_SCALARS: dict[object, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": ["string", "number"]},  # `name: 2024` means the text
    type(None): {"type": "null"},
}
# What files say in another way than the settings that are made of them: a file of prompts, a table of backends
_ALSO: dict[str, Schema] = {"prompts": {"type": "string"}, "attention": {"type": "string", "pattern": r"\.json$"}}


def json_schema(config: type[DataclassInstance]) -> Schema:
    """The schema of a run file. Nothing is required: what a file lacks may stand in those under its `base:`."""
    name: Schema = {"type": "string"}
    base = {"description": "Files that this one changes, relative to it.", "anyOf": [name, _list_of(name)]}
    found = _section((config,))
    properties = typing.cast("Schema", found["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A run of Heddle",
        **found,
        "properties": {"base": base, **properties},
    }


def _section(kinds: Sequence[type[DataclassInstance]]) -> Schema:
    """A mapping of the settings that one of these dataclasses has."""
    ways: dict[str, list[Schema]] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            found = _setting(kind, field, hints[field.name])
            if field.init and found not in ways.setdefault(field.name, []):
                ways[field.name].append(found)
    properties = {name: found[0] if len(found) == 1 else {"anyOf": found} for name, found in ways.items()}
    if len(kinds) > 1:  # told apart by their first field
        tag = dataclasses.fields(kinds[0])[0].name
        properties[tag] = {**ways[tag][0], "enum": [dataclasses.fields(kind)[0].default for kind in kinds]}
    about = first_paragraph(kinds[0]) if len(kinds) == 1 else ""
    mapping: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    if AUTO in properties:  # `batch: auto` is short for `batch: {auto: true}`
        mapping |= {"type": ["object", "string"], "pattern": f"^{AUTO}$"}
    return {"description": about, **mapping} if about else mapping


def _setting(kind: type[DataclassInstance], field: dataclasses.Field[object], hint: object) -> Schema:
    found = _of(hint)
    if field.name in _ALSO:
        found = {"anyOf": [found, _ALSO[field.name]]}
    about = sentences(comment_of(kind, field.name), str(found.get("description", "")))
    if about:
        found = {"description": about, **{key: value for key, value in found.items() if key != "description"}}
    if field.default is not dataclasses.MISSING and not dataclasses.is_dataclass(field.default):
        found = {**found, "default": as_plain(field.default)}
    return found


def _of(hint: object) -> Schema:
    inner, origin = get_args(hint), get_origin(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return {"enum": [*inner, *({"on": True, "off": False}[one] for one in inner if one in ("on", "off"))]}
    if origin in (tuple, list):
        if origin is list or inner[-1] is Ellipsis:
            return _list_of(_of(inner[0]))
        return {"type": "array", "prefixItems": [_of(one) for one in inner], "minItems": len(inner), "items": False}
    if sections := dataclasses_in(hint):
        rest = [one for one in inner if one not in sections]
        found = _section(sections)
        if rest == [type(None)]:  # not by anyOf, of which an editor says that nothing in it fits
            kinds = found["type"] if isinstance(found["type"], list) else [found["type"]]
            return found | {"type": [*kinds, "null"]}
        return {"anyOf": [found, *map(_of, rest)]} if rest else found
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(one) for one in inner]}
    assert origin in (dict, Mapping), hint
    return {"type": "object"}


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}
