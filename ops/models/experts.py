"""Two transformers in one module, for high and for low noise, as Wan2.2 A14B has them: one run trains both.

A forward pass is that of one of them (`transformers`), for clips whose noise levels are its own. Parameters are
`high.NAME` and `low.NAME`, so in the flat vector those of one expert lie after those of the other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ops.models.base.config import CudaGraphsSetting, DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.packed.compiled_blocks import CompiledBlocks, codes_made
from ops.packed.graphed_blocks import CudaGraphs, GraphedBlocks
from ops.packed.packing import Layout, Sequence
from ops.spatial_temporal.choice import SliceRates

log = logging.getLogger(__name__)

_BLOCK_WEIGHTS = 2**26  # that a row of video meets
# 12 ms at 400 TFLOP/s. For the 250 operators of a block a host takes 1.5 ms at 6 us each, and 16 ms where one was
# measured (a virtual machine beside an H200).
_BLOCK_FLOPS = 5e12
_ELEMENTS = 2**25  # of a narrow model's rows: its passes are as much work for the memory, and take as much of it
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
    """From now on blocks are compiled calls (`ops.packed.compiled_blocks`)."""
    for one in transformers(module):
        assert isinstance(one, PackedTransformer)
        one.compiled = CompiledBlocks(one.block_parts)


def graph_blocks(module: nn.Module, setting: CudaGraphsSetting, device: torch.device) -> None:
    """From now on blocks of small passes run by CUDA graphs (`ops.packed.graphed_blocks`), if the setting says so and
    device and family have them."""
    if not setting:
        return
    for one in transformers(module):
        assert isinstance(one, PackedTransformer)
        if device.type == "cuda" and one.config.compiles:
            work = partial(share_of_small, one.config)
            one.graphed = GraphedBlocks(work, CudaGraphs(device), compared=setting == "auto")
        else:
            log.info("model.dit.cuda_graphs: blocks of %s on %s run as written", one.config.architecture, device.type)


def share_of_small(config: DiTConfig, layout: Layout) -> float:
    """The size of a pass as a share of the most that a small one may have: forward, forward again and backward of a
    block are less work for a large GPU than for its host. Infinite for blocks whose gradients would be a weight in its
    memory, as they are there three times."""
    return sum(_share_of(config, one) for one in layout.sequences)


def most_in_small_pass(config: DiTConfig, sequence: Sequence) -> int:
    """How many such clips a pass may have that is small."""
    return int(1 / _share_of(config, sequence))


def _share_of(config: DiTConfig, sequence: Sequence) -> float:
    flops, blocks = config.flops, sum(config.block_counts)
    if flops.video > 2 * _BLOCK_WEIGHTS * blocks:
        return math.inf
    tokens, text = sequence.tokens, sequence.text_tokens
    forward = flops.linear(tokens, text) + flops.attention(tokens, text, sequence.grid[0])
    return max(4 * forward / (_BLOCK_FLOPS * blocks), (tokens + text) * config.dim / _ELEMENTS)


def run_as_written(module: nn.Module) -> None:
    """From now on no pass runs by CUDA graphs."""
    for one in transformers(module):
        if isinstance(one, PackedTransformer):
            one.graphed = None


def by_graphs(transformer: nn.Module) -> bool:
    """Whether its last pass ran by CUDA graphs."""
    return (
        isinstance(transformer, PackedTransformer) and transformer.graphed is not None and transformer.graphed.by_graphs
    )


def code_made(module: nn.Module) -> int:
    """Pieces of code that this process has compiled, and blocks of the transformers that were captured, by now."""
    graphed = [one.graphed for one in transformers(module) if isinstance(one, PackedTransformer)]
    return codes_made() + sum(one.captures for one in graphed if one is not None)


def pass_timing(transformer: nn.Module) -> Callable[[float], None]:
    """To be called with the seconds of its last pass, when they are known (`GraphedBlocks.timing`)."""
    graphed = transformer.graphed if isinstance(transformer, PackedTransformer) else None
    return _untimed if graphed is None else graphed.timing()


def _untimed(seconds: float) -> None:
    """Nothing is decided by them."""


def parts_of(module: nn.Module) -> tuple[str, ...]:
    """What the names of parameters of each of the `transformers` begin with."""
    return tuple(f"{name}." for name in EXPERTS) if isinstance(module, ExpertPair) else ("",)
