"""The memory (GiB) that each worker will have for cascades in a generation that is about to form.

Each worker has measured what was free on its device when its modules were loaded; the training state and the
communicators of the generation will take their part of that. `heddle plan` computes the same before there is a worker,
from the size of the device (`MemoryForecast.room_gib`); a measurement also counts whatever else is on the device. Once
a step has run, workers report what they have left, and only communicators of bags that are not connected yet are still
forecast (`left_gib`).
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
from ops.update.node_routes import peers

_GRADIENTS: tuple[GradientPlace, ...] = get_args(GradientPlace)  # each takes less of a device than the one before it
_PARAMETERS: tuple[ParameterPlace, ...] = get_args(ParameterPlace)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRoom:
    """Forecasts the room of workers, for one model and the bags that a run may connect."""

    sizes: MemoryForecast
    degrees: tuple[int, ...] = (1,)  # of DiT cascades that may be planned
    bag_peers: int = 0  # at most, of a worker in all its open bags together; 0: no limit

    def of(self, infos: Sequence[WorkerInfo]) -> tuple[float | None, ...]:
        """GiB for cascades on each of these workers, in their order, once they have formed a generation: the training
        state is in place, and every communicator is connected. None for a worker without a limit."""
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
        """GiB that forming a generation takes from what a worker has measured as free.

        `own`: where it had gradients, state and parameters when it measured. In the generation all workers have
        gradients and parameters where `agreed` says; the state stays where it is. `here`: number of workers on its
        node. `others`: number of workers of other nodes with which it exchanges gradients or parameters."""
        state: StatePlace = own.state if gpu else "device"
        ready = replace(self.sizes, cuda=gpu, places=replace(own, state=state))
        formed = replace(ready, places=replace(agreed, state=state))
        taken = formed.states(workers, here).total - ready.loaded_gib
        if not gpu:
            return taken
        exchange = PEER_GIB * others if formed.exchanges else 0.0
        return taken + USABLE * (CONTEXT_GIB - BARE_CONTEXT_GIB + self.bags_gib(workers) + exchange)


def left_gib(room_gib: float, bags_gib: float, open_peers: int) -> float:
    """GiB for cascades on a GPU: `room_gib`, which it has measured, less what communicators of its bags may still take.
    They may come to take `bags_gib` in all, and had `open_peers` peers when it measured."""
    return room_gib - USABLE * max(0.0, bags_gib - PEER_GIB * open_peers)


def places_of(info: WorkerInfo) -> Places:
    """Where a worker has gradients, optimizer state and parameters; before its first generation, where it would have
    them by its own settings and memory."""
    gradients = next(place for place in _GRADIENTS if place == info.gradients)
    parameters = next(place for place in _PARAMETERS if place == info.parameters)
    return Places(gradients, "host" if info.state_on_host else "device", parameters)


def _agreed(infos: Sequence[WorkerInfo]) -> Places:
    """Where all of these workers will have gradients and parameters: in the places that take least of a device, among
    those that at least one of them has chosen, as `FlatSync.form` agrees. The state's place is every worker's own."""
    found = [places_of(info) for info in infos]
    return Places(
        max((places.gradients for places in found), key=_GRADIENTS.index),
        "device",
        max((places.parameters for places in found), key=_PARAMETERS.index),
    )
