"""Where heads and parts of heads go in a bag whose degree does not divide them: dealt evenly, fixed once per layout.

n rows of one rank, N rows of the bag, H heads, k ranks (the degree). The queries of all heads are one line, head by
head; every rank computes H / k heads of it. Example, 3 heads on 2 ranks: rank 0 has head 0 and the first half of each
sequence's queries of head 1, rank 1 their second half and head 2. Keys and values of a head go to every rank that has
queries of it, all rows of them. A unit is one row of one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.attention.lengths import Lengths
from ops.packed.uploads import upload_all


class Share(NamedTuple):
    """Heads [first, last) of which a rank has the same part of the queries: from `low` / k to `high` / k of them."""

    first: int
    last: int
    low: int
    high: int

    @property
    def heads(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class HeldShare:
    """A share as its rank computes it; indices are int64 units of what an all-to-all has delivered."""

    heads: int
    lengths: Lengths  # of its queries
    q: Tensor  # queries that came with keys and values
    k: Tensor
    v: Tensor
    q_alone: Tensor  # queries, outputs or their gradients alone


@dataclass(frozen=True, slots=True)
class Copies:
    """Where this rank's keys and values of some heads lie in what it sends, for one of the ranks that get each head.

    The first of a list has all heads, the m-th those that at least m ranks share.
    """

    heads: Tensor  # int64
    k: Tensor  # int64 [n * heads]
    v: Tensor


@dataclass(frozen=True, slots=True)
class Splits:
    """Units that go to each rank, and that come from each."""

    sent: list[int]
    received: list[int]


@dataclass(frozen=True, slots=True)
class HeadShares:
    """Where every unit of a layout goes, as one rank sees it."""

    q: Tensor  # int64 [n * H]: place of each own query in what is sent with keys and values
    q_alone: Tensor  # int64 [n * H]: in what is sent alone
    copies: list[Copies]
    pieces: list[HeldShare]
    together: Splits
    alone: Splits


def deal(heads: int, degree: int) -> list[list[Share]]:
    """The shares of each rank, at most three: parts of a first and a last head, and whole ones between them."""
    dealt: list[list[Share]] = []
    for rank in range(degree):
        start, stop = rank * heads, (rank + 1) * heads  # in k-ths of a head
        own: list[Share] = []
        for head in range(start // degree, -(-stop // degree)):
            low, high = max(start - head * degree, 0), min(stop - head * degree, degree)
            if own and (own[-1].low, own[-1].high) == (low, high) == (0, degree):
                own[-1] = own[-1]._replace(last=head + 1)
            else:
                own.append(Share(head, head + 1, low, high))
        dealt.append(own)
    return dealt


def shares_of(
    rows: Sequence[int], rank: int, places: np.ndarray, lengths: Lengths, heads: int, device: torch.device
) -> HeadShares:
    """The shares of a bag whose ranks hold `rows` rows each; `places` int64 [N] are the places of these rows, rank by
    rank, in packed sequences of these lengths."""
    return upload_all(_Dealing(rows, rank, places, lengths, heads).made(), device)


class _Dealing:
    """Finds on the host where units go. What one rank sends to another is in this order: the queries of each of the
    receiver's shares, row by row, then the keys of all its heads, then their values."""

    def __init__(
        self,
        rows: Sequence[int],
        rank: int,
        places: np.ndarray,
        lengths: Lengths,
        heads: int,
    ) -> None:
        self.rank, self.degree, self.heads = rank, len(rows), heads
        self.dealt = deal(heads, self.degree)
        self.recur = lengths.recur
        self.lengths = np.array(lengths.host, dtype=np.int64)
        starts = np.cumsum(self.lengths) - self.lengths
        self.sequence = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.position = np.arange(len(places)) - starts[self.sequence]
        ends = np.cumsum(rows)
        self.rows = [places[end - count : end] for end, count in zip(ends, rows, strict=True)]  # of each rank

    def made(self) -> HeadShares:
        q, q_alone, copies, together, alone = self._sends()
        pieces, from_all, alone_from_all = self._receives()
        return HeadShares(
            q=_tensor(q),
            q_alone=_tensor(q_alone),
            copies=copies,
            pieces=pieces,
            together=Splits(together, from_all),
            alone=Splits(alone, alone_from_all),
        )

    def _cut(self, part: int) -> np.ndarray:
        """int64 [S]: the first query of each sequence after `part` / k of them. The sequence's number turns what is
        rounded, so that many short ones do not all burden one rank."""
        turn = np.arange(len(self.lengths)) % self.degree
        cut: np.ndarray = (self.lengths * part + turn) // self.degree
        return cut

    def _queries(self, share: Share) -> np.ndarray:
        """bool [N]: the rows of the packed sequences whose queries are in the share."""
        low, high = self._cut(share.low)[self.sequence], self._cut(share.high)[self.sequence]
        inside: np.ndarray = (low <= self.position) & (self.position < high)
        return inside

    def _sends(self) -> tuple[np.ndarray, np.ndarray, list[Copies], list[int], list[int]]:
        own = self.rows[self.rank]
        q, q_alone = (np.zeros((len(own), self.heads), dtype=np.int64) for _ in range(2))
        to_rank: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(self.heads)]  # of each head: k, v
        together, alone = [], []
        unit = unit_alone = 0
        for shares in self.dealt:
            begin, begin_alone = unit, unit_alone
            for share in shares:
                inside = np.flatnonzero(self._queries(share)[own])
                places = _grid(len(inside), share.heads)
                q[inside, share.first : share.last] = unit + places
                q_alone[inside, share.first : share.last] = unit_alone + places
                unit, unit_alone = unit + places.size, unit_alone + places.size
            first, last = shares[0].first, shares[-1].last
            places = unit + _grid(len(own), last - first)
            for head in range(first, last):
                key = places[:, head - first]
                to_rank[head].append((key, key + places.size))
            unit += 2 * places.size
            together.append(unit - begin)
            alone.append(unit_alone - begin_alone)
        return q, q_alone, self._copies(to_rank), together, alone

    def _copies(self, to_rank: list[list[tuple[np.ndarray, np.ndarray]]]) -> list[Copies]:
        found = []
        for turn in range(max(map(len, to_rank))):
            heads = [head for head, ranks in enumerate(to_rank) if len(ranks) > turn]
            k, v = (np.stack([to_rank[head][turn][which] for head in heads], axis=1) for which in (0, 1))
            found.append(Copies(_tensor(np.array(heads)), _tensor(k), _tensor(v)))
        return found

    def _receives(self) -> tuple[list[HeldShare], list[int], list[int]]:
        shares, num_rows = self.dealt[self.rank], len(self.position)
        first, last = shares[0].first, shares[-1].last
        chosen = [self._queries(share) for share in shares]
        # by row of the packed sequences: the unit of its first head
        q, q_alone = (np.zeros((len(shares), num_rows), dtype=np.int64) for _ in range(2))
        k, v = (np.zeros(num_rows, dtype=np.int64) for _ in range(2))
        together, alone = [], []
        unit = unit_alone = 0
        for rows in self.rows:
            begin, begin_alone = unit, unit_alone
            for number, share in enumerate(shares):
                inside = rows[chosen[number][rows]]
                steps = np.arange(len(inside)) * share.heads
                q[number, inside], q_alone[number, inside] = unit + steps, unit_alone + steps
                unit, unit_alone = unit + len(inside) * share.heads, unit_alone + len(inside) * share.heads
            size = len(rows) * (last - first)
            k[rows] = unit + np.arange(len(rows)) * (last - first)
            v[rows] = k[rows] + size
            unit += 2 * size
            together.append(unit - begin)
            alone.append(unit_alone - begin_alone)
        pieces = []
        for number, share in enumerate(shares):
            heads, inside = np.arange(share.heads), chosen[number]
            lengths = self._cut(share.high) - self._cut(share.low)
            pieces.append(
                HeldShare(
                    heads=share.heads,
                    lengths=Lengths.of(lengths.tolist(), recur=self.recur),
                    q=_tensor(q[number, inside][:, None] + heads),
                    k=_tensor(k[:, None] + heads + share.first - first),
                    v=_tensor(v[:, None] + heads + share.first - first),
                    q_alone=_tensor(q_alone[number, inside][:, None] + heads),
                )
            )
        return pieces, together, alone


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.reshape(-1), dtype=np.int64))


def _grid(rows: int, heads: int) -> np.ndarray:
    """int64 [rows, heads]: units one after the other."""
    return np.arange(rows * heads, dtype=np.int64).reshape(rows, heads)
