"""Rows of a source in shuffled order: shards are permuted per epoch and rows within windows of a few shards, so that
reads stay near each other and no global permutation is held."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from data.dataset.order_state import Cursor, Population


class SourceRows:
    """Which row of a source comes after another. Holds the permutation of each source's last window alone."""

    def __init__(self, populations: Sequence[Population], seed: int) -> None:
        self._populations, self._seed = populations, seed
        self._orders: dict[int, tuple[tuple[int, int], np.ndarray]] = {}  # source -> (epoch, window), permuted rows
        self._shards: dict[int, tuple[int, np.ndarray]] = {}  # source -> epoch, permuted shards

    def next(self, source: int, cursor: Cursor) -> tuple[int, int]:
        """(epoch, row) of the row that comes next in a source; moves its cursor there."""
        order = self._order(source, cursor.epoch, cursor.window)
        while cursor.position >= len(order):
            cursor.position, cursor.window = 0, cursor.window + 1
            population = self._populations[source]
            if cursor.window * population.window >= len(population.shard_bounds) - 1:
                cursor.window, cursor.epoch = 0, cursor.epoch + 1
            order = self._order(source, cursor.epoch, cursor.window)
        cursor.position += 1
        return cursor.epoch, int(order[cursor.position - 1])

    def _order(self, source: int, epoch: int, window: int) -> np.ndarray:
        """Permuted rows of a window of permuted shards."""
        held = self._orders.get(source)
        if held is not None and held[0] == (epoch, window):
            return held[1]
        population = self._populations[source]
        bounds, size = population.shard_bounds, population.window
        shards = self._shard_order(source, epoch)[window * size : (window + 1) * size]
        rows = np.concatenate([np.arange(bounds[s], bounds[s + 1]) for s in shards])
        order = _generator(self._seed, source, epoch, window).permutation(rows)
        self._orders[source] = ((epoch, window), order)
        return order

    def _shard_order(self, source: int, epoch: int) -> np.ndarray:
        held = self._shards.get(source)
        if held is None or held[0] != epoch:
            count = len(self._populations[source].shard_bounds) - 1
            held = (epoch, _generator(self._seed, source, epoch, -1).permutation(count))
            self._shards[source] = held
        return held[1]


def _generator(*key: int) -> np.random.Generator:
    bits = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(bits, "little")))
