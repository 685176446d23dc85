"""References to what other processes hold or compute, and handles of actors, with types. No Ray.

Ray's own handles have no types; one that is named by a protocol is checked like any other object, and a test's fake is
ten plain lines:

    class WorkerHandle(Protocol):
        @property
        def turn(self) -> Method[[TurnTask], TurnReport]: ...

    seat.handle.turn.remote(task)                      # Ref[TurnReport]
    get(seat.handle.turn.remote(task), timeout=60)     # TurnReport; see actors.ray_calls
"""

from __future__ import annotations

from typing import Generic, ParamSpec, Protocol, TypedDict, TypeVar

T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")


class Ref(Generic[T_co]):
    """A value of type T_co, here or elsewhere, now or later. At run time it is Ray's ObjectRef, in tests anything."""


class RayNode(TypedDict):
    """A node that is or was in the cluster, by Ray's own keys."""

    NodeID: str
    Alive: bool
    Resources: dict[str, float]  # by Ray's names: "CPU", "GPU", "memory"
    NodeManagerAddress: str
    NodeManagerHostname: str
    NodeManagerPort: int
    RayletSocketName: str


class Method(Protocol[P, R_co]):
    """A method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Ref[R_co]: ...
    def options(
        self, *, name: str = ..., concurrency_group: str = ..., max_task_retries: int = ...
    ) -> Method[P, R_co]: ...
