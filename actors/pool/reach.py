"""Which nodes of a run do not reach each other through the network, and who stays out of a generation for that.

Two nodes may be up and answer the controller, and yet not reach each other. They are tried together again after a
while, as networks are mended, and each time that fails after twice as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from actors.messages import NodesApart
from actors.pool.membership_types import Limits, Member


@dataclass(frozen=True, kw_only=True, slots=True)
class _ApartPair:
    """Two nodes do not reach each other."""

    found: NodesApart
    at: float  # when that was seen last
    wait_s: float  # from then on, until they may be tried together
    tried: bool = False  # they may be, and nobody has said since that they still are apart


class NodeReach:
    """The pairs of nodes that are apart, as generations report them.

    reach.broken(event.apart, now)                  # a generation could not begin
    staying, why = reach.among(ready)               # of these the most that reach each other
    reach.try_again(now, soon=waiting)              # some of the others may be among them from now on
    reach.trained(nodes)                            # a generation on these has finished a step
    """

    def __init__(self, limits: Limits, home: str) -> None:
        """`home` is the controller's node, the last to be left out, as no step runs without the controller."""
        self._limits, self._home = limits, home
        self._pairs: dict[frozenset[str], _ApartPair] = {}

    def broken(self, seen: Sequence[NodesApart], now: float) -> None:
        """Remember these: until they are tried again, for `Limits.apart_s`, then twice as long as before each time, up
        to `Limits.apart_longest_s`."""
        for pair, found in {frozenset((one.node, other.node)): one for one in seen for other in one.others}.items():
            before = self._pairs.get(pair)
            wait_s = self._limits.apart_s if before is None else min(2 * before.wait_s, self._limits.apart_longest_s)
            self._pairs[pair] = _ApartPair(found=found, at=now, wait_s=wait_s)

    def trained(self, nodes: Collection[str]) -> None:
        """All of these nodes reach each other."""
        self._pairs = {pair: apart for pair, apart in self._pairs.items() if not pair <= set(nodes)}

    def among(self, members: list[Member]) -> tuple[list[Member], str]:
        """(members whose nodes all reach each other, why the others are not among them: "" if there are none).

        Nodes are taken out one by one until no two are left that do not reach each other: always the node that most
        members do not reach, less the members on it. Among equals it is the one with the newest worker. The
        controller's node comes last."""
        sizes = Counter(member.node for member in members)
        newest = {member.node: member.worker for member in sorted(members, key=lambda member: member.worker)}
        beyond: dict[str, set[str]] = {}  # of each node
        first = ""
        for pair, apart in self._pairs.items():
            if not apart.tried and pair <= sizes.keys():
                first = first or apart.found.describe()
                one, other = pair
                beyond.setdefault(one, set()).add(other)
                beyond.setdefault(other, set()).add(one)
        lost = {node: sum(sizes[other] for other in others) for node, others in beyond.items()}
        out: set[str] = set()
        while any(beyond.values()):
            worst = max(
                filter(beyond.get, beyond),
                key=lambda node: (node != self._home, lost[node] - sizes[node], newest[node]),
            )
            out.add(worst)
            for other in beyond.pop(worst):
                beyond[other].discard(worst)
                lost[other] -= sizes[worst]
        return [member for member in members if member.node not in out], first

    def beyond(self, nodes: set[str], also_tried: bool) -> tuple[str, ...]:
        """Other nodes that at least one of these nodes does not reach, sorted. Those that may be tried together again
        are among them with `also_tried` alone."""
        pairs = [pair for pair, apart in self._pairs.items() if pair & nodes and (also_tried or not apart.tried)]
        return tuple(sorted(frozenset[str]().union(*pairs) - nodes))

    def try_again(self, now: float, *, soon: bool) -> bool:
        """Whether two nodes may be tried together from now on that might not before; `soon`: after
        `Limits.apart_waiting_s` at the latest."""
        due = [pair for pair in self._due(now, soon) if not self._pairs[pair].tried]
        for pair in due:
            self._pairs[pair] = replace(self._pairs[pair], tried=True)
        return bool(due)

    def forget_lost(self, now: float, here: Collection[str]) -> bool:
        """Whether two nodes are not apart any more, of which one is not `here`: no worker is left on it that could
        try. Asked where the run waits for them, so `soon` as in `try_again`."""
        due = [pair for pair in self._due(now, soon=True) if not pair <= set(here)]
        for pair in due:
            del self._pairs[pair]
        return bool(due)

    def _due(self, now: float, soon: bool) -> list[frozenset[str]]:
        most_s = self._limits.apart_waiting_s
        return [
            pair
            for pair, apart in self._pairs.items()
            if now - apart.at >= (min(apart.wait_s, most_s) if soon else apart.wait_s)
        ]
