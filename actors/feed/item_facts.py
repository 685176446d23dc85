"""What a run and its preview know of an item before its pixels are there."""

from __future__ import annotations

from dataclasses import dataclass

from actors.feed.encoders import Encoders
from actors.feed.experts import ExpertDraw
from actors.feed.item_cache import CacheNames
from actors.plan.types import Item, Module
from actors.step import DrawnItem
from data.types import DataItem
from ops.geometry import Geometry


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFacts:
    """All of a run that says how its items look to planner and workers. The same in every process."""

    geometry: Geometry
    encoders: Encoders
    experts: ExpertDraw
    loss_weights: tuple[float, ...] = ()  # of the sources; (): all 1
    own_rates: bool = False  # the transformer takes the frame rate of each clip, which clips keep

    def drawn(self, item: DataItem, names: CacheNames, cached: tuple[Module, ...]) -> DrawnItem:
        """An item, by the names of its results in the cache and the modules of which they exist."""
        frames, height, width = item.bucket.frames, item.bucket.height, item.bucket.width
        tokens = self.geometry.tokens(frames, height, width)
        plan = Item(
            id=item.id,
            batch=item.batch,
            frames=frames,
            height=height,
            width=width,
            text_tokens=self.encoders.text_tokens(item),
            expert=self.experts.of_item(item.step, item.id, tokens),
            cached=cached,
        )
        keys = tuple(sample.draw for sample in item.samples)
        rates = tuple(clip.fps for clip in item.job.clips) if self.own_rates else ()
        return DrawnItem(
            plan=plan,
            keys=keys,
            latent_keys=names.latents,
            text_keys=names.texts,
            frame_rates=rates,
            loss_weights=tuple(self.loss_weights[s.source] for s in item.samples) if self.loss_weights else (),
        )
