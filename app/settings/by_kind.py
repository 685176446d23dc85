"""Defaults of a run's optimizer that depend on its kind."""

from __future__ import annotations

from ops.config import USUAL_OF_KIND
from ops.typed import Node, node_of


def with_usual_of_kind(config: Node) -> Node:
    """The config with what its `train.optimizer.kind` takes by default, for settings that it does not give."""
    return _filled(config, ["train", "optimizer"])


def _filled(node: Node, names: list[str]) -> Node:
    if not isinstance(node.value, dict):
        return node
    if not names:
        kind = node.value["kind"].value if "kind" in node.value else None
        usual = USUAL_OF_KIND.get(kind, {}) if isinstance(kind, str) else {}
        return Node({**{name: node_of(value) for name, value in usual.items()}, **node.value}, node.where)
    head, *rest = names
    if head not in node.value:
        return node
    return Node({**node.value, head: _filled(node.value[head], rest)}, node.where)
