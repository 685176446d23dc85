"""KnapFormer's balancing: sequences to compute bags, so that the busiest worker is least busy.

A topology `g1n16+g2n4+g8n1` is 16 bags of 1 worker, 4 of 2 and 1 of 8. A sequence runs on one bag; its cost there is
seconds (or workload per worker), given per bag size. Any input is answered: bags and workers may stay empty, sequences
of length zero cost nothing, and only a memory cap that cannot be met is an error.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.plan.types import PlanError
from ops.counted import counted
from ops.degrees import bags_of

EXCHANGES = 400  # improvement steps after the constructive assignment


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Sequence -> bag, with the seconds of every bag."""

    sizes: tuple[int, ...]  # workers of each bag
    bag_of: tuple[int, ...]
    load: tuple[float, ...]

    @property
    def wir(self) -> float:
        """Workload imbalance ratio: busiest over least busy worker; infinite when a worker has nothing."""
        low = min(self.load)
        return max(self.load) / low if low > 0 else (1.0 if max(self.load) == 0 else float("inf"))

    @property
    def max_over_mean(self) -> float:
        total = sum(load * size for load, size in zip(self.load, self.sizes))
        return max(self.load) * sum(self.sizes) / total if total > 0 else 1.0


def parse_topology(spec: str, num_workers: int) -> tuple[int, ...]:
    """Bag sizes of one balancing group, ascending. Raises PlanError; the group must divide `num_workers` (replicas)."""
    try:
        counts = bags_of(spec)
    except ValueError as error:
        raise PlanError(str(error)) from None
    group = sum(size * count for size, count in counts.items())
    if num_workers % group:
        raise PlanError(
            f"topology {spec!r} is of {counted(group, 'worker')} or a multiple of them, and the cluster has "
            f"{num_workers}. Give bags that add up to the cluster, leave planner.topology empty, or set planner.misfit "
            "to adapt."
        )
    return tuple(size for size in sorted(counts) for _ in range(counts[size]))


def workload(length: float, width: int, gamma: float = 0.42) -> float:
    """KnapFormer Eq. 2 without k, in TFLOP: 24 l d^2 + gamma 4 l^2 d."""
    return (24.0 * length * width**2 + gamma * 4.0 * length**2 * width) / 1e12


def balance(
    lengths: Sequence[int],
    sizes: Sequence[int],
    *,
    width: int = 3072,
    gamma: float = 0.42,
    max_tokens: float | None = None,
) -> Balance:
    """Balance sequences over bags by Eq. 2. `max_tokens` caps the tokens of a worker; PlanError when it cannot hold."""
    work = np.array([workload(length, width, gamma) for length in lengths], dtype=float)
    kinds = sorted(set(sizes))
    costs = work.reshape(-1, 1) / np.array(kinds, dtype=float)[None, :]
    short = np.array(lengths, dtype=float).reshape(-1, 1) < np.array(kinds, dtype=float)[None, :]
    # A sequence shorter than its bag cannot be cut into that many chunks; it goes elsewhere if there is an elsewhere.
    allowed = ~short | short.all(axis=1, keepdims=True)
    return assign(np.where(allowed, costs, np.inf), sizes, np.array(lengths, dtype=float), max_tokens)


def assign(costs: np.ndarray, sizes: Sequence[int], tokens: np.ndarray, max_tokens: float | None = None) -> Balance:
    """Least possible maximum load. costs [U, kinds] seconds of a unit on each bag size, ascending; infinite if illegal.

    Two starts, improved by moves and swaps: earliest finish for the largest first, and KnapFormer's own rule, so the
    result is never less balanced than that.
    """
    kinds = sorted(set(sizes))
    kind_of = np.array([kinds.index(size) for size in sizes])
    if len(costs) and not np.isfinite(costs).any(axis=1).all():
        unit = int(np.flatnonzero(~np.isfinite(costs).any(axis=1))[0])
        raise PlanError(f"sequence {unit} can run on no bag of sizes {kinds}. Add a bag of a legal degree.")
    starts = [_earliest_finish(costs, kind_of, sizes, tokens, max_tokens)]
    if max_tokens is None and len(costs) * len(sizes) <= 200_000:
        starts.append(_occupancy(costs, kind_of, sizes))
    best: Balance | None = None
    for bags in starts:
        found = _improve(costs, kind_of, sizes, tokens, max_tokens, bags)
        if best is None or _better(found, best):
            best = found
    assert best is not None
    return best


