"""Prompts from a text file, one on each line."""

from __future__ import annotations

from pathlib import Path

from ops.typed import ConfigError, Node


def read_prompts(path: Path, setting: str = "--prompts") -> list[str]:
    """The lines of a text file that are not empty. Raises ConfigError when there are none."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} {path} is not UTF-8 text; write one prompt on each line.") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"{setting} {path} cannot be read ({why}); give a text file, one prompt on each line."
        ) from None
    if prompts := [line.strip() for line in lines if line.strip()]:
        return prompts
    raise ConfigError(f"{setting} {path} has no prompt; write one on each line.")


def with_prompts_of_file(config: Node) -> Node:
    """The config with `sample.prompts: FILE` replaced by the file's lines: a run keeps the prompts it began with."""
    if not isinstance(config.value, dict):
        return config
    section = config.value.get("sample")
    if section is None or not isinstance(section.value, dict):
        return config
    given = section.value.get("prompts")
    if given is None or not isinstance(given.value, str):
        return config
    lines = [Node(line, given.where) for line in read_prompts(Path(given.value), "sample.prompts")]
    sample = Node({**section.value, "prompts": Node(lines, given.where)}, section.where)
    return Node({**config.value, "sample": sample}, config.where)
