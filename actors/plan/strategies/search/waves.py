"""Starting candidates in waves: some items encode and run first, the next ones encode meanwhile beside them.

What optimal plans of long clips look like (proven with CP-SAT): the longest clips run last, at a degree that leaves
workers of each node over, and the left-over workers of several nodes form one more bag. A search that changes one job
at a time does not get there from plans in which every node takes its items one by one.
"""

from __future__ import annotations

import numpy as np

from actors.plan.strategies.search.space import Space

STRAY = 0.04  # share of jobs whose mode is drawn at random from all its modes
WASTE = 0.15  # a degree suits a job when it takes at most this much more GPU-seconds than the cheapest
HASTE = (0.0, 0.3, 1.0, 4.0)  # weight of an encode's duration, where its GPU-seconds have weight 1


def waves(space: Space, count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` candidates (keys [N, J], modes [N, J])."""
    dit = space.waits
    cost = np.where(space.degree > 0, space.degree * space.seconds, np.inf)
    chain_cost = np.zeros(len(space.chain_jobs))
    np.maximum.at(chain_cost, space.chain_of, cost.min(axis=1))
    chains = (count, len(chain_cost))
    # Chains in order of cost, either way, with a few exchanged; cut into two or three waves.
    place = np.argsort(np.argsort(chain_cost * (1 + 1e-6 * np.arange(len(chain_cost))))) / len(chain_cost)
    place = np.where(random.random((count, 1)) < 0.7, place, 1 - place)
    place = place + 0.15 * random.standard_normal(chains) * (random.random((count, 1)) < 0.6)
    cuts = np.sort(random.random((count, 2)), axis=1)
    cuts[random.random(count) < 0.5, 1] = 2.0
    wave = (place > cuts[:, :1]).astype(np.intp) + (place > cuts[:, 1:])
    inside = np.argsort(np.argsort(place, axis=1), axis=1) / len(chain_cost)
    wave, inside = wave[:, space.chain_of], inside[:, space.chain_of]
    # Encodes of a wave come before all its dits, before the dits of the wave ahead, or each right before its own dit.
    when = random.integers(3, size=(count, 3))
    own = np.take_along_axis(when, wave, axis=1)
    band = 2.0 * wave + dit
    band = np.where(~dit & (own == 1), band - 1.5, band)
    band = np.where(~dit & (own == 2), band + 1 - 0.5 / len(chain_cost), band)
    keys = (band + 0.98 * inside + 2) / 9
    return keys, _modes(space, cost, dit, wave, count, random)


def _modes(
    space: Space, cost: np.ndarray, dit: np.ndarray, wave: np.ndarray, count: int, random: np.random.Generator
) -> np.ndarray:
    """Every wave has one degree for all its dits and one haste for all its encodes; a few modes are drawn at random."""
    suits = (cost <= (1 + WASTE) * cost.min(axis=1, keepdims=True)) & dit[:, None]
    degrees, votes = np.unique(space.degree[suits], return_counts=True)
    wanted = random.choice(degrees, p=votes / votes.sum(), size=(count, 3)) if len(degrees) else np.zeros((count, 3))
    haste = np.array(HASTE)[random.integers(len(HASTE), size=(count, 3))]
    wanted, haste = np.take_along_axis(wanted, wave, axis=1), np.take_along_axis(haste, wave, axis=1)
    modes = np.empty((count, space.num_jobs), dtype=np.intp)
    for job in range(space.num_jobs):
        options = slice(0, space.num_modes[job])
        if dit[job]:
            far = np.abs(space.degree[job, options] - wanted[:, job, None]) + 0.1 * space.span[job, options]
        else:
            far = np.log(cost[job, options]) + haste[:, job, None] * np.log(space.seconds[job, options])
        modes[:, job] = far.argmin(axis=1)
    _spread(space, dit, wave, modes, random)
    stray = random.random(modes.shape) < STRAY
    return np.where(stray, (random.random(modes.shape) * space.num_modes).astype(np.intp), modes)


def _spread(space: Space, dit: np.ndarray, wave: np.ndarray, modes: np.ndarray, random: np.random.Generator) -> None:
    """Where a wave has more dits than there are nodes, the last ones run on left-over workers of several nodes."""
    num_nodes = len(space.nodes)
    if num_nodes == 1:
        return
    count = len(modes)
    seen = np.zeros((count, 3), dtype=np.intp)
    rows = np.arange(count)
    active = random.random(count) < 0.7
    nodes = random.integers(2, num_nodes + 1, size=count)
    for job in random.permutation(np.flatnonzero(dit)):
        turn = seen[rows, wave[:, job]]
        seen[rows, wave[:, job]] += 1
        spans = space.span[job, : space.num_modes[job]]
        if (spans > 1).any():
            degree = space.degree[job, modes[:, job]]
            far = (
                10 * np.abs(space.degree[job, : len(spans)] - degree[:, None])
                + np.abs(spans - nodes[:, None])
                + 100 * (spans == 1)
            )
            modes[:, job] = np.where(active & (turn >= num_nodes - 1), far.argmin(axis=1), modes[:, job])
