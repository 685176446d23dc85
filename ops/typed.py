"""YAML and JSON into frozen dataclasses: unknown keys name the nearest known one, wrong types name key, value and
expectation, with file and line.

    config = build(RunConfig, parse(text, "demo.yaml"))

Knows nothing about any particular file. Imports only the standard library and yaml.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
_MERGE = "tag:yaml.org,2002:merge"  # of the key <<
_DATE = "tag:yaml.org,2002:timestamp"  # of 2025-11-29


class ConfigError(ValueError):
    """What a person wrote in a config or an override is wrong. One sentence: value, rule, remedy. Exit code 2."""


@dataclass(frozen=True, slots=True)
class Node:
    """A YAML value and where it was written. A mapping holds Nodes under its keys, a list holds Nodes."""

    value: object
    where: str = ""  # "demo.yaml:12", or "--set"
    written: str = ""  # a number as it stands there: as a text, 1.10 is not 1.1, nor 010 eight

    def at(self) -> str:
        return f" ({self.where})" if self.where else ""


class UnknownKey(ConfigError):
    """A key that no setting has; `node` is what was written under it."""

    def __init__(self, sentence: str, key: str = "", node: Node = Node(None)) -> None:
        super().__init__(sentence)
        self.key, self.node = key, node


AUTO = "auto"


def as_auto(node: Node) -> Node:
    """`section: auto` is short for `section: {auto: true}`."""
    return Node({AUTO: Node(True, node.where)}, node.where)


def parse(text: str, name: str = "") -> Node:
    """Text of one YAML document as Nodes. Raises ConfigError for broken YAML and for keys written twice."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return Node({}, name) if root is None else _convert(root, name)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{name or 'the value'}{line} is not valid YAML: {problem}.") from None
    except RecursionError:
        raise ConfigError(f"{name or 'the value'} holds itself by an alias, or is nested too deeply.") from None


def _convert(node: yaml.Node, name: str) -> Node:
    where = f"{name}:{node.start_mark.line + 1}" if name else ""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged = {**_merged(value_node, name), **merged}
                continue
            key = str(key_node.value)
            if key in result:
                raise ConfigError(
                    f"key {key!r} appears twice in one mapping ({name}:{key_node.start_mark.line + 1}); remove one."
                )
            place = f"{name}:{key_node.start_mark.line + 1}" if name else ""
            result[key] = replace(_convert(value_node, name), where=place)
        return Node({**merged, **result}, where)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(child, name) for child in node.value], where)
    return Node(_scalar(node, where), where, node.value)


def _merged(node: yaml.Node, name: str) -> dict[str, Node]:
    """What `<<: *a` or `<<: [*a, *b]` adds to a mapping: of a key in both, the value of the first."""
    result: dict[str, Node] = {}
    for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        added = _convert(one, name).value
        if not isinstance(added, dict):
            raise ConfigError(f"<< takes a mapping, or a list of them ({name}:{one.start_mark.line + 1}).")
        result = {**added, **result}
    return result


def _scalar(node: yaml.Node, where: str) -> object:
    if node.tag == _DATE:  # no setting is one
        return node.value
    loader = yaml.SafeLoader("")
    try:
        value: object = loader.construct_object(node)
        return value
    except (ValueError, KeyError):  # 0x_, !!bool maybe, thousands of digits
        kind = node.tag.rpartition(":")[2]
        raise ConfigError(
            f"{where or 'the value'}: {node.value[:40]!r} is no {kind} of YAML; put a text in quotation marks."
        ) from None
    finally:
        loader.dispose()


def read_json(path: str | Path, what: str) -> object:
    """The value of a JSON file, which is a `what`. Raises ConfigError naming the file and the place of a mistake."""
    try:
        value: object = json.loads(Path(path).read_text(encoding="utf-8"))
        return value
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} is not UTF-8 text; give a JSON file.") from None
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read ({error.strerror or error}).") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{what} {path} is not valid JSON: {error.msg} at {place}.") from None


