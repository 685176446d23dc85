"""Calls to Ray, with types; its errors for an actor that is gone, and the cause of a task that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, NodeDiedError, OutOfMemoryError, RayActorError

from actors.plan.types import PlanError
from actors.refs import Ref
from data.errors import DataError, DataIOError

FOR_GOOD = (ActorDiedError, ActorUnschedulableError, NodeDiedError, OutOfMemoryError)
GONE = (RayActorError, *FOR_GOOD)  # also one that is out of reach, and may answer again

T = TypeVar("T")
R = TypeVar("R")


def get(reference: Ref[T], timeout: float | None = None) -> T:
    """The value. Raises what its task raised, or Ray's error for what is lost or late (seconds)."""
    untyped: Any = reference
    value: T = ray.get(untyped) if timeout is None else ray.get(untyped, timeout=timeout)
    return value


def wait(references: Sequence[R], *, num_returns: int = 1, timeout: float | None) -> tuple[list[R], list[R]]:
    """(done, not done) after `timeout` seconds, or as soon as `num_returns` are done. `references` are not empty."""
    untyped: Any = list(references)
    done, waiting = ray.wait(untyped, num_returns=num_returns, timeout=timeout)
    found: Any = (done, waiting)
    answer: tuple[list[R], list[R]] = found
    return answer


def put(value: T) -> Ref[T]:
    """The value in the object store; it lives as long as this process."""
    untyped: Any = ray.put(value)
    reference: Ref[T] = untyped
    return reference


def kill(handle: object, *, no_restart: bool = True) -> None:
    """End an actor's process without a word to it."""
    untyped: Any = handle
    ray.kill(untyped, no_restart=no_restart)


def cancel(reference: Ref[T]) -> None:
    """End the process of a task that takes too long."""
    untyped: Any = reference
    ray.cancel(untyped, force=True)


def unwrap(call: Callable[[], T]) -> T:
    """Run `get` and raise a known cause of a task's failure as itself, so that callers can answer it."""
    try:
        return call()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError | DataIOError | PlanError):
            raise error.cause from None
        raise
