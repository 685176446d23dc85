"""Work and memory of a training step, counted as the planner counts them."""

from __future__ import annotations

from dataclasses import replace

from actors.plan.costs.flops import DiTWork
from ops.models.base.config import DiTConfig
from ops.packing import Sequence

# Saved for the backward by one block without checkpointing, bytes per token, by width: measured slopes over tokens.
SAVED_PER_TOKEN = {1536: 91_800, 5120: 240_500}
CHECKPOINT_BLOCKS = 1.35  # blocks' worth of saved tensors that live at once while a block is computed again
STATE_BYTES = 22  # a weight: 2 in bf16, 4 gradient, 4 master, 8 moments, 4 EMA


def step_flops(config: DiTConfig, sequences: list[Sequence], recompute: bool) -> float:
    """FLOP of forward and backward; with `recompute` the forward counts twice, as under checkpointing."""
    work = replace(DiTWork.of(config), recomputes=recompute, frozen=False)
    return 1e12 * sum(work.computed_tflop(1, s.tokens, s.text_tokens, s.grid[0]) for s in sequences)


def step_bytes(config: DiTConfig, parameters: int, tokens: int, checkpointing: bool) -> float | None:
    """Peak memory of a step on one GPU: states, what blocks keep, and what one of them needs; None: width not known."""
    saved = SAVED_PER_TOKEN.get(config.dim)
    if saved is None:
        return None
    layers = sum(config.block_counts)
    kept = layers * 2 * config.dim + CHECKPOINT_BLOCKS * saved if checkpointing else layers * saved
    return STATE_BYTES * parameters + tokens * kept


def blocks_that_fit(config: DiTConfig, block_parameters: int, other_parameters: int, tokens: int, free: float) -> int:
    """The number of blocks for which a step with checkpointing has room in `free` bytes, at most that of the model."""
    saved = SAVED_PER_TOKEN[config.dim]
    fixed = STATE_BYTES * other_parameters + tokens * CHECKPOINT_BLOCKS * saved
    each = STATE_BYTES * block_parameters + tokens * 2 * config.dim
    return max(0, min(config.num_layers, int((free - fixed) // each)))
