"""The controller's side of the planner: plans asked for ahead of their use, and a planner that is started again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import ray

from actors.config import PlannerConfig
from actors.letters import NodeAnswer
from actors.messages import MemoryExceeded, Span
from actors.plan.costs.fetching import ON_DEVICE, FetchedWeights
from actors.plan.costs.profile import Profile
from actors.plan.costs.setting import ProfiledSetting
from actors.plan.types import Cluster, EarlyEncode, Item
from actors.planning.actor import Planner, learn_limit
from actors.planning.learned import save_learned
from actors.ray_calls import GONE, get, kill, remote_of, unwrap, wait
from actors.refs import Method, Ref
from actors.step import StepAssignment
from data.config import BatchConfig
from data.engines.placement import beside_me
from data.types import Bucket

log = logging.getLogger(__name__)


_LEARNED_S = 60.0  # for the planner to hand out what it knows, beside its plans

Window = Sequence[Sequence[Item]]  # of a step and of those whose encodes may run early
# Step, items of its window, cluster, encodes of it that are planned already.
Question = tuple[int, tuple[tuple[Item, ...], ...], Cluster, tuple[EarlyEncode, ...]]


class PlannerHandle(Protocol):
    """The planner as the controller knows it (`actors.planning.actor`)."""

    @property
    def plan(self) -> Method[[int, Window, Cluster, Sequence[EarlyEncode], float], StepAssignment]: ...
    @property
    def observe(self) -> Method[..., None]: ...  # `Planner.observe`, whose answers are references here
    @property
    def learned(self) -> Method[[], Profile]: ...
    @property
    def best_sizes(self) -> Method[[Sequence[Bucket], BatchConfig, float], dict[Bucket, int]]: ...
    @property
    def exceeded(self) -> Method[[MemoryExceeded, dict[str, int]], None]: ...
    @property
    def count_fetched(self) -> Method[[FetchedWeights], None]: ...


class SizesAnswer:
    """The planner's answer to what batch sizes would be best, when it comes."""

    def __init__(self, reference: Ref[dict[Bucket, int]]) -> None:
        self._reference = reference

    @property
    def there(self) -> bool:
        """Whether the answer can be read without waiting."""
        return bool(wait([self._reference], timeout=0)[0])

    def sizes(self) -> dict[Bucket, int] | None:
        """Clips per batch; None where the planner died, or its costs say nothing."""
        try:
            return unwrap(partial(get, self._reference))
        except (*GONE, ray.exceptions.RayError, ValueError) as error:
            log.warning("batch sizes stay as they are: %s", error)
            return None


