"""Samples as packed sequences: no padding, any mix of shapes, each sequence cut into one chunk per rank of a bag.

S sequences, L tokens of one sequence, n rows that this rank holds, k ranks in the bag (its degree).
A `Layout` is built once per micro-batch; all index tensors of all layers live in it, so a layer never loops over
sequences or tokens on the host. They are made in host memory and copied to the device without a wait of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ops.attention.lengths import Lengths
from ops.chunks import chunk_bounds
from ops.kernels.base.segments import Segments
from ops.packed.head_shares import HeadShares, shares_of
from ops.packed.uploads import upload_all

_Part = TypeVar("_Part", Tensor, Lengths, Segments)
_T = TypeVar("_T")
FamilyPart = tuple[Callable[..., object], tuple[Hashable, ...]]
"""What makes a part that one family alone needs (`Layout.made`), and its settings."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sample: its token grid (t, h, w), and the numbers of its text tokens and rows of an image embedding.

    The first `clean_frames` of the grid are given to the transformer: as they are, at time 0, or with a little noise,
    at a small time of their own; in any case without a loss. With `frame_times` every frame has a time of its own,
    those that are given, too.
    """

    grid: tuple[int, int, int]
    text_tokens: int
    image_tokens: int = 0
    clean_frames: int = 0
    frame_rate: float = 0.0  # of the clip (1/s), for families that take it; 0: that of their settings
    frame_times: bool = False  # of all sequences of a layout, or of none

    @property
    def tokens(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def clean_tokens(self) -> int:
        return self.clean_frames * self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True)
class CausalBlock:
    """Neighbouring frames of a packed sequence, which see each other and the frames before them."""

    queries: slice  # their rows among the packed sequences
    keys: slice  # those and the rows of all frames before
    lengths: tuple[Lengths, Lengths]  # of both


@dataclass(eq=False, slots=True)  # not frozen: see ops/attention/opaque.py
class Exchange:
    """How the ranks of a bag turn (own rows, all heads) into (all rows, own heads). Fixed per layout.

    The all-to-all delivers rows rank by rank; `gather` [N] puts them sequence by sequence, `scatter` [N] undoes that.
    """

    rows: tuple[int, ...]  # rows that each rank of the bag holds
    rank: int
    gather: Tensor  # int64 [N]: row of the received buffer that belongs at each place of the packed sequences
    scatter: Tensor  # int64 [N]
    lengths: Lengths  # of the whole sequences, in the order of `gather`
    in_order: bool  # the received buffer already is the packed sequences
    places: np.ndarray  # int64 [N]: `scatter` on the host
    scores: int  # of a head: the sum of the squared lengths
    in_halves: bool | None = None  # whether heads travel in two halves (ops.packed.exchange_halves); None: by size
    blocks: tuple[CausalBlock, ...] = ()  # in the order of the packed rows; (): all of a sequence sees all of it
    _shared: dict[int, HeadShares] = field(default_factory=dict)

    @property
    def degree(self) -> int:
        return len(self.rows)

    def shared(self, heads: int) -> HeadShares:
        """How `heads` heads are dealt where the degree does not divide them; made for the first layer that asks."""
        if heads not in self._shared:
            device = self.gather.device
            self._shared[heads] = shares_of(self.rows, self.rank, self.places, self.lengths, heads, device)
        return self._shared[heads]


class Layout:
    """The rows of a packed micro-batch that one rank of a bag holds, and the index tensors that all layers share.

    Example: two sequences of 5 and 2 tokens on degree 2. Rank 0 holds rows 0..2 of the first and row 0 of the second,
    rank 1 the rest: `local_tokens` 4 and 3, `seq_index` [0, 0, 0, 1] and [0, 0, 1].
    A rank may hold no row at all; it still takes part in every collective of its bag.
    """

    def __init__(
        self,
        sequences: Seq[Sequence],
        degree: int = 1,
        rank: int = 0,
        device: torch.device | str = "cpu",
        text_recurs: bool = False,
        beforehand: Iterable[str | FamilyPart] = (),
        in_halves: bool | None = None,
        block_frames: int = 0,
    ) -> None:
        """`text_recurs`: its lengths of text come again, because texts are padded or the layout serves many passes.
        `beforehand` are parts that go to the device at once, in one copy: those `asked` of another layout. Others
        follow one by one. `in_halves`: whether attention heads travel in two halves; None: where that is worth it.
        `block_frames`: a frame sees, in self-attention, the frames of its own block of this number and of those before;
        0: all."""
        if not sequences:
            raise ValueError("a layout needs at least one sequence; a worker without work runs no cascade instead.")
        if not 0 <= rank < degree:
            raise ValueError(f"rank {rank} is outside a bag of degree {degree}. Use 0..{degree - 1}.")
        for sequence in sequences:
            if min(sequence.grid) < 1 or sequence.text_tokens < 0:
                raise ValueError(f"{sequence} is empty; every sequence needs a grid of at least 1x1x1.")
            if not 0 <= sequence.clean_frames < sequence.grid[0]:
                raise ValueError(f"{sequence} has no frame that is not given; leave at least one.")
        if len({sequence.frame_times for sequence in sequences}) > 1:
            raise ValueError("sequences with a time for each frame and others in one layout; give them layouts apart.")
        self.sequences = tuple(sequences)
        self.degree, self.rank, self.device = degree, rank, torch.device(device)
        if block_frames and (odd := next((s for s in sequences if s.grid[0] % block_frames), None)) is not None:
            raise ValueError(f"{odd.grid[0]} latent frames are not whole blocks of {block_frames}.")
        self.in_halves, self.block_frames = in_halves, block_frames
        self.lengths = tuple(sequence.tokens for sequence in sequences)
        self.text_lengths = tuple(sequence.text_tokens for sequence in sequences)
        self._chunks = _chunk_lengths(self.lengths, degree)
        self._text_chunks = _chunk_lengths(self.text_lengths, degree)
        self.text_recurs = text_recurs or not any(self.text_lengths)
        self._rope: dict[tuple[tuple[int, ...], float, torch.dtype], tuple[Tensor, Tensor]] = {}
        self.local_tokens = int(self._chunks[rank].sum())
        self.local_text_tokens = int(self._text_chunks[rank].sum())
        self.has_clean_frames = any(sequence.clean_frames for sequence in sequences)
        self.has_frame_times = self.sequences[0].frame_times
        self._made: dict[FamilyPart, object] = {}  # used
        self._sent: dict[FamilyPart, object] = {}  # beforehand, and not used yet
        if (parts := list(beforehand)) and self.device.type != "cpu":
            self._send(parts)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def asked(self) -> frozenset[str | FamilyPart]:
        """The parts with index tensors that are on the device; of a family's parts only those that were used, so that
        parts with the settings of an earlier cascade are not carried along for ever."""
        names = (name for name in self.__dict__ if not name.startswith("_"))
        own = {name for name in names if isinstance(getattr(Layout, name, None), cached_property)}
        return frozenset(own | self._made.keys())

    def made(self, make: Callable[..., _T], *settings: Hashable) -> _T:
        """A part that one family alone needs, on the device: `make(layout, *settings)` of this layout in host memory, a
        tensor or a dataclass, list or tuple of them. Made once for the same settings."""
        part: FamilyPart = (make, settings)
        if part not in self._made:
            there = self._sent.pop(part, None)
            self._made[part] = upload_all(make(self._on_host, *settings), self.device) if there is None else there
        return cast(_T, self._made[part])

    @cached_property
    def _on_host(self) -> Layout:
        if self.device.type == "cpu":
            return self
        same = {"text_recurs": self.text_recurs, "in_halves": self.in_halves, "block_frames": self.block_frames}
        return Layout(self.sequences, self.degree, self.rank, **same)  # type: ignore[arg-type]  # each has its own type

    def _send(self, parts: Seq[str | FamilyPart]) -> None:
        host = self._on_host
        sent = upload_all(
            [getattr(host, part) if isinstance(part, str) else part[0](host, *part[1]) for part in parts], self.device
        )
        for part, there in zip(parts, sent, strict=True):
            if isinstance(part, str):
                self.__dict__[part] = there
            else:
                self._sent[part] = there

    def chunk(self, index: int, rank: int | None = None) -> slice:
        """Rows of sequence `index` that `rank` (this rank by default) owns."""
        return slice(*chunk_bounds(self.lengths[index], self.degree, self.rank if rank is None else rank, index))

    def local(self, sequences: Seq[Tensor]) -> Tensor:
        """This rank's rows of whole sequences ([L_i, ...] each), packed: [n, ...]."""
        return torch.cat([rows[self.chunk(index)] for index, rows in enumerate(sequences)])

    @cached_property
    def seq_index(self) -> Tensor:
        """int64 [n]: the sequence of each local row."""
        return self._there(_tensor(np.repeat(np.arange(len(self)), self._chunks[self.rank])))

    @property
    def num_times(self) -> int:
        """Times that a transformer is given: one of each sequence, or of each of its frames, sequence by sequence."""
        return sum(sequence.grid[0] for sequence in self.sequences) if self.has_frame_times else len(self)

    @property
    def num_tables(self) -> int:
        """Rows of the modulation tables, as `times` has them."""
        apart = self.has_clean_frames and not self.has_frame_times
        return 2 * len(self) if apart else self.num_times

    @cached_property
    def table_sequences(self) -> Tensor:
        """int64 [num_tables]: the sequence of each row of the modulation tables."""
        order = np.arange(len(self))
        if self.has_frame_times:
            return self._there(_tensor(np.repeat(order, [sequence.grid[0] for sequence in self.sequences])))
        return self._there(_tensor(np.tile(order, self.num_tables // len(self))))

    @cached_property
    def time_index(self) -> Tensor:
        """int64 [n]: the row of the modulation tables of each local row."""
        lengths, tables = self._runs
        return self._there(_tensor(np.repeat(tables, lengths)))

    @cached_property
    def segments(self) -> Segments:
        """The modulation row of each local row, for the fused ops; rows of the tables are in the order of `times`."""
        if self.num_tables == len(self):
            return self.sequence_segments
        lengths, tables = self._runs
        return self._there(Segments.packed(lengths, tables, self.num_tables))

    @cached_property
    def sequence_segments(self) -> Segments:
        """The sequence of each local row, for tables of one row per sequence also where frames are clean."""
        return self._there(Segments.packed(self._chunks[self.rank].tolist()))

    @property
    def _runs(self) -> tuple[list[int], list[int]]:
        """Runs of local rows of one time: of each sequence every frame that has its own, else the clean frames, then
        the others. (The lengths of the runs, their rows of the modulation tables.)"""
        if self.has_frame_times:
            return self._frame_runs, list(range(self.num_times))
        rows, order = self._chunks[self.rank], np.arange(len(self))
        if not self.has_clean_frames:
            return rows.tolist(), order.tolist()
        clean = self._clean_rows
        lengths = np.stack([clean, rows - clean], axis=1)
        tables = np.stack([len(self) + order, order], axis=1)
        return lengths.ravel().tolist(), tables.ravel().tolist()

    @property
    def _frame_runs(self) -> list[int]:
        """The number of local rows of each frame of each sequence."""
        found = []
        for index, sequence in enumerate(self.sequences):
            chunk, plane = self.chunk(index), sequence.grid[1] * sequence.grid[2]
            ends = np.arange(sequence.grid[0] + 1) * plane
            found += np.diff(np.clip(ends, chunk.start, chunk.stop)).tolist()
        return found

    def times(self, timesteps: Tensor, first: Tensor | None = None) -> Tensor:
        """The time of each row of the modulation tables: that of each sequence [S] and, where there are clean frames,
        after them that of each sequence's clean frames, `first` [S] or 0: [2 S]. Times by frame stay as they are."""
        if not self.has_clean_frames or self.has_frame_times:
            return timesteps
        return torch.cat([timesteps, torch.zeros_like(timesteps) if first is None else first])

    @cached_property
    def noisy_rows(self) -> Tensor:
        """bool [n]: the local rows that are not of clean frames."""
        rows, clean = self._chunks[self.rank], self._clean_rows
        kinds = np.tile([False, True], len(self))
        noisy = np.repeat(kinds, np.stack([clean, rows - clean], axis=1).ravel())
        return self._there(torch.from_numpy(noisy))

    @property
    def _clean_rows(self) -> np.ndarray:
        """int64 [S]: local rows of clean frames; they are the first of their sequence."""
        start = self._chunks[: self.rank].sum(axis=0)
        clean = np.array([sequence.clean_tokens for sequence in self.sequences])
        rows: np.ndarray = np.clip(clean - start, 0, self._chunks[self.rank])
        return rows

    @cached_property
    def positions(self) -> Tensor:
        """int64 [n, 3]: (t, h, w) of each local row in its own grid."""
        grids = np.repeat(np.array([s.grid for s in self.sequences]), self._chunks[self.rank], axis=0)
        row = _ranges(self._chunks[: self.rank].sum(axis=0), self._chunks[self.rank])
        plane = grids[:, 1] * grids[:, 2]
        return self._there(_tensor(np.stack([row // plane, row % plane // grids[:, 2], row % grids[:, 2]], axis=1)))

    @cached_property
    def text_rows(self) -> Tensor:
        """int64 [m]: rows of the replicated text that this rank owns in joint attention."""
        starts = np.cumsum((0, *self.text_lengths[:-1])) + self._text_chunks[: self.rank].sum(axis=0)
        return self._there(_tensor(_ranges(starts, self._text_chunks[self.rank])))

    @cached_property
    def text_segments(self) -> Segments:
        """The modulation row of each row of the replicated text."""
        return self._there(Segments.packed(self.text_lengths))

    @cached_property
    def local_text_segments(self) -> Segments:
        """The modulation row of each text row that this rank owns in joint attention."""
        return self._there(Segments.packed(self._text_chunks[self.rank].tolist()))

    @cached_property
    def joint_segments(self) -> Segments:
        """The modulation row of each local row of joint attention, video rows first."""
        assert not self.has_frame_times, "text has the time of its sequence"
        lengths, tables = self._runs
        lengths += self._text_chunks[self.rank].tolist()
        return self._there(Segments.packed(lengths, [*tables, *range(len(self))], self.num_tables))

    @cached_property
    def stream_segments(self) -> Segments:
        """The same where video and text have modulation rows of their own, those of the text after the others."""
        lengths = [*self._chunks[self.rank].tolist(), *self._text_chunks[self.rank].tolist()]
        return self._there(Segments.packed(lengths))

    @cached_property
    def local_lengths(self) -> Lengths:
        """Lengths of this rank's chunks: the queries of cross-attention."""
        return self._there(Lengths.of(self._chunks[self.rank].tolist()))

    @cached_property
    def text(self) -> Lengths:
        """Lengths of the replicated text: the keys of cross-attention."""
        return self._there(Lengths.of(self.text_lengths, recur=self.text_recurs))

    @cached_property
    def image(self) -> Lengths:
        """Lengths of the replicated image embeddings: further keys of cross-attention."""
        return self._there(Lengths.of([sequence.image_tokens for sequence in self.sequences]))

    def text_mean(self, dtype: torch.dtype) -> Tensor:
        """[S, sum text_tokens]: times the replicated text it gives the mean embedding of each sequence, always in the
        same order of summation (index_add on CUDA has none). A sequence without text gives zeros."""
        return self.text_shares.to(dtype)

    @cached_property
    def text_shares(self) -> Tensor:
        """`text_mean` in fp64."""
        rows = np.repeat(np.arange(len(self)), self.text_lengths)
        mean = torch.zeros(len(self), len(rows), dtype=torch.float64)
        mean[rows, np.arange(len(rows))] = 1.0 / torch.tensor(self.text_lengths, dtype=torch.float64)[rows]
        return self._there(mean)

    @cached_property
    def video_exchange(self) -> Exchange:
        """Sequence parallelism over the video rows: self-attention."""
        exchange = exchange_of(self._chunks[:, None], self.rank, self.device, in_halves=self.in_halves)
        return replace(exchange, blocks=tuple(self._causal_blocks())) if self.block_frames else exchange

    def _causal_blocks(self) -> Iterator[CausalBlock]:
        start = 0
        for sequence in self.sequences:
            rows = self.block_frames * sequence.grid[1] * sequence.grid[2]
            for first in range(start, start + sequence.tokens, rows):
                queries, keys = slice(first, first + rows), slice(start, first + rows)
                lengths = tuple(self._there(Lengths.of([part.stop - part.start])) for part in (queries, keys))
                yield CausalBlock(queries, keys, (lengths[0], lengths[1]))
            start += sequence.tokens

    @cached_property
    def joint_exchange(self) -> Exchange:
        """Sequence parallelism over video and text rows: joint attention. Each whole sequence is its video,
        then its text."""
        rows = np.stack([self._chunks, self._text_chunks], axis=1)
        return exchange_of(rows, self.rank, self.device, self.text_recurs, self.in_halves)

    @cached_property
    def token_counts(self) -> Tensor:
        """fp64 [S]: tokens of the whole sequences, without those of clean frames: the denominators of the loss."""
        counts = [sequence.tokens - sequence.clean_tokens for sequence in self.sequences]
        return self._there(torch.tensor(counts, dtype=torch.float64))

    def rope(self, axes: tuple[int, int, int], theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [n, sum(axes) / 2] of the rotation of each local row; `axes` are the head sizes given to t, h
        and w. Angles are computed in fp64 as Diffusers does; kept per layout, so all layers share one table."""
        key = (axes, theta, dtype)
        if key not in self._rope:
            angles = [
                self.positions[:, axis, None].double() * _frequencies(size, theta, self.device)
                for axis, size in enumerate(axes)
            ]
            angle = torch.cat(angles, dim=1)
            self._rope[key] = angle.cos().to(dtype), angle.sin().to(dtype)
        return self._rope[key]

    def _there(self, part: _Part) -> _Part:
        """What was made in host memory, on the device."""
        return upload_all(part, self.device)


def exchange_of(
    rows: np.ndarray,
    rank: int,
    device: torch.device | str = "cpu",
    lengths_recur: bool = True,
    in_halves: bool | None = None,
) -> Exchange:
    """The exchange of a bag in which `rows` int64 [rank, kind, sequence] are the lengths of the segments that each rank
    holds, kind by kind, sequence by sequence. A whole sequence is its kinds one after the other, each rank by rank."""
    starts = (np.cumsum(rows.ravel()) - rows.ravel()).reshape(rows.shape)
    order = (2, 1, 0)  # packed sequences: sequence, then kind, then rank
    gather = _ranges(starts.transpose(order).ravel(), rows.transpose(order).ravel())
    scatter = np.empty_like(gather)
    scatter[gather] = np.arange(len(gather))
    whole = rows.sum(axis=(0, 1))
    exchange = Exchange(
        rows=tuple(rows.sum(axis=(1, 2)).tolist()),
        rank=rank,
        gather=_tensor(gather),
        scatter=_tensor(scatter),
        places=scatter,
        in_order=bool((gather[1:] > gather[:-1]).all()),
        lengths=Lengths.of(whole.tolist(), recur=lengths_recur),
        scores=int((whole**2).sum()),
        in_halves=in_halves,
    )
    return upload_all(exchange, device)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def _chunk_lengths(tokens: Seq[int], degree: int) -> np.ndarray:
    """int64 [degree, S]: rows of each sequence on each rank, as `chunk_bounds` cuts them."""
    length, turn, rank = np.array(tokens), np.arange(len(tokens)), np.arange(degree)[:, None]
    lengths: np.ndarray = length // degree + ((rank - turn) % degree < length % degree)
    return lengths


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """arange(start, start + length) of all, one after the other."""
    places: np.ndarray = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return places


def _frequencies(size: int, theta: float, device: torch.device) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)
