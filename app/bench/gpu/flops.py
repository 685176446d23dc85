"""Work of a training step, counted as plans count it."""

from __future__ import annotations

from dataclasses import replace

from actors.plan.costs.flops import DiTWork
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ALL_TRAINED
from ops.packed.packing import Sequence


def step_flops(config: DiTConfig, sequences: list[Sequence], recompute: bool) -> float:
    """FLOP of forward and backward; with `recompute` the forward counts twice, as under checkpointing."""
    work = replace(DiTWork.of(config), recomputes=recompute, part=ALL_TRAINED)
    return 1e12 * sum(work.computed_tflop(1, s.tokens, s.text_tokens, s.grid[0]) for s in sequences)
