"""What the machines of a virtual cluster are like."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from actors.plan.costs.topology import Topology
from actors.plan.types import Module, refuse_below, refuse_unless_positive

_LATE = 1.5  # of a straggling cascade


@dataclass(frozen=True, kw_only=True, slots=True)
class Physics:
    """Seconds are virtual ones unless said otherwise."""

    speed: float = 1.0  # virtual seconds in a real one
    noise: float = 0.03  # standard deviation of the logarithm of a cascade's seconds
    stragglers: float = 0.01  # share of cascades that take half as long again
    link_s: float = 0.05  # for results that another worker has encoded
    update_s: float = 0.2  # gradient sum and update, after all workers have come
    load_s: float = 20.0  # from the start of a worker until its modules are there
    restore_s: float = 2.0  # for its part of the state when a generation forms
    text_tokens: int = 226  # of every sample: tasks do not say them
    heartbeat_s: float = 2.0  # real seconds between two of a worker
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_unless_positive(self, "speed", "heartbeat_s")
        refuse_below(0, self, "noise", "stragglers", "link_s", "update_s", "load_s", "restore_s")

    def real_s(self, virtual_s: float) -> float:
        """The same in real seconds."""
        return virtual_s / self.speed

    def cascade_s(
        self,
        profile: Profile,
        topology: Topology,
        module: Module,
        samples: Mapping[tuple[int, int, int], int],
        bag: Sequence[int],
        key: str,
    ) -> float:
        """Seconds of a cascade of these samples by (frames, height, width): what `profile`, in whose seconds
        they are, says of it, times noise, and now and then half as long again. Equal for equal keys."""
        parts = [Samples.of(count, shape, self.text_tokens) for shape, count in samples.items()]
        luck = random.Random(f"{self.seed}/{key}")
        late = _LATE if luck.random() < self.stragglers else 1.0
        return profile.on(topology, module, parts, bag) * math.exp(luck.gauss(0.0, self.noise)) * late
