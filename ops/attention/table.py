"""A measured table of attention backends on one device, by which `auto` chooses: `python -m app.bench.gpu` writes it.

As JSON:

    {"device": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16", "torch": "2.13.0+cu130", "cuda": "13.0", "rows": [
      {"backend": "cudnn", "head_dim": 128, "lengths": "one", "length": 32760.0, "forward_s": 0.01, "backward_s": 0.03},
      ...]}

Seconds are of one call in one direction; `backward_s` is null where a backend has none. `lengths` says how many rows
the sequences of a call have: there is one, they are equal, or they are not. `length` is their mean over rows, sum(n^2)
/ sum(n), the keys that a query sees. Rows with the same head size, lengths and length are of the same call. Imports
neither torch nor Ray.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ops.attention.names import BACKEND_NAMES, AttentionName, BackendName

LengthsKind = Literal["one", "equal", "unequal"]

BEYOND = 2.0  # times shorter than the shortest length, or longer than the longest, the nearest one still counts

_Curve = dict[float, dict[BackendName, float]]  # length -> seconds by backend


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One backend on one call of self-attention."""

    backend: BackendName
    head_dim: int
    lengths: LengthsKind
    length: float
    forward_s: float
    backward_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("length", self.length), ("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} {value:g} of attention {self.backend} is not above 0; measure it again.")

    def seconds(self, gradient: bool) -> float | None:
        """Seconds of the forward, with `gradient` of both directions; None where the backend has no backward."""
        if not gradient:
            return self.forward_s
        return None if self.backward_s is None else self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTable:
    """What backends took on one device. Part of a run's settings, so that all its workers and resumes choose alike."""

    device: str  # as its driver names it, or CPU
    dtype: str  # of queries, keys and values
    rows: tuple[TableRow, ...]
    torch: str = ""  # versions that it was measured with
    cuda: str | None = None

    def __post_init__(self) -> None:
        seen: set[tuple[object, ...]] = set()
        for row in self.rows:
            key = (row.backend, row.head_dim, row.lengths, row.length)
            if key in seen:
                raise ValueError(
                    f"attention {row.backend} of head_dim {row.head_dim}, lengths {row.lengths} and length "
                    f"{row.length:g} stands twice in the table; leave one of the two rows."
                )
            seen.add(key)

    @property
    def on_cuda(self) -> bool:
        return self.device != "CPU"

    @property
    def backends(self) -> tuple[BackendName, ...]:
        """Those that it has a row of."""
        return tuple(name for name in BACKEND_NAMES if any(row.backend == name for row in self.rows))

    def fastest(self, head_dim: int, equal: bool, length: float, gradient: bool) -> list[BackendName]:
        """Backends by their seconds for such a call, fastest first; [] where the table says nothing of it.

        Between two lengths seconds are interpolated as powers of the length. One sequence and several of one length
        are the same call to every backend, so they share their rows.
        """
        curve = self._curve(head_dim, equal, gradient)
        lengths = sorted(curve)
        if not lengths or not lengths[0] / BEYOND <= length <= lengths[-1] * BEYOND:
            return []
        above = bisect_left(lengths, length)
        low, high = lengths[max(above - 1, 0)], lengths[min(above, len(lengths) - 1)]
        if length in curve or not low < length < high:  # measured, or beyond all that was
            low = high = min((low, high), key=lambda one: abs(one - length))
        share = math.log(length / low) / math.log(high / low) if high > low else 0.0

        def logarithm(name: BackendName) -> float:
            return (1 - share) * math.log(curve[low][name]) + share * math.log(curve[high][name])

        both = [name for name in BACKEND_NAMES if name in curve[low] and name in curve[high]]
        return sorted(both, key=logarithm)  # stable: equal ones in the order of their names' list

    def _curve(self, head_dim: int, equal: bool, gradient: bool) -> _Curve:
        curve: _Curve = {}
        for row in self.rows:
            seconds = row.seconds(gradient)
            if seconds is not None and row.head_dim == head_dim and (row.lengths != "unequal") == equal:
                curve.setdefault(row.length, {}).setdefault(row.backend, seconds)
        return curve


AttentionSetting = AttentionName | AttentionTable  # a table: `auto` by what it says


def mean_length(lengths: Sequence[int]) -> float:
    """Rows of the sequences, as the mean over rows: the keys that a query of self-attention sees."""
    return sum(n * n for n in lengths) / max(sum(lengths), 1)


def kind_of_lengths(lengths: Sequence[int]) -> LengthsKind:
    """What a table calls them."""
    if len(lengths) == 1:
        return "one"
    return "equal" if len(set(lengths)) == 1 else "unequal"


def name_of(setting: AttentionSetting) -> AttentionName:
    """The name that a setting comes to."""
    return "auto" if isinstance(setting, AttentionTable) else setting
