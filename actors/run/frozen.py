"""Weights that every worker reads or makes for itself must be equal on all: no later check would notice. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from actors.messages import WorkerInfo


def disagreement(infos: Sequence[WorkerInfo]) -> str:
    """What differs and on which workers, in one sentence; "" when all that hold it hold the same. Who has not made an
    encoder compares it when it does."""
    held = {info.worker: dict(info.frozen) for info in infos}
    for part in sorted({part for digests in held.values() for part in digests}):
        counts = Counter(digests[part] for digests in held.values() if part in digests)
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        others = [f"{i.worker} on {i.host}" for i in infos if held[i.worker].get(part, usual) != usual]
        like = [info.worker for info in infos if held[info.worker].get(part) == usual]
        return (
            f"the weights of {part} on {', '.join(others)} are not those on {', '.join(like)}. Give all nodes the same "
            f"files there, and --resume."
        )
    return ""


def first_disagreement(infos: Sequence[WorkerInfo]) -> str:
    """Which parameter differs before the first update, and on which workers; "" when all begin with the same.

    Each worker contributes its range of the vector, so a run would begin with a mixture of two models.
    """
    usual = Counter(info.first for info in infos).most_common(1)[0][0] if infos else ()
    others = [info for info in infos if info.first != usual]
    if not others:
        return ""
    pairs = zip_longest(others[0].first, usual, fillvalue=("a parameter that only one has", 0))
    name = next(mine[0] for mine, theirs in pairs if mine != theirs)
    where = ", ".join(f"{info.worker} on {info.host}" for info in others)
    return (
        f"the first weights on {where} are not those of the other workers (first in {name}). Give all nodes the same "
        f"model.dit.path and the same torch, and start again."
    )
