"""Every setting of a run in words: what it takes, its default, and the explanation that stands beside it in the code.

    sections = reference(RunConfig)
    wanted = chosen(sections, "train.flow")   # a section with those below it, or one setting

Printed by `heddle settings`; docs/all-settings.md is `as_markdown(sections)`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import io
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, Union, get_args, get_origin

from app.settings.elsewhere import DONE_OTHERWISE, ELSEWHERE
from ops.typed import ConfigError, as_plain, dataclasses_in

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FIRST_WORD = re.compile(r"^[a-z]+(?=[ ,])")  # no name of a setting or of a value
_OPTION = "the command line option"  # how ELSEWHERE begins to say of what is no setting
_MEMBER = "N"  # in names: the place in a list, counted from 0
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedSetting:
    name: str  # of its section: learning_rate
    takes: str  # number, true | false, text, a | b
    default: str  # as YAML would have it; empty: none, it must be given
    about: str  # one line; may be empty where the name says it


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    name: str  # dotted; empty: the top level
    about: str
    settings: tuple[ExplainedSetting, ...]
    when: str = ""  # of sections that may be several things: architecture: wan
    like: str = ""  # the section that has the same settings

    @property
    def title(self) -> str:
        return f"{self.name or 'the top level'}{f' ({self.when})' if self.when else ''}"


def reference(config: type[DataclassInstance]) -> tuple[Section, ...]:
    """All sections of a config, in the order of its fields."""
    seen: dict[type, str] = {}
    return tuple(_sections(config, "", seen))


def _sections(kind: type[DataclassInstance], name: str, seen: dict[type, str], about: str = "") -> Iterator[Section]:
    """The section that a dataclass is, and those below it. `about`: what its name says in the section above."""
    hints = typing.get_type_hints(kind)
    fields = [(field, _below(hints[field.name])) for field in dataclasses.fields(kind) if field.init]
    plain = (_setting(kind, field, hints[field.name]) for field, below in fields if not below.sections)
    about = sentences(first_paragraph(kind), about)
    yield Section(name=name, about=about, settings=tuple(plain), like=seen.get(kind, ""))
    if kind in seen:
        return
    seen[kind] = name
    for field, below in fields:
        path = ".".join(filter(None, (name, field.name, *below.steps)))
        note = sentences(comment_of(kind, field.name), "Unset by default." if field.default is None else "")
        if len(below.sections) > 1:
            yield from _variants(below.sections, path, seen)
        for one in below.sections[:1] if len(below.sections) == 1 else ():
            yield from _sections(one, path, seen, note)


def _variants(kinds: Sequence[type[DataclassInstance]], path: str, seen: dict[type, str]) -> Iterator[Section]:
    """Dataclasses told apart by their first field: what all have, then what each adds or has otherwise."""
    tag = dataclasses.fields(kinds[0])[0].name
    tables = [list(_sections(kind, path, seen)) for kind in kinds]
    shared = [one for one in tables[0][0].settings if all(_named(rest[0], one.name) for rest in tables[1:])]
    choices = [str(dataclasses.fields(kind)[0].default) for kind in kinds]
    base = next(one for one in kinds[0].__mro__ if all(issubclass(kind, one) for kind in kinds))
    yield replace(
        tables[0][0],
        about=first_paragraph(base),
        settings=(replace(shared[0], takes=" | ".join(choices)), *shared[1:]),
    )
    for choice, (own, *below) in zip(choices, tables, strict=True):
        differs = tuple(one for one in own.settings if one not in shared and one.name != tag)
        yield replace(own, settings=differs, when=f"{tag}: {choice}")
        yield from below


def _named(section: Section, name: str) -> ExplainedSetting | None:
    return next((one for one in section.settings if one.name == name), None)


@dataclass(frozen=True, slots=True)
class _Below:
    """The dataclasses that a setting is made of, and the steps to them from its name: N of a list."""

    sections: tuple[type[DataclassInstance], ...]
    steps: tuple[str, ...] = ()


def _below(hint: object) -> _Below:
    """A setting that may be a word as well, as `attention: auto`, is none of sections."""
    if get_origin(hint) in (tuple, list):
        return _Below(tuple(dataclasses_in(get_args(hint)[0])), (_MEMBER,))
    found = tuple(dataclasses_in(hint))
    alone = found == (hint,) or {*found} == {*get_args(hint)} - {type(None)}
    return _Below(found if alone else ())


def _setting(kind: type, field: dataclasses.Field[object], hint: object) -> ExplainedSetting:
    return ExplainedSetting(
        name=field.name, takes=_takes(hint), default=_default(field), about=comment_of(kind, field.name)
    )


def comment_of(kind: type, name: str) -> str:
    """The comment at a field of a dataclass, in one line; empty: there is none."""
    return next((found for one in kind.__mro__ if (found := _comments(one).get(name))), "")


def _takes(hint: object) -> str:
    if hint in _WORDS:
        return _WORDS[hint]
    inner, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (tuple, list):
        several = inner[-1] is Ellipsis or origin is list
        return f"list of {_takes(inner[0])}" if several else f"[{', '.join(map(_takes, inner))}]"
    if origin in (Union, typing.get_origin(int | str)):
        return " | ".join(dict.fromkeys(map(_takes, inner)))
    return "mapping"


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return _yaml(as_plain(field.default))
    return "" if field.default_factory is dataclasses.MISSING else _yaml(as_plain(field.default_factory()))


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(one)}' for key, one in value.items())}}}"
    return repr(value) if isinstance(value, float) else str(value) or '""'


def first_paragraph(kind: type) -> str:
    """What a docstring begins with, in one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())


