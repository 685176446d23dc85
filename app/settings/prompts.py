"""Prompts: from a text file, one on each line; and what is to be said of them before clips are made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from app.settings.files import changed_at
from app.settings.prompt_line import PromptLine, short
from app.settings.sections import LongPrompts
from ops.models.config import TextConfig
from ops.typed import ConfigError, Node

_MARKS = 8  # tokens that an encoder adds to those of a text, at most


def read_prompts(path: Path, setting: str = "--prompts") -> list[str]:
    """The lines of a text file that are not empty; those that begin with # are comments. Raises ConfigError when there
    are none, and for options on one that are none."""
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")  # editors mark it so
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} {path} is not UTF-8 text; write one prompt on each line.") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"{setting} {path} cannot be read ({why}); give a text file, one prompt on each line."
        ) from None
    prompts = []
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):  # U+2028 and the like may stand in a prompt
        if (prompt := line.strip()) and not line.startswith("#"):
            PromptLine.of(prompt, f"{setting} {path}, line {number}, {short(prompt)}")
            prompts.append(prompt)
    if prompts:
        return prompts
    raise ConfigError(f"{setting} {path} has no prompt; write one on each line.")


def with_prompts_of_file(config: Node) -> Node:
    """The config with `sample.prompts: FILE` replaced by the file's lines: a run keeps the prompts it began with."""
    return changed_at(config, ["sample", "prompts"], _of_file)


def _of_file(given: Node) -> Node:
    if not isinstance(given.value, str):
        return given
    return Node([Node(line, given.where) for line in read_prompts(Path(given.value), "sample.prompts")], given.where)


def prompt_notes(prompts: Sequence[str], text: TextConfig, long_prompts: LongPrompts, negative: str = "") -> list[str]:
    """A sentence for each prompt, and each negative one, of which the encoder sees only the beginning, and one that
    lists prompts without text, numbered from 1 as in errors. `text` is of a resolved config. Raises ConfigError for the
    first prompt that is too long where those are refused."""
    lines = [PromptLine.of(prompt) for prompt in prompts]
    texts, negatives = [line.text for line in lines], [line.negative_prompt or "" for line in lines]
    found = _empty(texts)
    for prompt, tokens in _too_long([*texts, negative, *negatives], text):
        what = f"prompt {prompt[:40]!r}... has {tokens} tokens"
        if long_prompts == "refuse":
            raise ConfigError(
                f"{what}, and model.text.max_length is {text.max_length}. Shorten it, or have what is beyond cut "
                f"(sample.long_prompts: cut, or --long-prompts cut)."
            )
        found.append(f"{what}; those beyond model.text.max_length {text.max_length} are cut.")
    return found


def _empty(prompts: Sequence[str]) -> list[str]:
    empty = [str(number) for number, prompt in enumerate(prompts, 1) if not prompt.strip()]
    if not empty:
        return []
    what = f"prompts {', '.join(empty)} are" if len(empty) > 1 else f"prompt {empty[0]} is"
    return [f"{what} empty: their clips are what the model makes without any text."]


def _too_long(prompts: Sequence[str], text: TextConfig) -> list[tuple[str, int]]:
    """(prompt, its tokens). No tokenizer is loaded, which takes seconds, for prompts of fewer bytes than tokens fit."""
    from ops.models.load import token_counter

    long = [prompt for prompt in dict.fromkeys(prompts) if len(prompt.encode()) + _MARKS > text.max_length]
    if not long:
        return []
    count = token_counter(text)
    return [(prompt, tokens) for prompt in long if (tokens := count(prompt)) > text.max_length]