def occupancy_rule(work: Sequence[float], sizes: Sequence[int]) -> Balance:
    """What KnapFormer's published rule makes of workloads, for comparison."""
    kinds = sorted(set(sizes))
    return by_occupancy(np.array(work, dtype=float)[:, None] / np.array(kinds, dtype=float)[None, :], sizes)


def by_occupancy(costs: np.ndarray, sizes: Sequence[int]) -> Balance:
    """KnapFormer's published rule alone: no improvement, no cap. `costs` as for `assign`."""
    kinds = sorted(set(sizes))
    kind_of = np.array([kinds.index(size) for size in sizes])
    bags = _occupancy(costs, kind_of, sizes)
    load = [0.0] * len(sizes)
    for unit, bag in enumerate(bags):
        load[bag] += float(costs[unit, kind_of[bag]])
    return Balance(sizes=tuple(sizes), bag_of=tuple(bags), load=tuple(load))


def _better(one: Balance, other: Balance) -> bool:
    top, best = max(one.load), max(other.load)
    if abs(top - best) > 1e-3 * best:
        return top < best
    return one.wir < other.wir


def _earliest_finish(
    costs: np.ndarray, kind_of: np.ndarray, sizes: Sequence[int], tokens: np.ndarray, max_tokens: float | None
) -> list[int]:
    """Largest first, each to the bag where it ends first; one heap per bag size keeps it near-linear."""
    num_kinds = int(kind_of.max()) + 1
    heaps = [[(0.0, int(bag)) for bag in np.flatnonzero(kind_of == kind)] for kind in range(num_kinds)]
    held = [0.0] * len(sizes)
    bag_of = [0] * len(costs)
    weight = np.where(np.isfinite(costs), costs, -np.inf).max(axis=1) if len(costs) else np.zeros(0)
    for unit in np.argsort(-weight, kind="stable"):
        best: tuple[float, int, int] | None = None
        blocked: list[tuple[int, tuple[float, int]]] = []
        for kind, heap in enumerate(heaps):
            if not np.isfinite(costs[unit, kind]):
                continue
            while max_tokens is not None and heap and held[heap[0][1]] + tokens[unit] > max_tokens * sizes[heap[0][1]]:
                blocked.append((kind, heapq.heappop(heap)))
            if heap and (best is None or heap[0][0] + costs[unit, kind] < best[0] - 1e-12):
                best = (heap[0][0] + costs[unit, kind], kind, heap[0][1])
        if best is None:
            raise PlanError(
                f"sequence {int(unit)} of {int(tokens[unit])} tokens fits no bag below {max_tokens:.0f} "
                f"tokens per worker. Use a larger bag, fewer sequences, or raise the cap."
            )
        end, kind, bag = best
        heapq.heapreplace(heaps[kind], (end, bag))
        for kind, entry in blocked:
            heapq.heappush(heaps[kind], entry)
        held[bag] += tokens[unit]
        bag_of[unit] = bag
    return bag_of


def _occupancy(costs: np.ndarray, kind_of: np.ndarray, sizes: Sequence[int]) -> list[int]:
    """KnapFormer's published rule: of the bags whose full capacity holds the sequence, the least occupied."""
    workers = np.array(sizes, dtype=float)
    per_bag = costs[:, kind_of]
    if not len(costs):
        return []
    legal = np.isfinite(per_bag)
    work = np.where(legal, per_bag, -np.inf).max(axis=1)
    share = float(np.where(legal, per_bag * workers, np.inf).min(axis=1).sum()) / float(workers.sum())
    load = np.zeros(len(sizes))
    bag_of = [0] * len(costs)
    for unit in np.argsort(-work, kind="stable"):
        fits = per_bag[unit] <= share
        candidates = fits if fits.any() else legal[unit] & (workers == workers[legal[unit]].max())
        bag = int(np.where(candidates, load, np.inf).argmin())
        load[bag] += per_bag[unit, bag]
        bag_of[unit] = bag
    return bag_of


