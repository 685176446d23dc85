"""Panda-70M: the table of Koala-36M's reader, with lists of captions and timestamps per video."""

from __future__ import annotations

from data.readers.kinds.koala import KoalaReader

READER = KoalaReader
