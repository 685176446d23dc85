"""Which nodes have a relay (`actors.run.relay`), from their start to their end. A node whose relay was lost goes on
without: its workers are called directly again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.letters import RelayHandle
from actors.ray_calls import kill, remote_of, wait
from actors.refs import Ref
from actors.run.relay import Relay
from actors.step import Seat

log = logging.getLogger(__name__)

_AT_A_TIME = 100_000  # calls of a relay that wait for workers
_QUESTION_S = 5.0  # between two questions to a relay
_SILENT_S = 60.0  # one that does not answer for so long hangs: it answers beside all its other work
_START_S = 600.0  # for the first answer, as for a worker's (`workers.start_s`)


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
    _asked: dict[str, tuple[Ref[None], float]] = field(
        default_factory=dict
    )  # by node: what is not answered, since when
    _heard: set[str] = field(default_factory=set)  # nodes whose relay has answered
    _asked_at: float = -_QUESTION_S

    def of(self, world: Sequence[Seat]) -> Mapping[str, RelayHandle]:
        """The relays of a generation, by node; none of a node with one worker, where a letter would save nothing."""
        counts = Counter(seat.node for seat in world)
        for node in [node for node in self._known if node not in counts]:
            self._forget(node, self._known.pop(node))
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

    def silent(self, now: float) -> dict[str, float]:
        """Relays that hang, by node, with the seconds since they were asked for a sign of life; `now` are monotonic
        seconds. Ray says when a process dies, not when it stands still; nothing that its workers say comes then."""
        if now - self._asked_at < _QUESTION_S:
            return {}
        self._asked_at = now
        open_ones = {reference: node for node, (reference, _) in self._asked.items()}
        if open_ones:
            for reference in wait(list(open_ones), num_returns=len(open_ones), timeout=0)[0]:
                self._heard.add(open_ones[reference])
                del self._asked[open_ones[reference]]
        for node, relay in self._known.items():
            if node not in self._asked:
                self._asked[node] = (relay.here.remote(), now)
        waited = {node: now - since for node, (_, since) in self._asked.items()}
        return {node: s for node, s in waited.items() if s >= (_SILENT_S if node in self._heard else _START_S)}

    def lose(self, node: str) -> None:
        """The relay of this node is gone, hangs, or has failed."""
        self._without.add(node)
        if (gone := self._known.pop(node, None)) is not None:
            self._forget(node, gone)

    def close(self) -> None:
        """End them all."""
        while self._known:
            self._forget(*self._known.popitem())

    def _forget(self, node: str, relay: RelayHandle) -> None:
        self._asked.pop(node, None)
        self._heard.discard(node)
        self._end(relay)

    def _end(self, relay: RelayHandle) -> None:
        try:
            kill(relay)
        except Exception:  # it is gone with its node
            log.debug("a relay could not be ended", exc_info=True)