def node_of(value: object, path: str = "") -> Node:
    """A value of JSON as Nodes. Objects know their place in it, such as latency.3, for errors about them as a whole."""
    below = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return Node({str(key): node_of(child, f"{below}{key}") for key, child in value.items()}, path)
    if isinstance(value, list | tuple):
        return Node([node_of(child, f"{below}{i}") for i, child in enumerate(value)])
    return Node(value)


def plain(node: Node) -> object:
    """The node as ordinary dicts, lists and scalars. Keys of digits are numbers again, as in a bucket table."""
    if isinstance(node.value, dict):
        return {int(key) if key.isdecimal() else key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


# Words that mean something else in every section: a setting of another section by that name is not what was meant.
EVERYWHERE = frozenset((
    "name", "path", "dir", "kind", "min", "max", "every", "steps", "seed", "device", "enabled", "width", "height",
    "frames", "fps", "table", "weight", "index", "text",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Names:
    """How an unknown key or value is answered: every legal dotted name, and names of other programs with ours."""

    known: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    done_otherwise: Mapping[str, str] = field(default_factory=dict)  # names without one of ours: what is done instead
    values: Mapping[str, str] = field(default_factory=dict)  # a setting: what else is said of a value it does not take
    words: Mapping[str, str] = field(default_factory=dict)  # values as others write them, and ours
    others: bool = False  # unknown keys are passed over: files that other programs make, too

    def nearest(self, path: str, siblings: Sequence[str]) -> str:
        """The dotted name most likely meant by `path`, or an empty string."""
        parent, _, leaf = path.rpartition(".")
        if leaf in self.elsewhere:
            return self.elsewhere[leaf]
        if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
            return f"{parent}.{close[0]}" if parent else close[0]
        same_leaf = [name for name in self.known if name.rpartition(".")[2] == leaf and leaf not in EVERYWHERE]
        if same_leaf:
            return same_leaf[0]
        if parent and leaf in EVERYWHERE:
            return ""
        close = difflib.get_close_matches(path, self.known, n=1, cutoff=0.7)
        return close[0] if close else ""


def build(cls: type[T], node: Node, names: Names | None = None, path: str = "") -> T:
    """A dataclass from a mapping node. Raises ConfigError for the first key, type or rule that does not hold.

    A section that may stand in several places names the one that its own rules speak of as `PLACE`."""
    names = names or Names(known=dotted_names(cls))  # type: ignore[arg-type]
    if node.value == AUTO and any(f.name == AUTO for f in dataclasses.fields(cls)):  # type: ignore[arg-type]
        node = as_auto(node)
    if not isinstance(node.value, dict):
        raise ConfigError(f"{path or 'the config'} must be a mapping of settings, not {plain(node)!r}{node.at()}.")
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    values = {}
    for key, child in node.value.items():
        full = f"{path}.{key}" if path else key
        if key not in fields:
            if names.others:
                continue
            raise UnknownKey(_unknown(full, child, names, list(fields)), full, child)
        values[key] = _value(hints[key], child, names, full)
    for key, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and key not in values:
            raise ConfigError(f"{f'{path}.{key}' if path else key} is missing{node.at()}; it has no default.")
    try:
        return cls(**values)
    except ValueError as error:
        usual = getattr(cls, "PLACE", path)
        rule = re.sub(rf"\b{re.escape(usual)}\b", path, str(error)) if path != usual else str(error)
        raise ConfigError(f"{rule.rstrip('.')}{_broken(rule, node.value, path, node).at()}.") from None


def _broken(message: str, children: Mapping[str, Node], path: str, section: Node) -> Node:
    """What a rule's message is about: the setting that it begins with where that is written, else the section."""
    parent, _, key = message.partition(" ")[0].rpartition(".")
    return children.get(key, section) if path and parent == path else section


def _unknown(full: str, node: Node, names: Names, siblings: list[str]) -> str:
    parent, _, leaf = full.rpartition(".")
    if leaf in names.done_otherwise:
        return f"unknown key {full}{node.at()}; {names.done_otherwise[leaf]}"
    meant = names.nearest(full, siblings)
    remedy = f"did you mean {meant}?" if meant else f"{parent or 'the top level'} has {', '.join(sorted(siblings))}."
    return f"unknown key {full}{node.at()}; {remedy}"


def _value(kind: object, node: Node, names: Names, path: str) -> object:
    """`node` as a value of type `kind` (scalars, Literal, unions with None, tuples, dicts, dataclasses)."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union(kind, node, names, path)
    if origin is Literal:
        return _choice(get_args(kind), node, path, names)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return build(kind, node, names, path)
    if origin in (tuple, list, Sequence) or kind in (tuple, list):
        return _sequence(kind, node, names, path)
    if origin in (dict, Mapping) or kind is dict:
        return _dict(kind, node, names, path)
    return _plain_value(kind, node, path)


def _wrong(path: str, node: Node, expected: str) -> ConfigError:
    return ConfigError(f"{path} is {plain(node)!r}{node.at()}; expected {expected}.")


def _plain_value(kind: object, node: Node, path: str) -> object:
    value = node.value
    if kind is Any:  # a setting that may be anything
        return plain(node)
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise _wrong(path, node, "true or false")
    if kind is int:
        _check_digits(node, path)
        value = _whole_text(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise _wrong(path, node, "a whole number")
    if kind is float:
        return _float(node, path)
    if kind is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return node.written or str(value)  # `name: 2024` means the text
        raise _wrong(path, node, "text")
    if kind is type(None):
        if value is None:
            return None
        raise _wrong(path, node, "null")
    raise AssertionError(f"{path}: settings of type {kind} cannot be read from YAML")


def _whole_text(value: object) -> object:
    """YAML 1.1 reads 1e6 as text."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9.]+[eE][+-]?[0-9]+", value):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _check_digits(node: Node, path: str) -> None:
    """Raises ConfigError for a number that YAML 1.1 does not read as people do: 010 is eight there, 1:30 is ninety."""
    if isinstance(node.value, str):
        return
    part = "leading 0" if re.fullmatch(r"[+-]?0[0-7_]+", node.written) else "colon" if ":" in node.written else ""
    if part:
        raise ConfigError(
            f"{path} is {node.written}{node.at()}, which YAML reads as {node.value}; write it without the {part}."
        )


def _float(node: Node, path: str) -> float:
    _check_digits(node, path)
    value = node.value
    if isinstance(value, str):
        try:
            value = float(value)  # YAML 1.1 reads 1e-4 as text
        except ValueError:
            raise _wrong(path, node, "a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise _wrong(path, node, "a number")
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        number = math.inf
    if math.isinf(number):
        raise _wrong(path, node, "a finite number")
    return number


def _choice(choices: Sequence[object], node: Node, path: str, names: Names) -> object:
    """The node's value, which must be one of `choices`."""
    _check_digits(node, path)
    if node.value in choices:
        return node.value
    if isinstance(node.value, bool) and (word := "on" if node.value else "off") in choices:
        return word  # as it was written: YAML 1.1 takes on and off for truth values
    ours = names.words.get(str(node.value).lower())
    close = [ours] if ours in choices else difflib.get_close_matches(str(node.value), [*map(str, choices)], n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    expected = ", ".join(map(str, choices))
    others = names.values.get(path, "")
    why = f" {others}" if others else ""
    raise ConfigError(f"{path} is {plain(node)!r}{node.at()}; expected one of {expected}{hint}{why}")


def _union(kind: object, node: Node, names: Names, path: str) -> object:
    members = get_args(kind)
    if node.value is None and type(None) in members:
        return None
    rest = [member for member in members if member is not type(None)]
    if len(rest) == 1:
        return _value(rest[0], node, names, path)
    if len(classes := dataclasses_in(kind)) == len(rest):
        return _tagged(classes, node, names, path)
    if isinstance(node.value, dict) and len(classes) == 1:
        return build(classes[0], node, names, path)
    if str not in rest:
        _check_digits(node, path)
    others = [member for member in rest if member not in classes]
    if classes and len(others) == 1:
        return _value(others[0], node, names, path)
    for member in rest:
        try:
            return _value(member, node, names, path)
        except ConfigError:
            continue
    raise _wrong(path, node, " or ".join(describe(member) for member in members))


def _tagged(members: Sequence[type[DataclassInstance]], node: Node, names: Names, path: str) -> object:
    """One of several dataclasses, told apart by the default of their first field (`architecture: Literal["wan"]`); the
    first of them where the field is not given.

    A setting of another member is taken with its default there, as version 0.1 wrote all settings of all of them;
    another value is an error that names the member whose setting it is.
    """
    settings = {member: {f.name: f for f in dataclasses.fields(member) if f.init} for member in members}
    tag = next(iter(settings[members[0]]))
    by_value = {fields[tag].default: member for member, fields in settings.items()}
    children = node.value if isinstance(node.value, dict) else {}
    chosen = _choice(list(by_value), children[tag], f"{path}.{tag}", names) if tag in children else next(iter(by_value))
    own = settings[by_value[chosen]]
    strangers = set(children) - set(own)
    for key in sorted(strangers):
        defaults = {
            value: settings[member][key].default for value, member in by_value.items() if key in settings[member]
        }
        given = plain(children[key])
        if defaults and not any(
            given == as_plain(default) and isinstance(given, bool) == isinstance(default, bool)  # true is not 1
            for default in defaults.values()
        ):
            owners = " or ".join(map(str, defaults))
            raise ConfigError(
                f"{path}.{key} is a setting of {tag} {owners}{children[key].at()}; {path}.{tag} is {chosen}."
            )
    elsewhere = {key for key in strangers if any(key in fields for fields in settings.values())}
    if elsewhere:
        node = Node({key: child for key, child in children.items() if key not in elsewhere}, node.where)
    return build(by_value[chosen], node, names, path)


def _sequence(kind: object, node: Node, names: Names, path: str) -> list[object] | tuple[object, ...]:
    items = node.value
    args = get_args(kind)
    make = list if get_origin(kind) is list or kind is list else tuple
    if not isinstance(items, list):
        raise _wrong(path, node, describe(kind))
    fixed = make is tuple and args and args[-1] is not Ellipsis
    if fixed and len(items) != len(args):
        raise _wrong(path, node, describe(kind))
    kinds = list(args) if fixed else [args[0] if args else Any] * len(items)  # a bare `tuple` holds anything
    return make(_value(k, item, names, f"{path}.{i}") for i, (k, item) in enumerate(zip(kinds, items, strict=True)))


def _dict(kind: object, node: Node, names: Names, path: str) -> dict[str, object]:
    if not isinstance(node.value, dict):
        raise _wrong(path, node, "a mapping")
    args = get_args(kind)
    kind = args[1] if args else Any  # a bare `dict` holds anything
    return {key: _value(kind, child, names, f"{path}.{key}") for key, child in node.value.items()}


def describe(kind: object) -> str:
    """A type in words, for error messages."""
    simple = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if isinstance(kind, type) and kind in simple:
        return simple[kind]
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple and get_args(kind)[-1] is not Ellipsis:
        return f"a list of {len(get_args(kind))}: {', '.join(describe(k) for k in get_args(kind))}"
    if get_origin(kind) in (tuple, list):
        return f"a list, each {describe(get_args(kind)[0])}"
    return "a mapping"


@functools.cache
def dotted_names(cls: type, path: str = "") -> tuple[str, ...]:
    """Every setting below a dataclass as section.key; lists and dicts end a path."""
    hints = _hints(cls)
    names: dict[str, None] = {}  # in order, each once: members of a union share settings
    for f in dataclasses.fields(cls):
        full = f"{path}.{f.name}" if path else f.name
        names[full] = None
        for member in dataclasses_in(hints[f.name]):
            names.update(dict.fromkeys(dotted_names(member, full)))
    return tuple(names)


@functools.cache
def _hints(cls: type) -> dict[str, object]:
    """Types of a dataclass's fields, whose annotations Python compiles from text at each asking: 0.7 ms a section."""
    return typing.get_type_hints(cls)


def dataclasses_in(kind: object) -> list[type[DataclassInstance]]:
    """The dataclasses that a setting may be: itself, or the members of a union."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


def as_plain(value: object) -> Any:  # as deep as the value, whose shape the caller knows
    """A dataclass as dicts, lists and scalars, ready for YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: as_plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(child) for child in value]
    return value
