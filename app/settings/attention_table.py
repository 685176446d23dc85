"""A table of attention backends: from its file, and into the settings of a run."""

from __future__ import annotations

from pathlib import Path

from app.settings.files import changed_at
from ops.attention.table import AttentionTable
from ops.typed import ConfigError, Node, as_plain, build, node_of, read_json


def read_table(path: Path) -> AttentionTable:
    """The table of a file that `python -m app.bench.gpu` wrote. Raises ConfigError for what is none."""
    try:
        table = build(AttentionTable, node_of(read_json(path.expanduser(), "attention table")))
    except ConfigError as error:
        said = str(error)
        raise ConfigError(said if str(path) in said else f"attention table {path}: {said}") from None
    if not table.rows:
        raise ConfigError(f"attention table {path} has no rows; run python -m app.bench.gpu --only attention.")
    return table


def with_attention_table(config: Node) -> Node:
    """The config with `model.dit.attention: FILE.json` replaced by what the file says: other nodes lack the file, and
    a run keeps the table it began with."""
    return changed_at(config, ["model", "dit", "attention"], _of_file)


def _of_file(setting: Node) -> Node:
    if not (isinstance(setting.value, str) and setting.value.endswith(".json")):
        return setting
    return Node(node_of(as_plain(read_table(Path(setting.value)))).value, setting.where)
