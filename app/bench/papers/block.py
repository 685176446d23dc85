"""Seconds of one block of the Wan transformer on a core of this machine, for figures that are about ratios of times."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many


def block_s(lengths: Many[int], width: int, heads: int, backward: bool, repeats: int) -> float:
    """Least CPU seconds of `repeats` passes over sequences of these lengths, packed; the first pass is not counted.

    A pass is a forward and, with `backward`, the gradients of all weights."""
    import torch

    from ops.comm.collectives import Group
    from ops.models.load import build_dit
    from ops.models.wan.config import WanConfig
    from ops.packed.packing import Layout, Sequence

    torch.set_num_threads(1)
    settings = WanConfig(num_layers=1, num_heads=heads, head_dim=width // heads, ffn_dim=4 * width, text_dim=32)
    dit = build_dit(settings, 0)
    layout = Layout([Sequence(grid=(1, 1, length), text_tokens=8) for length in lengths])
    rows = torch.randn(sum(lengths), settings.in_channels * 4)
    words, times = torch.randn(8 * len(lengths), 32), torch.full((len(lengths),), 500.0)
    taken = []
    for _ in range(repeats + 1):
        started = time.process_time()
        with torch.set_grad_enabled(backward):
            made = dit(rows, times, words, layout, Group.solo())
        if backward:
            made.square().mean().backward()
            dit.zero_grad()
        taken.append(time.process_time() - started)
    return min(taken[1:])
