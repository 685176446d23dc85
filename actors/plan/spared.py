"""What a run that takes its encode results from a cache alone (`data.cache.only`) spares its workers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from actors.plan.types import ENCODED, Module
from data.config import CacheConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Spared:
    """Modules of which its steps have no cascade, and those of them whose encoder no worker ever loads."""

    cascades: tuple[Module, ...] = ()
    encoders: tuple[Module, ...] = ()

    @classmethod
    def of(cls, cache: CacheConfig, beside: Collection[Module] = ()) -> Spared:
        """`beside`: encoders that workers need for what they make beside their steps."""
        cascades = from_cache(cache)
        return cls(cascades=cascades, encoders=tuple(module for module in cascades if module not in beside))


NOTHING_SPARED = Spared()


def from_cache(cache: CacheConfig) -> tuple[Module, ...]:
    """Modules whose results all come from the cache."""
    kept = {"vae": cache.latents, "text": cache.text}
    return tuple(module for module in ENCODED if kept[module]) if cache.only else ()


def comes_whole(cache: CacheConfig) -> bool:
    """Whether nothing is encoded in steps at all, so that no run keeps anything for another one."""
    return from_cache(cache) == ENCODED
