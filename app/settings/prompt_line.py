"""A prompt and the options on its line, by the names that prompt files of kohya's trainers and musubi-tuner have:

    a cat on a wall --w 832 --h 480 --f 81 --d 42 --s 20 --l 5.0 --fs 3 --n blurred, cut off --i cat.png

Each says it for this prompt's clip instead of the setting of `sample`. Two dashes are an option where a letter follows
and nothing but a space is before them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from ops.ranges import SEED, Range, above, between
from ops.typed import ConfigError

_OPTION = re.compile(r"(?:^|(?<=\s))--(?=[A-Za-z])")
# what word processors make of two hyphens, where a number or a picture's file stands after the letters of an option
_DASH = re.compile(
    r"(?:^|(?<=\s))[\u2010-\u2015\u2212]+"
    r"(?:(?P<number>[whfdsgl]|fs)\s+[+-]?\.?[0-9]\S*|(?P<text>n)\s+\S+|(?P<file>e?i)\s.*?\.(?:png|jpe?g|webp|bmp)\b)",
    re.IGNORECASE,
)
_SHOWN = 60  # letters of a line in a message
_WHOLE: dict[str, tuple[str, Range]] = {
    "w": ("width", between(1, 1 << 16)),
    "h": ("height", between(1, 1 << 16)),
    "f": ("frames", between(1, 100_000)),
    "d": ("seed", between(0, SEED)),
    "s": ("steps", between(1, 100_000)),
}
_NUMBERS: dict[str, tuple[str, Range]] = {
    # of weights with guidance_embeds the others call it g, of classifier-free guidance l: here they are one setting
    "g": ("guidance_scale", between(0, 1e6)),
    "l": ("guidance_scale", between(0, 1e6)),
    "fs": ("flow_shift", above(0, 1e6)),
}
_FORMS = {  # of values; digits of other scripts and 8_32, which int() and float() read, are slips
    "whole number": re.compile(r"[+-]?[0-9]{1,30}"),
    "number": re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?(?:nan|inf)", re.IGNORECASE),
}
_TEXTS = {"n": "negative_prompt", "i": "image", "ei": "last_image"}
_PICTURES = ("i", "ei")
_MEANING = (
    "--w and --h (pixels), --f (frames), --d (seed), --s (steps), --l or --g (guidance scale), --fs (flow shift), "
    "--n (negative prompt), --i (first frame), --ei (last frame)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    """What a line asks for; None is what its settings say."""

    text: str
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    seed: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    flow_shift: float | None = None
    negative_prompt: str | None = None
    image: str | None = None
    last_image: str | None = None

    @staticmethod
    def of(line: str, called: str = "") -> PromptLine:
        """Raises ConfigError, of a line that is `called` so, for options that are none, and for values that these do
        not take."""
        called = called or f"prompt {short(line)}"
        if dash := _DASH.search(line):
            name = next(filter(None, dash.groups()))
            raise ConfigError(
                f"{called}: {dash[0].split()[0]!r} begins with a dash, and options with two hyphens; write --{name}, "
                f"or put a space after the dash where it is text."
            )
        options = list(_options(line))
        found = PromptLine(text=line[: options[0].start].strip() if options else line)
        for option in options:
            name, value = _read(option, called)
            if getattr(found, name) is not None:
                one = " --g and --l are one setting here." if name == "guidance_scale" else ""
                raise ConfigError(f"{called}: --{option.name} is given twice.{one} Leave one out.")
            found = replace(found, **{name: value})  # type: ignore[arg-type]  # by its field's name
        return found

    @property
    def has_options(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self) if field.name != "text")


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of a line: its name, its value, and where on the line it begins and its value stands."""

    name: str
    value: str
    start: int
    at: slice


def _options(line: str) -> Iterator[_Option]:
    starts = [match.start() for match in _OPTION.finditer(line)]
    for start, end in pairwise([*starts, len(line)]):
        said = line[start:end]
        name = said.split(maxsplit=1)[0]
        value = said[len(name) :].strip()
        begin = start + (said.index(value, len(name)) if value else len(name))
        at, name = slice(begin, begin + len(value)), name.removeprefix("--").lower()
        if name in _PICTURES and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1].strip()  # quotes of a file, as in a shell
        yield _Option(name, value, start, at)


def _read(option: _Option, called: str) -> tuple[str, int | float | str]:
    """(field, value). Raises ConfigError."""
    where, (name, value) = f"{called}: --{option.name}", (option.name, option.value)
    if name in _TEXTS:
        if not value:
            raise ConfigError(f"{where} has no value; give a {'text' if name == 'n' else 'picture'}, or leave it out.")
        return _TEXTS[name], value
    if name not in _WHOLE and name not in _NUMBERS:
        raise ConfigError(
            f"{where} is no option of a prompt; there are {_MEANING}. Leave it out, or put a space after the dashes "
            f"where they are text."
        )
    field, allowed = _WHOLE[name] if name in _WHOLE else _NUMBERS[name]
    kind = "whole number" if name in _WHOLE else "number"
    if not value:
        raise ConfigError(f"{where} has no value; give a {kind}, or leave it out.")
    if not _FORMS[kind].fullmatch(value):
        first, _, more = value.partition(" ")
        if more and _FORMS[kind].fullmatch(first):
            raise ConfigError(f"{where} {value!r} is no {kind}; options stand at the end, after the text.")
        form = "digits 0 to 9 alone" if name in _WHOLE else "digits 0 to 9, with a point for a part of one"
        raise ConfigError(f"{where} {value!r} is no {kind}; write {form}.")
    number = int(value) if name in _WHOLE else float(value)
    if fault := allowed.fault(number):
        raise ConfigError(f"{where} is {value}; {fault}.")
    return field, number


def short(line: str) -> str:
    return repr(line if len(line) <= _SHOWN else f"{line[:_SHOWN]}...")


def may_have_options(line: str) -> bool:
    """Whether something on the line looks like an option, which may be none."""
    return _OPTION.search(line) is not None or _DASH.search(line) is not None


def text_of(line: str) -> str:
    """The text before the options of a line, also where `PromptLine.of` refuses these, as in a run that kept it when
    its prompts had none."""
    starts = [found.start() for found in (_OPTION.search(line), _DASH.search(line)) if found is not None]
    return line[: min(starts)].strip() if starts else line


def with_pictures(line: str, place: Callable[[str], str]) -> str:
    """The line with the paths of its pictures as `place` says them. One that `PromptLine.of` refuses stays as it is."""
    try:
        PromptLine.of(line)
    except ValueError:
        return line
    for option in reversed([option for option in _options(line) if option.name in _PICTURES]):
        line = line[: option.at.start] + place(option.value) + line[option.at.stop :]
    return line


def named(number: int, line: str) -> str:
    """What errors call a prompt: numbers begin with 1, those of lists and of clips' files with 0."""
    return f"prompt {number + 1} {short(line)}"


@contextmanager
def about_prompt(number: int, line: str) -> Iterator[None]:
    """What is found wrong in the block is said of this prompt, where it has options: raises ConfigError for
    ValueError, and for options that are none."""
    has_options = PromptLine.of(line, named(number, line)).has_options
    try:
        yield
    except ValueError as error:
        if not has_options:
            raise
        raise ConfigError(f"{named(number, line)}: {error}") from None
