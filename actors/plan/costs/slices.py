"""Bags of spatial-temporal transformers in prices: how they are sliced, and what stays exposed of their exchanges.

Pure. Computation is that of the rank with most frames and positions, not a k-th of the whole; an exchange counts with
the share that the chosen schedule does not hide (ScaleFusion 4.3, 4.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.plan.costs.exchange import ExchangePoint, exchange_speed
from actors.plan.costs.fit import Fit, model_from, with_exchange
from actors.plan.costs.forms import Load
from ops.models.base.config import DiTConfig
from ops.models.base.flops import TrainedPart
from ops.spatial_temporal.choice import SliceRates, choose
from ops.spatial_temporal.slicing import Slicing


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicedBlocks:
    """What a price needs to know of a transformer whose bags run by spatial-temporal parallelism."""

    blocks: int  # of both kinds
    part: TrainedPart  # how many forwards a training pass is
    again: bool  # blocks are computed again in the backward
    slicing: Slicing
    text_share: float  # of the blocks, that attend to the text: all spatial ones
    prior: Fit  # the FLOP model

    @classmethod
    def of(cls, dit: DiTConfig, prior: Fit, part: TrainedPart) -> SlicedBlocks | None:
        """None for a transformer that runs by Ulysses."""
        slicing = dit.slicing
        if slicing is None:
            return None
        return cls(
            blocks=sum(dit.block_counts),
            part=part,
            again=dit.gradient_checkpointing,
            slicing=slicing,
            text_share=dit.flops.across / dit.flops.pair,
            prior=prior,
        )

    def rates(
        self,
        loads: Sequence[Load],
        seconds: Sequence[float],
        device: str,
        exchanges: Sequence[ExchangePoint],
        exchange_s: float,
    ) -> SliceRates:
        """The rates by the points of one device and measured all-to-alls, as far as there are any: of the rest by the
        FLOP model. `exchange_s` is the coefficient `comm`; 0: not measured. What a block has fixed stands for a slice's
        kernels."""
        found = model_from("dit", self.prior, loads, seconds, device, False, exchange_s)[0] if loads else self.prior
        constant, linear, attention, comm = with_exchange(found, exchange_s or self.prior.coefficients[-1]).coefficients
        products = self.part.products(self.again)
        line = exchange_speed(exchanges)
        return SliceRates(
            row_s=linear / (products * self.blocks),
            key_s=attention / (self.part.attention(self.again) * self.blocks),
            moved_s=comm / (2 * self.blocks),  # once forward and once backward
            slice_s=constant / (products * self.blocks),
            part_s=self.prior.coefficients[0] / self.blocks if line is None else line[0],
            backward=products - 1,  # attention within a frame or along a position is little beside products
            temporal_text=2 * self.text_share - 1,
        ).rounded()

    def sliced(self, load: Load, rates: SliceRates) -> Load:
        """The load as the bag runs it: slices that the member with most rows has rows in."""
        frames = load.token_frames
        positions = load.tokens // frames
        costs = rates.layer_costs(frames, positions, load.batch, load.text_tokens, load.degree)
        found = choose(frames, positions, load.degree, costs, True, self.slicing)
        own_T, own_S = -(-frames // load.degree), -(-positions // load.degree)
        slices = min(found.schedule.temporal_slices, own_T) + min(found.schedule.spatial_slices, own_S)
        return replace(load, slices=slices / 2, exposed=found.exposed)