def sentences(*texts: str) -> str:
    """The texts that are not empty, each with a capital and a full stop."""
    return " ".join(f"{_FIRST_WORD.sub(_capital, text).rstrip('.')}." for text in texts if text)


def _capital(word: re.Match[str]) -> str:
    return word[0].capitalize()


@cache
def _comments(kind: type) -> dict[str, str]:
    """The comments of a class's own fields: the lines right above each, and what follows it on its own lines."""
    if not dataclasses.is_dataclass(kind):
        return {}
    source = textwrap.dedent(inspect.getsource(kind))
    notes, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# type:"):
            notes[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    found = {}
    (body,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            lines = [notes[line] for line in range(first, (node.end_lineno or first) + 1) if line in notes]
            found[node.target.id] = " ".join(lines)
    return found


def chosen(sections: Sequence[Section], name: str) -> tuple[Section, ...]:
    """The section of that name with all below it, or else its section with that setting alone; also by its last words
    (`flow_shift`), by the family that a section is for (`cogvideox`), or by the name that another trainer has for it.
    Raises ConfigError with the nearest name."""
    wanted = _without_places(name.strip(".")).lower()
    if instead := DONE_OTHERWISE.get(wanted.rpartition(".")[2]):
        raise ConfigError(f"{name} is no setting here; {instead}")
    theirs = ELSEWHERE.get(wanted.rpartition(".")[2], wanted).partition(" (")[0]
    if theirs.startswith(_OPTION):
        raise ConfigError(f"{name} is no setting here; it is {theirs}.")
    for path in (wanted, theirs):
        if of_family := tuple(one for one in sections if one.when and one.when.rpartition(" ")[2] == path):
            return of_family
        at = [one.name for one in sections if f".{_without_places(one.name)}".endswith(f".{path}")]
        below = tuple(one for one in sections if any(f"{one.name}.".startswith(f"{top}.") for top in at))
        if found := below or tuple(_with_setting(sections, path)):
            return found
    names = [_without_places(f"{one.name}.{setting.name}".lstrip(".")) for one in sections for setting in one.settings]
    names += [_without_places(one.name) for one in sections if one.name]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    near = close or [full for full in names if difflib.get_close_matches(wanted, [full.rpartition(".")[2]], cutoff=0.7)]
    hint = f"did you mean {near[0]}?" if near else "heddle settings lists all."
    raise ConfigError(f"no setting or section is called {name}; {hint}")


def full_names(sections: Sequence[Section], leaf: str) -> list[str]:
    """Dotted names of all settings with this last word."""
    found = (one for one in _once(sections) if _named(one, leaf))
    return list(dict.fromkeys(_without_places(f"{one.name}.{leaf}".lstrip(".")) for one in found))


def _with_setting(sections: Sequence[Section], path: str) -> Iterator[Section]:
    parent, _, leaf = path.rpartition(".")
    for section in sections:
        setting = _named(section, leaf)
        if setting and (not parent or f".{_without_places(section.name)}".endswith(f".{parent}")):
            yield replace(section, settings=(setting,))


def _without_places(name: str) -> str:
    return re.sub(rf"\.(\d+|{_MEMBER})(?=\.|$)", "", name)


def _once(sections: Sequence[Section]) -> Iterator[Section]:
    """Without the settings that another one of these sections has, too."""
    names = {section.name for section in sections}
    for one in sections:
        yield replace(one, settings=()) if one.like and one.like in names else replace(one, like="")


def as_text(sections: Sequence[Section], width: int = 100) -> str:
    """For a terminal of that many columns."""
    return "\n\n".join("\n".join(_lines(section, width)) for section in _once(sections))


def _lines(section: Section, width: int) -> Iterator[str]:
    yield f"{section.title}: {section.about}" if section.about else section.title
    if section.like:
        yield f"  as {section.like}"
    for one in section.settings:
        default = f" = {one.default}" if one.default else " must be given"
        yield f"  {one.name}{default}   ({one.takes})"
        yield from textwrap.wrap(one.about, width, initial_indent="      ", subsequent_indent="      ")


def as_markdown(sections: Sequence[Section]) -> str:
    """One table for each section."""
    return "\n\n".join("\n".join(_table(section)) for section in _once(sections))


def _table(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield ""
    yield _escaped(section.about)
    if section.like:
        yield ""
        yield f"As {section.like}."
    if section.settings:
        yield ""
        yield "| setting | takes | default | |"
        yield "|---|---|---|---|"
    for one in section.settings:
        default = f"`{_escaped(one.default)}`" if one.default else "must be given"
        yield f"| `{one.name}` | {_escaped(one.takes)} | {default} | {_escaped(one.about)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
