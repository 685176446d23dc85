"""Bags that deal out heads in prices: what stays exposed of their exchanges where these travel in two halves. Pure.

The rule is the ranks' own (`ops/halving.py`), for the parts of a pack alone. Attention is taken to last as long as the
exchanges that it hides: on a slow link more of them is exposed, which only a measured bag says.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.plan.costs.forms import Load
from ops.halving import exposed_of_halves, fills_halves
from ops.models.base.config import DiTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvedHeads:
    """What a price needs to know of such a transformer."""

    heads: int
    joint: bool  # rows of text attend, too, and travel with those of video
    setting: bool | None  # `model.dit.exchange`: in halves or whole; None: where that is worth it
    gpu: bool  # of a CPU's halves none is worth it

    @classmethod
    def of(cls, dit: DiTConfig, device: str) -> HalvedHeads | None:
        """`device`: cpu, or the name of a GPU. None for blocks that attend in turn: their sequences are short ones of a
        frame or a position."""
        if dit.spatial_temporal or not dit.deals_heads:
            return None
        return cls(
            heads=dit.num_heads,
            joint=dit.flops.within > 0,
            setting=dit.in_halves,
            gpu=device not in ("", "cpu"),
        )

    def exposed(self, load: Load) -> float:
        """The share of the exchanges of a bag's cascade that attention does not hide."""
        own = self.heads // load.degree
        if self.heads % load.degree or own < 2:
            return 1.0
        length = load.length if self.joint else load.tokens
        by_size = self.gpu and fills_halves(own, load.batch * length, load.batch * length**2)
        return exposed_of_halves(own) if (by_size if self.setting is None else self.setting) else 1.0
