"""How often the steps of a run draw its samples: what other trainers count as epochs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from data.dataset.dataset import Dataset
from data.dataset.index import Index
from data.in_words import EpochForecast

MOST_DRAWS = 30_000  # looked at in a segment, a second's work: more steps are taken to be like these


def forecast(dataset: Dataset, steps: int, most_draws: int = MOST_DRAWS) -> EpochForecast:
    """Draws of the first `steps` steps by the order of the data alone: of each segment as many as `most_draws` are
    looked at, and the others counted as these."""
    planner, drawn, exact, first = dataset.planner, Counter[int](), True, 0
    state = planner.start()
    for stage in planner.stages:
        last = min(stage.until_step or steps, steps)
        if last <= first:
            continue
        state.step, seen = first, Counter[int]()
        while state.step < last and seen.total() < most_draws:
            seen.update(draw.source for batch in planner.advance(state) for draw in batch.draws)
        exact = exact and state.step == last
        for source, count in seen.items():
            drawn[source] += round(count * (last - first) / (state.step - first))
        first = last
    counts = dataset.ledger.sources
    return EpochForecast(
        steps=steps,
        draws=drawn.total(),
        samples=dataset.ledger.planned,
        sources={
            name: drawn[index.ordinal] / max(counts[index.ordinal].planned, 1)
            for name, index in zip(names_of(dataset.indexes), dataset.indexes, strict=True)
        },
        exact=exact,
    )


def names_of(indexes: Sequence[Index]) -> list[str]:
    """A name for each source: the last part of its path, with its number among the sources where that comes again."""
    names = Counter(index.name for index in indexes)
    return [f"{index.name} ({index.ordinal})" if names[index.name] > 1 else index.name for index in indexes]
