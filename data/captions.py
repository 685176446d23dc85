"""Captions: which fields are read, where each lies, and reading one when it is needed.

The setting `a|b+c` offers the first of a and b that a sample has, and also c. A field is a tar member or column
(`txt`), or a field of the JSON member (`json:caption`); a list of strings offers each of its strings.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence

from data.config import LimitsConfig, SourceConfig
from data.ledger import BadSample, Reason
from data.storage import read_range
from data.types import CaptionRef

# What datasets call the column or field of a caption, the usual ones first
USUAL_NAMES = (
    "caption",
    "text",
    "cap",
    "prompt",
    "captions",
    "vila_caption",
    "long_caption",
    "short_caption",
    "description",
    "prompts",
)
MAX_CHOICES = 32  # captions of one sample; the rest is ignored
MOST_SAID = 240  # characters of why a sample has no caption, as a list of faults shows them
GIVE_DEFAULT = "default_caption of the source gives such samples one"
_TEXT_FILES = ("txt",)
_MOST_SCORES = 64  # of one sample


def parse_policy(policy: str) -> tuple[tuple[str, ...], ...]:
    """`"txt|json:caption+json:short"` -> (("txt", "json:caption"), ("json:short",))."""
    return tuple(tuple(name.strip() for name in offer.split("|") if name.strip()) for offer in policy.split("+"))


def choose(policy: tuple[tuple[str, ...], ...], find: Callable[[str], list[str]]) -> list[tuple[str, int, str]]:
    """(field, position in its list, text) of every caption offered. `find(field)` gives its texts, empty if absent.
    Raises BadSample for a text that UTF-8 cannot hold."""
    found = []
    for offer in policy:
        for name in offer:
            texts = find(name)
            if any(text.strip() for text in texts):
                found += [(name, i, text) for i, text in enumerate(texts) if text.strip()]
                break
    for _, _, text in found[:MAX_CHOICES]:
        check_encodable(text)
    return found[:MAX_CHOICES]


def check_any(captions: Sequence[object], config: SourceConfig, why: str, hint: str = "") -> None:
    """Raises BadSample for a sample without a caption, unless its source has one for such samples. `why`: where none
    was found; `hint`: what to set where it is elsewhere."""
    if not captions and config.default_caption is None:
        raise BadSample(Reason.NO_CAPTION, f"{why}; {hint or GIVE_DEFAULT}"[:MOST_SAID])


def named_elsewhere(policy: str, files: Sequence[str], about: Mapping[str, object]) -> str:
    """What to set where a sample has text that `policy` does not name: in `files`, its members or the suffixes beside
    it, or in a field of its JSON. Empty: it has none."""
    named = {name for offer in parse_policy(policy) for name in offer}
    fields = [f"json:{name}" for name in about if any(text.strip() for text in json_texts(about, name))]
    found = [name for name in (*files, *fields) if name not in named]
    if not found:
        return ""
    usual = [name for usual in (*_TEXT_FILES, *USUAL_NAMES) for name in found if _last_word(name) == usual]
    there = f"text is in {', '.join(found)}"
    return f"set caption: {policy}|{usual[0]}, as {there}" if usual else f"{there}; caption of the source names its own"


def holds_text(name: str) -> bool:
    """Whether a member of a tar, or a file beside a clip, is a text by its last suffix: `long.txt`, `prompt`."""
    return _last_word(name) in (*_TEXT_FILES, *USUAL_NAMES)


def _last_word(name: str) -> str:
    return re.split(r"[.:]", name)[-1]


def read_caption(ref: CaptionRef, limits: LimitsConfig | None = None) -> str:
    """A caption as it is trained, with its source's prefix, which UTF-8 can hold. Raises BadSample if the bytes changed
    since they were indexed."""
    text = _text_of(ref, limits or LimitsConfig())
    check_encodable(text)
    return f"{ref.prefix}{text}".strip() if ref.prefix else text


def _text_of(ref: CaptionRef, limits: LimitsConfig) -> str:
    if ref.text is not None:
        return ref.text
    data = read_range(ref.path, ref.offset, ref.size, limits.retries)
    if not ref.field:
        return decode_text(data, limits)
    name, _, position = ref.field.rpartition("#")
    texts = json_texts(parse_json(data, limits), name)
    if int(position) >= len(texts):
        raise BadSample(Reason.NO_CAPTION, f"json field {name} has {len(texts)} captions", ref.offset)
    return texts[int(position)].strip()


def decode_text(data: bytes, limits: LimitsConfig) -> str:
    """A caption from bytes: UTF-8 with or without byte order mark."""
    if len(data) > limits.max_caption_bytes:
        raise BadSample(Reason.CAPTION_TOO_LARGE, f"{len(data)} bytes > max_caption_bytes {limits.max_caption_bytes}")
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}; save the caption as UTF-8"
        raise BadSample(Reason.CAPTION_NOT_UTF8, why) from error


def parse_json(data: bytes, limits: LimitsConfig) -> dict[str, object]:
    """A JSON object, refused when it is too large, too deep or something else."""
    if len(data) > limits.max_json_bytes:
        raise BadSample(Reason.BAD_JSON, f"{len(data)} bytes > max_json_bytes {limits.max_json_bytes}")
    try:
        value: object = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadSample(Reason.BAD_JSON, f"not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise BadSample(Reason.BAD_JSON, str(error) or "nested too deeply") from error
    if not isinstance(value, dict):
        raise BadSample(Reason.BAD_JSON, f"a {type(value).__name__}, not an object")
    return value


def json_texts(value: Mapping[str, object], name: str) -> list[str]:
    """Texts of field `name`: a string, or the strings of a list."""
    field = value.get(name)
    if isinstance(field, str):
        return [field]
    return [text for text in field if isinstance(text, str)] if isinstance(field, list) else []


def scores_of(value: Mapping[str, object]) -> dict[str, float]:
    """The first numeric fields of a JSON object or table row, named without spaces."""
    found: dict[str, float] = {}
    for name, field in value.items():
        if len(found) == _MOST_SCORES:
            break
        if isinstance(field, (int, float)) and not isinstance(field, bool) and len(name) <= 64:
            name = name.strip().replace(" ", "_").encode("utf-8", "backslashreplace").decode()
            with contextlib.suppress(OverflowError):
                found[name] = float(field)
    return found


def check_encodable(text: str) -> None:
    """Raises BadSample for half a surrogate pair, such as the JSON escape of a cut emoji: no block could hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSample(Reason.CAPTION_NOT_UTF8, f"{error.reason} at character {error.start}") from error


def check_lengths(texts: Sequence[str], limits: LimitsConfig) -> None:
    for text in texts:
        check_encodable(text)
        if len(text.encode()) > limits.max_caption_bytes:
            raise BadSample(
                Reason.CAPTION_TOO_LARGE, f"{len(text)} characters > max_caption_bytes {limits.max_caption_bytes}"
            )
