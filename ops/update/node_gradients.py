"""One gradient per node: its workers add into one sum (`ops.update.node_sum`), each pass as backward makes it.

A worker waits for no other worker's computation. At the end of a step all workers of a node have added to the same sum,
so inside a node nothing is sent; between nodes each range goes once to its owner, which adds in the order of nodes. The
fp32 gradient is held once per node in place of once per worker.

Additions come in the order of arrival: another order of the same fp32 sum, so two runs of one plan differ by rounding.
The parameters stay equal on all workers: each element is computed once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ops.comm.collectives import Group
from ops.counted import counted
from ops.shards import Bounds, Slot
from ops.typed import ConfigError
from ops.update.node_routes import exchange_windows, routes, splits
from ops.update.node_sum import NodeSum, Unreachable, meet

log = logging.getLogger(__name__)


class NodeGradients:
    """The `Gradients` of a worker whose node has one sum, in the first of `sums` by which its workers reach it."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Sequence[Slot], sums: Sequence[NodeSum]) -> None:
        self._parameters, self._layout, self._sums = parameters, layout, tuple(sums)
        self._device = parameters[0].device
        self._group = Group.solo()
        self._bounds: Bounds = [(0, layout[-1].hi)]
        self._sum = self._sums[0]
        self._sends = routes(self._group.nodes)

    @property
    def place(self) -> str:
        """Where the sum lies, for a person."""
        return self._sum.name

    @property
    def sum(self) -> NodeSum:
        """The sum of this generation."""
        return self._sum

    @property
    def flat(self) -> Tensor:
        """As `Gradients.flat`."""
        return self._sum.memory

    def part(self, lo: int, hi: int) -> Tensor:
        """As `Gradients.part`."""
        return self._sum.part(lo, hi)

    def form(self, group: Group, bounds: Bounds) -> None:
        """As `Gradients.form`. Raises MemoryError where a node has no room for the gradient, ConfigError where its
        workers reach none of the places; of workers that have all of `sums` to try all raise the same."""
        self.leave()
        meet(group, self._device)  # all have let go of the last memory: the node need not have room for both
        self.release()
        self._group, self._bounds, self._sends = group, bounds, routes(group.nodes)
        refused, no_room = [], False
        for one in self._sums:
            try:
                self._sum = one
                one.form(group, bounds, self._sends)
                break
            except Unreachable as error:
                refused.append(f"{one.name} cannot be used ({error})")
                no_room = no_room or error.no_room
                one.leave()
                meet(group, self._device)
                one.release()
        else:
            why = f"train.memory.gradients: {', '.join(refused)}."
            if no_room:
                raise MemoryError(f"{why} Set it to auto or host, or train on more GPUs.")
            raise ConfigError(f"{why} Set it to auto or host, or to own where a GPU has room.")
        why = f": {', '.join(refused)}" if refused else ""
        log.info("gradients of %s add up in %s%s", counted(group.size, "worker"), self._sum.name, why)

    def leave(self) -> None:
        """As `Gradients.leave`."""
        self._sum.leave()

    def release(self) -> None:
        """As `Gradients.release`."""
        self._sum.release()

    def begin_step(self) -> None:
        """Nothing of this worker is left over; the sum is zero since its last use."""
        for parameter in self._parameters:
            parameter.grad = None

    def received(self, index: int) -> None:
        """Give the parameter's gradient to the sum."""
        parameter = self._parameters[index]
        assert parameter.grad is not None, "backward has just made it"
        self.add(index, parameter.grad)
        parameter.grad = None

    def add(self, index: int, gradient: Tensor) -> None:
        """As `Gradients.add`."""
        if gradient.numel():
            self._sum.add(self._layout[index], gradient)

    def watch(self) -> None:
        """Nothing: there is no sum to start."""

    def start(self) -> None:
        """Nothing, see `watch`."""

    def finish(self) -> None:
        """Wait until all workers have added, and exchange between nodes."""
        self._sum.flush()
        meet(self._group, self._device)
        if len(set(self._group.nodes)) > 1:
            for pieces in exchange_windows(self._bounds, self._device):
                self._exchange(pieces)

    def used(self, lo: int, hi: int) -> None:
        """Zero it for the next step, which no worker begins before all parameters have come."""
        self._sum.part(lo, hi).zero_()

    def drop(self) -> None:
        """Zero the own range; returns when all have."""
        self.used(*self._bounds[self._group.rank])
        meet(self._group, self._device)

    def _exchange(self, pieces: Bounds) -> None:
        """Send this node's sum of other nodes' pieces, and add theirs of this rank's, in the order of their ranks."""
        rank = self._group.rank
        come, go = splits(self._sends, rank, pieces)
        mine = self._sum.part(*pieces[rank])
        parts = [self._sum.part(*pieces[target]) for target in self._sends[rank]]
        sent = (torch.cat(parts) if parts else mine[:0]).to(self._device)
        received = sent.new_empty(sum(come))
        self._group.all_to_all(received, sent, come, go)
        for part in received.split([n for n in come if n]):
            mine.add_(part.to(mine.device))
        for part in parts:  # sent: every worker waits for the all-reduce of norm and loss before the next addition
            part.zero_()
