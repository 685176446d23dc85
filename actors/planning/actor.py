"""The actor around the planner: items in, plan out; measured seconds in, truer costs out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import cast

from actors.config import PlannerConfig
from actors.messages import Span
from actors.plan.costs.profile import Profile
from actors.plan.schedule.check import check
from actors.plan.types import Cluster, EarlyEncode, Item, Module
from actors.planning.adapt import adapted
from actors.planning.make_plan import make_plan, rolling_cut
from actors.planning.options import options_of
from actors.step import StepAssignment

log = logging.getLogger(__name__)


class Planner:
    """Plain class; `actors.planning.client` makes the actor of it."""

    def __init__(self, profile: Profile, config: PlannerConfig) -> None:
        self._profile, self._config = profile, config

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
        options = options_of(self._config, budget_s=budget_s, replans=True)
        if self._config.misfit == "adapt":
            options, told = adapted(options, window, self._profile, cluster)
        plan = make_plan(window, self._profile, cluster, options, first_step=step, done=done)
        check(plan, window, self._profile, cluster, done=done)
        cascades = tuple(rolling_cut(plan, options.update_waits))
        return StepAssignment(
            step=plan.steps[0], cascades=cascades, planning_s=time.perf_counter() - started, adapted=told
        )

    def observe(self, spans: Sequence[Span], text_tokens: dict[str, int]) -> None:
        """Measured cascades of a step keep the cost model true. The model's points are of one bucket each, so a packed
        cascade of several says nothing about any of them."""
        for span in spans:
            if span.bucket is None or span.module == "finish":
                continue
            frames, height, width = span.bucket
            tokens = sum(piece.batch * text_tokens.get(piece.item, 0) for piece in span.pieces)
            self._profile.observe(
                cast(Module, span.module),
                batch=span.batch,
                frames=frames,
                height=height,
                width=width,
                degree=span.degree,
                seconds=span.end - span.start,
                text_tokens=round(tokens / span.batch),
            )
        for num_bytes, seconds in fetches(spans):
            self._profile.observe_handoff(num_bytes, seconds)


def fetches(spans: Sequence[Span]) -> list[tuple[int, float]]:
    """(bytes, seconds) of handoffs through the object store, one per cascade: its quickest rank, as a rank that was
    slowed down by something else says nothing about the handoff. What travels inside a bag is part of its cascade."""
    quickest: dict[tuple[int, str], tuple[float, int]] = {}
    for span in spans:
        if span.fetch_s is not None:
            key, found = (span.step, span.cascade), (span.fetch_s, span.fetched_bytes)
            quickest[key] = min(quickest.get(key, found), found)
    return [(num_bytes, seconds) for seconds, num_bytes in quickest.values()]
