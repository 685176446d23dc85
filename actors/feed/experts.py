"""Which of two experts the clips of an item are trained by: known before the step, so that it can be planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.config import TrainConfig
from actors.plan.types import Item
from ops.config import FlowConfig
from ops.flow.objective import draw_expert
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertDraw:
    """Draws that depend on seed, step and item alone: the same on any run, for any workers and plan."""

    flow: FlowConfig
    seed: int
    geometry: Geometry
    sigmas: tuple[tuple[float, float], ...]  # noise levels of each expert

    @staticmethod
    def of(dit: DiTConfig, train: TrainConfig, geometry: Geometry) -> ExpertDraw:
        """The draw for a resolved transformer; of one without experts every item is of the only one."""
        sigmas = tuple(expert.sigmas for expert in dit.experts)
        return ExpertDraw(flow=train.flow, seed=train.seed, geometry=geometry, sigmas=sigmas)

    def of_item(self, step: int, item: str, tokens: int) -> int:
        """The expert of the item with this id, whose clips have `tokens` tokens."""
        return draw_expert(self.flow, self.seed, step, item, tokens, self.sigmas)

    def routed(self, step: int, items: Sequence[Item]) -> tuple[Item, ...]:
        """The items of a step, each with its expert."""
        sizes = {item.id: self.geometry.tokens(item.frames, item.height, item.width) for item in items}
        return tuple(replace(item, expert=self.of_item(step, item.id, sizes[item.id])) for item in items)
