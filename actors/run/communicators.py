"""Which bags stay connected: a worker's bags together have at most so many peers. Pure.

On a GPU each peer of a bag's communicator takes hundreds of MiB outside PyTorch's allocator (`PEER_GIB` in
actors/planning/memory.py), and a run uses a new bag every few steps. So the controller, which knows every bag in the
order of its use, says which are closed: those that the step uses last or not at all, then those unused for longest.
All members of a bag close it at the same place of their work, so it may come back later, connected anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Bag = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBags:
    """What happens to bags around the cascades of one dispatch."""

    closed: tuple[Bag, ...]  # before the first cascade
    connected: tuple[Bag, ...]  # then, in the background; the others when their first cascade comes
    left: frozenset[int]  # positions of cascades whose bag is closed as they end
    made: int  # connections in all, of bags that come back too


class Communicators:
    """The bags that are connected in one generation."""

    def __init__(self, most_peers: int) -> None:
        """`most_peers`: the sum of a worker's peers over its bags; 0: no limit. A bag with more peers is alone."""
        self._most = most_peers
        self._open: dict[Bag, None] = {}  # the one that is unused for longest comes first
        self.most_seen = 0  # peers of any worker at any time

    def peers(self, worker: int) -> int:
        """Of all open bags of this worker."""
        return sum(len(bag) - 1 for bag in self._open if worker in bag)

    def bags(self, worker: int) -> int:
        """How many are open on this worker."""
        return sum(worker in bag for bag in self._open)

    def step(self, bags: Sequence[Bag]) -> StepBags:
        """`bags` of the cascades of one dispatch in the order of the plan, each by ascending worker."""
        last: dict[Bag, int] = {}  # position of the last use so far
        closed: list[Bag] = []
        connected: list[Bag] = []
        left: set[int] = set()
        waiting: set[int] = set()  # workers that close a bag between two cascades of this step
        made = 0
        for position, bag in enumerate(bags):
            if len(bag) == 1:
                continue
            if bag not in self._open:
                for gone in self._room_for(bag, bags[position:]):
                    if gone in last:
                        left.add(last[gone])
                        waiting.update(gone)
                    else:
                        closed.append(gone)
                if bag not in last and waiting.isdisjoint(bag):
                    connected.append(bag)
                made += 1
            self._open.pop(bag, None)
            self._open[bag] = None
            self.most_seen = max(self.most_seen, *(self.peers(worker) for worker in bag))
            last[bag] = position
        return StepBags(closed=tuple(closed), connected=tuple(connected), left=frozenset(left), made=made)

    def _room_for(self, bag: Bag, coming: Sequence[Bag]) -> list[Bag]:
        """Close what has to go before `bag` is opened."""
        gone: list[Bag] = []
        for worker in bag if self._most else ():
            while self.peers(worker) + len(bag) - 1 > self._most:
                own = [one for one in self._open if worker in one]
                if not own:
                    break
                victim = max(own, key=lambda one: coming.index(one) if one in coming else len(coming))
                del self._open[victim]
                gone.append(victim)
        return gone
