"""`heddle profile --write`: the limits of batches that were measured, put into the YAML file of a run as it stands."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from app.settings.config import RunConfig
from data.config import BatchConfig
from ops.typed import ConfigError

KEPT = ("max_batch", "text_tokens")  # of the config, beside the limits
_FOLLOWS = ("auto", "target_s", "recalibrate", "recalibrate_steps", "recalibrate_change")  # of sizes that follow a run


def write_limits(path: Path, found: BatchConfig) -> None:
    """Replace `data.batch` of the file; everything else in it, comments too, stays. Raises ConfigError, and leaves the
    file alone, where it cannot be edited so."""
    before = path.read_text(encoding="utf-8")
    after = edited(before, flow(found))
    path.write_text(after, encoding="utf-8")
    try:
        written = RunConfig.load(path).data.batch
        if (written.compute, written.exponent, written.memory_tokens) != (
            found.compute,
            found.exponent,
            found.memory_tokens,
        ):
            raise ConfigError("another file under base: or an alias decides data.batch")
    except ConfigError as error:
        path.write_text(before, encoding="utf-8")
        raise ConfigError(
            f"{path} was not changed ({error}). Put this into it: data: {{batch: {flow(found)}}}"
        ) from None


def flow(found: BatchConfig) -> str:
    """The limits as a YAML mapping on one line."""
    values = {"memory_tokens": found.memory_tokens, "compute": found.compute, "exponent": found.exponent}
    kept = KEPT if found.recalibrate == "off" else (*KEPT, *_FOLLOWS)
    values |= {name: getattr(found, name) for name in kept if getattr(found, name) != getattr(BatchConfig(), name)}
    return "{" + ", ".join(f"{name}: {_number(value)}" for name, value in values.items()) + "}"


def _number(value: float | str) -> str:
    """As YAML 1.1 reads it back: a number with an exponent has a point, and on is a word only in quotes."""
    if isinstance(value, bool | str):
        return json.dumps(value)
    text = f"{value:.15g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def edited(text: str, batch: str) -> str:
    """The text of a YAML document with `data.batch` set to this mapping."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    data = _child(root, "data")
    if root is None or data is None:
        return f"{text.rstrip()}\n\ndata:\n  batch: {batch}\n"
    old = _child(data, "batch")
    if old is not None:
        return text[: old.start_mark.index] + batch + text[_end(old) :]
    at = data.start_mark.index
    if isinstance(data, yaml.MappingNode) and data.flow_style:
        return f"{text[: at + 1]}batch: {batch}, {text[at + 1 :]}"
    return f"{text[:at]}batch: {batch}\n{' ' * data.start_mark.column}{text[at:]}"


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for key, value in node.value if key.value == name), None)


def _end(node: yaml.Node) -> int:
    """Where its last word ends: a block ends at the next one, after comments that are not its own."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end
