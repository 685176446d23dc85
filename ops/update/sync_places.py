"""Where a worker's gradients, parameters and optimizer state lie, by name, and what makes them there.

All workers of a generation sum and send alike: where they name different places for gradients, or for parameters, they
agree on the one that takes least of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from ops.comm.collectives import Group
from ops.shards import Slot
from ops.update.gradient_places import MEMORIES, GradientMemory, GradientsOf, gradients_in
from ops.update.gradients import Gradients
from ops.update.node_sum import exchange
from ops.update.parameter_places import ParametersOf, node_parameters
from ops.update.parameters import PARAMETER_MEMORIES, ParameterMemory, Parameters, Received

StateLocation = Literal["device", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPlaces:
    """The places that one worker names."""

    gradients: GradientMemory = "own"  # see `ops.update.gradient_places`
    parameters: ParameterMemory = "replicated"  # node: they lie once in host memory of each node
    state: StateLocation = "device"  # host: master, moments and EMA of the own range lie and are updated there
    sum_elements: int | None = None  # of own gradients that are summed together; None: the usual number
    gradients_of: GradientsOf | None = None
    """Makes the gradients, in place of what the name stands for. All workers have one, or none."""
    parameters_of: ParametersOf | None = None
    """Makes the parameters of a node, in place of `node_parameters`."""

    @property
    def are_given(self) -> bool:
        """Whether all workers have the same: there is nothing to agree on."""
        return self.gradients_of is not None and (self.parameters == "replicated" or self.parameters_of is not None)

    def make_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Sequence[Slot],
        dtype: torch.dtype,
        host_cores: int | None = None,
    ) -> Gradients:
        """The gradients of these parameters; `host_cores` as `HostSum`. Raises ValueError for a place that their device
        does not have."""
        make = self.gradients_of or gradients_in(self.gradients, self.sum_elements, host_cores=host_cores)
        return make(parameters, layout, dtype)

    def make_node_parameters(
        self, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]], layout: Sequence[Slot], received: Received
    ) -> Parameters:
        """These parameters of a module, from now on in memory of the node. Raises ValueError for a module that cannot
        fetch its blocks from there."""
        return (self.parameters_of or node_parameters)(module, named, layout, received)

    def agreed(self, group: Group, device: torch.device) -> SyncPlaces:
        """The places that all members use from now on. Collective."""
        mine = MEMORIES.index(self.gradients), PARAMETER_MEMORIES.index(self.parameters)
        numbers = exchange(group, mine[1] * len(MEMORIES) + mine[0], device)
        held, summed = zip(*(divmod(number, len(MEMORIES)) for number in numbers), strict=True)
        gradients = self.gradients if self.gradients_of is not None else MEMORIES[max(summed)]
        return replace(self, gradients=gradients, parameters=PARAMETER_MEMORIES[max(held)])
