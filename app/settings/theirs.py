"""The settings of another trainer's file, name by name, and where each of them stands here.

    found = [translated(one, sections) for one in read_theirs(Path("wan.toml"))]
    print(as_text(found))

Reads what the usual trainers are started with: TOML (musubi-tuner, diffusion-pipe), YAML and JSON (ai-toolkit,
finetrainers, Open-Sora-Plan), Python files of assignments (Open-Sora), and the options of a command in a shell script
(DiffSynth-Studio, kohya, Megatron-LM). Values are shown as they are there: their units may be others.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from app.settings.elsewhere import DONE_OTHERWISE, ELSEWHERE, IN_FILES, VALUES, WORDS
from app.settings.reference import Section, chosen, full_names
from ops.counted import counted, first_of
from ops.typed import ConfigError

_OPTION = re.compile(r"^--?[A-Za-z][\w.-]*(=.*)?$", re.DOTALL)
_OPTION_INSIDE = re.compile(r"\s--[A-Za-z]")
_SHOWN = 30  # characters of a value
_LEFT = 52  # columns of names with values, at most
# what a script does besides starting a trainer: the options of these are no settings
_SHELL = {"set", "[", "[[", "test", "echo", "printf", "export", "source", "cd", "mkdir", "rm", "cp", "mv", "ln", "ls"}
_SHELL |= {"cat", "grep", "sed", "kill", "ulimit", "sleep", "tar", "git", "wget", "curl", "apt", "apt-get"}
_SHELL |= {"pip", "pip3", "hf", "huggingface-cli", "tensorboard", "nvidia-smi"}
# words before the name of a command, with options of their own: python -u -m pip, sudo -E python
_LEADING = re.compile(r"if|then|elif|else|while|until|do|!|\{|sudo|env|exec|nohup|time|(.*/)?python[\d.]*")
_ASSIGNMENT = re.compile(r"\w+\+?=")
# words that stand for options of their own: ${model_options[@]}, $@, and the program that the options before it start
_ENDS_VALUES = re.compile(r"\$\{?(\w+\[)?[@*]\]?\}?|[^-].*\.py")
_ARGUMENTS = ("optimizer_args",)  # whose values are settings themselves: ["d_coef=2", "weight_decay=0.01"]
_TABLES: tuple[Mapping[str, str], ...] = (DONE_OTHERWISE, ELSEWHERE, IN_FILES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Theirs:
    """One setting of such a file: its dotted name, and what is written there."""

    name: str
    value: object

    @property
    def words(self) -> tuple[str, ...]:
        """Its last word, as names are written here, and that with the word before it: optimizer.type is optimizer_type
        where others have it so."""
        *above, leaf = self.name.replace("-", "_").lower().split(".")
        return (f"{above[-1]}_{leaf}", leaf) if above else (leaf,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Translated:
    theirs: Theirs
    here: str  # where it stands, or what is done in place of it; empty: nothing here has that name


def read_theirs(path: Path) -> list[Theirs]:
    """In the order of the file; of names that come again, in every entry of a list, the first. Raises ConfigError for
    a file that cannot be read or has no settings."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the file by which the other trainer is started.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as text ({error}); give TOML, YAML, JSON, Python or a shell script."
        ) from None
    read: Mapping[str, Callable[[str], object]] = {
        ".toml": tomllib.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".json": json.loads,
    }
    try:
        if path.suffix == ".py":
            found = list(_assigned(text))
        elif path.suffix in read:
            found = list(_leaves(read[path.suffix](text)))
        else:
            found = list(_options(text))
    except (ValueError, SyntaxError, yaml.YAMLError) as error:
        kind = path.suffix.lstrip(".") or "a shell script"
        raise ConfigError(f"{path} cannot be read as {kind}: {' '.join(str(error).split())}.") from None
    if not found:
        raise ConfigError(f"{path} has no settings: no keys, no assignments, and no options such as --name value.")
    first: dict[str, Theirs] = {}
    for one in (each for setting in found for each in _taken_apart(setting)):
        first.setdefault(re.sub(r"\.\d+(?=\.)", "", one.name), one)
    return list(first.values())


def _taken_apart(one: Theirs) -> list[Theirs]:
    """What a list of name=value says, each by itself; anything else as it is."""
    given = one.value.split() if isinstance(one.value, str) else one.value if isinstance(one.value, list) else []
    pairs = [str(word).partition("=") for word in given]
    if one.words[-1] not in _ARGUMENTS or not pairs or not all(sign for _, sign, _ in pairs):
        return [one]
    return [Theirs(name=f"{one.name}.{name.strip()}", value=value.strip()) for name, _, value in pairs]


