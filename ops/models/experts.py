"""Two transformers in one module, for high and for low noise, as Wan2.2 A14B has them: one run trains both.

A forward pass is that of one of them (`transformers`), for clips whose noise levels are its own. Parameters are
`high.NAME` and `low.NAME`, so in the flat vector those of one expert lie after those of the other.
"""

from __future__ import annotations

from torch import nn

from ops.compiled_blocks import CompiledBlocks
from ops.models.base.transformer import PackedTransformer
from ops.spatial_temporal.choice import SliceRates

EXPERTS = ("high", "low")  # in the order of `DiTConfig.experts`


class ExpertPair(nn.Module):
    """Holds both. It is never called: a pass is of one of them."""

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.high, self.low = high, low


def transformers(module: nn.Module) -> tuple[nn.Module, ...]:
    """Both experts of a pair, for high noise first; else the transformer itself."""
    return (module.high, module.low) if isinstance(module, ExpertPair) else (module,)


def slice_by(module: nn.Module, rates: SliceRates | None) -> None:
    """From now on a bag slices spatial-temporal blocks by these rates, equal on all its ranks."""
    for one in transformers(module):
        if isinstance(one, PackedTransformer):
            one.rates = rates


def keep_attention(module: nn.Module, keeps: bool) -> None:
    """From now on gradient checkpointing keeps what attention gives, or computes it again. Each rank for itself."""
    for one in transformers(module):
        if isinstance(one, PackedTransformer):
            one.keeps_attention = keeps


def compile_blocks(module: nn.Module) -> None:
    """From now on blocks are compiled calls (`ops.compiled_blocks`)."""
    for one in transformers(module):
        assert isinstance(one, PackedTransformer)
        one.compiled = CompiledBlocks(one.block_parts)


def parts_of(module: nn.Module) -> tuple[str, ...]:
    """What the names of parameters of each of the `transformers` begin with."""
    return tuple(f"{name}." for name in EXPERTS) if isinstance(module, ExpertPair) else ("",)
