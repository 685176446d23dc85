"""Which nodes have a relay (`actors.run.relay`), from their start to their end.

A node whose relay was lost goes on without: its workers are called directly. Some time after another one is started
there. It is given letters once it has answered, and later after each further loss: so no step waits for it, and a node
that always loses its relays breaks few generations.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.letters import RelayHandle
from actors.names import NAMESPACE
from actors.ray_calls import get, kill, remote_of, wait
from actors.refs import Ref
from actors.run.failures import last_line
from actors.run.relay import Relay
from actors.step import Seat

log = logging.getLogger(__name__)

_AT_A_TIME = 100_000  # calls of a relay that wait for workers
_LOOK_S = 5.0  # between two looks at what relays have answered
_QUIET_S = 20.0  # a relay that has said nothing for so long is asked for a sign of life
_SILENT_S = 60.0  # one that does not answer for so long hangs: it answers beside all its other work
_GONE_S = 1.0  # until those that live have answered, when one is lost
_START_S = 600.0  # for the first answer, as for a worker's (`workers.start_s`)
_LONGEST_AGAIN_S = 3600.0  # that a node goes on without a relay, however many it has lost


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRelay:
    """A relay, and the address by which other relays find it."""

    address: str
    handle: RelayHandle


@dataclass(kw_only=True, slots=True)
class LostRelay:
    """A node that has lost its relay, and the next one, which is used once it has answered. Monotonic seconds."""

    again_at: float  # another one is started
    next: NodeRelay | None = None
    asked: Ref[None] | None = None  # its first sign of life
    asked_at: float = 0.0
    answered_at: float | None = None


def start_relay(node: str) -> NodeRelay:
    """A relay on the node with this id; it ends with this process."""
    placed, address = NodeAffinitySchedulingStrategy(node, soft=False), f"relay-{uuid.uuid4().hex}"
    made = remote_of(Relay).options(
        name=address, namespace=NAMESPACE, num_cpus=0, max_concurrency=_AT_A_TIME, scheduling_strategy=placed
    )
    return NodeRelay(address=address, handle=made.remote())


def groups_of(nodes: Sequence[str]) -> list[list[str]]:
    """Some sqrt(n) groups of some sqrt(n) nodes, which a relay can serve at once: the controller writes to the first of
    each, which hands on the letters of the others. Node by node in turn, so that neighbours' work is spread."""
    count = math.isqrt(max(0, len(nodes) - 1)) + 1
    return [list(nodes[n::count]) for n in range(min(count, len(nodes)))]


