"""Which ranks of different nodes exchange gradients and parameters, and in what pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ops.shards import Bounds

if TYPE_CHECKING:
    import torch

_WINDOW_CPU = 1 << 21  # elements of a range that go between nodes at a time
_WINDOW_CUDA = 1 << 25


def routes(nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """To which ranks each rank sends its node's part of their ranges, given the node of every rank: each rank hears
    from one rank of every other node, and the ranks of a node share the work.

    Between nodes of one size those of the same place talk to each other: a rank then has one peer for each other node,
    which is what a communicator takes memory for, and both use the same rail.

    >>> routes([0, 0, 1, 1])
    [(2,), (3,), (0,), (1,)]
    >>> routes([0, 0, 0, 1])
    [(), (), (3,), (0, 1, 2)]
    """
    members = {node: [rank for rank, home in enumerate(nodes) if home == node] for node in dict.fromkeys(nodes)}
    sends: list[list[int]] = [[] for _ in nodes]
    for node, here in members.items():
        alike = [there for other, there in members.items() if other != node and len(there) == len(here)]
        others = [there for other, there in members.items() if other != node and len(there) != len(here)]
        for there in alike:
            for rank, target in zip(here, there, strict=True):
                sends[rank].append(target)
        away = [target for there in others for target in there]
        for number, rank in enumerate(here):
            first, last = (len(away) * end // len(here) for end in (number, number + 1))
            sends[rank] += away[first:last]
    return [tuple(sorted(targets)) for targets in sends]


def peers(nodes: Sequence[int]) -> list[int]:
    """The number of ranks of other nodes that each rank exchanges with by `routes`.

    >>> peers([0] * 8 + [1] * 8 + [2] * 8) == [2] * 24, peers([0, 0, 0, 1])
    (True, [1, 1, 1, 3])
    """
    sends = routes(nodes)
    met = [set(targets) for targets in sends]
    for rank, targets in enumerate(sends):
        for target in targets:
            met[target].add(rank)
    return [len(found) for found in met]


def splits(sends: Sequence[tuple[int, ...]], rank: int, pieces: Bounds) -> tuple[list[int], list[int]]:
    """How many elements come from every rank, and go to it, where each rank gets other nodes' parts of its piece by
    these `routes`. The pieces themselves take the way back.

    >>> splits([(2,), (3,), (0,), (1,)], 0, [(0, 5), (5, 9), (9, 12), (12, 14)])
    ([0, 0, 5, 0], [0, 0, 3, 0])
    """
    lengths = [hi - lo for lo, hi in pieces]
    come = [lengths[rank] if rank in targets else 0 for targets in sends]
    return come, [length if other in sends[rank] else 0 for other, length in enumerate(lengths)]


def exchange_windows(bounds: Bounds, device: torch.device) -> Iterator[Bounds]:
    """The ranges of all ranks in pieces that are exchanged one after the other: of each range the next elements, none
    where it has ended."""
    window = _WINDOW_CPU if device.type == "cpu" else _WINDOW_CUDA
    for start in range(0, max(hi - lo for lo, hi in bounds), window):
        yield [(min(hi, lo + start), min(hi, lo + start + window)) for lo, hi in bounds]
