"""Training of some weights alone (`model.dit.train_only`): those that patterns name; the others stay frozen."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def freeze_others(module: nn.Module, patterns: Sequence[str]) -> None:
    """Leave those parameters trainable that a pattern names: a parameter, or a part of the module with all below it.

    `*` stands for any characters, also dots: `blocks.*.attn1`, `blocks.3[0-9]`, `*.bias`. Raises ValueError for a
    pattern that names nothing, with the nearest parts that exist.
    """
    parts = {name: _parts(name) for name, _ in module.named_parameters()}
    for pattern in patterns:
        if not any(fnmatchcase(part, pattern) for of in parts.values() for part in of):
            raise ValueError(
                f"model.dit.train_only {pattern!r} names no weight of this transformer; near are "
                f"{', '.join(_nearest(pattern, parts))}."
            )
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(part, pattern) for pattern in patterns for part in parts[name]))


def _parts(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    pieces = name.split(".")
    return [".".join(pieces[: end + 1]) for end in range(len(pieces))]


def _nearest(pattern: str, parts: dict[str, list[str]]) -> list[str]:
    """Up to three parts of all blocks alike, the most similar first."""
    known = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", part) for of in parts.values() for part in of)
    alike = re.sub(r"\.\d+(?=\.|$)", ".*", pattern)
    return difflib.get_close_matches(alike, known, n=3, cutoff=0.0)
