"""Ranges of one flat vector: how optimizer state is cut over workers, moved and cut again. NumPy only.

All trainable parameters, in `named_parameters` order and without padding, are one vector of `total` elements. A worker
owns [lo, hi) of it. Keepers, checkpoints and peers hold the same ranges, so going from N to M workers is arithmetic.
Only tensors that NCCL sums or gathers have a few more elements after the vector (`padding`), in no state and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ops.config import OptimizerConfig

Bounds = Sequence[tuple[int, int]]  # [lo, hi) of each rank, one after the other
ARRAYS = ("master", "exp_avg", "exp_avg_sq", "ema", "s", "p0")  # of a state; which it has, `state_names` says
_ITEM_BYTES = 4  # fp32
STAGE = 1 << 25  # elements of each of the two buffers from which a GPU pushes gradients into others
EDGE = 512  # elements: pushed ranges begin at multiples of it (`ALIGN` of ops/kernels/push, without PyTorch)
_ALIGN = 16  # elements: shards begin on a cache line
_EVEN_WORKERS = (64, 1024)  # at least, and at most, for which a vector has room after it
_PADDED = 1 << 13  # elements of the vector for each worker more: 0.2 % of it


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Distance:
    """What Prodigy knows of how far the solution lies from where training began (`ops.update.prodigy`)."""

    d: float  # the estimate, by which the learning rate is multiplied
    d_max: float  # the largest that any update has given
    numerator: float  # of the estimate, which is a running sum


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """Optimizer state of the range [lo, hi) of the flat vector. Made by a sync engine, held by keepers and checkpoints.

    `arrays` has "master", "exp_avg" and "exp_avg_sq", "ema" when the EMA is on, and of Prodigy "s" and "p0"; float32
    (float64 for a float64 model), each hi - lo long. Before the first update the last three may be missing.
    """

    updates: int  # of the optimizer, applied so far: skipped steps do not count
    lo: int
    hi: int
    total: int
    arrays: dict[str, np.ndarray]
    # of each part of the vector that is updated apart (`ops.update.sync.FlatSync`); (): it is one, with `updates`
    part_updates: tuple[int, ...] = ()
    distances: tuple[Distance, ...] = ()  # of each part, of Prodigy alone

    def __post_init__(self) -> None:
        if not 0 <= self.lo <= self.hi <= self.total:
            raise ValueError(f"shard [{self.lo}, {self.hi}) does not lie in [0, {self.total}).")
        for name, array in self.arrays.items():
            if array.shape != (self.hi - self.lo,):
                raise ValueError(
                    f"shard [{self.lo}, {self.hi}): {name} has shape {array.shape}, not ({self.hi - self.lo},)."
                )

    @property
    def state(self) -> tuple[int, int, tuple[int, ...], tuple[Distance, ...]]:
        """What all shards of one state have in common."""
        return self.updates, self.total, self.part_updates, self.distances

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def copy(self) -> ShardState:
        """The same state in memory of its own."""
        return replace(self, arrays={name: np.array(array) for name, array in self.arrays.items()})


def state_names(config: OptimizerConfig) -> tuple[str, ...]:
    """Arrays of the optimizer state, in the order of `ARRAYS`."""
    left_out = set() if config.ema_decay > 0 else {"ema"}
    left_out |= set() if config.kind == "prodigy" else {"s", "p0"}
    return tuple(name for name in ARRAYS if name not in left_out)


def bytes_per_weight(config: OptimizerConfig) -> int:
    """Bytes of optimizer state per trained weight: fp32 master, two moments, where there is one the average, and what
    Prodigy has besides.

    >>> bytes_per_weight(OptimizerConfig()), bytes_per_weight(OptimizerConfig(ema_decay=0.0))
    (16, 12)
    """
    return _ITEM_BYTES * len(state_names(config))


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where one named parameter lies in the flat vector."""

    name: str
    shape: tuple[int, ...]
    lo: int
    hi: int


def shard_bounds(total: int, size: int) -> list[tuple[int, int]]:
    """[lo, hi) of each of `size` workers: contiguous, in order, unpadded; late ones may be empty.

    >>> shard_bounds(100, 3)
    [(0, 48), (48, 96), (96, 100)]
    """
    return [(min(total, lo), min(total, hi)) for lo, hi in even_bounds(total, size)]


def even_bounds(total: int, size: int) -> list[tuple[int, int]]:
    """`shard_bounds`, all of one length: they reach beyond the vector, by less than 16 elements for each worker.

    >>> even_bounds(100, 3)
    [(0, 48), (48, 96), (96, 144)]
    """
    step = -(-total // (size * _ALIGN)) * _ALIGN
    return [(r * step, (r + 1) * step) for r in range(size)]


def padding(total: int) -> int:
    """Elements after a vector of `total`: 16 for each of 64 to 1,024 workers, whose ranges then have one length
    (`even_bounds`).

    >>> padding(1000) // 16, padding(1_400_000_000) // 16
    (64, 1024)
    """
    least, most = _EVEN_WORKERS
    return _ALIGN * min(most, max(least, total // _PADDED))


def held_elements(total: int, largest: int, workers: int, here: int) -> int:
    """Elements of a vector of `total` that the fullest of `here` workers of a node holds for it, of ranges of `largest`
    over all workers: its own, and its share of those of other nodes.

    >>> held_elements(100, 48, 3, 3), held_elements(100, 48, 3, 1)
    (48, 100)
    """
    return min(total, -(-workers // here) * largest)


def missing(ranges: Iterable[tuple[int, int]], lo: int, hi: int) -> list[tuple[int, int]]:
    """The parts of [lo, hi) that no range covers.

    >>> missing([(0, 4), (6, 9)], 2, 12)
    [(4, 6), (9, 12)]
    """
    gaps, at = [], lo
    for a, b in sorted(ranges):
        a, b = max(a, lo), min(b, hi)
        if a >= b:
            continue
        if a > at:
            gaps.append((at, a))
        at = max(at, b)
    return [*gaps, (at, hi)] if at < hi else gaps


def cut(shards: Sequence[ShardState], lo: int, hi: int) -> ShardState:
    """The state of [lo, hi) out of shards cut in any other way. Copies; shards may overlap (replicas).

    Raises ValueError when the shards are of different states or leave a part of [lo, hi) uncovered.
    """
    if not shards:
        raise ValueError(f"no shards given for the range [{lo}, {hi}).")
    first = shards[0]
    states = {shard.state for shard in shards}
    if len(states) > 1:
        raise ValueError(f"shards of different states: (updates, total, those of parts, distances) {sorted(states)}.")
    gaps = missing([(shard.lo, shard.hi) for shard in shards], lo, hi)
    if gaps:
        raise ValueError(f"state of [{lo}, {hi}) is incomplete: {gaps} is in none of the {len(shards)} shards.")
    arrays = {name: np.empty(hi - lo, array.dtype) for name, array in first.arrays.items()}
    for shard in shards:
        a, b = max(lo, shard.lo), min(hi, shard.hi)
        if a < b:
            for name, array in arrays.items():
                array[a - lo : b - lo] = shard.arrays[name][a - shard.lo : b - shard.lo]
    return replace(first, lo=lo, hi=hi, arrays=arrays)
