"""Samples whose clip an earlier one has, too: listed twice, or the same bytes in another place. Nothing is decoded.

Two clips are the same if they lie in the same place, or if size, shape, length and range agree and PIECE bytes from
their middle. Only clips that agree in the former, which the index knows, are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from data.dataset.index import Index, IndexRow
from data.storage import read_range

PIECE = 65536  # bytes; of smaller clips and pictures all
FACTS = ("size", "width", "height", "num_frames", "duration", "start_s", "end_s")


@dataclass(frozen=True, slots=True)
class RepeatedSample:
    """A sample with the clip of another that comes before it."""

    row: IndexRow
    first: IndexRow

    def to_json(self) -> dict[str, str | int]:
        """A line of repeated.jsonl."""
        own, first = self.row, self.first
        return {
            "source": own.source,
            "shard": own.shard,
            "key": own.key,
            "first_source": first.source,
            "first_shard": first.shard,
            "first_key": first.key,
        }


def repeated_samples(indexes: Sequence[Index], admitted: Sequence[np.ndarray] | None = None) -> list[RepeatedSample]:
    """All that repeat, in the order of the sources and their rows; of the usable rows, or of those that `admitted`
    masks. Raises DataIOError where storage fails."""
    masks = admitted or [index.columns("ok")["ok"].astype(bool) for index in indexes]
    found: list[RepeatedSample] = []
    firsts: dict[tuple[object, ...], IndexRow] = {}
    for index, rows, groups in zip(indexes, *_alike(indexes, masks), strict=True):
        for number, group in zip(rows, groups, strict=True):
            row = index.row(int(number))
            digest = _digest(row)
            if not digest:
                continue
            first = firsts.setdefault((group, row.crop, digest), row)
            if first is not row:
                found.append(RepeatedSample(row, first))
    return found


def write_repeated(path: Path, repeated: Sequence[RepeatedSample]) -> None:
    """A line for each; no file where there is none."""
    path.unlink(missing_ok=True)
    if repeated:
        path.write_text("".join(json.dumps(one.to_json()) + "\n" for one in repeated), encoding="utf-8")


def _alike(indexes: Sequence[Index], masks: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows of each index that agree with another row in all FACTS, and numbers that are equal where they agree."""
    rows = [np.flatnonzero(mask) for mask in masks]
    codes = [_code(index)[own] for index, own in zip(indexes, rows)]
    _, group, counts = np.unique(np.concatenate(codes), return_inverse=True, return_counts=True)
    groups = np.split(group, np.cumsum([len(own) for own in rows])[:-1])
    kept = [counts[own] > 1 for own in groups]
    return [own[keep] for own, keep in zip(rows, kept)], [own[keep] for own, keep in zip(groups, kept)]


def _code(index: Index) -> np.ndarray:
    """A number of 64 bits for the FACTS of each row: sorting them takes a tenth of the time of sorting the rows. Equal
    numbers of different facts would only have two clips read."""
    code = np.zeros(len(index), np.uint64)
    for values in index.columns(*FACTS).values():
        code = (code ^ values.astype(np.float64).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        code ^= code >> np.uint64(32)
    return code


def _digest(row: IndexRow) -> bytes:
    """Digest of the middle of a clip; empty for one that is gone."""
    begin = max(row.size - PIECE, 0) // 2
    try:
        data = read_range(row.path, row.offset + begin, min(row.size, PIECE))
    except FileNotFoundError:
        return b""
    return blake2b(data, digest_size=16).digest()
