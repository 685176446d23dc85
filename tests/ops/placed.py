"""Places of a sync engine by their names, or by what makes them."""

from __future__ import annotations

from ops.update.gradient_places import GradientMemory, GradientsOf
from ops.update.parameter_places import ParametersOf
from ops.update.parameters import ParameterMemory
from ops.update.sync_places import StateLocation, SyncPlaces


def placed(
    gradients: GradientMemory | GradientsOf = "own",
    parameters: ParameterMemory | ParametersOf = "replicated",
    state: StateLocation = "device",
    sum_elements: int | None = None,
) -> SyncPlaces:
    """Gradients and parameters that have no name are those of a node."""
    return SyncPlaces(
        gradients="node" if callable(gradients) else gradients,
        gradients_of=gradients if callable(gradients) else None,
        parameters="node" if callable(parameters) else parameters,
        parameters_of=parameters if callable(parameters) else None,
        state=state,
        sum_elements=sum_elements,
    )
