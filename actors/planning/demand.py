"""What must run on some workers, and whether it fits there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.plan.costs.needs import Needs, footprint
from actors.plan.costs.point import Samples
from actors.plan.spared import from_cache
from actors.plan.types import ENCODED, USABLE, Module
from actors.planning.memory import CONTEXT_GIB, MemoryForecast, communicators_gib
from data.buckets import BucketTable
from data.config import DataConfig
from ops.geometry import Geometry, PixelShape
from ops.models.base.tiles import clips_at_once
from ops.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What must run on some workers: one clip of each shape, with the longest captions, at some degree."""

    geometry: Geometry
    clips: tuple[PixelShape, ...]
    text_tokens: int
    bag_peers: int
    encoded: tuple[Module, ...] = ENCODED  # modules of which steps have cascades

    @classmethod
    def of(cls, data: DataConfig, model: ModelConfig, geometry: Geometry, bag_peers: int) -> Demand:
        """The demand of a run's data."""
        tokens = min(data.batch.text_tokens, model.text.most_tokens)
        return cls(
            geometry=geometry,
            clips=tuple(clips_of(data, geometry)),
            text_tokens=tokens,
            bag_peers=bag_peers,
            encoded=tuple(module for module in ENCODED if module not in from_cache(data.cache)),
        )

    def need_gib(self, needs: Needs, degrees: Sequence[int], workers: int) -> float:
        """The largest cascade, with the DiT at the degree at which it needs least; infinite where none is legal."""
        legal = [degree for degree in degrees if degree <= workers]
        return max((self._need_of(needs, clip, legal) for clip in self.clips), default=0.0)

    def fits(self, found: MemoryForecast, degrees: Sequence[int], workers: int, memory_gib: float) -> bool:
        """Whether the demand fits on this number of workers with `memory_gib` each."""
        room = found.room_gib(memory_gib, workers, communicators_gib(degrees, workers, self.bag_peers))
        return self.need_gib(found.needs, degrees, workers) <= room

    def with_graphs(
        self, found: MemoryForecast, degrees: Sequence[int], workers: Sequence[int], memory_gib: float
    ) -> MemoryForecast:
        """The forecast with the graphs that a worker has which finds room for them beside all else."""
        return replace(found, has_graphs=self.graphs_least_gib(found, degrees, workers) <= memory_gib)

    def graphs_least_gib(self, found: MemoryForecast, degrees: Sequence[int], workers: Sequence[int]) -> float:
        """GiB of a GPU on which there is room for graphs with each of these numbers of workers: many have smaller parts
        of the state each, and communicators that one has not. Infinite where blocks are fetched, of which there are
        none."""
        if found.fetches:
            return math.inf
        return max(self.least_gib(found, degrees, count) for count in workers) + found.graphs_gib / USABLE

    def fewest(
        self, found: MemoryForecast, degrees: Sequence[int], memory_gib: float, least: int, most: int
    ) -> int | None:
        """The smallest number of workers from `least` to `most` on which the demand fits."""
        counts = range(least, most + 1)
        return next((workers for workers in counts if self.fits(found, degrees, workers, memory_gib)), None)

    def least_gib(self, found: MemoryForecast, degrees: Sequence[int], workers: int) -> float:
        """GiB of a GPU on which the demand fits with this number of workers, or with the least degree where all degrees
        take more workers."""
        legal = [degree for degree in degrees if degree <= workers] or [min(degrees)]
        need = self.need_gib(found.needs, legal, max(legal))
        taken = max(found.states(workers).total + need, found.loaded_gib)
        other = communicators_gib(degrees, workers, self.bag_peers) + found.exchange_gib(workers)
        return CONTEXT_GIB + other + taken / USABLE

    def _need_of(self, needs: Needs, clip: PixelShape, degrees: Sequence[int]) -> float:
        one, tokens = [Samples.of(1, clip, self.text_tokens)], self.geometry.tokens
        dit = min((needs.gib(footprint("dit", one, k, tokens, needs)) or 0.0 for k in degrees), default=math.inf)
        return max([dit, *(needs.gib(footprint(module, one, 1, tokens)) or 0.0 for module in self.encoded)])


def clips_of(data: DataConfig, geometry: Geometry) -> list[PixelShape]:
    """The shapes of all buckets, of every segment of the run."""
    return [bucket.shape for bucket in BucketTable.buckets_of(data.tables, geometry)]


def largest_upload(clips: Sequence[PixelShape]) -> int:
    """Bytes of the pixels, uint8, that a VAE takes to its device at once, of clips of these shapes."""
    return max((3 * math.prod(clip) * clips_at_once(*clip) for clip in clips), default=0)
