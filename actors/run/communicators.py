"""Which bags stay connected: a worker's bags together have a limited number of peers. Pure.

On a GPU each peer of a bag's communicator takes hundreds of MiB outside PyTorch's allocator (`PEER_GIB` in
actors/planning/memory.py), and a run uses a new bag every few steps. So the controller, which knows every bag in the
order of its use, says which are closed: those that the step uses last or not at all, then those unused for longest.
All members of a bag close it at the same place of their work, so it may come back later, connected anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.degrees import BagRanks


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBags:
    """What happens to bags around the cascades of one dispatch."""

    closed: tuple[BagRanks, ...]  # before the first cascade
    connected: tuple[BagRanks, ...]  # after that, in the background; the others when their first cascade comes
    left: frozenset[int]  # positions of cascades whose bag is closed as they end
    made: int  # connections in all, of bags that come back too


class Communicators:
    """The bags that are connected in one generation."""

    def __init__(self, most_peers: int) -> None:
        """`most_peers`: the sum of a worker's peers over its bags; 0: no limit. A bag with more peers is alone."""
        self._most = most_peers
        self._open: set[BagRanks] = set()
        # by worker: its open bags; the one that is unused for longest comes first
        self._of: dict[int, dict[BagRanks, None]] = {}
        self._peers: dict[int, int] = {}  # of each worker: a sum over its bags at every use would grow with the run
        self.most_seen = 0  # peers of any worker at any time

    def peers(self, worker: int) -> int:
        """Number of peers in all open bags of this worker."""
        return self._peers.get(worker, 0)

    def bags(self, worker: int) -> int:
        """Number of bags that are open on this worker."""
        return len(self._of.get(worker, ()))

    def step(self, bags: Sequence[BagRanks]) -> StepBags:
        """`bags` of the cascades of one dispatch in the order of the plan, each by ascending worker."""
        last: dict[BagRanks, int] = {}  # position of the last use so far
        closed: list[BagRanks] = []
        connected: list[BagRanks] = []
        left: set[int] = set()
        waiting: set[int] = set()  # workers that close a bag between two cascades of this step
        made = 0
        after, next_use = _uses(bags)
        for position, bag in enumerate(bags):
            if len(bag) == 1:
                continue
            if bag not in self._open:
                for gone in self._room_for(bag, next_use, len(bags)):
                    if gone in last:
                        left.add(last[gone])
                        waiting.update(gone)
                    else:
                        closed.append(gone)
                if bag not in last and waiting.isdisjoint(bag):
                    connected.append(bag)
                made += 1
            self._close(bag)
            self._use(bag)
            self.most_seen = max(self.most_seen, *(self.peers(worker) for worker in bag))
            last[bag], next_use[bag] = position, after[position]
        return StepBags(closed=tuple(closed), connected=tuple(connected), left=frozenset(left), made=made)

    def _room_for(self, bag: BagRanks, next_use: Mapping[BagRanks, int], never: int) -> list[BagRanks]:
        """Close what has to go before `bag` is opened, by where the step uses it next."""
        gone: list[BagRanks] = []
        for worker in bag if self._most else ():
            while self.peers(worker) + len(bag) - 1 > self._most:
                own = self._of.get(worker)
                if not own:
                    break
                victim = max(own, key=lambda one: next_use.get(one, never))
                self._close(victim)
                gone.append(victim)
        return gone

    def _use(self, bag: BagRanks) -> None:
        """The bag is open, and the last one that was used."""
        self._open.add(bag)
        for worker in bag:
            self._of.setdefault(worker, {})[bag] = None
            self._peers[worker] = self._peers.get(worker, 0) + len(bag) - 1

    def _close(self, bag: BagRanks) -> None:
        """The bag is closed, if it is open."""
        if bag in self._open:
            self._open.remove(bag)
            for worker in bag:
                del self._of[worker][bag]
                self._peers[worker] -= len(bag) - 1


def _uses(bags: Sequence[BagRanks]) -> tuple[list[int], dict[BagRanks, int]]:
    """(by position: where its bag is used next; by bag: where it is used first). In one pass: hundreds of workers have
    a dozen open bags each, and to look for their next uses one by one would read the whole step each time."""
    after, first = [len(bags)] * len(bags), dict[BagRanks, int]()
    for position in range(len(bags) - 1, -1, -1):
        after[position] = first.get(bags[position], len(bags))
        first[bags[position]] = position
    return after, first
