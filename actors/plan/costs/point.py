"""A point: a cascade that is measured, and what a run has measured of it. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

PointKey = tuple[str, int, int, int, int, int]  # module, batch, frames, height, width, degree
PartShape = tuple[int, int, int, int, int]  # samples, frames, height, width, mean text tokens of one
NEWEST = 9  # measurements of a point that count


@dataclass(frozen=True, kw_only=True, slots=True)
class LivePoint:
    """What a run has measured of one point: the median of the newest, so that one worker of many that is slower than
    is known yet, or a moment on a busy host, does not move it."""

    newest: tuple[float, ...]  # seconds, at most NEWEST of them
    texts: tuple[int, ...]  # text tokens of a sample of each, 0 where that is not known
    count: int  # cascades in all
    refused: int = 0  # absurd ones since the last that was believed

    @classmethod
    def of(cls, seconds: float, count: int = 1, text_tokens: int = 0) -> LivePoint:
        """A point of `count` equal measurements."""
        kept = min(count, NEWEST)
        return cls(newest=(seconds,) * kept, texts=(text_tokens,) * kept, count=count)

    @property
    def seconds(self) -> float:
        return statistics.median(self.newest)

    @property
    def text_tokens(self) -> int:
        """Text tokens of a sample, where known: the median."""
        return round(statistics.median([text for text in self.texts if text] or [0]))

    def after(self, seconds: float, text_tokens: int = 0) -> LivePoint:
        """The point with one measurement more."""
        newest, texts = (*self.newest, seconds)[-NEWEST:], (*self.texts, text_tokens)[-NEWEST:]
        return LivePoint(newest=newest, texts=texts, count=self.count + 1)

    def over(self, factor: float) -> LivePoint:
        """The same where everything is quicker by this factor."""
        return replace(self, newest=tuple(seconds / factor for seconds in self.newest))
