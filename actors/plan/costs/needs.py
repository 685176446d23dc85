"""What a cascade needs of a worker's memory beside the states: predicted, measured, and what was too much.

A need is a line, GiB = fixed + slope x units, for cascades of one kind (`Footprint.kind`). The DiT's units are rows of
a rank over all its samples: its need is exactly linear in them. Those of video are divided by the degree, those of text
count as the part of a row that they take (`Needs.text_rows`), and where ranks share heads a row counts more
(`Needs.row_weight`). Units of a VAE are the clips of one shape that it encodes at a time, and of the others what their
rows take; those of a text encoder are tokens. A line is predicted from the model, before anything has run, and replaced
by the peaks that workers measure: of each size the greatest of its newest ones, as one may be higher by chance, such as
where the allocator first gave cached blocks back. Where memory ran out is a limit until something larger has fitted.
`known` is what outlasts the process: in the folder of a run, and in the file of `heddle profile`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.plan.costs.point import Samples
from actors.plan.types import Module, refuse_below, refuse_unless_positive
from ops.degrees import surplus
from ops.geometry import PixelShape
from ops.models.config import TEXT_BATCH_TOKENS

NeedKey = tuple[Module, str]
TRIES = 3  # times that the smallest cascade of a shape may run out of memory before the shape counts as impossible
NEWEST_PEAKS = 100  # of a size, one for each step in which it ran, of which the greatest counts
SOLO, BAG = "solo", "bag"
_APART = 1.5  # largest over smallest of the sizes that say how a need grows
_BELOW = 1 - 1e-9  # of a limit: less than this fits
_ALIKE = 0.02  # by which a row may count otherwise before measured peaks are of another unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """The size of a cascade as its need of memory sees it, on its busiest rank."""

    module: Module
    kind: str
    units: float

    @property
    def line(self) -> NeedKey:
        """The line that says what it needs."""
        return self.module, self.kind

    @property
    def size(self) -> tuple[NeedKey, float]:
        """What its peak is known by: its line, and its units to three digits, which are enough for a line, and few
        points however many sizes come."""
        return self.line, float(f"{self.units:.3g}")


def footprint(
    module: Module,
    samples: Sequence[Samples],
    degree: int,
    tokens: Callable[[int, int, int], int],
    needs: Needs | None = None,
) -> Footprint:
    """The footprint of a cascade of these samples on `degree` workers; `tokens` of a clip of (frames, height, width).
    `needs` says what a row counts, and how many clips a VAE encodes at a time."""
    if module == "dit":
        kind = SOLO if degree == 1 else BAG
        share = degree * needs.text_rows[kind] if needs and kind in needs.text_rows else 1.0
        weight = needs.row_weight(degree) if needs else 1.0
        rows = sum(s.count * (tokens(*s.shape) + share * s.text_tokens) for s in samples)
        return Footprint(module=module, kind=kind, units=weight * rows / degree)
    if module == "text":
        count = sum(s.count for s in samples)
        longest = max(s.text_tokens for s in samples)
        captions = -(-count // degree)
        return Footprint(module=module, kind=SOLO, units=min(captions * max(longest, 1), TEXT_BATCH_TOKENS))
    kind, clips = clip_kind(samples[0].shape, degree), sum(s.count for s in samples)
    batches = (needs.batches if needs else {}).get(kind, WHOLE)
    together = min(clips, batches.together)
    return Footprint(module=module, kind=kind, units=together + batches.kept * (clips - together))


class ClipBatches(NamedTuple):
    """How a VAE takes the clips of a cascade."""

    together: float  # at a time
    kept: float = 0.0  # what the rows of a clip that is encoded take on, as a part of what encoding it takes


WHOLE = ClipBatches(math.inf)  # all at once


def clip_kind(shape: PixelShape, degree: int = 1) -> str:
    """Kind of the VAE cascades of clips of this shape; a bag encodes them tile by tile."""
    frames, height, width = shape
    return f"{frames}f {height}x{width}{'' if degree == 1 else ' tiles'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedLine:
    """GiB of a cascade of `units`."""

    fixed_gib: float
    gib_per_unit: float

    def at(self, units: float) -> float:
        return self.fixed_gib + self.gib_per_unit * units

    def most(self, room_gib: float) -> float:
        """The most units that fit; infinite where more of them need no more memory."""
        if self.gib_per_unit <= 0:
            return math.inf if self.fixed_gib <= room_gib else 0.0
        return max(0.0, (room_gib - self.fixed_gib) / self.gib_per_unit)


def line_through(units: tuple[float, float], gib: tuple[float, float]) -> NeedLine:
    """The line of two predictions. Raises ValueError unless their units differ."""
    if units[0] == units[1]:
        raise ValueError(f"two predictions at {units[0]:g} units make no line; take two sizes.")
    slope = (gib[1] - gib[0]) / (units[1] - units[0])
    return NeedLine(fixed_gib=gib[0] - slope * units[0], gib_per_unit=slope)


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedPeak:
    """The peak that counts of cascades of one number of units."""

    units: float
    gib: float

    def __post_init__(self) -> None:
        refuse_unless_positive(self, "units")
        refuse_below(0, self, "gib")


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedTry:
    """How often a cascade of this number of units has run out of memory, and what it lacked at least."""

    units: float
    times: int
    missing_gib: float = 0.0

    def __post_init__(self) -> None:
        refuse_unless_positive(self, "units")
        refuse_below(0, self, "times", "missing_gib")


@dataclass(frozen=True, kw_only=True, slots=True)
class KindNeeds:
    """What was measured of the cascades of one kind."""

    module: Module
    kind: str
    peaks: tuple[NeedPeak, ...] = ()
    limit: float | None = None  # units at which memory ran out
    tries: tuple[NeedTry, ...] = ()

    def __post_init__(self) -> None:
        refuse_unless_positive(self, "limit")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownNeeds:
    """What `Needs` has measured, and the rows that it counted by: as it is kept in a file."""

    beside: str = ""
    text_rows: Mapping[str, float] = field(default_factory=dict)
    copied: float = 0.0
    num_heads: int = 0
    kinds: tuple[KindNeeds, ...] = ()


@dataclass(kw_only=True, slots=True)
class Needs:
    """Lines, peaks and limits of one model on one device. `observe` and `exceed` change it."""

    predicted: dict[NeedKey, NeedLine] = field(default_factory=dict)
    measured: dict[NeedKey, dict[float, float]] = field(default_factory=dict)  # units -> the peak that counts, GiB
    limits: dict[NeedKey, float] = field(default_factory=dict)  # units at which memory ran out
    tries: dict[tuple[NeedKey, float], int] = field(default_factory=dict)  # times it did, by kind and units
    missing: dict[tuple[NeedKey, float], float] = field(default_factory=dict)  # GiB that it lacked at least
    # By SOLO and BAG: rows of video that take as much of a rank of the DiT as one row of text, which every rank of a
    # bag holds. Where nothing was predicted, text counts as video does, and is divided like it.
    text_rows: dict[str, float] = field(default_factory=dict)
    # A bag whose ranks share heads holds copies of their keys and values: what a copy of all heads would add to a row,
    # and the number of heads; 0: nothing was predicted.
    copied: float = 0.0
    num_heads: int = 0
    beside: str = ""  # how the states lie beside which memory ran out, and what a device may give: limits hold for that
    batches: dict[str, ClipBatches] = field(default_factory=dict)  # by kind of VAE cascade, where it was predicted
    _learned: dict[NeedKey, NeedLine] = field(default_factory=dict)
    _newest: dict[NeedKey, dict[float, deque[float]]] = field(default_factory=dict)  # units -> peaks, the oldest first

    def gib(self, found: Footprint) -> float | None:
        """GiB that a cascade needs, or None where nothing is known of its kind."""
        points = self.measured.get(found.line)
        if not points:
            line = self.predicted.get(found.line)
            return None if line is None else line.at(found.units)
        known = points.get(found.size[1])
        return self._line(found.line, points).at(found.units) if known is None else known

    def fits(self, found: Footprint, room_gib: float) -> bool:
        """Whether a cascade is within the memory that a worker has for it, as far as is known, and below the limits."""
        limit = min((self.limits.get(kind, math.inf) for kind in _bounding(found)), default=math.inf)
        if found.units >= limit * _BELOW:
            return False
        need = self.gib(found)
        return need is None or need <= room_gib

    def may_try(self, found: Footprint, room_gib: float) -> bool:
        """Whether the smallest cascade of its shape, which no limit can make smaller, may run once more: memory may
        have run out by chance. Not what is known to be too large."""
        need = self.gib(found)
        tried = self.tries.get(found.size, 0)
        return tried < TRIES and (need is None or need <= room_gib)

    def row_weight(self, degree: int) -> float:
        """What a row of a bag counts, beside one of a bag whose ranks share no heads."""
        return 1.0 + self.copied * surplus(self.num_heads, degree) if self.num_heads else 1.0

    def text_share(self, degree: int) -> float:
        """Rows of video, divided by the degree, that are no less than a row of text in bags up to this one."""
        return max(1.0, self.text_rows.get(SOLO, 1.0), degree * self.text_rows.get(BAG, 1.0 / degree))

    def most_rows(self, room_gib: float) -> float:
        """DiT rows of a worker that fit, in a bag or alone: below where memory ran out, as that size does not fit."""
        most = [self.limits.get(("dit", kind), math.inf) * (2 * _BELOW - 1) for kind in (SOLO, BAG)]
        for kind in (SOLO, BAG):
            points = self.measured.get(("dit", kind))
            line = self._line(("dit", kind), points) if points else self.predicted.get(("dit", kind))
            if line is not None:
                most.append(line.most(room_gib))
        return min(most)

    def lines(self) -> dict[NeedKey, NeedLine]:
        """What is predicted by measured peaks, for every kind that has some."""
        return {kind: self._line(kind, points) for kind, points in self.measured.items()}

    def observe(self, found: Footprint, peak_gib: float) -> None:
        """Cascades of this size have run in a step, and one needed so much, the others less. A limit that they reached
        is none."""
        self._count(*found.size, peak_gib)
        self._learned.pop(found.line, None)
        if self.limits.get(found.line, math.inf) <= found.units:
            del self.limits[found.line]

    def _count(self, line: NeedKey, units: float, peak_gib: float) -> None:
        newest = self._newest.setdefault(line, {}).setdefault(units, deque(maxlen=NEWEST_PEAKS))
        newest.append(peak_gib)
        self.measured.setdefault(line, {})[units] = max(newest)

    def expect(self, forecast: Needs) -> None:
        """Predict by this from now on. What was measured stays; that of the DiT only where rows count as before."""
        if not self._counts_as(forecast.text_rows, forecast.copied, forecast.num_heads):
            for learned in (self.measured, self.limits, self._learned, self._newest):
                for line in [line for line in learned if line[0] == "dit"]:
                    del learned[line]
            for counted in (self.tries, self.missing):
                for key in [key for key in counted if key[0][0] == "dit"]:
                    del counted[key]
        self.predicted, self.text_rows = dict(forecast.predicted), dict(forecast.text_rows)
        self.copied, self.num_heads = forecast.copied, forecast.num_heads
        self._learned.clear()

    def lie_beside(self, states: str) -> None:
        """Say how the states lie from now on. Limits that were met beside other ones are none."""
        if states != self.beside:
            for learned in (self.limits, self.tries, self.missing):
                learned.clear()
        self.beside = states

    def known(self) -> KnownNeeds:
        """What was measured, to be kept."""
        lines = sorted({*self.measured, *self.limits, *(line for line, _ in self.tries)})
        return KnownNeeds(
            beside=self.beside,
            text_rows=dict(self.text_rows),
            copied=self.copied,
            num_heads=self.num_heads,
            kinds=tuple(self._known_of(line) for line in lines),
        )

    def _known_of(self, line: NeedKey) -> KindNeeds:
        return KindNeeds(
            module=line[0],
            kind=line[1],
            peaks=tuple(NeedPeak(units=u, gib=gib) for u, gib in sorted(self.measured.get(line, {}).items())),
            limit=self.limits.get(line),
            tries=tuple(
                NeedTry(units=units, times=times, missing_gib=self.missing.get((line, units), 0.0))
                for (of, units), times in sorted(self.tries.items())
                if of == line
            ),
        )

    def take_up(self, known: KnownNeeds) -> None:
        """Go on with what was measured before. The DiT's part counts where rows count as they did then, or where
        nothing says yet what a row counts; limits do where the states lie as they did. A cascade that has used up its
        tries gets one more: what took its memory may be gone."""
        if not self.predicted and not self.measured:
            self.text_rows, self.copied, self.num_heads = dict(known.text_rows), known.copied, known.num_heads
            self.beside = self.beside or known.beside
        alike = self._counts_as(known.text_rows, known.copied, known.num_heads)
        for one in known.kinds:
            line: NeedKey = (one.module, one.kind)
            if one.module == "dit" and not alike:
                continue
            for peak in one.peaks:
                self._count(line, peak.units, peak.gib)
            if known.beside == self.beside:
                if one.limit is not None:
                    self.limits[line] = min(one.limit, self.limits.get(line, math.inf))
                for found in one.tries:
                    self.tries[line, found.units] = min(found.times, TRIES - 1)
                    self.missing[line, found.units] = found.missing_gib
        self._learned.clear()

    def _counts_as(self, text_rows: Mapping[str, float], copied: float, num_heads: int) -> bool:
        """Whether units of the DiT are the same where rows count like this."""
        if (self.num_heads, set(self.text_rows)) != (num_heads, set(text_rows)):
            return False
        pairs = [(self.copied, copied), *((rows, text_rows[kind]) for kind, rows in self.text_rows.items())]
        return all(abs(one - other) <= _ALIKE * max(one, other) for one, other in pairs)

    def lacking_gib(self, found: Footprint) -> float | None:
        """What a cascade lacked that has run out of memory as often as it may; None for others."""
        return self.missing[found.size] if self.tries.get(found.size, 0) >= TRIES else None

    def exceed(self, found: Footprint, missing_gib: float = 0.0) -> bool:
        """A cascade ran out of memory. Returns whether that teaches anything: a stricter limit, or one try less."""
        key = found.size
        before = self.tries.get(key, 0)
        stricter = found.units < self.limits.get(found.line, math.inf) * _BELOW
        self.tries[key] = before + 1
        self.missing[key] = max(missing_gib, self.missing.get(key, 0.0))
        self.limits[found.line] = min(found.units, self.limits.get(found.line, math.inf))
        return stricter or before < TRIES

    def _line(self, kind: NeedKey, points: dict[float, float]) -> NeedLine:
        """Through the measured points and below none of them; where they are hardly apart, the prediction scaled to
        them: of sizes that differ by their captions alone, noise and rounded units would be the slope."""
        if kind not in self._learned:
            self._learned[kind] = _above(points, self.predicted.get(kind))
        return self._learned[kind]


def _above(points: dict[float, float], predicted: NeedLine | None) -> NeedLine:
    if max(points) < _APART * min(points):
        if predicted is None or min(predicted.at(units) for units in points) <= 0:
            return NeedLine(fixed_gib=0.0, gib_per_unit=max(gib / max(units, 1e-9) for units, gib in points.items()))
        scale = max(gib / predicted.at(units) for units, gib in points.items())
        return NeedLine(fixed_gib=predicted.fixed_gib * scale, gib_per_unit=predicted.gib_per_unit * scale)
    mean_units = sum(points) / len(points)
    mean_gib = sum(points.values()) / len(points)
    spread = sum((units - mean_units) ** 2 for units in points)
    slope = sum((units - mean_units) * (gib - mean_gib) for units, gib in points.items()) / spread
    slope = max(slope, 0.0)
    return NeedLine(fixed_gib=max(gib - slope * units for units, gib in points.items()), gib_per_unit=slope)


def _bounding(found: Footprint) -> tuple[NeedKey, ...]:
    """Kinds whose limits hold for it: a rank of a bag needs at least what the same rows need alone."""
    return (("dit", SOLO), ("dit", BAG)) if found.line == ("dit", BAG) else (found.line,)
