"""Where gradients, optimizer state and parameters lie, on devices or in host memory: one rule for runs, plans and
previews."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GradientSetting = Literal["auto", "own", "node", "host"]
GradientPlace = Literal["own", "node", "host"]
StateSetting = Literal["auto", "device", "host"]
AttentionMemory = Literal["auto", "kept", "recomputed"]
StatePlace = Literal["device", "host"]
ParameterSetting = Literal["auto", "replicated", "node"]
ParameterPlace = Literal["replicated", "node"]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the memory of training lies. Gradients: on each worker, once in the memory of a node's devices, or once
    in its host memory. Optimizer state: on the device, or in host memory. Parameters: on each worker, or once in a
    node's host memory."""

    gradients: GradientPlace
    state: StatePlace
    parameters: ParameterPlace = "replicated"

    def describe(self) -> str:
        """The places in words, for a person, of GPUs."""
        gradient = {
            "own": "a gradient on each",
            "node": "one gradient per node in its GPUs' memory",
            "host": "one gradient per node in host memory",
        }
        state = {"device": "optimizer state beside the weights", "host": "optimizer state in host memory"}
        if self.parameters == "replicated":
            return f"{gradient[self.gradients]}, {state[self.state]}"
        state["device"] = "optimizer state on the device"
        weights = "weights of blocks once per node in host memory"
        return f"{gradient[self.gradients]}, {state[self.state]}, {weights}"


BESIDE = Places("own", "device")  # all of it on each worker


def gpu_places(
    gradients: GradientSetting, state: StateSetting, parameters: Sequence[ParameterPlace] = ("replicated",)
) -> tuple[Places, ...]:
    """What the settings allow on GPUs, the fastest first: state in host memory is updated by the CPU, parameters there
    are copied for every block.

    >>> gpu_places("auto", "host")
    (Places(gradients='own', state='host', parameters='replicated'), Places(gradients='node', state='host', \
parameters='replicated'))
    """
    where: tuple[GradientPlace, ...] = ("own", "node") if gradients == "auto" else (gradients,)
    states: tuple[StatePlace, ...] = ("device", "host") if state == "auto" else (state,)
    return tuple(Places(gradient, place, held) for held in parameters for place in states for gradient in where)


def parameter_places(setting: ParameterSetting, fetchable: bool) -> tuple[ParameterPlace, ...]:
    """What the setting allows, the fastest first; `fetchable`: the model's blocks can be fetched.

    >>> parameter_places("auto", True), parameter_places("auto", False)
    (('replicated', 'node'), ('replicated',))
    """
    if setting == "auto":
        return ("replicated", "node") if fetchable else ("replicated",)
    return (setting,)


def chosen(places: Sequence[Places], least_gib: Sequence[float], device_gib: float) -> Places:
    """The first with which training fits a device of `device_gib` (0: unknown, or no limit), of which it needs
    `least_gib` with each of them; the last where none does. Workers of one run may differ in where their state lies:
    they send each other parameters alone. In where gradients and parameters lie they agree (`FlatSync`).

    >>> chosen(gpu_places("auto", "device"), (64.0, 30.0), 40.0).gradients
    'node'
    """
    return places[number_of_chosen(least_gib, device_gib)]


def number_of_chosen(least_gib: Sequence[float], device_gib: float) -> int:
    """Which of the places is `chosen`."""
    if device_gib <= 0:
        return 0
    return next((number for number, least in enumerate(least_gib) if least <= device_gib), max(len(least_gib) - 1, 0))