class PlannerClient:
    """The planner actor, started again when it dies; a plan requested ahead is asked for again."""

    def __init__(
        self,
        profile: Profile,
        config: PlannerConfig,
        setting: ProfiledSetting | None = None,
        keep_in: Path | None = None,
        copies: FetchedWeights | None = None,
    ) -> None:
        """`keep_in` is the run's folder, where what is learned is kept as costs of this `setting`. `copies`: what
        passes copy where workers have put the weights of blocks into host memory; None where they have no choice."""
        self._profile, self._config, self._copies = profile, config, copies
        self._setting, self._keep_in = setting or ProfiledSetting(), keep_in
        self._actor = self._start()
        self._asked: tuple[Question, Ref[StepAssignment]] | None = None
        self._learned: Ref[Profile] | None = None  # on its way from the planner

    def request(
        self, step: int, window: Window, cluster: Cluster, done: Sequence[EarlyEncode], budget_s: float
    ) -> None:
        """Ask ahead for the plan that `plan` will be called for."""
        question = (step, tuple(map(tuple, window)), cluster, tuple(done))
        self._asked = (question, self._actor.plan.remote(*question, budget_s))

    def plan(
        self, step: int, window: Window, cluster: Cluster, done: Sequence[EarlyEncode], budget_s: float
    ) -> StepAssignment:
        """The plan of a step. Raises PlanError."""
        question = (step, tuple(map(tuple, window)), cluster, tuple(done))
        if self._asked is None or self._asked[0] != question:
            self.request(*question, budget_s)
        for _ in range(3):
            assert self._asked is not None
            reference = self._asked[1]
            try:
                return unwrap(partial(get, reference, timeout=60 + 10 * budget_s))
            except (*GONE, ray.exceptions.GetTimeoutError) as error:
                log.warning("the planner is started again, step %d is planned anew: %s", step, error)
                kill(self._actor)
                self._actor = self._start()
                self.request(*question, budget_s)
        raise RuntimeError(f"the planner died three times while planning step {step}.")

    def observe(
        self,
        spans: Sequence[Span],
        text_tokens: dict[str, int],
        cluster: Cluster,
        generation: int,
        remainder_s: float | None,
        answers: Sequence[Ref[NodeAnswer]] = (),
    ) -> None:
        """Tell what a step of this generation has measured on `cluster`, with the speeds of its workers as far as they
        are known now, and what it took beside its cascades and its end; nothing waits for the answer. `spans` are those
        of workers that are in no answer of a relay: the planner reads these itself, so nobody packs them again."""
        self._actor.observe.remote(spans, text_tokens, cluster, generation, remainder_s, *answers)

    def ask_sizes(self, buckets: Sequence[Bucket], limits: BatchConfig, room_gib: float) -> SizesAnswer:
        """Ask what batch sizes the costs learned so far would give; nothing waits."""
        return SizesAnswer(self._actor.best_sizes.remote(buckets, limits, room_gib))

    def begin(self, fetched: bool) -> None:
        """A generation begins. `fetched`: its workers fetch the weights of blocks from host memory."""
        copies = self._copies if fetched else ON_DEVICE
        if self._copies is None or copies == self._profile.fetched:
            return
        assert copies is not None
        self._asked = None
        self._profile.count_fetched(copies)
        self._actor.count_fetched.remote(copies)

    def exceeded(self, found: MemoryExceeded, text_tokens: dict[str, int]) -> bool:
        """Plans from now on do without a cascade that ran out of memory, also those of a planner that is started again.
        Returns whether that is news. `text_tokens`: by item, what the profile counts the cascade by."""
        self._asked = None
        self._actor.exceeded.remote(found, text_tokens)
        if self._keep_in is not None:  # a resume must not run into it again; what was asked for does not have it
            self._ask_learned_anew()
        return learn_limit(self._profile, found, text_tokens)

    def ask_learned(self) -> None:
        """Have the planner hand out what it has learned, between two plans; `poll` writes it. For a step with a
        checkpoint."""
        if self._keep_in is not None and self._learned is None:
            self._ask_learned_anew()

    def _ask_learned_anew(self) -> None:
        self._learned = self._actor.learned.remote()

    def poll(self) -> None:
        """Keep what was asked for in the run's folder once it is there; returns at once."""
        if self._learned is not None and wait([self._learned], timeout=0)[0]:
            self._keep(0.0)

    def save_learned(self) -> None:
        """Write what the planner has learned, and wait for it: the run ends."""
        if self._keep_in is not None:
            self._ask_learned_anew()
            self._keep(_LEARNED_S)

    def _keep(self, timeout_s: float) -> None:
        """Costs can be learned again: what prevents keeping them is only logged."""
        asked, self._learned = self._learned, None
        assert asked is not None and self._keep_in is not None
        try:
            self._profile = unwrap(partial(get, asked, timeout=timeout_s))
            save_learned(self._profile, self._setting, self._keep_in)
        except (*GONE, ray.exceptions.RayError, OSError) as error:
            log.warning("what was learned of costs was not saved: %s", error)

    def close(self) -> None:
        kill(self._actor)

    def _start(self) -> PlannerHandle:
        actor = remote_of(Planner).options(num_cpus=0, scheduling_strategy=beside_me())
        handle: PlannerHandle = actor.remote(self._profile, self._config)
        return handle
