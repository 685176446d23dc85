"""Strips: every node encodes all its items side by side, then runs their dits one after the other on all its workers.

A strip's time is known without a schedule, so hundreds of nodes are balanced in milliseconds: largest first, then swaps
between the slowest strip and others. Where a node holds several items this is within a few percent of the area bound.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.plan.schedule.problem import PlannedJob

PARTNERS = 40  # quickest strips that are tried as partners of the slowest
PAIRS = 4  # exchanges tried with each


@dataclass(frozen=True, slots=True)
class Strip:
    """One node's chains: the encodes, longest first, then the dits, each at its quickest degree."""

    chains: tuple[int, ...]
    seconds: float
    order: tuple[tuple[int, int], ...]  # (job, degree)


def balanced_strips(
    jobs: Sequence[PlannedJob], groups: Sequence[Sequence[int]], paces: Sequence[float], size: int, deadline: float
) -> list[Strip]:
    """Chains over nodes of `size` workers each, so that no exchange of two makes the slowest strip quicker; or the best
    until the deadline. `paces`: the speed of each node's slowest worker, as bags of a whole node are."""
    balancer = _Strips(jobs, groups, paces, size)
    strips = balancer.dealt()
    while time.perf_counter() < deadline and balancer.relieve(strips):
        pass
    return strips


class _Strips:
    """Balances chains over nodes of `size` workers each."""

    def __init__(
        self, jobs: Sequence[PlannedJob], groups: Sequence[Sequence[int]], paces: Sequence[float], size: int
    ) -> None:
        self.jobs = jobs
        self.groups = groups
        self.paces, self.size = paces, size
        self.modes = [[(k, s) for k, s in job.modes if k <= size] for job in jobs]
        self.quickest = [min((s, k) for k, s in modes) for modes in self.modes]
        self.about = [
            sum(
                self.quickest[i][0] if jobs[i].module == "dit" else min(k * s for k, s in self.modes[i]) / size
                for i in group
            )
            for group in groups
        ]
        self._known: dict[tuple[tuple[int, ...], float], Strip] = {}

    def dealt(self) -> list[Strip]:
        """Largest chain first, each to the node with the least to do."""
        heap = [(0.0, node) for node in range(len(self.paces))]
        chains: list[list[int]] = [[] for _ in heap]
        for chain in sorted(range(len(self.groups)), key=lambda c: (-self.about[c], c)):
            load, node = heapq.heappop(heap)
            chains[node].append(chain)
            heapq.heappush(heap, (load + self.about[chain] / self.paces[node], node))
        return [self.strip(own, pace) for own, pace in zip(chains, self.paces)]

    def relieve(self, strips: list[Strip]) -> bool:
        """One exchange that makes the slowest strip and its partner both quicker than the slowest was."""
        ranked = sorted(range(len(strips)), key=lambda node: (strips[node].seconds, node))
        slow = ranked[-1]
        for other in ranked[:-1][:PARTNERS]:
            gap = strips[slow].seconds - strips[other].seconds
            loss, gain = 1 / self.paces[other], (1 / self.paces[slow] + 1 / self.paces[other]) / 2
            pairs: list[tuple[float, int, int]] = []
            for give in strips[slow].chains:
                for take in (*strips[other].chains, -1):
                    moved = self.about[give] - (self.about[take] if take >= 0 else 0.0)
                    if 0 < moved * loss < gap:
                        pairs.append((abs(moved * gain - gap / 2), give, take))
            for _, give, take in sorted(pairs)[:PAIRS]:
                back = (take,) if take >= 0 else ()
                one = self.strip([c for c in strips[slow].chains if c != give] + [*back], self.paces[slow])
                two = self.strip([c for c in strips[other].chains if c != take] + [give], self.paces[other])
                if max(one.seconds, two.seconds) < strips[slow].seconds - 1e-9:
                    strips[slow], strips[other] = one, two
                    return True
        return False

    def strip(self, chains: Sequence[int], pace: float) -> Strip:
        """The quickest way found to encode these chains side by side, then their dits in order of their encodes."""
        key = tuple(sorted(chains))
        known = self._known.get((key, pace))
        if known is None:
            encodes = [i for chain in key for i in self.groups[chain] if self.jobs[i].module != "dit"]
            dits = [i for chain in key for i in self.groups[chain] if self.jobs[i].module == "dit"]
            encode_s, order = self._encode(encodes)
            seconds = encode_s + sum(self.quickest[i][0] for i in dits)
            known = Strip(key, seconds / pace, (*order, *((i, self.quickest[i][1]) for i in dits)))
            self._known[key, pace] = known
        return known

    def _encode(self, encodes: Sequence[int]) -> tuple[float, tuple[tuple[int, int], ...]]:
        """Least time of all, each within a common limit at its fewest worker-seconds, longest first."""
        best: tuple[float, tuple[tuple[int, int], ...]] | None = None
        for limit in sorted({s for i in encodes for _, s in self.modes[i]}):
            if best is not None and limit >= best[0]:
                break
            fitting = [[(k * s, k, s) for k, s in self.modes[i] if s <= limit] for i in encodes]
            if not all(fitting):
                continue
            chosen = sorted(((*min(options)[:0:-1], i) for options, i in zip(fitting, encodes)), reverse=True)
            free = [0.0] * self.size
            for seconds, degree, _ in chosen:
                free.sort()
                free[:degree] = [free[degree - 1] + seconds] * degree
            if best is None or max(free) < best[0]:
                best = (max(free), tuple((i, degree) for _, degree, i in chosen))
        return best or (0.0, ())
