"""Gradients of nodes for tests: host memory stands for that of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from app.bench.gpu.node_peers import NodePeers
from ops.shards import Slot
from ops.update.host_sum import HostSum
from ops.update.node_gradients import NodeGradients
from ops.update.node_sum import NodeSum
from ops.update.peer_sum import PeerSum

STAGE = 1024  # elements: some gradients of the tests go in pieces


@dataclass
class HostCopies:
    """`HostCopy` of a GPU whose memory is the host's."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pinned: list[int] = field(default_factory=list)

    def to_host(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None]]:
        return gradient.clone(), lambda: None

    def room(self, like: Tensor) -> Tensor:
        return torch.full_like(like, torch.nan)

    def pin(self, memory: Tensor) -> None:
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


def peer_sum(total: int, dtype: torch.dtype, parameters: Sequence[nn.Parameter], peers: NodePeers) -> PeerSum:
    return PeerSum(total, dtype, parameters[0].dtype, peers, STAGE)


def in_peers(parameters: Sequence[nn.Parameter], layout: Sequence[Slot], dtype: torch.dtype) -> NodeGradients:
    """Each worker holds a part, as GPUs do."""
    return NodeGradients(parameters, layout, [peer_sum(layout[-1].hi, dtype, parameters, NodePeers())])


def in_host(parameters: Sequence[nn.Parameter], layout: Sequence[Slot], dtype: torch.dtype) -> NodeGradients:
    """In host memory beside devices."""
    sums: list[NodeSum] = [HostSum(layout[-1].hi, dtype, HostCopies())]
    return NodeGradients(parameters, layout, sums)
