"""What Ulysses costs a layer beside communication and attention: rows ordered by one index, against per-chunk lists.

One rank of a bag on this machine; the all-to-all is a local copy of the same size, so the figures hold the bookkeeping
alone: cutting heads, packing q, k, v, ordering rows, and the way back.
- `index`: ops.packed.sequence_parallel, orders fixed once per layout.
- `lists`: the published way (KnapFormer), which splits and concatenates one tensor per chunk in every layer.
The host part, which a GPU must wait for, is measured with one token per chunk, where no time goes into bytes.
The default workload is KnapFormer's low-resolution mix on one g8 bag: 256 sequences of 245 to 658 tokens, 2048 chunks.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from app.settings.out_files import check_writable
from ops.attention.varlen import attention
from ops.packed.packing import Exchange, Layout, Sequence
from ops.packed.sequence_parallel import heads_to_rows, rows_to_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class UlyssesCost:
    """Medians over repeats; milliseconds of one layer's forward on one rank."""

    sequences: int
    degree: int
    chunks: int
    tokens: int  # of the whole bag
    layout_ms: float  # once per micro-batch: all index tensors
    index_ms: float  # bookkeeping of one layer, bytes included
    lists_ms: float  # the same work with one tensor per chunk
    index_host_ms: float  # the same with one token per chunk: the time of the host
    lists_host_ms: float
    attention_ms: float  # plain attention of this rank's heads over the bag's sequences

    @property
    def share(self) -> float:
        """Bookkeeping relative to the attention call it surrounds."""
        return self.index_ms / self.attention_ms


class _CopyGroup:
    """A bag whose collective is a local copy: the received rows are this rank's own, repeated."""

    def all_to_all(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]) -> None:
        rows = min(len(output), len(input))
        output[:rows].copy_(input[:rows])
        output[rows:].copy_(input[: len(output) - rows])


