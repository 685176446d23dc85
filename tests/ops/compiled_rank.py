"""One rank of a bag as a process, whose blocks are compiled: saves the gradients that it adds to the bag's sum.

    python -m tests.ops.compiled_rank RANK SIZE PORT FOLDER

Processes, as workers are: threads would share what the compiler keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.models.base.transformer import PackedTransformer
from ops.models.load import build_dit
from ops.models.wan.config import WanConfig
from ops.packed.compiled_blocks import CompiledBlocks
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.waiting import CancelToken

TINY = WanConfig(
    num_layers=2,
    num_heads=4,
    head_dim=8,
    ffn_dim=32,
    freq_dim=16,
    text_dim=12,
    in_channels=2,
    out_channels=2,
    gradient_checkpointing=True,
)
Parts = Sequence[tuple[tuple[int, int, int], int]]
"""The grid and the rows of text of each sequence."""
PACKS: list[Parts] = [  # on three ranks: rows for all, then for some
    [((2, 3, 4), 5), ((1, 2, 2), 3)],
    [((1, 3, 5), 4)],
    [((1, 1, 1), 2), ((1, 1, 1), 4)],
    [((1, 3, 3), 0)],
    [((1, 1, 1), 2)],
    [((1, 4, 4), 1), ((1, 2, 3), 7), ((3, 1, 2), 2)],
]
_TIMEOUT_S = 200.0


def compiled(module: nn.Module, backend: str = "aot_eager") -> PackedTransformer:
    """The same transformer with compiled blocks."""
    assert isinstance(module, PackedTransformer)
    module.compiled = CompiledBlocks(module.block_parts, backend)
    return module


def gradients(module: nn.Module) -> list[Tensor]:
    """Those of a pass, zero where it used no parameter; the module then forgets them."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters() if p.requires_grad]
    module.zero_grad()
    return found


def local_step(module: nn.Module, parts: Parts, group: Group) -> list[Tensor]:
    """Gradients that a rank adds to the sum over its bag."""
    layout = Layout([PackedSequence(grid, text) for grid, text in parts], group.size, group.rank)
    generator = torch.Generator().manual_seed(len(parts))
    rows = torch.randn(sum(layout.lengths), TINY.in_channels * 4, generator=generator)
    text = torch.randn(sum(layout.text_lengths), TINY.text_dim, generator=generator)
    times = torch.linspace(900.0, 100.0, len(parts))
    out = module(layout.local(list(rows.split(layout.lengths))), times, text, layout, group)
    out.square().sum().backward()
    return gradients(module)


def main(rank: int, size: int, port: int, folder: Path) -> None:
    """Every pack, as this rank of one bag."""
    torch.set_num_threads(1)
    module = compiled(build_dit(TINY, 0))
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_TIMEOUT_S))
    groups = Groups(store, rank, tuple(range(size)), "gloo", 0, _TIMEOUT_S, CancelToken())
    group = groups.get(tuple(range(size)))
    torch.save([local_step(module, parts, group) for parts in PACKS], folder / f"{rank}.pt")
    groups.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