def _improve(
    costs: np.ndarray,
    kind_of: np.ndarray,
    sizes: Sequence[int],
    tokens: np.ndarray,
    max_tokens: float | None,
    bags: list[int],
) -> Balance:
    """Relieve the busiest bag, then fill the least busy one, by moves and swaps that hurt neither end."""
    per_bag = costs[:, kind_of]
    bag_of = np.array(bags, dtype=np.intp)
    cap = np.array(sizes, dtype=float) * max_tokens if max_tokens is not None else np.full(len(sizes), np.inf)
    load = np.zeros(len(sizes))
    held = np.zeros(len(sizes))
    for unit, bag in enumerate(bag_of):
        load[bag] += per_bag[unit, bag]
        held[bag] += tokens[unit]
    for relieve in (True, False):
        for _ in range(EXCHANGES if len(costs) else 0):
            bag = int(load.argmax() if relieve else load.argmin())
            change = _exchange(per_bag, bag_of, kind_of, load, held, cap, tokens, bag, relieve)
            if change is None:
                break
            for unit, target in change:
                source = bag_of[unit]
                load[source] -= per_bag[unit, source]
                held[source] -= tokens[unit]
                bag_of[unit] = target
                load[target] += per_bag[unit, target]
                held[target] += tokens[unit]
    exact = [0.0] * len(sizes)  # summed afresh: thousands of exchanges leave rounding errors
    for unit, bag in enumerate(bag_of):
        exact[bag] += float(per_bag[unit, bag])
    return Balance(sizes=tuple(sizes), bag_of=tuple(int(b) for b in bag_of), load=tuple(exact))


def _exchange(
    per_bag: np.ndarray,
    bag_of: np.ndarray,
    kind_of: np.ndarray,
    load: np.ndarray,
    held: np.ndarray,
    cap: np.ndarray,
    tokens: np.ndarray,
    bag: int,
    relieve: bool,
) -> list[tuple[int, int]] | None:
    """The best move or swap between `bag` and any other, or None; both must end strictly inside the extremes."""
    own = np.flatnonzero(bag_of == bag)
    others = np.argsort(load, kind="stable") if relieve else np.argsort(-load, kind="stable")
    best: tuple[float, list[tuple[int, int]]] | None = None
    high, low = load.max(), load.min()
    for other in others[:48]:
        if other == bag:
            continue
        # where both are of one size an exchange keeps their sum, and its score is no better than half of that
        half = (load[bag] + load[other]) / 2 if relieve else -(load[bag] + load[other]) / 2
        if best is not None and kind_of[bag] == kind_of[other] and half > best[0] + 1e-12 * abs(half):
            continue
        theirs = np.flatnonzero(bag_of == other)
        # Index 0 of each side is "nothing": a swap with nothing is a move.
        out_own = np.concatenate([[0.0], per_bag[own, bag]])
        in_own = np.concatenate([[0.0], per_bag[theirs, bag]])
        out_their = np.concatenate([[0.0], per_bag[theirs, other]])
        in_their = np.concatenate([[0.0], per_bag[own, other]])
        mine = load[bag] - out_own[:, None] + in_own[None, :]
        other_load = load[other] - out_their[None, :] + in_their[:, None]
        own_tokens = np.concatenate([[0.0], tokens[own]])
        their_tokens = np.concatenate([[0.0], tokens[theirs]])
        shift = their_tokens[None, :] - own_tokens[:, None]
        legal = (held[bag] + shift <= cap[bag]) & (held[other] - shift <= cap[other])
        score = np.maximum(mine, other_load) if relieve else -np.minimum(mine, other_load)
        if not relieve:
            legal &= np.maximum(mine, other_load) <= high * (1 - 1e-12)
        score = np.where(legal & np.isfinite(score), score, np.inf)
        row, column = np.unravel_index(int(score.argmin()), score.shape)
        limit = load[bag] * (1 - 1e-9) if relieve else -(low + 1e-9 * high)
        if score[row, column] < limit and (best is None or score[row, column] < best[0]):
            change = [(int(own[row - 1]), int(other))] if row else []
            change += [(int(theirs[column - 1]), bag)] if column else []
            best = (float(score[row, column]), change)
    return best[1] if best else None