class AttentionLayer:
    """One layer's bookkeeping on rank 0 of a bag, both ways, and the attention between."""

    def __init__(self, lengths: list[int], degree: int, heads: int, head_dim: int, device: str) -> None:
        self.layout = Layout([Sequence((1, 1, length), 1) for length in lengths], degree, 0, device)
        self.exchange: Exchange = self.layout.video_exchange
        shape = (self.layout.local_tokens, heads, head_dim)
        self.own = tuple(torch.randn(shape, device=device) for _ in range(3))
        self.whole = tuple(
            torch.randn(sum(self.exchange.rows), heads // degree, head_dim, device=device) for _ in range(3)
        )
        arrival = [
            (index, rank, self.layout.chunk(index, rank)) for rank in range(degree) for index in range(len(lengths))
        ]
        self.chunks = [(index, rank, rows.stop - rows.start) for index, rank, rows in arrival]
        self.group = _CopyGroup()

    def index(self) -> None:
        rows_to_heads(self.own, self.exchange, self.group)  # type: ignore[arg-type]
        heads_to_rows(self.whole[:1], self.exchange, self.group)  # type: ignore[arg-type]

    def lists(self) -> None:
        self.lists_there(torch.stack(self.own, dim=1))
        self.lists_back(self.whole[0])

    def attention(self) -> None:
        q, k, v = self.whole
        attention(q, k, v, self.exchange.lengths, self.exchange.lengths)

    def lists_there(self, x: Tensor) -> Tensor:
        """[n, c, H, d] -> [N, c, h, d]."""
        degree = self.exchange.degree
        sent = torch.cat([part.contiguous() for part in x.chunk(degree, dim=2)])
        received = x.new_empty(sum(self.exchange.rows), *sent.shape[1:])
        self.group.all_to_all(received, sent, [], [])
        pieces = dict(zip([chunk[:2] for chunk in self.chunks], received.split([chunk[2] for chunk in self.chunks])))
        return torch.cat([pieces[key] for key in sorted(pieces)])

    def lists_back(self, x: Tensor) -> Tensor:
        """[N, h, d] -> [n, H, d]."""
        ordered = sorted(self.chunks)
        pieces = dict(zip([chunk[:2] for chunk in ordered], x.split([chunk[2] for chunk in ordered])))
        sent = torch.cat([pieces[index, rank] for index, rank, _ in self.chunks])
        degree = self.exchange.degree
        received = x.new_empty(degree * self.exchange.rows[0], *x.shape[1:])
        self.group.all_to_all(received, sent, [], [])
        return torch.cat(list(received.chunk(degree)), dim=1)


def measure(
    sequences: int = 256, degree: int = 8, heads: int = 8, head_dim: int = 16, repeats: int = 7, device: str = "cpu"
) -> UlyssesCost:
    """Times one rank's share of a layer. Raises ValueError when degree does not divide heads."""
    if heads % degree:
        raise ValueError(f"{heads} heads over degree {degree}: use a multiple of {degree} heads.")
    lengths = np.random.default_rng(0).integers(245, 659, size=sequences).tolist()
    layer = AttentionLayer(lengths, degree, heads, head_dim, device)
    host = AttentionLayer([degree] * sequences, degree, heads, 1, device)

    def layout() -> None:
        built = Layout(layer.layout.sequences, degree, 0, device)
        assert built.seq_index.shape[0] == built.segments.num_rows == built.positions.shape[0]
        assert built.video_exchange.lengths.total == sum(lengths)

    def median(work: Callable[[], None], times: int = repeats) -> float:
        return _median_ms(work, times, device)

    return UlyssesCost(
        sequences=sequences,
        degree=degree,
        chunks=len(layer.chunks),
        tokens=sum(lengths),
        layout_ms=median(layout, 3),
        index_ms=median(layer.index),
        lists_ms=median(layer.lists),
        index_host_ms=median(host.index),
        lists_host_ms=median(host.lists),
        attention_ms=median(layer.attention, 3),
    )


def run(
    sequences: Annotated[int, typer.Option(help="In the pack.", min=1)] = 256,
    degree: Annotated[int, typer.Option(help="Ranks of the bag, whose bookkeeping one process makes.", min=1)] = 8,
    heads: Annotated[int, typer.Option(help="Of attention.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a head.", min=1)] = 16,
    repeats: Annotated[int, typer.Option(help="Timed runs; the median counts.", min=1)] = 7,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Ulysses bookkeeping per layer against per-chunk lists and a plain attention call."""
    check_writable([out])
    cost = measure(sequences, degree, heads, head_dim, repeats, device)
    print(
        f"{cost.sequences} sequences, {cost.tokens} tokens, degree {cost.degree}, {cost.chunks} chunks; one layer "
        f"forward on one rank ({device}), without communication, ms:"
    )
    print(f"{'':38}{'index':>9}{'lists':>9}")
    print(f"{'  bookkeeping, host part':38}{cost.index_host_ms:9.3f}{cost.lists_host_ms:9.3f}")
    print(f"{'  bookkeeping, bytes included':38}{cost.index_ms:9.2f}{cost.lists_ms:9.2f}")
    print(f"{'  plain attention call':38}{cost.attention_ms:9.2f}   (bookkeeping by index is {cost.share:.1%} of it)")
    print(f"{'  index tensors, once per micro-batch':38}{cost.layout_ms:9.2f}")
    if out is not None:
        out.write_text(json.dumps(asdict(cost) | {"share": cost.share}, indent=1), encoding="utf-8")


def _median_ms(work: Callable[[], None], repeats: int, device: str) -> float:
    """CPU time on the CPU, which other processes do not lengthen; wall time of a synchronised call on CUDA."""
    on_gpu = device.startswith("cuda")
    clock = time.perf_counter if on_gpu else time.process_time
    work()
    times = []
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        begin = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (clock() - begin))
    return statistics.median(times)