def translated(one: Theirs, sections: Sequence[Section]) -> Translated:
    """Where a setting stands in `reference(RunConfig)`. A name that both have and mean otherwise is the other
    trainer's."""
    here = next((where[word] for word in one.words for where in _TABLES if word in where), "")
    value = str(one.value).rpartition(".")[2].lower()  # torch.optim.AdamW
    if here in VALUES and WORDS.get(value, value) not in _takes(sections, here):
        here = f"{here}. {VALUES[here]}"
    return Translated(theirs=one, here=here or first_of(full_names(sections, one.words[-1]), most=3))


def _takes(sections: Sequence[Section], name: str) -> list[str]:
    (section,) = chosen(sections, name)
    return section.settings[0].takes.split(" | ")


def as_text(found: Sequence[Translated], width: int = 100) -> str:
    """For a terminal of that many columns: names with values, beside them what they are here, and at the end those that
    nothing here is called."""
    known = {f"{one.theirs.name} = {_short(one.theirs.value)}": one.here for one in found if one.here}
    left = min(_LEFT, max(map(len, known), default=0))
    lines = []
    for name, here in known.items():
        first, *rest = textwrap.wrap(here, max(width - left - 2, 30), break_on_hyphens=False)
        lines += [f"{name:<{left}}  {first}"] if len(name) <= left else [name, f"{'':<{left}}  {first}"]
        lines += [f"{'':<{left}}  {line}" for line in rest]
    unknown = [one.theirs.name for one in found if not one.here]
    if unknown:
        told = f"{counted(len(unknown), 'name')} that nothing here is called: {', '.join(unknown)}"
        lines += ["", *textwrap.wrap(told, width, subsequent_indent="    ", break_on_hyphens=False)]
    return "\n".join(lines).lstrip("\n")


def _leaves(value: object, path: str = "") -> Iterator[Theirs]:
    """Lists of mappings are walked; other lists are values, and so are mappings whose name is a setting."""
    if isinstance(value, Mapping) and path.rpartition(".")[2] not in ELSEWHERE:
        for name, below in value.items():
            yield from _leaves(below, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for index, below in enumerate(value):
            yield from _leaves(below, f"{path}.{index}".lstrip("."))
    elif path:
        yield Theirs(name=path, value=value)


def _assigned(text: str) -> Iterator[Theirs]:
    """What a Python file gives names at its top level."""
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(name := statement.targets[0], ast.Name):
            yield from _leaves(_written(statement.value), name.id)


def _written(value: ast.expr) -> object:
    """What is computed is shown as it is written; `dict(a=1)` is a mapping, as configs of mmengine have it."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        return {one.arg: _written(one.value) for one in value.keywords if one.arg}
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)


def _options(text: str) -> Iterator[Theirs]:
    """`--name value`, `--name=value` and `--switch` of the commands in a script. A line that is no whole command, such
    as one of a text in it, is left out where its quotes do not close."""
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            if _OPTION_INSIDE.search(line):
                raise
            continue
        yield from _of_command(words)


def _of_command(words: Sequence[str]) -> Iterator[Theirs]:
    """Options with what follows them, up to the next one, a word that stands for others, or the end of a command; none
    of commands that are the shell's own."""
    command, name, values = list[str](), "", list[str]()
    for word in [*words, ";"]:
        ends, stands_for_others = not word.strip("();<>|&"), bool(_ENDS_VALUES.fullmatch(word))
        command = [] if ends else [*command, word]
        if not (ends or stands_for_others or _OPTION.match(word)):
            values.append(word)
            continue
        if name:
            yield Theirs(name=name, value=" ".join(values) or True)
        name, values = "", []
        if not (ends or stands_for_others or _is_of_shell(command)):
            name, _, value = word.lstrip("-").partition("=")
            values = [value] if value else []


def _is_of_shell(command: Sequence[str]) -> bool:
    """Whether the option that ends these words is of a command of the shell's own, or of a word before a command."""
    words = [word for word in command if not _ASSIGNMENT.match(word)]
    if _OPTION.match(words[0]):  # a line of a list of options
        return False
    first = next((word for word in words if not _LEADING.fullmatch(word) and not _OPTION.match(word)), "")
    return not first or first in _SHELL


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
