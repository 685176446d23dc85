"""What a cascade holds, as prices and needs see it; a point: one that is measured, and what a run has measured of it.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from actors.plan.types import Item, Module
from ops.geometry import PixelShape

PointKey = tuple[Module, int, int, int, int, int]  # module, batch, frames, height, width, degree
NEWEST = 9  # measurements of a point that count
MOST_POINTS = 2000  # that are remembered of a run, those that ran last: each step fits the models to all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Some samples of one shape, as a cascade holds them: all of it, or a part of a packed one."""

    count: int
    frames: int
    height: int
    width: int
    text_tokens: int = 0  # mean per sample; 0: not known

    @classmethod
    def of(cls, count: int, shape: PixelShape, text_tokens: int = 0) -> Samples:
        """`count` clips of (frames, height, width)."""
        return cls(count=count, frames=shape[0], height=shape[1], width=shape[2], text_tokens=text_tokens)

    @classmethod
    def of_item(cls, item: Item, count: int) -> Samples:
        """`count` samples of an item."""
        return cls.of(count, item.shape, item.text_tokens)

    @classmethod
    def by_shape(cls, parts: Iterable[Samples]) -> tuple[Samples, ...]:
        """The samples of a cascade as plans price them: those of equal shape as one batch."""
        shapes: dict[PixelShape, tuple[int, float]] = {}
        for part in parts:
            count, text = shapes.get(part.shape, (0, 0.0))
            shapes[part.shape] = (count + part.count, text + part.count * part.text_tokens)
        return tuple(cls.of(count, shape, round(text / count)) for shape, (count, text) in shapes.items())

    @classmethod
    def of_key(cls, key: PointKey, text_tokens: int) -> Samples:
        """The samples of a point."""
        return cls.of(key[1], key[2:5], text_tokens)

    @property
    def shape(self) -> PixelShape:
        return self.frames, self.height, self.width

    def key(self, module: Module, degree: int) -> PointKey:
        """The point of a cascade of these alone; whatever their text, it is one."""
        return module, self.count, self.frames, self.height, self.width, degree


@dataclass(frozen=True, kw_only=True, slots=True)
class LivePoint:
    """What a run has measured of one point: the median of the newest, so that one worker of many that is slower than
    is known yet, or a moment on a busy host, does not move it."""

    newest: tuple[float, ...]  # seconds, at most NEWEST of them
    texts: tuple[int, ...]  # text tokens of a sample of each, 0 where that is not known
    count: int  # cascades in all
    refused: int = 0  # absurd ones since the last that was believed
    seconds: float = field(init=False, compare=False)
    text_tokens: int = field(init=False, compare=False)  # of a sample, where known: the median

    def __post_init__(self) -> None:  # asked for thousands of times in a step
        object.__setattr__(self, "seconds", statistics.median(self.newest))
        object.__setattr__(self, "text_tokens", round(statistics.median([text for text in self.texts if text] or [0])))

    @classmethod
    def of(cls, seconds: float, count: int = 1, text_tokens: int = 0) -> LivePoint:
        """A point of `count` equal measurements."""
        kept = min(count, NEWEST)
        return cls(newest=(seconds,) * kept, texts=(text_tokens,) * kept, count=count)

    def after(self, seconds: float, text_tokens: int = 0) -> LivePoint:
        """The point with one measurement more."""
        newest, texts = (*self.newest, seconds)[-NEWEST:], (*self.texts, text_tokens)[-NEWEST:]
        return LivePoint(newest=newest, texts=texts, count=self.count + 1)

    def over(self, factor: float) -> LivePoint:
        """The point with all its seconds divided by `factor`."""
        return replace(self, newest=tuple(seconds / factor for seconds in self.newest))
