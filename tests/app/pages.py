"""What the tests of all pages ask of them."""

from __future__ import annotations

import re


def assert_every_picture_has_a_name(page: str) -> None:
    """Nothing is read out of a picture without one, as its words and hover titles are parts of it."""
    pictures = re.findall(r'<svg [^>]*role="img"[^>]*>', page)
    assert pictures
    nameless = [picture for picture in pictures if not re.search(r'aria-label="[^"]+"', picture)]
    assert not nameless
