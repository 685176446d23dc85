"""Lengths of packed sequences, as attention wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False, slots=True)  # not frozen: see ops/attention/opaque.py
class Lengths:
    """Lengths of packed sequences as attention kernels want them: on the host, and as offsets on the device."""

    host: tuple[int, ...]
    offsets: Tensor  # int32 [S + 1], exclusive cumulative sum on the device
    longest: int
    recur: bool = True  # they come again in other cascades; the lengths of captions, unless padded, hardly ever do

    @property
    def total(self) -> int:
        """Rows of all sequences."""
        return sum(self.host)

    @property
    def equal(self) -> bool:
        """One sequence, or several of one length that is not 0."""
        return bool(self.longest) and len(set(self.host)) == 1

    def cut(self, sequences: slice) -> Lengths:
        """The lengths of some neighbouring sequences."""
        host, (first, last, _) = self.host[sequences], sequences.indices(len(self.host))
        offsets = self.offsets[first : last + 1] - self.offsets[first]
        return Lengths(host, offsets, max(host, default=0), self.recur)

    @staticmethod
    def alike(length: int, count: int, device: torch.device | str = "cpu") -> Lengths:
        """`count` sequences of one length; the offsets are made where they are used."""
        offsets = torch.arange(count + 1, dtype=torch.int32, device=device) * length
        return Lengths((length,) * count, offsets, length if count else 0)

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu", recur: bool = True) -> Lengths:
        """Lengths of sequences of these numbers of rows, 0 or more, for tensors on `device`."""
        host = tuple(int(length) for length in lengths)
        if any(length < 0 for length in host):
            raise ValueError(f"negative length {min(host)}; lengths count rows.")
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(host, dtype=np.int32)]).astype(np.int32))
        return Lengths(host, offsets.to(device), max(host, default=0), recur)


Pair = tuple[Lengths, Lengths]  # of queries and of keys
