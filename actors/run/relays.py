"""Which nodes have a relay (`actors.run.relay`), from their start to their end. A node whose relay was lost goes on
without: its workers are called directly again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.letters import RelayHandle
from actors.ray_calls import kill, remote_of
from actors.run.relay import Relay
from actors.step import Seat

log = logging.getLogger(__name__)

_AT_A_TIME = 100_000  # calls of a relay that wait for workers


def start_relay(node: str) -> RelayHandle:
    """A relay on the node with this id; it ends with this process."""
    placed = NodeAffinitySchedulingStrategy(node, soft=False)
    made: RelayHandle = (
        remote_of(Relay).options(num_cpus=0, max_concurrency=_AT_A_TIME, scheduling_strategy=placed).remote()
    )
    return made


@dataclass(kw_only=True)
class Relays:
    """The relays of one run. `least` workers and more are called through them; 0: all are called directly."""

    least: int = 0
    start: Callable[[str], RelayHandle] = start_relay  # on a node
    _known: dict[str, RelayHandle] = field(default_factory=dict)
    _without: set[str] = field(default_factory=set)  # nodes that have lost theirs

    def of(self, world: Sequence[Seat]) -> Mapping[str, RelayHandle]:
        """The relays of a generation, by node; none of a node with one worker, where a letter would save nothing."""
        counts = Counter(seat.node for seat in world)
        for node in [node for node in self._known if node not in counts]:
            self._end(self._known.pop(node))
        if not self.least or len(world) < self.least:
            return {}
        wanted = [node for node, count in counts.items() if count > 1 and node not in self._without]
        for node in wanted:
            if node not in self._known:
                self._known[node] = self.start(node)
        return {node: self._known[node] for node in wanted}

    @property
    def known(self) -> Mapping[str, RelayHandle]:
        """Those that live, by node."""
        return self._known

    def lose(self, node: str) -> None:
        """The relay of this node is gone, or has failed."""
        self._without.add(node)
        if (gone := self._known.pop(node, None)) is not None:
            self._end(gone)

    def close(self) -> None:
        """End them all."""
        while self._known:
            self._end(self._known.popitem()[1])

    def _end(self, relay: RelayHandle) -> None:
        try:
            kill(relay)
        except Exception:  # it is gone with its node
            log.debug("a relay could not be ended", exc_info=True)
