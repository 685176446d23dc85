"""Training of some weights alone (`model.dit.train_only`): those that patterns name; the others stay frozen."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn


def freeze_others(module: nn.Module, patterns: Sequence[str]) -> None:
    """Leave those parameters trainable that a pattern names: a parameter, or a part of the module with all below it.

    `*` stands for any characters, also dots: `blocks.*.attn1`, `blocks.3[0-9]`, `*.bias`. Raises ValueError for a
    pattern that names nothing, with the nearest parts that exist.
    """
    parts = {name: _parts(name) for name, _ in module.named_parameters()}
    known = [part for of in parts.values() for part in of]
    for pattern in patterns:
        if not any(fnmatchcase(part, pattern) for part in known):
            raise ValueError(
                f"model.dit.train_only {pattern!r} names no weight of this transformer; near are "
                f"{', '.join(nearest(pattern, known))}."
            )
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(part, pattern) for pattern in patterns for part in parts[name]))


def _parts(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    pieces = name.split(".")
    return [".".join(pieces[: end + 1]) for end in range(len(pieces))]


def nearest(pattern: str, parts: Iterable[str]) -> list[str]:
    """Up to three names of parts, those of all blocks alike, the most similar to a pattern first."""
    known = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", part) for part in parts)
    alike = re.sub(r"\.\d+(?=\.|$)", ".*", pattern)
    return difflib.get_close_matches(alike, known, n=3, cutoff=0.0)
