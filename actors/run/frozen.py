"""Weights that training does not change must be the same on every worker: nothing else would ever tell. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from actors.messages import WorkerInfo


def disagreement(infos: Sequence[WorkerInfo]) -> str:
    """What differs and on which workers, in one sentence; "" when all hold the same."""
    held = {info.worker: dict(info.frozen) for info in infos}
    for part in sorted({part for digests in held.values() for part in digests}):
        counts = Counter(digests.get(part, "") for digests in held.values())
        if len(counts) == 1:
            continue
        usual = counts.most_common(1)[0][0]
        others = [f"{i.worker} on {i.host}" for i in infos if held[i.worker].get(part, "") != usual]
        like = [info.worker for info in infos if held[info.worker].get(part, "") == usual]
        return (
            f"the weights of {part} on {', '.join(others)} are not those on {', '.join(like)}. Give all nodes the same "
            f"files there, and --resume."
        )
    return ""
