"""What workers have for cascades in a generation that is about to form: what each measured when it was ready, less what
the generation will take of it.

The same sums as a preview's (`MemoryForecast`), but for where they begin: whatever else is on a device has been
measured. Once a step has run its workers say what is left (`left_gib`), and nothing is forecast but bags that will be
connected later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from actors.messages import WorkerInfo
from actors.plan.places import GradientPlace, ParameterPlace, Places, StatePlace
from actors.plan.types import USABLE
from actors.planning.memory import BARE_CONTEXT_GIB, CONTEXT_GIB, PEER_GIB, MemoryForecast, communicators_gib
from ops.node_routes import peers

_GRADIENTS: tuple[GradientPlace, ...] = get_args(GradientPlace)  # each takes less of a device than the one before it
_PARAMETERS: tuple[ParameterPlace, ...] = get_args(ParameterPlace)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRoom:
    """The model's sizes, and which bags may be connected at a time."""

    sizes: MemoryForecast
    degrees: tuple[int, ...] = (1,)
    bag_peers: int = 0

    def of(self, infos: Sequence[WorkerInfo]) -> tuple[float | None, ...]:
        """GiB for cascades on each of these workers, in their order, with the state of training in place and every
        communicator connected; None for those that have no limit."""
        here = Counter(info.node for info in infos)
        numbers = {node: number for number, node in enumerate(here)}
        met = peers([numbers[info.node] for info in infos])
        agreed = _agreed(infos)
        known: dict[tuple[bool, Places, int, int], float] = {}
        rooms: list[float | None] = []
        for info, others in zip(infos, met, strict=True):
            key = info.device != "cpu", places_of(info), here[info.node], others
            if key not in known:  # most workers of a large pool are alike
                known[key] = self._taken(*key, agreed=agreed, workers=len(infos))
            rooms.append(None if info.room_gib is None else info.room_gib - known[key])
        return tuple(rooms)

    def bags_gib(self, workers: int) -> float:
        """GiB of a GPU that communicators of its bags may come to take."""
        return communicators_gib(self.degrees, workers, self.bag_peers) if self.sizes.cuda else 0.0

    def _taken(self, gpu: bool, own: Places, here: int, others: int, *, agreed: Places, workers: int) -> float:
        """GiB that a worker has less when it has formed. It has loaded with places of its `own`; then it does as all
        do, but for its state. `here` are on its node, and of other nodes it exchanges with `others`."""
        state: StatePlace = own.state if gpu else "device"
        ready = replace(self.sizes, cuda=gpu, places=replace(own, state=state))
        formed = replace(ready, places=replace(agreed, state=state))
        taken = formed.states(workers, here).total - ready.loaded_gib
        if not gpu:
            return taken
        exchange = PEER_GIB * others if formed.exchanges else 0.0
        return taken + USABLE * (CONTEXT_GIB - BARE_CONTEXT_GIB + self.bags_gib(workers) + exchange)


def left_gib(room_gib: float, bags_gib: float, open_peers: int) -> float:
    """GiB for cascades of a GPU that has measured `room_gib` with `open_peers` in communicators of its bags, which may
    come to take `bags_gib`."""
    return room_gib - USABLE * max(0.0, bags_gib - PEER_GIB * open_peers)


def places_of(info: WorkerInfo) -> Places:
    """Where a worker has gradients and parameters, or would have them if it had the choice."""
    gradients = next(place for place in _GRADIENTS if place == info.gradients)
    parameters = next(place for place in _PARAMETERS if place == info.parameters)
    return Places(gradients, "host" if info.state_on_host else "device", parameters)


def _agreed(infos: Sequence[WorkerInfo]) -> Places:
    """Gradients and parameters are where they take least of a device, if one worker has them there (`FlatSync`)."""
    found = [places_of(info) for info in infos]
    return Places(
        max((places.gradients for places in found), key=_GRADIENTS.index),
        "device",
        max((places.parameters for places in found), key=_PARAMETERS.index),
    )
