"""The gradients of a worker by the name of the place where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import nn

from ops.memory.cuda_memory import CudaHostCopy, CudaPeers
from ops.shards import Slot
from ops.update.gradients import Gradients
from ops.update.host_sum import HostSum
from ops.update.node_gradients import NodeGradients
from ops.update.node_sum import NodeSum, SharedSum
from ops.update.own_gradients import OwnGradients
from ops.update.peer_sum import PeerSum

# own: a whole gradient on each worker. node: one per node, in memory of its devices. node_or_host: the same, or in host
# memory where GPUs cannot reach each other. host: one per node, in host memory beside its GPUs.
GradientMemory = Literal["own", "node", "node_or_host", "host"]
MEMORIES: tuple[GradientMemory, ...] = get_args(GradientMemory)  # each takes less of a device than the one before it
GradientsOf = Callable[[Sequence[nn.Parameter], Sequence[Slot], torch.dtype], Gradients]

_SUM_ELEMENTS = 1 << 21  # of the gradient, whose sum starts together: enough to fill a link, few enough to start early


def gradients_in(
    memory: GradientMemory,
    sum_elements: int | None = None,
    gathers: bool | None = None,
    host_cores: int | None = None,
) -> GradientsOf:
    """A function that makes gradients lying there. `sum_elements` of own gradients are summed together; None: the usual
    number. `gathers`: as `OwnGradients`. `host_cores`: as `HostSum`."""

    def made(parameters: Sequence[nn.Parameter], layout: Sequence[Slot], dtype: torch.dtype) -> Gradients:
        if memory == "own":
            return OwnGradients(parameters, layout, dtype, sum_elements or _SUM_ELEMENTS, gathers=gathers)
        return NodeGradients(parameters, layout, _sums(memory, layout[-1].hi, dtype, parameters[0], host_cores))

    return made


def _sums(
    memory: GradientMemory, total: int, dtype: torch.dtype, parameter: nn.Parameter, host_cores: int | None
) -> list[NodeSum]:
    device = parameter.device
    if device.type == "cpu" and memory != "host":
        return [SharedSum(total, dtype)]
    if device.type != "cuda":
        raise ValueError(
            f"train.memory.gradients {memory} is for workers on {'GPUs' if memory == 'host' else 'CPUs and GPUs'}, and "
            f"this worker is on {device}. Set train.memory.gradients: {'node' if device.type == 'cpu' else 'own'}, or "
            f"auto."
        )
    found: list[NodeSum] = []
    if memory != "host":
        found.append(PeerSum(total, dtype, parameter.dtype, CudaPeers(device)))
    if memory != "node":
        found.append(HostSum(total, dtype, CudaHostCopy(device), host_cores=host_cores))
    return found
