"""Text in pictures, in any script that a font of this machine has: prompts and captions are not all ASCII."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

SIZE = 11  # pixels
LINE = 14  # pixels from one line to the next


def font_of(text: str) -> ImageFont.FreeTypeFont:
    """The first font that has all characters of the text: DejaVu, which comes with Matplotlib and lacks Chinese,
    Japanese and Korean, then those of the system. DejaVu if none has."""
    wanted = frozenset(map(ord, "".join(text.split())))
    return ImageFont.truetype(_file_for(wanted) or _dejavu(), SIZE)


def lines_of(text: str, width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """The text in lines of at most `width` pixels, broken between words, or inside one that is longer."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for piece, begins in _pieces(paragraph, width, font):
            longer = f"{line} {piece}" if begins and line else line + piece
            if line and font.getlength(longer) > width:
                lines.append(line)
                longer = piece
            line = longer
        lines.append(line)
    return lines


def _pieces(text: str, width: int, font: ImageFont.FreeTypeFont) -> Iterator[tuple[str, bool]]:
    """Words in parts that fit the width, and whether a word begins with each."""
    for word in text.split():
        start = 0
        while start < len(word):
            count = 1
            while start + count < len(word) and font.getlength(word[start : start + count + 1]) <= width:
                count += 1
            yield word[start : start + count], start == 0
            start += count


@functools.cache
def _file_for(wanted: frozenset[int]) -> str:
    """The first font file with all these characters; "" if there is none."""
    return next((file for file in _files() if wanted <= _characters(file)), "")


def _files() -> Iterator[str]:
    yield _dejavu()
    yield from _fonts_of_system()


@functools.cache
def _dejavu() -> str:
    found = find_spec("matplotlib")
    assert found is not None and found.origin is not None, "Matplotlib is installed with Heddle"
    return str(Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf")


@functools.cache
def _fonts_of_system() -> tuple[str, ...]:
    from matplotlib.font_manager import findSystemFonts

    return tuple(sorted(findSystemFonts()))


@functools.cache
def _characters(file: str) -> frozenset[int]:
    """What a font has; nothing where it cannot be drawn in any size."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(file)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(font.get_charmap()) if font.scalable else frozenset()
