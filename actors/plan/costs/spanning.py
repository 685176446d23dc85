"""Cascades whose bag spans nodes, measured apart from a run or in one, and what spanning costs by them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from actors.plan.costs.fit import nonnegative_fit
from actors.plan.costs.point import PointKey
from actors.plan.costs.topology import CrossNode, cross_of
from actors.plan.types import Module, refuse_below, refuse_unless_positive

OVERLAP = 1.0  # of rails: equal shares of nodes that are alike use the same
MOST_COUNT = 9  # runs of a cascade that count: of more, the newest do
CLEAR = 0.5  # of the squared errors a part for each peer may leave: one made of noise is worst at unmeasured degrees


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanningPoint:
    """One cascade on a bag with equally many workers on each of its nodes."""

    module: Module = "dit"
    batch: int
    frames: int
    height: int
    width: int
    degree: int
    nodes: int
    seconds: float
    text_tokens: int = 0  # of a sample

    def __post_init__(self) -> None:
        refuse_below(1, self, "batch", "frames", "height", "width")
        refuse_below(2, self, "degree", "nodes")
        refuse_below(0, self, "text_tokens")
        refuse_unless_positive(self, "seconds")

    @property
    def key(self) -> PointKey:
        return self.module, self.batch, self.frames, self.height, self.width, self.degree


class BagSpread(NamedTuple):
    """How a bag lies over nodes: bags of two nodes and of three are not the same, however many rails they share."""

    nodes: int
    overlap: float  # of its rails, see `Topology.overlap`

    @classmethod
    def of(cls, nodes: int, overlap: float) -> BagSpread:
        """To hundredths, so that equal bags are one."""
        return cls(nodes, round(overlap, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadCascade:
    """A cascade over nodes, beside what the same takes on one."""

    seconds: float
    alone: float
    overlap: float = OVERLAP
    rows: float = 0.0  # that a member sends; 0 of modules that are not priced by them
    peers: int = 1
    count: int = 1  # how often it ran
    modelled: bool = False  # `alone` is what the cost model says


def cross_of_spread(found: Sequence[SpreadCascade], known: CrossNode) -> CrossNode:
    """What spanning nodes costs by these: as a share, beside what was measured on one node or, where nothing was, what
    is modelled; and by what they send. Where that prices the DiT, the share is that of encoders, if any ran."""
    beside = [one for one in found if not one.modelled] or found
    if not beside:
        return known
    shares = cross_of([(one.overlap, one.seconds / one.alone, one.count) for one in beside], known)
    priced = _by_rows([one for one in found if one.rows > 0], shares)
    encoders = [(one.overlap, one.seconds / one.alone, one.count) for one in beside if not one.rows]
    if priced.by_rows and encoders:
        return replace(priced, penalty=cross_of(encoders, priced).penalty)
    return priced


def _by_rows(found: Sequence[SpreadCascade], known: CrossNode) -> CrossNode:
    """Seconds for a row and for a peer: non-negative least squares of relative errors. Cascades of one size cannot
    tell them apart; they scale what is known."""
    sizes: dict[int, set[float]] = {}
    for one in found:
        sizes.setdefault(one.peers, set()).add(round(one.rows, 6))
    more = np.array([one.seconds - one.alone for one in found])
    falls = np.array([known.fall(one.overlap) for one in found])
    if max(map(len, sizes.values()), default=0) >= 2:
        columns = np.array([(one.rows, one.peers) for one in found]) * falls[:, None]
        errors = np.array([one.seconds / math.sqrt(min(one.count, MOST_COUNT)) for one in found])
        row_s, peer_s = _row_and_peer(columns, more, errors)
        return replace(known, row_s=row_s, peer_s=peer_s)
    if not found or not known.by_rows:
        return known
    ratio = float(np.median(more / falls / [known.sending(one.rows, one.peers) for one in found]))
    if ratio <= 0:  # noise: no bag is quicker for being spread, and nothing scales what is 0
        return known
    return replace(known, row_s=ratio * known.row_s, peer_s=ratio * known.peer_s)


def _row_and_peer(columns: np.ndarray, more: np.ndarray, errors: np.ndarray) -> tuple[float, float]:
    """Seconds for a row alone, or for a row and a peer where that is clearly better. columns [n, 2]; [n] seconds that
    they stand for, and what an error of these is relative to."""

    def left(found: np.ndarray) -> float:
        return float((((columns[:, : len(found)] @ found - more) / errors) ** 2).sum())

    row, both = nonnegative_fit(columns[:, :1], more, errors), nonnegative_fit(columns, more, errors)
    if left(both) < CLEAR * left(row):
        return float(both[0]), float(both[1])
    return float(row[0]), 0.0
