"""What the controller and the workers say about asides: the work, its turns, and what has become of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ops.waiting import Patience

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WAITS = ""  # no piece: an aside waits for what no worker computes
MORE_ROOM = "more room"  # no piece: an aside's memory ran out, and its next pieces need what the trained weights take


class NoMoreRoom(Exception):
    """Nothing that an aside could have besides would give memory back."""


class AsideWork(Protocol):
    """Work of low priority that a worker does in turns (`actors.worker.aside`). Whoever wants it makes it; it is
    pickled. `modules` are the worker's (`actors.worker.loading.Modules`)."""

    @property
    def name(self) -> str:
        """A name that only this aside has among all of the run."""
        ...

    def weights(self, modules: Any) -> Mapping[str, Tensor]:  # Modules: that room imports this one
        """Tensors, in host memory, that the transformer's trained parameters are while it is made. Called beside the
        worker's steps, so it only reads."""
        ...

    def make(self, modules: Any, device: torch.device, before: Callable[[str], None]) -> object:  # Modules
        """What it makes, for the controller. Calls `before(kind)` ahead of each piece of its work, also the first, and
        `before(WAITS)` where it waits for others after a piece, as for a decoder: the turn ends, and until its next
        piece it computes nothing. `before(MORE_ROOM)` where a piece ran out of memory: the turn ends, and its weights
        take the place of the trained ones from the next one on; raises NoMoreRoom where they take no other memory
        (`actors.worker.aside.with_room` does both)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTask:
    """A turn of an aside on one worker, after its cascades of a step and before the step's end."""

    generation: int
    step: int
    aside: AsideWork
    gap_s: float  # that the plan leaves idle there
    share: float  # of the run's time that it may take besides
    whole: bool = False  # no step waits for it: until it has ended
    patience: Patience | None = None  # of the step


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReport:
    """What has become of an aside in its turn."""

    aside: str
    took_s: float = 0.0
    ended: bool = False
    made: object = None
    failed: str = ""  # why it was not made
    no_room: bool = False  # for lack of memory
