"""The YAML files of a run's settings: one over another, with `--set` over all of them.

    node = read("configs/runs/demo.yaml")          # merges the files under `base:` first
    node = override(node, ["train.steps=10"])
    config = build(RunConfig, node)                # ops/typed.py

Knows nothing about any particular section; `app/settings/config.py` holds those, and says which come in several kinds:
of such a section the last layer that gives a kind decides, and what earlier layers say of other kinds goes. Imports
neither torch nor Ray.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from ops.typed import AUTO, ConfigError, Node, as_auto, parse, plain

SET = "--set"  # where the nodes of assignments were written
# name of a section -> the settings of which it takes one, each with those that belong to it
Kinds = Mapping[str, Mapping[str, Sequence[str]]]


def read(path: str | Path, kinds: Kinds | None = None) -> Node:
    """The mapping of a YAML file over those of the files under its `base:` (relative to it, earlier ones first)."""
    return _read(Path(path), (), kinds or {})


def _read(path: Path, open_files: tuple[Path, ...], kinds: Kinds) -> Node:
    if path.exists() and not path.is_file():
        raise ConfigError(f"config {path} is no file; give one of YAML: it is read more than once, as no pipe can be.")
    if not path.is_file():
        raise ConfigError(f"config {path} does not exist; the shipped ones are under configs/runs/.")
    if path.resolve() in open_files:
        raise ConfigError(f"config {path} lists itself under base: ({' -> '.join(p.name for p in open_files)}).")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"config {path} is not UTF-8 text; give a YAML file.") from None
    node = parse(text, path.name)
    if not isinstance(node.value, dict):
        raise ConfigError(f"config {path} must hold a mapping of sections such as model:, data: and train:.")
    base = node.value.pop("base", Node([]))
    names = base.value if isinstance(base.value, list) else [base]
    merged = Node({}, path.name)
    for name in names:
        if not isinstance(name.value, str):
            raise ConfigError(f"base must be a file name or a list of them, not {plain(name)!r}{name.at()}.")
        merged = merge(merged, _read(path.parent / name.value, (*open_files, path.resolve()), kinds), kinds)
    return merge(merged, node, kinds)


def merge(below: Node, above: Node, kinds: Kinds | None = None, section: str = "") -> Node:
    """Mappings are merged key by key; anything else of `above` replaces what is below, and so does the kind of a
    `section` that comes in `kinds`. Two kinds in one layer are left to the section's own rules."""
    kinds = kinds or {}
    if isinstance(below.value, dict) and above.value == AUTO:
        above = as_auto(above)
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    given = [kind for kind in kinds.get(section, ()) if kind in above.value and above.value[kind].value]
    gone = _of_other_kinds(kinds[section], given[0]) if len(given) == 1 else frozenset()
    result = {key: node for key, node in below.value.items() if key not in gone}
    for key, node in above.value.items():
        result[key] = merge(result[key], node, kinds, key) if key in result else node
    return Node(result, above.where or below.where)


def _of_other_kinds(kinds: Mapping[str, Sequence[str]], kind: str) -> frozenset[str]:
    """Keys that say nothing of a section of this kind."""
    return frozenset(key for other, own in kinds.items() if other != kind for key in (other, *own))


def changed_at(node: Node, path: Sequence[str], change: Callable[[Node], Node]) -> Node:
    """The node with what stands at a path below it changed; as it is where nothing does."""
    if not path:
        return change(node)
    head, *rest = path
    if not isinstance(node.value, dict) or head not in node.value:
        return node
    return Node({**node.value, head: changed_at(node.value[head], rest, change)}, node.where)


def override(node: Node, assignments: Sequence[str], kinds: Kinds | None = None, joined: Collection[str] = ()) -> Node:
    """`a.b=value` assignments over a node, values read as YAML; together they are one layer over it. A list element is
    written `a.0.b=value`. `joined`: keys of texts that stand before another one, so that their last spaces count."""
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {assignment!r} is not key=value, for example --set train.steps=100.")
        path = name.strip().split(".")
        value = _assigned(assignment, name.strip(), text) if text.strip() else Node(None, SET)
        if path[-1] in joined and isinstance(value.value, str) and value.written == text.strip():
            value = replace(value, value=text.lstrip().rstrip("\n"))
        node = _assign(node, path, value, name.strip(), kinds or {})
    return node


def _assigned(assignment: str, name: str, text: str) -> Node:
    """The value of an assignment. Raises ConfigError where YAML would drop the end of a path or of a text as a comment;
    in several lines, as of a file, comments are meant."""
    value = _mark(parse(text))
    cut = _comment_of(text) if "\n" not in text.strip() else ""
    if cut:
        raise ConfigError(
            f"--set {assignment!r}: {cut!r} is a comment in YAML, as is all that follows a # after a space. Leave it "
            f"out, or put the text in quotation marks: '{name}=\"...\"'."
        )
    return value


def _comment_of(line: str) -> str:
    """The comment after a text or number without quotation marks, or in place of one; empty if there is none."""
    if line.lstrip().startswith("#"):
        return line.strip()
    for token in yaml.scan(line, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.ScalarToken) and token.plain:
            rest = line[token.end_mark.index :]
            if re.match(r"\s+#", rest):
                return rest.strip()
    return ""


def run_name_override(name: str) -> str:
    """The assignment of a run's name, whatever YAML would read in it."""
    return f"run.name={json.dumps(name, ensure_ascii=False)}"


def _assign(node: Node, path: list[str], value: Node, full: str, kinds: Kinds, section: str = "") -> Node:
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(node.value, list):
        if not head.isdecimal() or int(head) >= len(node.value):
            raise ConfigError(f"--set {full}: {head!r} is not a position in a list of {len(node.value)}.")
        items = list(node.value)
        items[int(head)] = _assign(items[int(head)], rest, value, full, kinds)
        return Node(items, node.where)
    children = dict(node.value) if isinstance(node.value, dict) else {}
    if head in kinds.get(section, ()) and (rest or value.value):
        gone = _of_other_kinds(kinds[section], head)
        children = {key: child for key, child in children.items() if key not in gone or child.where == SET}
    children[head] = _assign(children.get(head, Node(None, SET)), rest, value, full, kinds, head)
    return Node(children, node.where)


def _mark(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _mark(child) for key, child in node.value.items()}, SET)
    if isinstance(node.value, list):
        return Node([_mark(child) for child in node.value], SET)
    return replace(node, where=SET)
