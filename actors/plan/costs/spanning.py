"""Cascades whose bag spans nodes, as `heddle profile` measures them, and the slow-down that they show. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.plan.costs.topology import CrossNode, cross_of
from actors.plan.types import Module, refuse_below, refuse_unless_positive

OVERLAP = 1.0  # of rails: equal shares of nodes that are alike use the same


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanningPoint:
    """One cascade on a bag with equal shares of so many nodes."""

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
    def key(self) -> tuple[str, int, int, int, int, int]:
        """The cascade, as profiles name it."""
        return self.module, self.batch, self.frames, self.height, self.width, self.degree


def cross_of_points(
    found: Sequence[SpanningPoint],
    measured: Callable[[SpanningPoint], float | None],
    modelled: Callable[[SpanningPoint], float | None],
    known: CrossNode,
) -> CrossNode:
    """The slow-down over nodes: beside the same cascades `measured` on one node or, where there are none, `modelled`.
    `known` where neither says anything."""
    for on_one_node in (measured, modelled):
        pairs = [(OVERLAP, point.seconds / alone, 1) for point in found if (alone := on_one_node(point))]
        if pairs:
            return cross_of(pairs, known)
    return known
