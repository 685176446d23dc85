"""The actor around the planner: items in, plan out; measured seconds in, truer costs out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import cast

from actors.config import PlannerConfig
from actors.letters import NodeAnswer
from actors.messages import MemoryExceeded, Span
from actors.plan.costs.fetching import FetchedWeights
from actors.plan.costs.needs import Footprint, NeedKey
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import Topology
from actors.plan.schedule.check import check
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cluster, EarlyEncode, Item, Module
from actors.planning.adapt import adapted
from actors.planning.batching import best_sizes
from actors.planning.make_plan import make_plan, rolling_cut
from actors.planning.observations import Witnesses, learn, observations, samples_of
from actors.planning.options import options_of
from actors.step import StepAssignment
from data.config import BatchConfig
from data.types import Bucket

log = logging.getLogger(__name__)


class Planner:
    """Plain class; `actors.planning.client` makes the actor of it."""

    def __init__(self, profile: Profile, config: PlannerConfig) -> None:
        self._profile, self._config = profile, config
        self._witnesses = Witnesses()

    def plan(
        self,
        step: int,
        window: Sequence[Sequence[Item]],
        cluster: Cluster,
        done: Sequence[EarlyEncode],
        budget_s: float,
    ) -> StepAssignment:
        """Plan of the window's first step. Raises PlanError (never a plan that breaks a rule)."""
        started = time.perf_counter()
        told: tuple[str, ...] = ()
        options = self.options(budget_s)
        if self._config.misfit == "adapt":
            options, told = adapted(options, window, self._profile, cluster)
        plan = make_plan(window, self._profile, cluster, options, first_step=step, done=done)
        check(plan, window, self._profile, cluster, done=done)
        cascades = tuple(rolling_cut(plan))
        return StepAssignment(
            step=plan.steps[0],
            cascades=cascades,
            planning_s=time.perf_counter() - started,
            adapted=told,
            rates=self._profile.slice_rates() if self._profile.sliced is not None else None,
        )

    def options(self, budget_s: float) -> PlanOptions:
        """The options that plans of a run are made with."""
        return options_of(self._config, budget_s=budget_s, replans=True)

    def observe(
        self,
        spans: Sequence[Span],
        text_tokens: dict[str, int],
        cluster: Cluster,
        generation: int = 0,
        remainder_s: float | None = None,
        *answers: NodeAnswer,
    ) -> None:
        """Measured cascades of a step keep the cost model true. `cluster` has the workers of this generation, with
        their speeds as far as they are known now; a packed cascade counts as its parts together. `remainder_s` is
        what the step took beside them and its end, where that is known. `answers` of relays have the spans of their
        workers; those of the others are given."""
        ends = {rank: report for answer in answers for rank, (report, _) in answer.ends.items()}
        spans = [*spans, *(span for rank in sorted(ends) for span in ends[rank].spans)]
        learn_needs(self._profile, spans, text_tokens)
        for key, spanned in self._witnesses.doubted(cluster, generation):
            self._profile.forget(key, spanned)
        found, refused = observations(spans, text_tokens, Topology(cluster, self._profile.cross_node))
        for why in [*refused, *learn(self._profile, found, cluster.island_gbps)]:
            log.warning("%s", why)
        self._witnesses.saw(found)
        for workers, seconds in updates(spans):
            self._profile.observe_update(workers, len(cluster.nodes), seconds)
        if remainder_s is not None:
            self._profile.observe_remainder(cluster.num_workers, len(cluster.nodes), remainder_s)
        for num_bytes, seconds in fetches(spans):
            self._profile.observe_handoff(num_bytes, seconds)

    def count_fetched(self, found: FetchedWeights) -> None:
        """What passes copy in the generation that begins."""
        self._profile.count_fetched(found)

    def best_sizes(self, buckets: Sequence[Bucket], limits: BatchConfig, room_gib: float) -> dict[Bucket, int]:
        """Clips per batch of every bucket, by the costs known now. Raises ValueError where they say nothing, or are
        still from FLOPs alone: a planner that was started again has lost what it had learned since the last
        checkpoint."""
        if not self._profile.points("dit")[0]:
            raise ValueError("no cascade of the DiT has been measured since the planner was started")
        return best_sizes(self._profile, buckets, limits, room_gib)

    def learned(self) -> Profile:
        """The costs as they are known now."""
        return self._profile

    def exceeded(self, found: MemoryExceeded, text_tokens: Mapping[str, int]) -> None:
        """A cascade ran out of memory: no plan has one like it any more."""
        learn_limit(self._profile, found, text_tokens)


def learn_limit(profile: Profile, found: MemoryExceeded, text_tokens: Mapping[str, int]) -> bool:
    """Have the profile know that this cascade does not fit. Returns whether that is news."""
    samples = samples_of(found.pieces, text_tokens)
    return profile.exceed(profile.footprint(found.module, samples, found.degree), found.missing_gib)


def learn_needs(profile: Profile, spans: Sequence[Span], text_tokens: Mapping[str, int]) -> None:
    """Peaks of the cascades of a step; of a bag the rank that needed most, of a size the cascade that did."""
    peaks: dict[tuple[int, str], tuple[float, Span]] = {}
    for span in spans:
        counted = span.module != "text" or all(piece.item in text_tokens for piece in span.pieces)
        if span.need_gib is not None and span.module != "finish" and counted:
            key = span.step, span.cascade
            if key not in peaks or peaks[key][0] < span.need_gib:
                peaks[key] = span.need_gib, span
    of_size: dict[tuple[NeedKey, float], tuple[float, Footprint]] = {}
    too_large: list[Footprint] = []
    for need, span in peaks.values():
        module = cast(Module, span.module)
        found = profile.footprint(module, samples_of(span.pieces, text_tokens), span.degree)
        if span.exceeded_gib is not None:
            too_large.append(found)
        elif found.size not in of_size or of_size[found.size][0] < need:
            of_size[found.size] = need, found
    for need, found in of_size.values():
        profile.observe_need(found, need)
    for found in too_large:  # at last: what fitted once and not another time is a limit
        profile.exceed(found)


def updates(spans: Sequence[Span]) -> list[tuple[int, float]]:
    """(workers, seconds) of the ends of steps, one per step: of the worker that came last, which waited for no
    other."""
    ends: dict[int, list[Span]] = {}
    for span in spans:
        if span.module == "finish":
            ends.setdefault(span.step, []).append(span)
    whole = [of for of in ends.values() if len(of) == of[0].degree]
    found = [(len(of), min(span.end - span.start for span in of)) for of in whole]
    return [(workers, seconds) for workers, seconds in found if 0 < seconds < math.inf]


def fetches(spans: Sequence[Span]) -> list[tuple[int, float]]:
    """(bytes, seconds) of handoffs through the object store, one per cascade: its quickest rank, as a rank that was
    slowed down by something else says nothing about the handoff. What travels inside a bag is part of its cascade."""
    quickest: dict[tuple[int, str], tuple[float, int]] = {}
    for span in spans:
        if span.fetch_s is not None:
            key, found = (span.step, span.cascade), (span.fetch_s, span.fetched_bytes)
            quickest[key] = min(quickest.get(key, found), found)
    return [(num_bytes, seconds) for seconds, num_bytes in quickest.values()]
