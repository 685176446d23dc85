"""Bags over several nodes: as few nodes as possible, balanced, on the same NIC rails, nearest workers."""

from __future__ import annotations

from collections.abc import Sequence

from actors.plan.costs.topology import Topology

EPS = 1e-9


def shares(degree: int, sizes: Sequence[int]) -> list[int] | None:
    """How many workers each node gives: equal up to one, no more than it has. None when they are too few."""
    given = [0] * len(sizes)
    left = degree
    while left:
        open_nodes = [n for n in range(len(sizes)) if given[n] < sizes[n]]
        if not open_nodes:
            return None
        node = min(open_nodes, key=lambda n: (given[n], -sizes[n], n))
        given[node] += 1
        left -= 1
    return given


def span(topology: Topology, free: Sequence[float], degree: int, ready: float) -> tuple[int, ...]:
    """A bag of `degree` workers over the fewest nodes that can hold it, those that are free first."""
    order = sorted(range(len(topology.workers)), key=lambda n: -len(topology.workers[n]))
    count, total = 0, 0
    while total < degree:
        total += len(topology.workers[order[count]])
        count += 1
    share = -(-degree // count)

    def available(node: int) -> float:
        times = sorted(free[w] for w in topology.workers[node])
        return times[min(share, len(times)) - 1]

    ranked = sorted(order, key=lambda n: (len(topology.workers[n]) < share, available(n), n))
    nodes = ranked[:count]
    extra = count
    while sum(len(topology.workers[n]) for n in nodes) < degree:
        nodes.append(ranked[extra])
        extra += 1
    given = shares(degree, [len(topology.workers[n]) for n in nodes])
    assert given is not None, f"degree {degree} exceeds {topology.num_workers} workers"
    return pick_on(topology, free, [(n, g) for n, g in zip(nodes, given) if g], ready)


def pick_on(
    topology: Topology, free: Sequence[float], given: Sequence[tuple[int, int]], ready: float, turn: int = 0
) -> tuple[int, ...]:
    """The given number of workers of each node: earliest common start, then common rails, then best fit."""
    start = ready
    for node, count in given:
        start = max(start, sorted(free[w] for w in topology.workers[node])[count - 1])
    usable = [[w for w in topology.workers[node] if free[w] <= start + EPS] for node, _ in given]
    rails = sorted({topology.rail[w] for workers in usable for w in workers})
    stock = {rail: [sum(topology.rail[w] == rail for w in workers) for workers in usable] for rail in rails}
    # Rails present on every node first, the ones with most workers first: the overlap grows and few rails are used.
    flip = -1 if turn % 2 else 1
    rank = {rail: (-min(counts), -sum(counts), flip * ord(rail[0])) for rail, counts in stock.items()}
    chosen: list[int] = []
    for (_, count), workers in zip(given, usable):
        workers.sort(key=lambda w: (rank[topology.rail[w]], -free[w], w))
        chosen += workers[:count]
    return tuple(sorted(chosen))