@dataclass(kw_only=True)
class Relays:
    """The relays of one run. `least` workers and more are called through them; 0: all are called directly. `again_s`:
    how long a node goes on without a relay after it has lost its first; twice as long after each further loss."""

    least: int = 0
    again_s: float = 60.0
    start: Callable[[str], NodeRelay] = start_relay  # on a node
    groups: Sequence[Sequence[str]] = ()  # of the nodes with relays of the last generation
    _known: dict[str, NodeRelay] = field(default_factory=dict, init=False)  # by node: its relay that is used
    _first: dict[str, str] = field(default_factory=dict, init=False)  # by node: the first of its group
    _wanted: Sequence[str] = field(default=(), init=False)  # nodes of the last generation where letters save calls
    _without: dict[str, LostRelay] = field(default_factory=dict, init=False)  # by node
    _times: Counter[str] = field(default_factory=Counter, init=False)  # by node: relays that it has lost
    # by node: what is not answered, since when
    _asked: dict[str, tuple[Ref[None], float]] = field(default_factory=dict, init=False)
    _heard_at: dict[str, float] = field(default_factory=dict, init=False)  # by node: when its relay last said something
    _looked_at: float = field(default=-_LOOK_S, init=False)
    _renewed_at: float = field(default=-_LOOK_S, init=False)

    def of(self, world: Sequence[Seat]) -> Mapping[str, NodeRelay]:
        """The relays of a generation, by node; a node with one worker has none, as a letter would save nothing. Called
        again for the same world, it adds the relays that nodes have again."""
        counts = Counter(seat.node for seat in world)
        for node in [node for node in self._known if node not in counts]:
            self._forget(node, self._known.pop(node))
        self.groups, self._first, self._wanted = (), {}, ()
        if not self.least or len(world) < self.least:
            return {}
        self._wanted = [node for node, count in counts.items() if count > 1]
        self._take_up()
        wanted = [node for node in self._wanted if node not in self._without]
        for node in wanted:
            if node not in self._known:
                self._known[node] = self.start(node)
        self.groups = groups_of(wanted)
        self._first = {node: group[0] for group in self.groups for node in group}
        return {node: self._known[node] for node in wanted}

    def relay_for(self, node: str) -> RelayHandle | None:
        """The first relay of the group of a node, to make calls there; None without one."""
        first = self._known.get(self._first.get(node, ""))
        return first.handle if first is not None else None

    @property
    def known(self) -> Mapping[str, NodeRelay]:
        """The relays that live, by node."""
        return self._known

    def hear(self, nodes: Iterable[str], now: float) -> None:
        """The relays of these nodes have answered a letter: a sign of life, which need not be asked for."""
        self._heard_at.update((node, now) for node in nodes if node in self._known)

    def silent(self, now: float) -> dict[str, float]:
        """Relays that hang, by node, with the seconds since they were asked for a sign of life; `now` are monotonic
        seconds. Ray says when a process dies, not when it stands still; nothing that its workers say comes then."""
        if now - self._looked_at < _LOOK_S:
            return {}
        self._looked_at = now
        open_ones = {reference: node for node, (reference, _) in self._asked.items()}
        if open_ones:
            for reference in wait(list(open_ones), num_returns=len(open_ones), timeout=0)[0]:
                self._heard_at[open_ones[reference]] = now
                del self._asked[open_ones[reference]]
        for node, relay in self._known.items():
            if node not in self._asked and now - self._heard_at.get(node, -math.inf) >= _QUIET_S:
                self._asked[node] = (relay.handle.here.remote(), now)
        waited = {node: now - since for node, (_, since) in self._asked.items()}
        return {node: s for node, s in waited.items() if s >= (_SILENT_S if node in self._heard_at else _START_S)}

    def gone(self) -> dict[str, str]:
        """Relays that are gone, by node, with why. To be asked when one is lost: if it was the first of its group, it
        says nothing of the others, and each generation would lose some that have long been gone."""
        asked = {relay.handle.here.remote(): node for node, relay in self._known.items()}
        found: dict[str, str] = {}
        for reference in wait(list(asked), num_returns=len(asked), timeout=_GONE_S)[0] if asked else ():
            try:
                get(reference)
            except ray.exceptions.RayError as error:
                found[asked[reference]] = last_line(str(error)) or type(error).__name__
        return found

    def lose(self, node: str, now: float) -> None:
        """The relay of this node is gone, hangs, or has failed."""
        if (gone := self._known.pop(node, None)) is not None:
            self._forget(node, gone)
        if node not in self._without:
            self._without[node] = self._put_off(node, now)

    def renew(self, now: float) -> None:
        """Start relays where some were lost long enough ago, and hear whether those answer. Waits for none."""
        if not self._without or now - self._renewed_at < min(_LOOK_S, self.again_s):
            return
        self._renewed_at = now
        for node, lost in list(self._without.items()):
            if node not in self._wanted:  # its workers are gone, or one is left
                if lost.next is not None:
                    self._end(lost.next.handle)
                    self._without[node] = LostRelay(again_at=now)  # it has done no harm
                elif now - lost.again_at >= _LONGEST_AGAIN_S:  # most such nodes never come back
                    del self._without[node], self._times[node]
            elif lost.next is None:
                if now >= lost.again_at:
                    lost.next, lost.asked_at = self.start(node), now
                    lost.asked = lost.next.handle.here.remote()
            elif lost.answered_at is None and (why := self._hear_first(lost, now)):
                log.warning("node %s gets no relay: %s", node[:8], why)
                self._end(lost.next.handle)
                self._without[node] = self._put_off(node, now)

    @property
    def renewed(self) -> list[str]:
        """Nodes that can have a relay again: `of` gives it to them."""
        return [node for node, lost in self._without.items() if lost.answered_at is not None and node in self._wanted]

    def close(self) -> None:
        """End them all."""
        while self._known:
            self._forget(*self._known.popitem())
        while self._without:
            if (begun := self._without.popitem()[1].next) is not None:
                self._end(begun.handle)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _put_off(self, node: str, now: float) -> LostRelay:
        """One more relay of this node was no good."""
        pause_s = min(self.again_s * 2.0 ** min(self._times[node], 30), _LONGEST_AGAIN_S)
        self._times[node] += 1
        return LostRelay(again_at=now + pause_s)

    def _hear_first(self, lost: LostRelay, now: float) -> str:
        """Take in whether a new relay has answered. Returns why it cannot be used; "": it has answered, or may yet."""
        assert lost.asked is not None
        if not wait([lost.asked], timeout=0)[0]:
            waited_s = now - lost.asked_at
            return f"it has not answered for {waited_s:.0f} s" if waited_s >= _START_S else ""
        try:
            get(lost.asked)
        except ray.exceptions.RayError as error:
            return last_line(str(error)) or type(error).__name__
        lost.answered_at = now
        return ""

    def _take_up(self) -> None:
        for node in self.renewed:
            lost = self._without.pop(node)
            assert lost.next is not None and lost.answered_at is not None
            self._known[node], self._heard_at[node] = lost.next, lost.answered_at
            log.info("node %s has a relay again", node[:8])

    def _forget(self, node: str, relay: NodeRelay) -> None:
        self._asked.pop(node, None)
        self._heard_at.pop(node, None)
        self._end(relay.handle)

    def _end(self, relay: RelayHandle) -> None:
        try:
            kill(relay)
        except Exception:  # it is gone with its node
            log.debug("a relay could not be ended", exc_info=True)
